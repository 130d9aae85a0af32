"""`porter bisect`: which replaced kernels and modules, put back, restore the golden's tokens.

Cheap first: the reference in place of every kernel, of whole Ops, of single places; where that is not enough, the
source's modules in place of the candidate's, layers before their parts, and then kernels again within what was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.align import Progress
from porter.alignment.bisect_runs import Runs, Yardstick, yardstick
from porter.alignment.bisect_search import minimal
from porter.alignment.bisect_units import Replacements
from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate, compute_dtype, load_candidate
from porter.alignment.pairing import module_names, pair_modules
from porter.alignment.precision_swap import swapped
from porter.alignment.replay import Replayer
from porter.alignment.report import Tokens
from porter.alignment.source import rebuild_source
from porter.alignment.weight_judgement import adopt, judge
from porter.alignment.weights import WeightPairing
from porter.errors import PorterError
from porter.golden.store import Golden

SCHEMA = "porter.bisection/1"


@dataclass(frozen=True)
class Part:
    """Something that was put back. `kind`: "kernel" (with its `op` and `provider`) or "module" (with its `source`)."""

    kind: str
    name: str
    op: str | None = None
    provider: str | None = None
    source: str | None = None

    def says(self) -> str:
        """As a person names it."""
        return f"{self.op} at {self.name} ({self.provider})" if self.kind == "kernel" else f"module {self.name}"


@dataclass
class Bisection:
    """What restores the golden. `baseline`: the candidate as it is, None where it raises. `restored`: with `parts` put
    back, None where nothing that can be put back restores it. `limit`: what rounding explains."""

    baseline: Tokens | None
    limit: Yardstick
    parts: list[Part]
    restored: Tokens | None
    runs: int
    without_source: list[str] = field(default_factory=list)
    not_runnable: dict[str, str] = field(default_factory=dict)

    @property
    def matches(self) -> bool:
        """Whether the candidate as it is gives the golden's tokens."""
        return self.baseline is not None and self.limit.met_by(self.baseline)

    def says(self) -> str:
        """The result in one sentence."""
        if self.matches:
            return "the candidate gives the golden's tokens as it is: nothing to put back"
        if self.restored is None:
            elsewhere = f", or in {', '.join(self.without_source[:3])}" if self.without_source else ""
            return f"nothing that can be put back restores the golden: the fault is in the root's own code{elsewhere}"
        return f"put back, {' and '.join(part.says() for part in self.parts)} restore the golden"

    def to_json(self) -> dict[str, Any]:
        """As `porter bisect --json` prints it."""
        return {"schema": SCHEMA, "matches": self.matches, "says": self.says(), **asdict(self)}


