"""Linear attention of Qwen3-Next on Ascend, in torch's own operators.

torch_npu has fused operators for it, all in the catalogue, and none computes these Ops:
- npu_chunk_gated_delta_rule and npu_recurrent_gated_delta_rule take unit keys and beta in bfloat16, and states in
  bfloat16 too (the first in float32 on the 950). An Op's state stays in float32: rounded once it is off by 2e-3 of
  itself, where the Op allows 1e-6. The first is documented for decays of -1 to 0 a token; Qwen3-Next's are
  unbounded below.
- npu_fused_causal_conv1d is documented for kernels of 3 (these models' have 4), and applies neither bias nor silu.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.dry_run import Kernel
from porter.kernels.ascend.vendor import TORCH_ALONE
from porter.kernels.reference.delta_rule import NORM_EPSILON

CHUNK = 64
SEGMENT = 4096
"""Tokens whose chunks are worked on at once: a few hundred KB each, so that a long prompt does not need memory for all
of it."""
BLOCK = 16
"""Rows of a triangular system that are solved one after the other; larger blocks are merged by matrix products."""


def chunked(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunked gated delta rule in float32 (Yang et al. 2024, Gated Delta Networks, section 3.3): the systems of
    many chunks at once, by matrix products, so that only the state passes from chunk to chunk.

    torch_npu's products are in float32 unless torch.npu.matmul.allow_hf32 is switched on.
    """
    _real("the gated delta rule", value)
    states = _first(state, (value.shape[0], value.shape[2], key.shape[3], value.shape[3]), value)
    outputs = []
    for start in range(0, value.shape[1], SEGMENT):
        part = [x[:, start : start + SEGMENT] for x in (query, key, value, decay, beta)]
        output, states = _segment(part, states)
        outputs.append(output)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), states


