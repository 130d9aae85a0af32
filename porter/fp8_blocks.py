"""DeepSeek's FP8 checkpoints as a source: weight [N, K] in float8_e4m3fn, weight_scale_inv one factor per block.

W[i, j] = weight[i, j] * weight_scale_inv[i // rows of a block, j // columns of a block]: despite its name the factor
multiplies (DeepSeek-V3 README_WEIGHTS.md; inference/kernel.py `weight_dequant`). Edges are blocks cut short. Nothing
but a band of one block's rows is ever in a wider dtype, unless the result is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.strict_json import listed, shown
from porter.errors import PorterError
from porter.recipe import Compute, TensorRecipe

SUFFIX = "_scale_inv"
WEIGHT_DTYPE = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
READABLE = "porter reads quant_method fp8 in blocks (weight_block_size, weight_scale_inv), bf16 and fp32"


def block_size(config: Any, where: str = "config.json") -> tuple[int, int] | None:
    """Rows and columns of a block by the quantization_config of `config` (a dictionary, or transformers' object); None
    without one. Raises PorterError for any other kind of quantization, naming what porter reads."""
    name = "quantization_config"
    found = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    method, size = fields.get("quant_method"), fields.get("weight_block_size")
    if method != "fp8" or size is None or fields.get("fmt", "e4m3") != "e4m3":
        told = f"quant_method {shown(str(method))}" + ("" if size is not None else " without weight_block_size")
        raise PorterError(f"{where}: quantization_config: {told} is not read; {READABLE}")
    if not isinstance(size, (list, tuple)) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        raise PorterError(
            f"{where}: quantization_config.weight_block_size is {shown(str(size))}; expected [rows, columns] above 0"
        )
    return size[0], size[1]


@dataclass(frozen=True)
class BlockWeight:
    """One stored weight: codes float8_e4m3fn [N, K], scale [ceil(N / rows), ceil(K / columns)] of `block`."""

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) in float32: each product is rounded once."""
        height, width = self.block
        values = _widened(self.codes[start:stop])
        scale = self.scale.to(torch.float32)
        for band in range(start // height, -(-stop // height)):
            first, last = max(start, band * height), min(stop, (band + 1) * height)
            columns = scale[band].repeat_interleave(width)[: values.shape[1]]
            values[first - start : last - start] *= columns
        return values

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The whole weight in `dtype`, made band by band."""
        result = torch.empty(self.codes.shape, dtype=dtype)
        for start, stop in self.bands():
            result[start:stop] = self.rows(start, stop)
        return result

    def impossible_scales(self) -> int:
        """How many scales no quantizer writes: below 0, or 0 where a code of the block is not."""
        height, width = self.block
        scale = self.scale.to(torch.float32)
        wrong = int((scale < 0).sum())
        for row, column in (scale == 0).nonzero().tolist():
            codes = self.codes[row * height : (row + 1) * height, column * width : (column + 1) * width]
            wrong += bool((codes.contiguous().view(torch.int8) & 0x7F).any())
        return wrong

    def bands(self) -> list[tuple[int, int]]:
        """The rows of each row of blocks."""
        height, rows = self.block[0], self.codes.shape[0]
        return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def _widened(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, exactly, by moving its bits into float16, whose exponent is biased by 8 more.

    Several times as fast as torch's own conversion. NaN would become a number, so it is looked for.
    """
    bits = codes.contiguous().view(torch.int8).to(torch.int16)
    if bool(((bits & 0x7F) == 0x7F).any()):
        return codes.to(torch.float32)
    half = ((bits & 0x7F) << 7) | (bits & -0x8000)
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


@dataclass(frozen=True)
class Fp8Blocks:
    """The FP8 weights of one checkpoint: weight -> its scale, in blocks of `block`."""

    block: tuple[int, int]
    scales: Mapping[str, str]

    @staticmethod
    def of(checkpoint: Checkpoint, block: tuple[int, int] | None) -> Fp8Blocks:
        """The FP8 weights of `checkpoint`, from its headers; none where `block` (see `block_size`) is None.

        Raises PorterError unless every FP8 weight has one scale of the right shape, and every scale one FP8 weight.
        """
        if block is None:
            return Fp8Blocks((1, 1), MappingProxyType({}))
        at = checkpoint.directory
        weights = [n for n in checkpoint.names if checkpoint.info(n).dtype == WEIGHT_DTYPE]
        bare = [n for n in weights if f"{n}{SUFFIX}" not in checkpoint]
        if bare:
            raise PorterError(
                f"{at}: {len(bare)} FP8 weights have no {SUFFIX} ({listed(bare)}); without it their values are not "
                "known: download the missing shards"
            )
        scales = {n: f"{n}{SUFFIX}" for n in weights}
        orphans = sorted({n for n in checkpoint.names if n.endswith(SUFFIX)} - set(scales.values()))
        if orphans:
            raise PorterError(f"{at}: {len(orphans)} scales belong to no FP8 weight ({listed(orphans)}); remove them")
        for weight, scale in scales.items():
            _check_scale(checkpoint, weight, scale, block)
        return Fp8Blocks(block, MappingProxyType(scales))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions of names that `check_against` is to ignore: those of the scales."""
        return (rf".*{SUFFIX}",) if self.scales else ()

    def sources(self, names: Sequence[str]) -> tuple[str, ...]:
        """`names`, each FP8 weight followed by its scale."""
        return tuple(part for n in names for part in ((n, self.scales[n]) if n in self.scales else (n,)))

    def parts(self, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor | BlockWeight]:
        """The loaded `sources(names)`, put together again."""
        rest = iter(tensors)
        found = [BlockWeight(next(rest), next(rest), self.block) if n in self.scales else next(rest) for n in names]
        for part in found:
            if isinstance(part, BlockWeight) and (wrong := part.impossible_scales()):
                raise PorterError(
                    f"{wrong} of {part.scale.numel()} values of weight{SUFFIX} are negative, or 0 over codes that are "
                    "not; repair the checkpoint"
                )
        return found

    def dropped(self, names: Collection[str]) -> tuple[str, ...]:
        """Of dropped tensors, those left when the scales of weights that are read are not among them."""
        read = {scale for weight, scale in self.scales.items() if weight not in names}
        return tuple(n for n in names if n not in read)

    def reading(self, recipe: TensorRecipe) -> TensorRecipe:
        """`recipe` reading FP8 weights, where it has some. Its floats are made of the dtype that it stores."""
        if not any(n in self.scales for n in recipe.sources):
            return recipe
        width = len(recipe.sources) // recipe.pieces
        runs = [recipe.sources[i : i + width] for i in range(0, len(recipe.sources), width)]
        kinds = {tuple(n in self.scales for n in run) for run in runs}
        alike = len(kinds) == 1
        names, pieces = (runs[0], recipe.pieces) if alike else (recipe.sources, 1)
        if recipe.by_rows and len(names) == 1:
            compute = self._banded(recipe, names)
        else:
            stored = [dtype for dtype, _ in recipe.outputs.values()]
            compute = self._whole(recipe, names, stored[0] if stored[0].is_floating_point else torch.float32)
        return TensorRecipe(recipe.outputs, self.sources(recipe.sources), compute, pieces)

    def _whole(self, recipe: TensorRecipe, names: Sequence[str], dtype: torch.dtype) -> Compute:
        def compute(tensors: list[Tensor]) -> dict[str, Tensor]:
            parts = self.parts(names, tensors)
            return recipe.compute([p.dense(dtype) if isinstance(p, BlockWeight) else p for p in parts])

        return compute

    def _banded(self, recipe: TensorRecipe, names: Sequence[str]) -> Compute:
        """One weight whose rows are quantized each by itself: band by band, so its float copy never exists."""

        def compute(tensors: list[Tensor]) -> dict[str, Tensor]:
            (weight,) = self.parts(names, tensors)
            assert isinstance(weight, BlockWeight)
            bands = [recipe.compute([weight.rows(*band)]) for band in weight.bands()]
            return {name: torch.cat([band[name] for band in bands]) for name in recipe.outputs}

        return compute


def _check_scale(checkpoint: Checkpoint, weight: str, scale: str, block: tuple[int, int]) -> None:
    shape, found = checkpoint.info(weight).shape, checkpoint.info(scale)
    at = f"{checkpoint.directory / found.shard}: tensor {shown(scale)}"
    if len(shape) != 2:
        raise PorterError(f"{at}: its weight is {list(shape)}; FP8 blocks are read of matrices [N, K]")
    wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    if found.shape != wanted:
        raise PorterError(
            f"{at} is {list(found.shape)}; a weight {list(shape)} in blocks of {list(block)} has {list(wanted)}: check "
            "weight_block_size in config.json"
        )
    if found.dtype not in SCALE_DTYPES:
        raise PorterError(f"{at} is {found.dtype}; expected one of {', '.join(SCALE_DTYPES)}")
