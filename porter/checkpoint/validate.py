"""Whether a checkpoint holds the tensors that its config calls for, and whether their values can be used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.strict_json import listed, shown
from porter.errors import PorterError

CHUNK_ELEMENTS = 1 << 22
_QUANTIZED = (".weight_scale_inv", ".weight_scale", ".qweight", ".qzeros", ".weight_packed", ".scales", ".scale")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """How a checkpoint differs from what its config calls for; `misshaped` is name -> (expected, found)."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    misshaped: Mapping[str, tuple[Shape, Shape]]
    expected: Mapping[str, Shape]
    checkpoint: Checkpoint

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.misshaped)


def check_against(
    expected: Mapping[str, Shape],
    checkpoint: Checkpoint,
    *,
    ignored: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Compare the checkpoint's names and shapes with `expected`; reads headers only, but for stored tied tensors.

    `ignored` are regular expressions of whole names that the family leaves out (multi-token prediction layers).
    `tied` is name -> the name that it equals: such a tensor need not be stored, and where it is, its bytes must be
    the other's. Returns the stored names that a conversion drops, for `convert(dropped=...)`.

    Raises PorterError with the first missing, extra and misshaped names, how many there are, and the likely cause.
    """
    patterns = [re.compile(pattern) for pattern in ignored]
    ties = dict(tied or {})
    stored = set(checkpoint.names)
    skipped = {n for n in stored - expected.keys() if n in ties or any(p.fullmatch(n) for p in patterns)}
    shapes = {n: checkpoint.info(n).shape for n in checkpoint.names if n in expected}
    mismatch = Mismatch(
        missing=tuple(n for n in expected if n not in stored),
        extra=tuple(n for n in checkpoint.names if n not in expected and n not in skipped),
        misshaped={n: (tuple(expected[n]), s) for n, s in shapes.items() if tuple(expected[n]) != s},
        expected=expected,
        checkpoint=checkpoint,
    )
    if mismatch:
        raise PorterError(_describe(mismatch))
    for name in sorted(skipped & ties.keys()):
        _check_tied(name, ties[name], checkpoint)
    return tuple(n for n in checkpoint.names if n in skipped)


def _check_tied(name: str, other: str, checkpoint: Checkpoint) -> None:
    mine, its = checkpoint.info(name), checkpoint.info(other)
    same = (mine.dtype, mine.shape) == (its.dtype, its.shape)
    if not same or not torch.equal(checkpoint.load(name).view(torch.uint8), checkpoint.load(other).view(torch.uint8)):
        raise PorterError(
            f"{checkpoint.directory}: config.json ties {name} to {other}, but the checkpoint stores different values "
            f"for them; set tie_word_embeddings to false if {name} is meant"
        )


def _describe(mismatch: Mismatch) -> str:
    parts = []
    for word, names in (("missing", mismatch.missing), ("unexpected", mismatch.extra)):
        if names:
            parts.append(f"{len(names)} {word} ({listed(list(names))})")
    if mismatch.misshaped:
        shapes = [f"{n} is {list(found)}, expected {list(want)}" for n, (want, found) in mismatch.misshaped.items()]
        parts.append(f"{len(shapes)} misshaped ({listed(shapes, 2)})")
    hint = next(
        (h for h in (find(mismatch) for find in _HINTS) if h), "check that config.json belongs to these weights"
    )
    return f"{mismatch.checkpoint.directory}: tensors do not match config.json: {', '.join(parts)}; {hint}"


def _quantized(mismatch: Mismatch) -> str | None:
    scales = [name for name in mismatch.extra if name.endswith(_QUANTIZED)]
    return f"{shown(scales[0])} belongs to quantized weights: give the unquantized checkpoint" if scales else None


def _untied(mismatch: Mismatch) -> str | None:
    if mismatch.missing == ("lm_head.weight",):
        return "set tie_word_embeddings to true in config.json if the output embedding is the input's"
    if mismatch.extra == ("lm_head.weight",):
        return "set tie_word_embeddings to false in config.json if the stored output embedding is meant"
    return None


def _layers(mismatch: Mismatch) -> str | None:
    wanted, found = (
        len({int(m.group(1)) for m in map(_LAYER.search, names) if m})
        for names in (mismatch.expected, mismatch.checkpoint.names)
    )
    if wanted == found or not found:
        return None
    return f"config.json calls for {wanted} layers (num_hidden_layers), the weights have {found}"


def _prefix(mismatch: Mismatch) -> str | None:
    for name in mismatch.missing:
        for other in mismatch.extra:
            longer, shorter = (name, other) if len(name) > len(other) else (other, name)
            if longer.endswith("." + shorter):
                lead = longer[: -len(shorter)]
                return f"stored names {'lack' if longer == name else 'begin with'} the prefix {shown(lead)}"
        return None
    return None


def _transposed(mismatch: Mismatch) -> str | None:
    for name, (want, found) in mismatch.misshaped.items():
        if want != found and sorted(want) == sorted(found):
            return f"{shown(name)} looks transposed: save weights as [out_features, in_features]"
    return None


def _vocabulary(mismatch: Mismatch) -> str | None:
    for name, (want, found) in mismatch.misshaped.items():
        if "embed" in name and want[1:] == found[1:]:
            return f"config.json says vocab_size {want[0]}, the weights have {found[0]}"
    return None


_HINTS: tuple[Callable[[Mismatch], str | None], ...] = (
    _quantized,
    _untied,
    _layers,
    _prefix,
    _vocabulary,
    _transposed,
)


def check_finite(name: str, tensor: torch.Tensor, *, allow_nonfinite: bool = False) -> None:
    """PorterError naming how many NaN and infinities `tensor` holds, unless `allow_nonfinite`. Integers always pass."""
    if allow_nonfinite or tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    chunks = values.reshape(-1).split(CHUNK_ELEMENTS)
    if all(_all_finite(chunk) for chunk in chunks):
        return
    nan = sum(int(_comparable(chunk).isnan().sum()) for chunk in chunks)
    infinite = sum(int(_comparable(chunk).isinf().sum()) for chunk in chunks)
    raise PorterError(
        f"tensor {shown(name)}: holds {nan} NaN and {infinite} infinite of {tensor.numel()} values; repair the "
        "checkpoint, or pass --allow-nonfinite to convert it as it is"
    )


def _comparable(chunk: torch.Tensor) -> torch.Tensor:
    """The chunk in a dtype that torch can compare: 8-bit floats widened."""
    return chunk if chunk.element_size() > 1 else chunk.to(torch.float32)


def _all_finite(chunk: torch.Tensor) -> bool:
    """Minimum and maximum are finite: NaN spreads to both, and no array of the chunk's size is made."""
    low, high = torch.aminmax(_comparable(chunk))
    return bool(low.isfinite() & high.isfinite())