def bisect(
    golden: Golden | str | Path,
    candidate: Any,
    *,
    factor: float = 2.0,
    correspondence: Any = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Bisection:
    """Find a smallest set of kernels and modules of `candidate` that, put back, restores the tokens of `golden`.

    See `align` for the arguments. Raises PorterError where the candidate is a recording, or the golden has no whole
    logits, or its source cannot be rebuilt.
    """
    golden = golden if isinstance(golden, Golden) else Golden.open(golden)
    loaded = load_candidate(
        candidate, correspondence=correspondence, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if loaded.model is None:
        raise PorterError(f"{loaded.name}: bisecting runs the candidate; give a model, not a recording")
    if golden.detail != "full":
        raise PorterError(f"{golden.path}: recorded with --detail {golden.detail}, without logits; record it in full")
    source = rebuild_source(golden, trust_remote_code).to(device)
    recorded = Recorded(golden, compute_dtype(loaded.model), torch.device(device))
    runs = Runs(loaded.model, recorded, progress or (lambda amount: None))
    pairing = pair_modules(golden, module_names(loaded.model), loaded.correspondence)
    replayer = Replayer(recorded, pairing, loaded.model, source, factor)
    with ExitStack() as stack:
        stack.enter_context(_as_candidate(source, loaded, recorded))
        stack.enter_context(replayer.rounding_activations(source))
        limit = yardstick(runs, source, loaded.model, factor)
        return _Bisector(runs, Replacements(loaded.model, source, loaded.correspondence), limit).run()


def _as_candidate(source: nn.Module, loaded: Candidate, recorded: Recorded) -> Any:
    """The source with the candidate's weights where these are in order, its attention and its precision."""
    model = loaded.model
    assert model is not None, "refused before"
    stored = {name: tensor.dtype for name, tensor in (*source.named_parameters(), *source.named_buffers())}
    pairing = WeightPairing(model, source, loaded.correspondence, recorded.dtype, recorded.recorded_dtype)
    for weight in pairing:
        adopt(source, judge(weight))
    wanted = {}
    for name, tensor in (*source.named_parameters(), *source.named_buffers()):
        was = stored.get(name, tensor.dtype)
        wanted[id(tensor)] = recorded.dtype if was == recorded.recorded_dtype else was

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(wanted.get(id(tensor), tensor.dtype))

    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    setter = getattr(source, "set_attn_implementation", None)
    if setter is not None and getattr(source, "_supports_sdpa", False):
        setter("eager" if implementation == "eager" else "sdpa")
    return swapped(source, convert)


@dataclass
class _Bisector:
    runs: Runs
    replacements: Replacements
    limit: Yardstick

    def run(self) -> Bisection:
        baseline = self.runs.tokens()
        sites: list[str] = []
        modules: list[str] = []
        if baseline is None or not self.limit.met_by(baseline):
            sites = self._kernels()
            if not sites:
                sites, modules = self._modules()
        restored = self._tokens(sites, modules) if sites or modules else None
        return Bisection(
            baseline,
            self.limit,
            [self._kernel(site) for site in sites] + [self._module(name) for name in modules],
            restored,
            self.runs.count,
            self.replacements.without_source(),
            self.runs.failures,
        )

    def _kernel(self, site: str) -> Part:
        return Part("kernel", site, self.replacements.op_of(site), self.replacements.provider_of(site))

    def _module(self, name: str) -> Part:
        return Part("module", name, source=", ".join(self.replacements.source_names(name)))

    def _tokens(self, sites: Sequence[str], modules: Sequence[str]) -> Tokens | None:
        return self.runs.tokens(self.replacements, sites, modules)

    def _restores(self, sites: Sequence[str], modules: Sequence[str]) -> bool:
        found = self._tokens(sites, modules)
        return found is not None and self.limit.met_by(found)

    def _kernels(self) -> list[str]:
        """The fewest places whose kernels are at fault, found among whole Ops first; none where kernels are not it."""
        ops = self.replacements.ops()
        everywhere = [site for sites in ops.values() for site in sites]
        if not everywhere or not self._restores(everywhere, []):
            return []
        guilty = minimal(list(ops), lambda some: self._restores([site for op in some for site in ops[op]], []))
        return minimal([site for op in guilty for site in ops[op]], lambda some: self._restores(some, []))

    def _modules(self) -> tuple[list[str], list[str]]:
        """(places, modules): the fewest modules, the deepest that will do, each as its kernels alone where these do."""
        top = self.replacements.children("")
        if not top or not self._restores([], top):
            return [], []
        modules = self._deepest(minimal(top, lambda some: self._restores([], some)))
        sites: list[str] = []
        for name in list(modules):
            others = [other for other in modules if other != name]
            inside = self.replacements.sites_within(name)
            if inside and self._restores([*sites, *inside], others):
                modules, known = others, list(sites)
                sites += minimal(inside, lambda some, o=others, k=known: self._restores([*k, *some], o))  # type: ignore[misc]
        return sites, modules

    def _deepest(self, modules: list[str]) -> list[str]:
        """The modules, each replaced by the fewest of its parts as far as these restore the golden too."""
        waiting, done = list(modules), list[str]()
        while waiting:
            name = waiting.pop(0)
            beside = [*done, *waiting]
            parts = self.replacements.children(name)
            if parts and self._restores([], [*beside, *parts]):
                waiting = minimal(parts, lambda some, b=beside: self._restores([], [*b, *some])) + waiting  # type: ignore[misc]
            else:
                done.append(name)
        return minimal(done, lambda some: self._restores([], some))
