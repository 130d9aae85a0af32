"""Capture-point sanity: whether golden and candidate were captured so that comparing them says anything.

Checked before any comparison: both sides saw the same tokens; each layer got what the one before gave; the final norm
got the last layer's output; nothing was recorded after a buffer was reused; hooks leave the candidate's outputs bit for
bit as they are; and what no hook can see (compiled or graph-captured regions, modules never called) is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import Recorded, mapped, new_cache
from porter.alignment.capture_trace import Passed, recorded_passages, same, watching
from porter.alignment.lanes import natively
from porter.alignment.layer_chain import chain_checks, layer_names
from porter.alignment.model_call import CannotRun, called
from porter.alignment.pairing import module_names
from porter.alignment.report import SanityCheck
from porter.alignment.token_identity import same_tokens, vocabulary_holds
from porter.errors import PorterError
from porter.golden.store import Golden
from porter.golden.unseen import compiled_forward

NEVER_CALLED = "never called: the module above reads its weights itself, or it takes no part"


def sanity_of_model(golden: Golden, recorded: Recorded, model: nn.Module, run: bool) -> list[SanityCheck]:
    """The checks of a golden and a candidate that can be run. `run`: also the observer test, two forwards of the
    golden's first prompt."""
    checks = [*_golden_checks(golden), *vocabulary_holds(golden, model), *_gaps(_unhookable(model), "candidate")]
    return [*checks, *(_observed(recorded, model) if run else ())]


def sanity_of_recording(golden: Golden, candidate: Golden) -> list[SanityCheck]:
    """The checks of two recordings."""
    return [
        *same_tokens(golden, candidate),
        *_golden_checks(golden),
        *chain_checks(recorded_passages(candidate), "candidate", _reader(candidate)),
        *_gaps(_missed(candidate), "candidate"),
        *_unequal_ranks(candidate, "candidate"),
    ]


def invalid(checks: Iterable[SanityCheck]) -> list[SanityCheck]:
    """Those that void the comparison."""
    return [check for check in checks if check.status == "invalid"]


def _golden_checks(golden: Golden) -> Iterator[SanityCheck]:
    yield from chain_checks(recorded_passages(golden), "golden", _reader(golden))
    yield from _gaps(_missed(golden), "golden")
    yield from _unequal_ranks(golden, "golden")
    imported = golden.manifest.get("imported") or {"missing": ()}
    for lacking in imported["missing"]:
        told = f"the golden was imported from {imported['from']}, which lacks {lacking['what']}: {lacking['why']}"
        yield SanityCheck("imported", "", "uncovered", told)
    if not golden.complete:
        why = golden.manifest.get("incomplete", "the recording was cut off")
        yield SanityCheck("incomplete", "", "uncovered", f"the golden is incomplete: {why}")


def _unequal_ranks(golden: Golden, side: str) -> Iterator[SanityCheck]:
    """Of a recording gathered from ranks: the first module that should be whole on all of them, and is not."""
    unequal = (golden.manifest.get("gathered") or {}).get("unequal")
    if unequal:
        first, more = unequal[0], f" ({len(unequal) - 1} more such places)" if len(unequal) > 1 else ""
        told = (
            f"{side}: rank {first['rank']} has another {first['side']} of {first['module'] or 'the model'} than the "
            f"others, by {first['error']:.2g}{more}: a sum over the ranks left out, or other weights on that rank"
        )
        yield SanityCheck("ranks", str(first["module"]), "note", told)


def _reader(golden: Golden) -> Any:
    def read(passed: Passed) -> Tensor | None:
        return golden.tensor(passed.id) if golden.detail == "full" and passed.id is not None else None

    return read


def _missed(golden: Golden) -> list[tuple[str, str]]:
    return [(str(entry["module"]), str(entry["why"])) for entry in golden.manifest.get("missed") or ()]


