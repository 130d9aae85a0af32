"""The router's scores before softmax or sigmoid: hidden times the transposed weight, in float32 throughout."""

import triton
import triton.language as tl


@triton.jit
def router_logits(
    hidden,
    weight,
    logits,
    tokens,
    experts,
    width,
    hidden_stride,
    weight_stride,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """hidden [tokens, width], weight [experts, width] -> logits float32 [tokens, experts]; a tile of them a program.

    Products of 16-bit values are exact in float32, so that they are widened only where the two have other dtypes.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((TOKENS, EXPERTS), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(
            hidden + token[:, None] * hidden_stride + start + column[None, :],
            mask=(token < tokens)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + expert[None, :] * weight_stride + start + column[:, None],
            mask=inside[:, None] & (expert < experts)[None, :],
            other=0.0,
        )
        if x.dtype != w.dtype:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    tl.store(logits + token[:, None] * experts + expert[None, :], sums, mask=inside)
