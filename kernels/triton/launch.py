"""A launch of a Triton kernel, described without triton, and what the descriptions share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Arguments = dict[str, torch.Tensor | int | float]
Constants = dict[str, int | bool]


class NotServed(ValueError):
    """No kernel here takes the call; the message says why, in a few words."""


@dataclass(frozen=True)
class Launch:
    """One launch of `kernel` in the file `source` of this folder: run-time arguments by name (a tensor stands for the
    address of its first element), compile-time constants by name, and which arguments the kernel writes."""

    source: str
    kernel: str
    grid: tuple[int, ...]
    arguments: Arguments
    constants: Constants
    writes: tuple[str, ...]

    def written(self) -> list[torch.Tensor]:
        """The tensors that the kernel writes."""
        return [t for name in self.writes if isinstance(t := self.arguments[name], torch.Tensor)]


@dataclass(frozen=True)
class Plan:
    """Launches in order, and the tensors that hold the Op's outputs after them."""

    launches: tuple[Launch, ...]
    outputs: tuple[torch.Tensor, ...]


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`, at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """Blocks that cover `size`."""
    return -(-size // block)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied only where neighbours of the last dimension are not neighbours in memory."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def rows_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """([..., H] as [rows, H], rows, H, elements from row to row), copied only where no one stride reaches every row."""
    width = tensor.shape[-1]
    if tensor.numel() == 0:
        return tensor, 0, width, width
    tensor = unit_stride(tensor)
    flat = tensor.reshape(-1, width)
    return flat, flat.shape[0], width, flat.stride(0)
