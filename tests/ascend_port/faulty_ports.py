"""Minimal ports that make the mistakes of vllm-ascend's public bugs: each calls torch_npu as the bug did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NZ = 29
T, H, EXPERTS = 8, 64, 4


def vendor() -> Any:
    """The module torch_npu of the emulator."""
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu


class Calling(nn.Module):
    """A module whose forward is one function of itself and a hidden state."""

    def __init__(self, call: Callable[[Any, Tensor], Any], **held: Tensor) -> None:
        super().__init__()
        self.call = call
        for name, tensor in held.items():
            self.register_buffer(name, tensor)

    def forward(self, hidden: Tensor) -> Any:
        """What the function makes of it."""
        return self.call(self, hidden)


class Port(nn.Module):
    """A model of one part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, hidden: Tensor) -> Any:
        """The part's output."""
        return self.part(hidden)


@dataclass(frozen=True)
class FaultyPort:
    """A public bug: its id, the port that makes it, and how it must be caught: the rule of the lint, and its words."""

    id: str
    call: Callable[[Any, Tensor], Any]
    rule: str
    words: str
    held: Callable[[], dict[str, Tensor]] = dict
    config: dict[str, Any] = field(default_factory=dict)
    stored: tuple[str, ...] = ()
    hidden: Callable[[], Tensor] = lambda: torch.randn(T, H).bfloat16()
    runs: int = 1


def _counts_of_ends(self: Any, hidden: Tensor) -> Any:
    ends = torch.tensor([3, 5, 6, 8])
    counts = torch.cat((ends.diff()[:1], ends.diff()))
    return grouped(hidden, self.weight, counts)


