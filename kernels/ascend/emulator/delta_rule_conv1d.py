"""The short convolution as the vendor documents it, in float32, with states in place."""

from __future__ import annotations

import itertools

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_fused_causal_conv1d(call: Call) -> torch.Tensor:
    """y[i] = sum over k of weight[k] * padded[i + k], where `padded` is the cached state before x; the cache keeps what
    came last. Sequences whose cache line is pad_slot_id are left out."""
    x, states, taps = call["x"], call["conv_states"], call["weight"].shape[0]
    starts, output = call["query_start_loc"].tolist(), torch.full(x.shape, torch.nan)
    for sequence, (start, stop) in enumerate(itertools.pairwise(starts)):
        line = sequence if call["cache_indices"] is None else int(call["cache_indices"][sequence])
        if line == call["pad_slot_id"]:
            continue
        past = _past(call, sequence, states[line], taps)
        padded = torch.cat((past, x[start:stop]))
        kept = min(states.shape[1], padded.shape[0])
        states[line, states.shape[1] - kept :] = padded[padded.shape[0] - kept :]
        shown = padded[past.shape[0] - (taps - 1) :].float()
        length = stop - start
        output[start:stop] = sum(call["weight"][k].float() * shown[k : k + length] for k in range(taps))
        if call["residual_connection"]:
            output[start:stop] += x[start:stop].float()
    return output.to(x.dtype)


def _past(call: Call, sequence: int, state: torch.Tensor, taps: int) -> torch.Tensor:
    """The inputs before the first of a sequence: zeros, those up to the last accepted token, or its state."""
    if call["num_computed_tokens"] is not None and int(call["num_computed_tokens"][sequence]) == 0:
        return state.new_zeros(taps - 1, state.shape[1])
    if call["num_accepted_tokens"] is not None:
        return state[: int(call["num_accepted_tokens"][sequence]) + taps - 2].clone()
    return state.clone()


SEMANTICS = {"npu_fused_causal_conv1d": npu_fused_causal_conv1d}
