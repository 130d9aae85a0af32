"""The gated delta rule, token by token: the decode step (Yang et al. 2024, Gated Delta Networks, equation 10)."""

import triton
import triton.language as tl


@triton.jit
def gated_delta_rule(
    query,
    key,
    value,
    decay,
    beta,
    state,
    output,
    next_state,
    tokens,
    heads,
    share,
    key_size,
    value_size,
    scale,
    query_batch_stride,
    query_token_stride,
    query_head_stride,
    key_batch_stride,
    key_token_stride,
    key_head_stride,
    value_batch_stride,
    value_token_stride,
    value_head_stride,
    HAS_STATE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One head of one sequence a program on axis 0, VALUES columns of its state on axis 1, kept on the chip.

    query and key [B, tokens, heads / share, key_size], value [B, tokens, heads, value_size], decay and beta float32
    [B, tokens, heads], state and next_state float32 [B, heads, key_size, value_size], output as value, contiguous.
    With unit q (times `scale`) and k: S <- exp(decay) S; S <- S + k (beta (v - S^T k))^T; output = S^T q. 1e-6 is
    added to the sums of squares of q and k, as flash-linear-attention does.
    """
    batch = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    k_index = tl.arange(0, KEYS)
    v_index = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    in_keys = k_index < key_size
    in_values = v_index < value_size
    cell = (batch * heads + head) * key_size * value_size + k_index[:, None] * value_size + v_index[None, :]
    in_state = in_keys[:, None] & in_values[None, :]
    if HAS_STATE:
        memory = tl.load(state + cell, mask=in_state, other=0.0)
    else:
        memory = tl.zeros((KEYS, VALUES), tl.float32)
    q_row = query + batch * query_batch_stride + (head // share) * query_head_stride
    k_row = key + batch * key_batch_stride + (head // share) * key_head_stride
    v_row = value + batch * value_batch_stride + head * value_head_stride
    for token in range(0, tokens):
        q = tl.load(q_row + token * query_token_stride + k_index, mask=in_keys, other=0.0).to(tl.float32)
        k = tl.load(k_row + token * key_token_stride + k_index, mask=in_keys, other=0.0).to(tl.float32)
        v = tl.load(v_row + token * value_token_stride + v_index, mask=in_values, other=0.0).to(tl.float32)
        gate = (batch * tokens + token) * heads + head
        kept = tl.exp(tl.load(decay + gate))
        strength = tl.load(beta + gate)
        q = q / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6) * scale
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        memory = memory * kept
        recalled = tl.sum(memory * k[:, None], axis=0)
        correction = (v - recalled) * strength
        memory += k[:, None] * correction[None, :]
        read = tl.sum(memory * q[:, None], axis=0)
        tl.store(output + gate * value_size + v_index, read.to(output.dtype.element_ty), mask=in_values)
    tl.store(next_state + cell, memory, mask=in_state)