def _segment(part: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, state after) of a stretch of tokens."""
    query, key, value, decay, beta = part
    batch, tokens, heads, _ = value.shape
    key_heads, width = key.shape[2:]
    grouped = (batch, key_heads, heads // key_heads)
    keys, queries = (
        _chunks(_unit(key), (batch, key_heads, 1)),
        _chunks(_unit(query) * width**-0.5, (batch, key_heads, 1)),
    )
    values = _chunks(value.float(), grouped)
    strength, since = (_chunks(x.float().unsqueeze(-1), grouped) for x in (beta, decay))
    since = since.cumsum(-2)
    # Differences above the diagonal are positive and may overflow.
    between = (since - since.transpose(-1, -2)).tril().exp().tril()
    inverse = _inverse(strength * (keys @ keys.transpose(-1, -2)) * between)
    wanted, recalled = inverse @ (strength * values), inverse @ (strength * since.exp() * keys)
    attention, kept = (queries @ keys.transpose(-1, -2)) * between, since.exp()
    asking, to_end = queries * kept, ((since[..., -1:, :] - since).exp() * keys).transpose(-1, -2)
    states = state.view(*grouped, width, -1)
    outputs = torch.empty_like(values)
    for chunk in range(values.shape[3]):
        corrections = wanted[:, :, :, chunk] - recalled[:, :, :, chunk] @ states
        outputs[:, :, :, chunk] = asking[:, :, :, chunk] @ states + attention[:, :, :, chunk] @ corrections
        states = kept[:, :, :, chunk, -1:] * states + to_end[:, :, :, chunk] @ corrections
    by_token = outputs.flatten(1, 2).flatten(2, 3)[:, :, :tokens].transpose(1, 2)
    return by_token.to(value.dtype).contiguous(), states.flatten(1, 2)


def recurrent(
    torch_npu: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule token by token in float32, reading the state twice and writing it once a token.

    With a = exp(decay) the output q^T (a S + k c^T), where c is the correction, is a q^T S + (q.k) c: one product of
    the state with query and key, before it is changed, serves both.
    """
    _real("the gated delta rule", value)
    batch, tokens, heads, size = value.shape
    both = _unit(torch.stack((query, key), dim=3)).repeat_interleave(heads // key.shape[2], dim=2)
    overlap = (both[..., 0, :] * both[..., 1, :]).sum(-1, keepdim=True)
    kept, strength, values = decay.float().exp()[..., None], beta.float()[..., None], value.float()
    states = _first(state, (batch, heads, key.shape[3], size), value)
    outputs = torch.empty_like(values)
    for token in range(tokens):
        asked, recalled = ((both[:, token] @ states) * kept[:, token, :, None]).unbind(2)
        correction = strength[:, token] * (values[:, token] - recalled)
        outputs[:, token] = asked + overlap[:, token] * correction
        column = both[:, token, :, 1, :, None].flatten(0, 1)
        forgotten = (kept[:, token, :, None] * states).flatten(0, 1)
        states = torch.baddbmm(forgotten, column, correction.flatten(0, 1).unsqueeze(1)).view_as(states)
    return (outputs * key.shape[3] ** -0.5).to(value.dtype), states


def _first(state: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """The state before the first token, in float32 and `shape`: zeros where there is none."""
    return like.new_zeros(shape, dtype=torch.float32) if state is None else state.float().reshape(shape)


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _chunks(x: torch.Tensor, grouped: tuple[int, int, int]) -> torch.Tensor:
    """[B, T, H, D] -> [B, key heads, values per key head, chunks, CHUNK, D]; tokens of zeros, which write nothing and
    forget nothing, fill the last chunk."""
    x = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.transpose(1, 2).reshape(*grouped, -1, CHUNK, x.shape[-1])


def _inverse(system: torch.Tensor) -> torch.Tensor:
    """(1 + A)^-1 for A [..., CHUNK, CHUNK], of which the part below the diagonal is read.

    Blocks on the diagonal row by row; then [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]] until one is left.
    Unlike the product of 1 + A^2, 1 + A^4 ..., nothing larger than the inverse arises on the way.
    """
    system = system.tril(-1)
    solved = -_on_diagonal(system, BLOCK, below=False)
    for row in range(2, BLOCK):
        above = solved[..., row, :row]
        solved[..., row, :row] = above + (above.unsqueeze(-1) * solved[..., :row, :row]).sum(-2)
    solved = solved + torch.eye(BLOCK, dtype=system.dtype, device=system.device)
    while solved.shape[-1] < system.shape[-1]:
        first, second = solved[..., 0::2, :, :], solved[..., 1::2, :, :]
        below = -(second @ _on_diagonal(system, 2 * solved.shape[-1], below=True) @ first)
        top = torch.cat((first, torch.zeros_like(first)), dim=-1)
        solved = torch.cat((top, torch.cat((below, second), dim=-1)), dim=-2)
    return solved.squeeze(-3)


def _on_diagonal(system: torch.Tensor, size: int, below: bool) -> torch.Tensor:
    """[..., N / size, b, b]: of each size x size block on the diagonal of `system` [..., N, N] the whole, b = size, or
    with `below` its lower left quarter, b = size / 2."""
    count = system.shape[-1] // size
    split = system.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    blocks: torch.Tensor = split.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return blocks[..., size // 2 :, : size // 2] if below else blocks.contiguous()


def causal_conv1d(
    torch_npu: Any,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over the kernel's taps of the shifted inputs, without a copy of the inputs for each tap."""
    _real("the convolution", hidden_states)
    tokens, kernel = hidden_states.shape[1], weight.shape[-1]
    taps = weight.float().t()
    past = hidden_states.new_zeros(hidden_states.shape[0], kernel, hidden_states.shape[2])
    history = torch.cat((past if state is None else state[..., -kernel:].transpose(1, 2), hidden_states), dim=1)
    output = history[:, 1 : 1 + tokens].float() * taps[0]
    for tap in range(1, kernel):
        output = torch.addcmul(output, history[:, 1 + tap : 1 + tap + tokens].float(), taps[tap])
    output = output if bias is None else output + bias.float()
    activated = torch.nn.functional.silu(output).to(hidden_states.dtype)
    return activated, history[:, tokens:].transpose(1, 2).contiguous()


def _real(what: str, states: torch.Tensor) -> None:
    if states.dtype == torch.float64:
        raise VendorRefusal(f"{what} is in float32 on Ascend, not in float64")
    if states.numel() == 0:
        raise VendorRefusal(f"{what} of no tokens")


KERNELS: dict[tuple[str, str], Kernel] = {
    ("gated_delta_rule", "chunked"): chunked,
    ("gated_delta_rule", "recurrent"): recurrent,
    ("causal_conv1d", "silu"): causal_conv1d,
}

EVIDENCE = dict.fromkeys(KERNELS, TORCH_ALONE)
"""Of the kernels that make no call of torch_npu."""
