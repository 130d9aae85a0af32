"""Small random modules of three families, and drifts made by planting a fault in a copy of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DynamicCache, Qwen2Config, Qwen3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from porter.alignment.drift import Drift
from porter.alignment.observation import Observation, tensors, worst
from porter.precision import float64_mode

FLOOR = 1e-6
ROTARY = "rotary_emb"
CACHE = "a cache, fresh for every replay"
EAGER: dict[str, Any] = {"attn_implementation": "eager", "num_hidden_layers": 2, "vocab_size": 61}

QWEN3 = Qwen3Config(
    hidden_size=48, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, head_dim=16, **EAGER
)
QWEN2 = Qwen2Config(hidden_size=64, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2, **EAGER)
DEEPSEEK_V3 = DeepseekV3Config(
    hidden_size=48, intermediate_size=80, moe_intermediate_size=24, num_attention_heads=4, num_key_value_heads=4,
    first_k_dense_replace=0, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, q_lora_rank=24,
    kv_lora_rank=20, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, max_position_embeddings=2560,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    },
    **EAGER,
)  # fmt: skip

FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "qwen2": (QWEN2, qwen2.Qwen2DecoderLayer, qwen2.Qwen2RotaryEmbedding),
    "qwen3": (QWEN3, qwen3.Qwen3DecoderLayer, qwen3.Qwen3RotaryEmbedding),
    "deepseek_v3": (DEEPSEEK_V3, deepseek_v3.DeepseekV3DecoderLayer, deepseek_v3.DeepseekV3RotaryEmbedding),
}
PREFILL, DECODE_STEPS, BATCH = 13, 1, 2

Plant = Callable[[Any], object]


def layer(family: str) -> nn.Module:
    """A decoder layer with random float64 weights of the size that keeps activations near one."""
    config, layer_class, _ = FAMILIES[family]
    module: nn.Module = layer_class(config, 0).double().eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        scaled = (
            1 + 0.3 * drawn if "norm" in name else 0.3 * drawn if drawn.dim() == 1 else drawn / tensor.shape[-1] ** 0.5
        )
        tensor.data.copy_(scaled)
    return module


def rotary(family: str) -> nn.Module:
    """The rotary embedding of `family` in float64."""
    config, _, rotary_class = FAMILIES[family]
    module: nn.Module = rotary_class(config).double()
    return module


def layer_calls(family: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Golden inputs of a layer or its attention: a prefill and two decode steps."""
    config, _, rotary_class = FAMILIES[family]
    generator = torch.Generator().manual_seed(2)
    rotary, calls, seen = rotary_class(config), [], 0
    for length in (PREFILL, *[1] * DECODE_STEPS):
        hidden = torch.randn(BATCH, length, config.hidden_size, generator=generator, dtype=torch.float64)
        positions = torch.arange(seen, seen + length)[None]
        embeddings = tuple(each.double() for each in rotary(hidden, positions))
        future = torch.ones(length, seen + length).triu(seen + 1).bool()
        mask = torch.zeros(1, 1, length, seen + length, dtype=torch.float64)
        mask = mask.masked_fill(future, torch.finfo(torch.float64).min) if length > 1 else None
        given = {"hidden_states": hidden, "position_embeddings": embeddings, "attention_mask": mask}
        calls.append(((), {**given, "position_ids": positions, "cache": CACHE}))
        seen += length
    return calls


def plain_calls(width: int, scale: float = 1.0) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """One call on random hidden states [2, 13, width]."""
    generator = torch.Generator().manual_seed(3)
    return [((scale * torch.randn(BATCH, PREFILL, width, generator=generator, dtype=torch.float64),), {})]


def replay(calls: list[Any]) -> Callable[..., list[Observation]]:
    """Runs a module on the calls in order, with one fresh cache."""

    def run(module: nn.Module, inputs: Any = None) -> list[Observation]:
        cache, seen = DynamicCache(), []
        with torch.no_grad(), float64_mode():
            for args, kwargs in calls:
                changed_args, changed = (args, kwargs) if inputs is None else inputs(args, kwargs)
                changed = {key: cache if value is CACHE else value for key, value in changed.items()}
                seen.append(dict(tensors(module(*changed_args, **changed), "output")))
        return seen

    return run


def drift_between(
    source: nn.Module,
    candidate: nn.Module,
    calls: list[Any],
    config: Any,
    path: str = "",
    floor: float = FLOOR,
    lane: str = "exact",
    elsewhere: Mapping[str, Tensor] | None = None,
) -> Drift:
    """The drift of `candidate` from `source`, both float64 modules with the same names, on `calls`."""
    run = replay(calls)
    expected, found = run(source), run(candidate)
    tensor, before, step = worst(found, expected)
    theirs = candidate.state_dict()
    weights = {name: (value, theirs[name]) for name, value in source.state_dict().items() if name in theirs}
    name = f"model.layers.1.{path}".rstrip(".")
    return Drift(
        module=name, source=name, kind=type(source).__name__, lane=lane, tensor=tensor, step=step, before=before,
        floor=floor, source_module=source, candidate_module=candidate, source_output=expected, candidate_output=found,
        config=config, weights=weights, elsewhere=elsewhere or {}, run_module=run,
        run_candidate=lambda: run(candidate),
    )  # fmt: skip


def drift_of(family: str, path: str, plant: Plant, floor: float = FLOOR, calls: list[Any] | None = None) -> Drift:
    """The drift that `plant` causes in a copy of the submodule `path` of a layer of `family`."""
    source = rotary(family) if path == ROTARY else layer(family).get_submodule(path)
    candidate = copy.deepcopy(source)
    with torch.no_grad():
        plant(candidate)
    return drift_between(source, candidate, calls or calls_for(family, path, source), FAMILIES[family][0], path, floor)


def calls_for(family: str, path: str, source: nn.Module) -> list[Any]:
    """Golden inputs that fit the submodule `path`."""
    if path in ("", "self_attn"):
        return layer_calls(family)
    if path == ROTARY:
        return [
            ((args[1]["hidden_states"],), {"position_ids": args[1]["position_ids"]}) for args in layer_calls(family)
        ]
    if path.endswith("experts") and "shared" not in path:
        return experts_calls(family)
    weight = source._parameters.get("weight")
    width = FAMILIES[family][0].hidden_size if weight is None else weight.shape[-1]
    return plain_calls(width)


def experts_calls(family: str) -> list[Any]:
    """Hidden states with the experts and weights of a gate that spreads them evenly."""
    config = FAMILIES[family][0]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH * PREFILL, config.hidden_size, generator=generator, dtype=torch.float64)
    scores: Tensor = torch.rand(len(hidden), config.n_routed_experts, generator=generator, dtype=torch.float64)
    weights, indices = scores.topk(config.num_experts_per_tok)
    return [((hidden, indices, weights), {})]
