"""Fused attention for inference on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.ascend.catalogue.attention_layouts import (
    Names,
    arranged,
    geometry,
    heads_first,
    key_heads_of,
    pages_first,
    split_layout,
)
from porter.kernels.ascend.catalogue.fused_infer_attention import FIRST, SECOND, lse_shape
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.attention import Extras, Sequence, attend, from_sums, hidden_by_mode

Place = tuple[int, slice]
"""Where the queries of a sequence are: the batch row and the rows within."""


def npu_fused_infer_attention_score(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention, and the logarithm of the sum of exponentials or nothing."""
    return _attention(call, FIRST, None)


def npu_fused_infer_attention_score_v2(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """As the first version, with a sink for each head."""
    return _attention(call, SECOND, call["learnable_sink"])


def _attention(call: Call, names: Names, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = geometry(call, names)
    query = call["query"]
    # Rows that belong to no sequence stay NaN: the documents leave them undefined.
    output = torch.full((sizes.batch, sizes.heads, sizes.queries, sizes.value_dim), torch.nan, dtype=query.dtype)
    lse = torch.full((sizes.batch, sizes.heads, sizes.queries, 1), torch.nan)
    for index, ((batch, rows), sequence) in enumerate(_sequences(call, names)):
        extras = Extras(
            hidden=_hidden(call, names, sequence, index),
            bias=_bias(call, index, sequence),
            sink=sink,
        )
        attended = attend(sequence, extras, call[names.scale])
        output[batch, :, rows] = attended.output
        lse[batch, :, rows] = attended.lse
    return arranged(output, sizes.output_layout), _lse(call, names, lse)


def _lse(call: Call, names: Names, lse: torch.Tensor) -> torch.Tensor:
    if not call[names.softmax_lse]:
        return torch.zeros(0)
    shape = lse_shape(call, geometry(call, names))
    return lse[0].transpose(0, 1).contiguous() if len(shape) == 3 else lse


def _sequences(call: Call, names: Names) -> Iterator[tuple[Place, Sequence]]:
    """Each sequence with its place among the queries."""
    inputs, _ = split_layout(call["input_layout"])
    sizes = geometry(call, names)
    heads, key_heads = call[names.heads], key_heads_of(call, names)
    query = heads_first(call["query"], inputs, heads)
    query_rope = None if call["query_rope"] is None else heads_first(call["query_rope"], inputs, heads)
    if sizes.packed:
        places = [(0, rows) for rows in from_sums(list(call[names.query_lengths]))]
    else:
        lengths = _each(call[names.query_lengths], sizes.batch, sizes.queries)
        if sizes.queries == 1:
            lengths = [1] * sizes.batch
        places = [(batch, slice(0, length)) for batch, length in enumerate(lengths)]
    for index, (batch, rows) in enumerate(places):
        key, value, key_rope = (_keys(call, names, name, key_heads, index) for name in ("key", "value", "key_rope"))
        assert key is not None and value is not None
        rope = None if query_rope is None else query_rope[batch, :, rows]
        yield (batch, rows), Sequence(query[batch, :, rows], key, value, rope, key_rope)


def _each(lengths: list[int] | None, batch: int, whole: int) -> list[int]:
    if lengths is None:
        return [whole] * batch
    return list(lengths) * batch if len(lengths) == 1 else list(lengths)[:batch]


def _keys(call: Call, names: Names, name: str, key_heads: int, index: int) -> torch.Tensor | None:
    """[N, S, D] of sequence `index` of key, value or key_rope."""
    tensor = call[name]
    if tensor is None:
        return None
    if call["block_table"] is not None:
        length = list(call[names.key_lengths])
        kept = length[0] if len(length) == 1 else length[index]
        pages = pages_first(tensor, key_heads)[call["block_table"][index].clamp(0, tensor.shape[0] - 1).long()]
        return pages.transpose(0, 1).flatten(1, 2)[:, :kept]
    whole = heads_first(tensor, split_layout(call["input_layout"])[0], key_heads)
    if geometry(call, names).packed:
        return whole[0][:, list(from_sums(list(call[names.key_lengths])))[index]]
    return whole[index][:, : _each(call[names.key_lengths], whole.shape[0], whole.shape[2])[index]]


def _hidden(call: Call, names: Names, sequence: Sequence, index: int) -> torch.Tensor | None:
    queries, keys = sequence.query.shape[1], sequence.key.shape[1]
    mask, mode = call["atten_mask"], call["sparse_mode"]
    if mask is not None and mode < 2:
        if mask.dim() == 2 and geometry(call, names).queries == 1:
            mask = mask[index][None]
        elif mask.dim() == 4:
            mask = mask[index if mask.shape[0] > 1 else 0]
    return hidden_by_mode(mode, queries, keys, call[names.pre], call[names.next], mask)


def _bias(call: Call, index: int, sequence: Sequence) -> torch.Tensor | None:
    bias = call["pse_shift"]
    if bias is None:
        return None
    row: torch.Tensor = bias[index if bias.shape[0] > 1 else 0]
    return row[:, : sequence.query.shape[1], : sequence.key.shape[1]]


SEMANTICS = {
    "npu_fused_infer_attention_score": npu_fused_infer_attention_score,
    "npu_fused_infer_attention_score_v2": npu_fused_infer_attention_score_v2,
}
