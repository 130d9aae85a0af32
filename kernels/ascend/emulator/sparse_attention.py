"""The lightning indexer and attention over what it selects, as the vendor documents them. Accumulated in float32."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.sparse_attention import selected_shape
from porter.kernels.ascend.catalogue.sparse_attention_layout import Span, gathered, spans
from porter.kernels.ascend.catalogue.vendor_op import Call

NOTHING = -1
"""What stands after the last selected key."""


def npu_lightning_indexer(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """The sparse_count visible keys of highest sum over heads of weights * relu(query . key), highest first."""
    query, weights = (call[n].reshape(-1, *call[n].shape[call["query"].dim() - 2 :]) for n in ("query", "weights"))
    count, shape = call["sparse_count"], selected_shape(call)
    indices = torch.full((query.shape[0], count), NOTHING, dtype=torch.int32)
    values = torch.full((query.shape[0], count), -torch.inf)
    for span in spans(call, "key"):
        keys = gathered(call, "key", span, "key").float()
        for row in range(span.queries):
            visible = span.visible(row, call["sparse_mode"] == 3)
            at = span.rows.start + row
            scores = weights[at].float() @ torch.relu(query[at].float() @ keys[:visible].T)
            best = scores.topk(min(count, visible))
            indices[at, : best.indices.shape[0]] = best.indices.to(torch.int32)
            values[at, : best.values.shape[0]] = best.values
    wanted = values.to(query.dtype).view(shape) if call["return_value"] else query.new_empty(0)
    return indices.view(shape), wanted


def npu_sparse_flash_attention(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(scale_value (q . k + q_rope . k_rope)) k over the selected keys, and the softmax's maxima and sums.

    Probabilities are rounded to the dtype of the keys for the second product, as on the chip.
    """
    query, ropes = (call[n].reshape(-1, *call[n].shape[-2:]).float() for n in ("query", "query_rope"))
    rows = call["sparse_indices"].reshape(query.shape[0], -1)
    output = torch.full(query.shape, torch.nan)
    maxima, sums = (torch.full(query.shape[:-1], torch.nan) for _ in range(2))
    for span in spans(call, "kv"):
        latent, rope = (gathered(call, n, span, "kv").float() for n in ("key", "key_rope"))
        for row in range(span.queries):
            at = span.rows.start + row
            chosen = selected_tokens(rows[at], span, row, call)
            scores = (query[at] @ latent[chosen].T + ropes[at] @ rope[chosen].T) * call["scale_value"]
            maxima[at], sums[at], weights = shifted_softmax(scores, call["sinks"])
            output[at] = weights.to(call["key"].dtype).float() @ latent[chosen]
    attended = output.to(call["query"].dtype).view(call["query"].shape)
    if not call["return_softmax_lse"]:
        return attended, torch.empty(0), torch.empty(0)
    return attended, _statistics(maxima, call["query"]), _statistics(sums, call["query"])


def selected_tokens(row: torch.Tensor, span: Span, query: int, call: Call) -> torch.Tensor:
    """The keys that a row of block indices names, as far as the query sees them. Reading stops at the first -1."""
    block, ends = call["sparse_block_size"], (row < 0).nonzero()
    named = row[: int(ends[0]) if len(ends) else None].long()
    tokens: torch.Tensor = (named[:, None] * block + torch.arange(block)).flatten()
    return tokens[tokens < span.visible(query, call["sparse_mode"] == 3)]


def shifted_softmax(
    scores: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(maximum, sum of exponentials, weights) of scores [heads, keys]; a sink takes part in the sum alone."""
    if scores.shape[1] == 0:
        return torch.full(scores.shape[:1], -torch.inf), torch.zeros(scores.shape[:1]), scores
    beside = scores if sinks is None else torch.cat((scores, sinks[:, None]), dim=1)
    highest = beside.amax(1, keepdim=True)
    total = (beside - highest).exp().sum(1, keepdim=True)
    return highest[:, 0], total[:, 0], (scores - highest).exp() / total


def _statistics(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[B, 1, S, heads] of BSND, [1, T, heads] of TND."""
    return rows.view(query.shape[:-1]).unsqueeze(1) if query.dim() == 4 else rows.unsqueeze(0)


SEMANTICS = {
    "npu_lightning_indexer": npu_lightning_indexer,
    "npu_sparse_flash_attention": npu_sparse_flash_attention,
}
