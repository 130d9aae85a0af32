"""What an alignment found: the verdict, the first drift, its causes, and a row for everything that was compared."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "porter.alignment/1"


@dataclass(frozen=True)
class FirstDrift:
    """The first module in execution order that introduces an error over its budget. `tensor`: which of its tensors."""

    module: str
    source: str
    step: int
    tensor: str = "output"


@dataclass(frozen=True)
class Cause:
    """A known bug that explains a drift. `before`: the module's error; `after`: what is left once the bug is undone.

    `kind` is one of the contract's; `confidence` is in [0, 1]; `says` is one sentence that a person can act on.
    """

    kind: str
    module: str
    confidence: float
    before: float
    after: float | None
    says: str


@dataclass(frozen=True)
class WeightRow:
    """One parameter or buffer. `error`: relative L2 against the source; `expected`: what dtype or scheme allows."""

    parameter: str
    source: str
    error: float | None
    expected: float | None
    status: str
    why: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """One module at one step. Errors are relative L2; `budget` is what `introduced` may be.

    `introduced` is measured on golden inputs against the float64 oracle of the source module; `end_to_end` in the free
    run against the golden; `inherited` is the part of it that the inputs and the children brought.
    """

    module: str
    source: str
    step: int
    op: str | None = None
    provider: str | None = None
    introduced: float | None = None
    inherited: float | None = None
    end_to_end: float | None = None
    budget: float | None = None
    cosine: float | None = None
    status: str = "ok"
    why: str = ""


@dataclass(frozen=True)
class Tokens:
    """Logits of the free run against the golden's, over `compared` positions; `first_divergence` counts among them."""

    compared: int
    top1_agreement: float | None
    kl_mean: float | None
    kl_max: float | None
    first_divergence: int | None


@dataclass(frozen=True)
class Routing:
    """Expert choices (one per token and gate) on golden inputs: flips against the oracle, and those within rounding."""

    decisions: int
    flips: int
    benign: int


@dataclass(frozen=True)
class Skipped:
    """Something that was not compared, and why."""

    module: str
    why: str


@dataclass(frozen=True)
class Coverage:
    """Fractions compared, of modules, of parameter elements and of flops (None where unknown)."""

    modules: float
    parameters: float
    flops: float | None = None
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class SanityCheck:
    """Whether what was captured can be compared at all, or what of it was not seen.

    `status`: "ok"; "note" (worth knowing, the comparison stands); "uncovered" (nothing was captured there); "invalid"
    (what follows from the comparison is void: the verdict cannot be `aligned`). `module` is empty for the whole model.
    """

    check: str
    module: str
    status: str
    says: str


@dataclass(frozen=True)
class LintFinding:
    """A numeric contract that the candidate keeps less well than the golden, found without running anything.

    `kind` says which (`contract_lint.kinds.KINDS`); `golden` and `candidate` are what either has, such as dtypes.
    `certain`: it follows from stored values or sizes alone and makes the verdict `drift`; else it is a warning, and the
    replay decides.
    """

    kind: str
    module: str
    what: str
    golden: str
    candidate: str
    certain: bool
    why: str


@dataclass(repr=False)
class Report:
    """The alignment of one candidate with one golden."""

    verdict: str
    first_drift: FirstDrift | None = None
    causes: list[Cause] = field(default_factory=list)
    tokens: Tokens | None = None
    routing: Routing | None = None
    coverage: Coverage = field(default_factory=lambda: Coverage(0.0, 0.0))
    weights: list[WeightRow] = field(default_factory=list)
    modules: list[ModuleRow] = field(default_factory=list)
    unmatched: dict[str, list[str]] = field(default_factory=lambda: {"golden": [], "candidate": []})
    environment: dict[str, Any] = field(default_factory=lambda: {"golden": {}, "candidate": {}})
    sanity: list[SanityCheck] = field(default_factory=list)
    lint: list[LintFinding] = field(default_factory=list)

    def __repr__(self) -> str:
        drift = self.first_drift
        where = "" if drift is None else f", first drift {drift.module or '(model)'} at step {drift.step}"
        cause = f", {self.causes[0].kind}" if self.causes else ""
        return f"Report({self.verdict}{where}{cause}, {len(self.modules)} rows, {len(self.weights)} parameters)"

    @property
    def aligned(self) -> bool:
        """Whether the verdict is `aligned`."""
        return self.verdict == "aligned"

    def to_json(self) -> dict[str, Any]:
        """The report as `porter align --json` prints it. JSON has no infinity: such errors become 1e308, NaN null."""
        content: dict[str, Any] = _finite({"schema": SCHEMA, **asdict(self)})
        return content


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(1e308, value)
    return value
