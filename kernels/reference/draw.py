"""Seeded tensors for the generated cases of the Ops."""

from __future__ import annotations

import torch


class Draw:
    """Random tensors of one dtype from one seed: the same on every machine."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Normal values with standard deviation `scale` about `shift`."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float32)
        return (values * scale + shift).to(self.dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Values in [0, 1)."""
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 values in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def int8_weight(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(int8 weight [..., N, K] over all of [-127, 127], float32 scale [..., N]) of about unit output variance."""
        weight = self.integers(-127, 128, *shape).to(torch.int8)
        scale = (self.uniform(*shape[:-1]) + 0.5) / (73.0 * shape[-1] ** 0.5)
        return weight, scale.to(self.dtype) if self.dtype == torch.float64 else scale

    def extreme_rows(self, hidden_size: int) -> torch.Tensor:
        """[4, hidden_size]: zeros, rows near 1e4, rows near 1e-4 (where an epsilon of 1e-6 matters), and ordinary."""
        scales = torch.tensor([0.0, 1e4, 1e-4, 1.0])[:, None]
        rows = torch.randn(4, hidden_size, generator=self.generator, dtype=torch.float32).clamp(-4, 4)
        return (rows * scales).to(self.dtype)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides: rows lie apart in memory, the last dimension stays contiguous."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension that is not contiguous."""
    wide = tensor.new_zeros(*tensor.shape, 2)
    wide[..., 0] = tensor
    return wide[..., 0]
