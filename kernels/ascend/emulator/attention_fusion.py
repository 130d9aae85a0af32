"""Fused attention of the training kernels on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_fusion import NAMES
from porter.kernels.ascend.catalogue.attention_layouts import arranged, geometry, heads_first, key_heads_of
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.attention import Attended, Extras, Sequence, attend, from_sums, hidden_by_mode


def npu_fusion_attention(call: Call) -> tuple[Any, ...]:
    """The attention, the largest scores, the sums of exponentials, an empty tensor, and the dropout's three numbers."""
    return (*_attention(call), 0, 0, 0)


def npu_fusion_attention_v3(call: Call) -> tuple[Any, ...]:
    """As the first version; the dropout's seed and offset are tensors."""
    return (*_attention(call), *(torch.zeros(1, dtype=torch.int64) for _ in range(2)))


def _attention(call: Call) -> tuple[torch.Tensor, ...]:
    sizes, layout = geometry(call, NAMES), call["input_layout"]
    query = heads_first(call["query"], layout, call["head_num"])
    key, value = (heads_first(call[name], layout, key_heads_of(call, NAMES)) for name in ("key", "value"))
    output = torch.full((sizes.batch, sizes.heads, sizes.queries, sizes.value_dim), torch.nan, dtype=query.dtype)
    statistics = [torch.full((sizes.batch, sizes.heads, sizes.queries, 1), torch.nan) for _ in range(2)]
    for batch, rows, columns in _places(call, sizes.batch, sizes.queries, sizes.keys):
        sequence = Sequence(query[batch, :, rows], key[batch, :, columns], value[batch, :, columns])
        attended = _attended(call, sequence, batch)
        output[batch, :, rows] = attended.output
        statistics[0][batch, :, rows], statistics[1][batch, :, rows] = attended.largest, attended.total
    wide = [s.expand(-1, -1, -1, 8) for s in statistics]
    if sizes.packed:
        wide = [s[0].transpose(0, 1) for s in wide]
    return arranged(output, layout), wide[0].contiguous(), wide[1].contiguous(), query.new_empty(0)


def _places(call: Call, batch: int, queries: int, keys: int) -> list[tuple[int, slice, slice]]:
    if call["input_layout"] != "TND":
        return [(b, slice(0, queries), slice(0, keys)) for b in range(batch)]
    sums = ([int(n) for n in call[name]] for name in ("actual_seq_qlen", "actual_seq_kvlen"))
    rows, columns = (list(from_sums(each)) for each in sums)
    return [(0, q, k) for q, k in zip(rows, columns, strict=True)]


def _attended(call: Call, sequence: Sequence, batch: int) -> Attended:
    mask, bias = call["atten_mask"], call["pse"]
    if mask is not None and mask.dim() == 4:
        mask = mask[batch if mask.shape[0] > 1 else 0]
    hidden = hidden_by_mode(
        call["sparse_mode"],
        sequence.query.shape[1],
        sequence.key.shape[1],
        call["pre_tockens"],
        call["next_tockens"],
        mask,
    )
    if bias is not None:
        bias = bias[batch if bias.shape[0] > 1 else 0]
    return attend(sequence, Extras(hidden, bias, call["sink"]), call["scale"])


SEMANTICS = {"npu_fusion_attention": npu_fusion_attention, "npu_fusion_attention_v3": npu_fusion_attention_v3}
