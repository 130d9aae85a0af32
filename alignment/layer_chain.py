"""The chain of layers in a trace: does each layer get what the one before gave, and does the last norm get the last?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from porter.alignment.capture_trace import Passage, Passed
from porter.alignment.observation import relative
from porter.alignment.report import SanityCheck

NORM_NAMES = ("norm", "ln", "layernorm")
Read = Callable[[Passed], Tensor | None]
"""The values of a tensor of the trace, None where they were not kept."""


def not_kept(passed: Passed) -> Tensor | None:
    """For traces that hold no values."""
    return None


@dataclass(frozen=True)
class Chain:
    """The layers `container`.0, `container`.1, ... of one stack, in execution order."""

    container: str
    layers: tuple[str, ...]


def chains_of(passages: Sequence[Passage]) -> list[Chain]:
    """The outermost numbered modules that pass a tensor of one shape on: decoder layers, not experts or projections."""
    first: dict[str, Passage] = {}
    for passage in passages:
        first.setdefault(passage.module, passage)
    found: dict[str, list[str]] = {}
    for name, passage in first.items():
        container, _, number = name.rpartition(".")
        if not number.isdigit() or any(part.isdigit() for part in container.split(".")):
            continue
        if passage.inputs and passage.outputs and passage.outputs[0].shape in [i.shape for i in passage.inputs]:
            found.setdefault(container, []).append(name)
    return [Chain(container, tuple(layers)) for container, layers in found.items() if len(layers) > 1]


def layer_names(names: Sequence[str]) -> set[str]:
    """Of all module names, those whose passages the checks of this file need."""
    outer = [n for n in names if n.rpartition(".")[2].isdigit() and not any(p.isdigit() for p in n.split(".")[:-1])]
    around = {n.rpartition(".")[0].rpartition(".")[0] for n in outer}
    siblings = [n for n in names if n and n.rpartition(".")[0] in around and not n.rpartition(".")[2].isdigit()]
    return {*outer, *siblings, "lm_head"}


def chain_checks(passages: Sequence[Passage], side: str, read: Read = not_kept) -> Iterator[SanityCheck]:
    """The checks of every chain in a trace of `side` ("golden" or "candidate"), over all its steps."""
    by_call = {(p.module, p.step, p.call): p for p in passages}
    for chain in chains_of(passages):
        yield from _links(chain, by_call, side, read)
        yield from _reused(chain, by_call, side)
        yield from _last_norm(chain, passages, by_call, side)


def _links(
    chain: Chain, by_call: Mapping[tuple[str, int, int], Passage], side: str, read: Read
) -> Iterator[SanityCheck]:
    broken: list[tuple[Passage, Passage]] = []
    streams = compared = 0
    for (module, step, call), passage in by_call.items():
        if module not in chain.layers or module == chain.layers[-1]:
            continue
        following = by_call.get((chain.layers[chain.layers.index(module) + 1], step, call))
        if following is None or not passage.outputs:
            continue
        compared += 1
        given = {passed.digest for passed in following.inputs}
        passed_on = _streams(passage)
        streams = max(streams, len(passed_on))
        if not all(passed.digest in given for passed in passed_on):
            broken.append((passage, following))
    if streams > 1:
        yield SanityCheck(
            "streams",
            chain.layers[0],
            "note",
            f"the {side}'s layers return {streams} streams of one shape, hidden and residual: their sum is what a "
            "layer with a single output returns; neither alone may be compared with it",
        )
    if not broken and compared:
        yield SanityCheck(
            "layer-chain", chain.container, "ok", f"{side}: out[i] is in[i+1] at {compared} of {compared} places"
        )
    elif broken:
        passage, after = broken[0]
        yield SanityCheck("layer-chain", after.module, "note", _broken(side, len(broken), passage, after, read))


def _streams(passage: Passage) -> list[Passed]:
    """The outputs of the shape of the first: hidden states, and the residual where a layer returns it apart."""
    return [passed for passed in passage.outputs if passed.shape == passage.outputs[0].shape]


def _broken(side: str, count: int, passage: Passage, after: Passage, read: Read) -> str:
    given, taken = read(passage.outputs[0]), read(after.inputs[0]) if after.inputs else None
    apart = ""
    if given is not None and taken is not None and given.shape == taken.shape:
        apart = f" (they differ by {relative(taken, given):.2g})"
    more = f", and at {count - 1} other places" if count > 1 else ""
    return (
        f"{side}: {after.module} does not get what {passage.module} returned{apart}{more}: either code between the "
        "layers changes it, or the tensor was overwritten in place after it was recorded; check that the capture clones"
    )


def _reused(chain: Chain, by_call: Mapping[tuple[str, int, int], Passage], side: str) -> Iterator[SanityCheck]:
    """Layers whose recorded outputs are one and the same: a buffer that was recorded without a copy."""
    outputs: dict[tuple[int, int, str], list[str]] = {}
    for (module, step, call), passage in by_call.items():
        # A layer that hands its input on unchanged gives what the layer before it gave.
        if module in chain.layers and passage.outputs and passage.outputs[0] not in passage.inputs:
            outputs.setdefault((step, call, passage.outputs[0].digest), []).append(module)
    alike = max(outputs.values(), key=len, default=[])
    if len(alike) > 1:
        others = ", ".join(alike[1:4]) + (", …" if len(alike) > 4 else "")
        yield SanityCheck(
            "aliased",
            alike[0],
            "invalid",
            f"the {side}'s outputs of {alike[0]} and {others} are bit for bit the same: one buffer was reused and "
            "recorded without a copy; clone tensors when capturing",
        )


def _last_norm(
    chain: Chain, passages: Sequence[Passage], by_call: Mapping[tuple[str, int, int], Passage], side: str
) -> Iterator[SanityCheck]:
    norm = next((name for name in dict.fromkeys(p.module for p in passages) if _closes(name, chain)), None)
    if norm is None:
        return
    last = chain.layers[-1]
    for (module, step, call), passage in by_call.items():
        before = by_call.get((last, step, call))
        if module != norm or before is None or not (before.outputs and passage.inputs and passage.outputs):
            continue
        out = before.outputs[0].digest
        if out in {p.digest for p in passage.inputs}:
            continue
        if out == passage.outputs[0].digest:
            yield SanityCheck(
                "final-norm",
                last,
                "invalid",
                f"the {side}'s output of {last} is what {norm} returned: it was captured after the final norm, not "
                "before it; record the layer's own output",
            )
            return
        yield SanityCheck(
            "final-norm", norm, "note", f"{side}: {norm} does not get what {last} returned: something works in between"
        )
        return
    yield SanityCheck("final-norm", norm, "ok", f"{side}: {norm} gets what {last} returned")


def _closes(name: str, chain: Chain) -> bool:
    """Whether a module is the norm that stands beside the layers: `model.norm` beside `model.layers`."""
    beside, _, leaf = name.rpartition(".")
    return beside == chain.container.rpartition(".")[0] and any(word in leaf.lower() for word in NORM_NAMES)
