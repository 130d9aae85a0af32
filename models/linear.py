"""The linear layers of a ported model, one Op call each, in floating point or over int8 weights; and embeddings whose
table is narrower than what they give."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall


class Linear(nn.Linear):
    """`torch.nn.Linear` whose product is the Op `linear/standard`. weight [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **keywords: Any) -> None:
        super().__init__(in_features, out_features, bias=bias, **keywords)
        self.linear = OpCall("linear", "standard")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return self.linear(input, self.weight, self.bias)  # type: ignore[no-any-return]


class Int8Linear(nn.Module):
    """A linear layer over int8 weights with one float32 scale per output row: weight = int8 * weight_scale[:, None].

    scheme "w8a16" multiplies activations as they are; "w8a8" quantizes each activation row to int8 first.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.scheme = in_features, out_features, scheme
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.linear = OpCall("linear", scheme)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        return self.linear(input, self.weight, self.weight_scale, self.bias)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"


class StaticInt8Linear(Int8Linear):
    """An `Int8Linear` whose input has one scale and one offset for all tokens, measured beforehand.

    Codes of the input are input / input_scale + input_offset; quant_bias is -input_offset * the sum of each weight row.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: str, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias, scheme, dtype)
        self.input_scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
        self.input_offset = nn.Parameter(torch.empty(1, dtype=torch.int8), requires_grad=False)
        self.quant_bias = nn.Parameter(torch.empty(out_features, dtype=torch.int32), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]."""
        measured = (self.input_scale, self.input_offset, self.quant_bias)
        return self.linear(input, self.weight, self.weight_scale, *measured, self.bias)  # type: ignore[no-any-return]


class WideningEmbedding(nn.Embedding):
    """The embedding `of`, its table [num_embeddings, embedding_dim] stored in `dtype`, its rows given in `of`'s.

    The buffer `given` is empty: its dtype is that of the rows, and follows when the model is cast.
    """

    given: torch.Tensor

    def __init__(self, of: nn.Embedding, dtype: torch.dtype) -> None:
        table = torch.empty_like(of.weight, dtype=dtype)
        super().__init__(of.num_embeddings, of.embedding_dim, of.padding_idx, _weight=table)
        self.register_buffer("given", torch.empty(0, dtype=of.weight.dtype), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [...] int64 -> [..., embedding_dim]; in the table's own dtype where that is the wider one."""
        rows = super().forward(input)
        return rows.to(torch.promote_types(rows.dtype, self.given.dtype))