def grouped(hidden: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The rows of `hidden` times their experts' weights, by counts."""
    result: Tensor = vendor().npu_grouped_matmul(
        [hidden], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1, output_dtype=hidden.dtype
    )[0]
    return result


def _unscaled_router(self: Any, hidden: Tensor) -> Any:
    return vendor().npu_moe_gating_top_k(
        hidden.float(), 2, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=1, out_flag=False,
        routed_scaling_factor=1.0, eps=1e-20, bias=torch.zeros(H),
    )  # fmt: skip


def _narrow_router(self: Any, hidden: Tensor) -> Any:
    return vendor().npu_moe_gating_top_k(
        hidden, 2, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=1, out_flag=False,
        routed_scaling_factor=2.5, eps=1e-20, bias=torch.zeros(H).bfloat16(),
    )  # fmt: skip


def _blocked_convolution(self: Any, hidden: Tensor) -> Any:
    if not hasattr(self, "cast"):
        weight = nn.Parameter(torch.randn(H, 16).bfloat16(), requires_grad=False)
        weight.data = vendor().npu_format_cast(weight.data, NZ)
        self.conv1d_weight, self.cast = weight, True
    return nn.functional.conv1d(hidden.T.unsqueeze(0), torch.ones(H, 1, 1, dtype=hidden.dtype), groups=H)


def _attention(query: Tensor, key: Tensor, **changed: Any) -> Any:
    given: dict[str, Any] = {
        "num_heads": query.shape[1], "num_key_value_heads": key.shape[1], "scale": 0.125, "input_layout": "BNSD",
        "sparse_mode": 0, "inner_precise": 0, "pre_tokens": 2147483647, "next_tokens": 2147483647,
        "softmax_lse_flag": False,
    }  # fmt: skip
    return vendor().npu_fused_infer_attention_score(query, key, key, **{**given, **changed})[0]


def _mask_of_keys(self: Any, hidden: Tensor) -> Any:
    states = hidden.view(1, 1, T, H)
    return _attention(states, states, atten_mask=torch.zeros(1, 1, 1, T, dtype=torch.bool))


def _packed_without_mask(self: Any, hidden: Tensor) -> Any:
    states = torch.randn(T, 1, 128).bfloat16()
    lengths = {"actual_seq_lengths": [T], "actual_seq_lengths_kv": [T]}
    return _attention(states, states, input_layout="TND", **lengths)


def _torchs_mask(self: Any, hidden: Tensor) -> Any:
    states = hidden.view(1, 1, T, H)
    return _attention(states, states, atten_mask=torch.ones(1, 1, T, T).tril().bool(), inner_precise=2)


def _boolean_bias(self: Any, hidden: Tensor) -> Any:
    states, bias = hidden.view(1, 1, T, H), torch.randn(1, 1, T, T)
    return _attention(states, states, atten_mask=bias.bool())


def _polluted_mask(self: Any, hidden: Tensor) -> Any:
    states = hidden.view(1, 1, T, H)
    out = _attention(states, states, atten_mask=self.mask)
    self.mask.logical_and_(torch.zeros(T, dtype=torch.bool))
    return out


def _default_activation(self: Any, hidden: Tensor) -> Any:
    return vendor().npu_clipped_swiglu(hidden)


def _overflowing(self: Any, hidden: Tensor) -> Any:
    return torch.where(torch.arange(hidden.shape[0])[:, None] >= 1024, torch.inf, hidden)


def _stale_slots(self: Any, hidden: Tensor) -> Any:
    states, cache = hidden.view(T, 1, H), torch.zeros(2, 16, 1, H).bfloat16()
    slots = torch.tensor([0, 1, 2, 3, 4, 5, 5, 5], dtype=torch.int32)
    return vendor().npu_scatter_pa_kv_cache(states, states, cache, cache.clone(), slots, cache_mode="Norm")


def _not_transposed(self: Any, hidden: Tensor) -> Any:
    return _quantized(hidden, self.codes, torch.ones(2 * H), torch.bfloat16)


def _narrow_scale(self: Any, hidden: Tensor) -> Any:
    return _quantized(hidden, self.codes.t(), torch.ones(2 * H).bfloat16(), torch.int32)


def _quantized(hidden: Tensor, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
    rows, scales = vendor().npu_dynamic_quant(hidden, smooth_scales=None, group_index=None, dst_type=torch.int8)
    return vendor().npu_quant_matmul(
        rows, codes, scale, offset=None, pertoken_scale=scales, bias=None, output_dtype=dtype
    )


def _multiplied_away(self: Any, hidden: Tensor) -> Any:
    counts = torch.tensor([2, 1, 1, 1])
    sorted_rows = hidden.masked_fill((torch.arange(T) >= 5)[:, None], torch.nan)  # as sorting operators leave them
    return grouped(sorted_rows, self.weight, counts) * (torch.arange(T) < 5)[:, None]


def normed(self: Any, hidden: Tensor) -> Any:
    """A norm with nothing wrong in its call."""
    return vendor().npu_rms_norm(hidden, torch.ones(H).bfloat16(), epsilon=1e-6)[0]


def _weights() -> dict[str, Tensor]:
    return {"weight": torch.randn(EXPERTS, H, H).bfloat16()}


def _codes() -> dict[str, Tensor]:
    return {"codes": torch.randint(-8, 8, (2 * H, H), dtype=torch.int8)}


SCALED = {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "num_experts_per_tok": 2}

PORTS = (
    FaultyPort("2: vllm-ascend #5025", _counts_of_ends, "refused", "group_list", _weights),
    FaultyPort("3: vllm-ascend #9036", _unscaled_router, "router-argument", "routed_scaling_factor", config=SCALED),
    FaultyPort("5: vllm-ascend #3465", normed, "unread-norm-bias", "smoothing", stored=("part.input_layernorm.bias",)),
    FaultyPort("6: vllm-ascend #4058", _blocked_convolution, "nz-format", "FRACTAL_NZ"),
    FaultyPort("7: vllm-ascend #15503", _mask_of_keys, "refused", "atten_mask"),
    FaultyPort("8: vllm-ascend #13699", _packed_without_mask, "refused", "packed layouts"),
    FaultyPort("9: vllm-ascend #12123", _default_activation, "refused", "alpha is left out"),
    FaultyPort("10: vllm-ascend #11391", _overflowing, "nan-in-padding", "1024", hidden=lambda: torch.ones(1030, H)),
    FaultyPort(
        "11: vllm-ascend #1331",
        normed,
        "rope-range",
        "128 rows",
        lambda: {"cos_cached": torch.ones(128, H)},
        {"max_position_embeddings": 4096},
    ),
    FaultyPort(
        "12: vllm-ascend #1678",
        _polluted_mask,
        "shared-buffer",
        "changed in place",
        lambda: {"mask": torch.ones(1, 1, T, T).triu(1).bool()},
        runs=2,
    ),
    FaultyPort("13: vllm-ascend #3482", _stale_slots, "refused", "slot_mapping"),
    FaultyPort("14: vllm-ascend #3850", _not_transposed, "refused", "x2", _codes),
    FaultyPort("15: vllm-ascend #768", _multiplied_away, "nan-in-undefined-rows", "masked_fill", _weights),
    FaultyPort("17: vllm-ascend #7537", normed, "unread-rotation", "Hadamard", stored=("part.indexer.q_rot",)),
    FaultyPort("18: vllm-ascend #7139", normed, "unread-rotation", "turned", stored=("part.heads_rotation",)),
    FaultyPort("21: vllm-ascend #2925", _narrow_scale, "refused", "scale", _codes),
    FaultyPort("22: sglang #39351", _narrow_router, "router-dtype", "bfloat16", config=SCALED),
    FaultyPort("25: transformers #48843", _boolean_bias, "refused", "masked from every key"),
    FaultyPort("26: vllm-ascend #883", normed, "unread-quantization-part", "mean nothing", stored=("part.deq_scale",)),
    FaultyPort("polarity of torch", _torchs_mask, "mask-polarity", "opposite"),
)
