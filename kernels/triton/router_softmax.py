"""Softmax routing: the experts of largest probability (transformers' Qwen3MoeTopKRouter)."""

import triton
import triton.language as tl


@triton.jit
def router_softmax(
    scores,
    logits,
    weights,
    indices,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PICKS: tl.constexpr,
):
    """scores float32 [tokens, experts] -> logits, the same as rounded; weights and indices int64 [tokens, TOP_K].

    The weights are the largest of softmax(scores), the lower index first where two are equal; divided by their sum if
    RENORMALIZE.
    """
    expert = tl.arange(0, EXPERTS)
    pick = tl.arange(0, PICKS)
    inside = expert < experts
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        x = tl.load(scores + token * experts + expert, mask=inside, other=float("-inf"))
        tl.store(logits + token * experts + expert, x.to(logits.dtype.element_ty), mask=inside)
        e = tl.exp(x - tl.max(x, axis=0))
        left = tl.where(inside, e / tl.sum(e, axis=0), -1.0)
        best = tl.zeros((PICKS,), tl.float32)
        chosen = tl.zeros((PICKS,), tl.int32)
        for i in range(TOP_K):
            top = tl.max(left, axis=0)
            where = tl.min(tl.where(left == top, expert, EXPERTS), axis=0)
            best = tl.where(pick == i, top, best)
            chosen = tl.where(pick == i, where, chosen)
            left = tl.where(expert == where, -1.0, left)
        if RENORMALIZE:
            best = best / tl.sum(best, axis=0)
        kept = pick < TOP_K
        tl.store(weights + token * TOP_K + pick, best.to(weights.dtype.element_ty), mask=kept)
        tl.store(indices + token * TOP_K + pick, chosen.to(tl.int64), mask=kept)
