"""The gated delta rule as the vendor documents it, in float32 over bfloat16 inputs. States are [value, key]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_chunk_gated_delta_rule(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens in bfloat16, and the last state of each sequence, rounded to the dtype of the first."""
    output = torch.full(call["value"].shape, torch.nan)
    states = call["initial_state"].float()
    for sequence, tokens in _sequences(call):
        for token in tokens:
            states[sequence], output[token] = _step(call, token, states[sequence])
    return output.to(torch.bfloat16), states.to(call["initial_state"].dtype)


def npu_recurrent_gated_delta_rule(call: Call) -> torch.Tensor:
    """Outputs in bfloat16. A sequence starts from the block of its last accepted token, the first where none is told;
    the state after each token is rounded into the block of that token."""
    output, blocks = torch.full(call["value"].shape, torch.nan), call["ssm_state_indices"]
    start = call["state"].clone()
    for sequence, tokens in _sequences(call):
        accepted = 1 if call["num_accepted_tokens"] is None else int(call["num_accepted_tokens"][sequence])
        state = start[blocks[tokens[accepted - 1]]].float()
        for token in tokens:
            state, output[token] = _step(call, token, state)
            call["state"][blocks[token]] = state.to(call["state"].dtype)
    return output.to(torch.bfloat16)


def _step(call: Call, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(state, output) of one token: S <- a S + beta (v - a S k) k^T and S (scale q), with a = exp(g) and exp(gk)."""
    value = call["value"][token].float()
    shared = value.shape[0] // call["key"].shape[1]
    query, key = (call[name][token].float().repeat_interleave(shared, dim=0) for name in ("query", "key"))
    kept = torch.ones(value.shape[0], 1, 1)
    if call["g"] is not None:
        kept = call["g"][token].exp()[:, None, None]
    if "gk" in call.arguments and call["gk"] is not None:
        kept = kept * call["gk"][token].exp().unsqueeze(1)
    strength = torch.ones(value.shape[0]) if call["beta"] is None else call["beta"][token].float()
    state = kept * state
    correction = strength[:, None] * (value - (state @ key.unsqueeze(2)).squeeze(2))
    state = state + correction.unsqueeze(2) * key.unsqueeze(1)
    return state, (state @ (query * call["scale"]).unsqueeze(2)).squeeze(2)


def _sequences(call: Call) -> Iterator[tuple[int, range]]:
    start = 0
    for sequence, length in enumerate(call["actual_seq_lengths"].tolist()):
        yield sequence, range(start, start + length)
        start += length


SEMANTICS = {
    "npu_chunk_gated_delta_rule": npu_chunk_gated_delta_rule,
    "npu_recurrent_gated_delta_rule": npu_recurrent_gated_delta_rule,
}