def _unhookable(model: nn.Module) -> list[tuple[str, str]]:
    """Regions in which hooks do not fire: compiled, scripted."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            found.append((name, "a ScriptModule, which takes no hooks"))
        elif _is_compiled(module):
            found.append((name, "compiled: its modules run as one graph, where hooks are lost"))
    return found


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or compiled_forward(module)


def _gaps(missed: Sequence[tuple[str, str]], side: str) -> Iterator[SanityCheck]:
    """One check for every kind of module that was missed: `model.layers.*.mlp` rather than each layer's."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, why in missed:
        groups.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), why), []).append(name)
    for (pattern, why), names in groups.items():
        count = f"{len(names)} modules, the first {names[0]}: " if len(names) > 1 else ""
        yield SanityCheck("gap", pattern, "uncovered", f"{side}: {count}{why}")


def _observed(recorded: Recorded, model: nn.Module) -> Iterator[SanityCheck]:
    """The observer test: one forward with hooks on every module and one without, bit for bit."""
    try:
        plain = _first_output(recorded, model)
        kept = layer_names(module_names(model))
        with watching(model, lambda name: name in kept) as trace:
            hooked = _first_output(recorded, model)
        again = hooked if same(plain, hooked) else _first_output(recorded, model)
    except (PorterError, CannotRun) as error:
        yield SanityCheck("observer", "", "note", f"the candidate could not be run whole: {error}")
        return
    yield _observer(same(plain, hooked), same(plain, again))
    yield from chain_checks(trace.passages, "candidate")
    yield from _in_place(trace.changed, trace.shared)
    never = [(name, NEVER_CALLED) for name in module_names(model) if name not in trace.called]
    yield from _gaps([each for each in never if _holds_weights(model, each[0])], "candidate")


def _holds_weights(model: nn.Module, name: str) -> bool:
    return any(True for _ in model.get_submodule(name).parameters())


def _first_output(recorded: Recorded, model: nn.Module) -> Any:
    """What the candidate gives for the golden's first prompt, with an empty cache of its own."""
    golden = recorded.golden
    with torch.no_grad():
        if golden.detail == "full":
            if "" not in recorded.records:
                raise PorterError("the golden has no record of the whole model's call")
            record = recorded.records[""][0]
            cache = new_cache(getattr(model, "config", None))
            inputs = mapped(recorded.value(record.inputs), natively, cache)
            return called(model, *inputs["args"], **inputs["kwargs"])
        batch = golden.batches[0]
        if batch.tokens is None:
            raise PorterError("the golden does not say which tokens it was given")
        tokens = batch.tokens.to(recorded.device)
        return called(model, input_ids=tokens, attention_mask=batch.attention_mask)


def _observer(unchanged: bool, repeatable: bool) -> SanityCheck:
    if unchanged:
        return SanityCheck("observer", "", "ok", "hooks leave the candidate's outputs bit for bit as they are")
    if not repeatable:
        return SanityCheck(
            "observer", "", "note", "two runs of the candidate on the same tokens differ: it is not deterministic"
        )
    return SanityCheck(
        "observer",
        "",
        "invalid",
        "the candidate gives other outputs with hooks than without (a fused path that hooks turn off?): what is "
        "measured with hooks is not what runs without them",
    )


def _in_place(changed: Sequence[tuple[str, str]], shared: Sequence[tuple[str, str]]) -> Iterator[SanityCheck]:
    if changed:
        module, at = changed[0]
        more = f" ({len(changed)} such places)" if len(changed) > 1 else ""
        yield SanityCheck(
            "in-place",
            module,
            "note",
            f"candidate: the output of {module} was changed in place before {at} got it{more}; porter copies at once, "
            "other recorders must clone",
        )
    if shared:
        module, earlier = shared[0]
        yield SanityCheck(
            "aliased",
            module,
            "note",
            f"candidate: {module} writes its output over that of {earlier} while it is still held ({len(shared)} such "
            "places): a recorder that keeps references sees the later values",
        )
    if not changed and not shared:
        yield SanityCheck("in-place", "", "ok", "no output of the candidate was overwritten while it was held")
