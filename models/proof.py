"""Float64 proof that a ported class, or a whole ported model, computes what its source computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import using_reference
from porter.models.images import forget_positions, image_prompt, reads_image_grids
from porter.models.proof_parts import IMAGE_PARTS, PARTS, random_tokens
from porter.precision import float64_mode

# Both sides are float64 and differ by the order of a few thousand additions: about 1e-13. A mistake is above 1e-6.
BOUND = 1e-9

CANNOT_RUN = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What a model raises that does not take the inputs or lacks a part that the code reads."""


@dataclass(frozen=True)
class Call:
    """One recorded call of a source module."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


@dataclass(frozen=True)
class Proof:
    """The largest relative L2 error seen, per part of the proof, and the bound it had to meet.

    `skipped` are the parts that upstream itself cannot run, with what it raised: nothing is known there. `raised` is
    what the ported model alone raised in a part, whose error is infinite.
    """

    errors: dict[str, float]
    bound: float = BOUND
    skipped: dict[str, str] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)

    def worst(self) -> str:
        """The part with the largest error, and how large it is or what was raised."""
        part, error = max(self.errors.items(), key=lambda item: item[1])
        return f"{part}: it raises {self.raised[part]}" if part in self.raised else f"{part} by {error:.1e}"

    @property
    def passed(self) -> bool:
        """Whether every part is within the bound (NaN is not)."""
        return all(error <= self.bound for error in self.errors.values())


def relative_error(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    """L2 norm of the difference over that of the reference; infinite where the shapes differ."""
    if candidate.shape != reference.shape:
        return float("inf")
    candidate, reference = candidate.double(), reference.double()
    # Masks hold minus infinity: equal values differ by nothing, whatever they are.
    difference = torch.where(candidate == reference, 0.0, candidate - reference)
    scale = reference.masked_fill(reference.isinf(), 0.0).norm().clamp_min(1e-300)
    return float(difference.norm() / scale)


def leading_tensors(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a module's output, in order; a router's weights in the order of expert ids.

    Which of the chosen experts comes first is no part of a router's meaning (upstream calls topk(sorted=False)).
    """
    if isinstance(output, tuple) and len(output) == 3 and _is_routing(*output[1:]):
        logits, weights, indices = output
        return [logits, weights.gather(-1, indices.argsort(-1)), indices.sort(-1).values.double()]
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, tuple | list):
        return [t for item in output for t in leading_tensors(item)]
    return []


def selection_error(ours: torch.Tensor, theirs: Any) -> float:
    """The share of rows [..., K] of indices, which are sets, that differ."""
    if not isinstance(theirs, torch.Tensor) or theirs.is_floating_point() or ours.shape != theirs.shape:
        return float("inf")
    return float((ours.sort(dim=-1).values != theirs.sort(dim=-1).values).any(-1).double().mean())


def _is_routing(weights: Any, indices: Any) -> bool:
    both = isinstance(weights, torch.Tensor) and isinstance(indices, torch.Tensor)
    return both and weights.shape == indices.shape and not indices.is_floating_point()


@contextmanager
def one_thread() -> Iterator[None]:
    """One CPU thread within the context: at reduced width, starting and awaiting threads takes longer than the work,
    and seconds where other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _exact(*models: nn.Module) -> Iterator[None]:
    with torch.no_grad(), float64_mode():
        for model in models:
            model.eval()
        yield


def record_calls(source: nn.Module) -> dict[str, Call]:
    """One prefill of `source` without a cache, with images where it reads them: each module's first call."""
    calls: dict[str, Call] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            calls.setdefault(name, Call(arguments, keywords, output))

        return record

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in source.named_modules() if n]
    try:
        with _exact(source):
            _first_prefill(source)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _first_prefill(source: nn.Module) -> None:
    """On images where `source` reads them as Qwen's models do; else, or where it fails on these, on text alone."""
    if reads_image_grids(source):
        prompt = image_prompt(source)
        try:
            source(prompt.input_ids, use_cache=False, **prompt.keywords)
            return
        except CANNOT_RUN:
            forget_positions(source)  # the parts with images are skipped with the same reason, see prove_model
    source(random_tokens(source), use_cache=False)


def module_error(ported: nn.Module, call: Call) -> float:
    """The relative error of a ported module on the recorded inputs of its source; infinite where it cannot run."""
    return module_verdict(ported, call)[0]


def module_verdict(ported: nn.Module, call: Call) -> tuple[float, str]:
    """`module_error`, and what the module raised where it cannot run (else an empty string)."""
    with _exact(ported), using_reference(ported):
        try:
            output = ported(*call.arguments, **call.keywords)
        except CANNOT_RUN as error:
            return float("inf"), _first_line(error)
    if isinstance(output, torch.Tensor) and not output.is_floating_point():
        return selection_error(output, call.output), ""
    ours, theirs = leading_tensors(output), leading_tensors(call.output)
    return max((relative_error(a, b) for a, b in zip(ours, theirs, strict=False)), default=float("inf")), ""


def prove_model(source: nn.Module, ported: nn.Module) -> Proof:
    """Logits of both in each of `PARTS`: a prefill, decode steps with a cache, chunks, a left-padded batch; and in each
    of `IMAGE_PARTS` where `source` reads images.

    A part that `source` cannot run is skipped, with its reason; one that only `ported` cannot run has infinite error.
    Raises what `source` raises on a plain prefill: of such a model nothing can be proven.
    """
    ids = random_tokens(source)
    parts = {**PARTS, **IMAGE_PARTS} if reads_image_grids(source) else PARTS
    errors: dict[str, float] = {}
    skipped, raised = {}, {}
    with _exact(source, ported), using_reference(ported):
        for name, part in parts.items():
            forget_positions(source)
            forget_positions(ported)
            try:
                wanted = part(source, ids)
            except CANNOT_RUN as error:
                if name == "prefill":
                    raise
                skipped[name] = _first_line(error)
                continue
            try:
                errors[name] = relative_error(part(ported, ids), wanted)
            except CANNOT_RUN as error:
                errors[name], raised[name] = float("inf"), _first_line(error)
    return Proof(errors, skipped=skipped, raised=raised)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
