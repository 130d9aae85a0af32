"""The eighteen public bugs in miniature: see `public_bugs`."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from benchmarks.drift import (
    faults_attention,
    faults_norms,
    faults_parts,
    faults_rope,
    faults_state,
    faults_weights,
    layers,
)
from benchmarks.drift.case import Case, Fault
from benchmarks.drift.families import FAMILIES
from benchmarks.drift.faults_moe import routed, stacked
from benchmarks.drift.public_bugs import PublicBug, doubts_the_golden, exonerates, names_it, refuses_other_tokens
from benchmarks.drift.site import Site


def fault(kinds: tuple[str, ...], family: str, plant: Any, number: int, **more: Any) -> Case:
    """The miniature as a case."""
    pair = more.pop("pair", "fp32-bf16")
    made = Fault(f"bug-{number}", kinds, (family,), plant, **more)
    seed = zlib.crc32(made.id.encode())
    return Case(f"{made.id}/{family}", seed, FAMILIES[family], pair, made.golden, made.form, made)


def negative_logits(site: Site) -> str:
    """A softmax whose running maximum starts at zero and whose masses below it are lost: wrong when all logits < 0."""

    def forward(self: Any, original: Any, hidden: Tensor) -> Any:
        logits, _, index = original(hidden)
        kept = logits.gather(1, index).clamp(min=0)
        weights = kept / kept.sum(-1, keepdim=True).clamp(min=1e-6)
        return logits, weights.to(logits.dtype), index

    return site.forward("mlp.gate", forward)


def narrow_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Past keys and values stored as float8 of x / 16 and read back without the scale: decays with the length."""
    if key.shape[2] > 1:
        return keys, values
    changed = [torch.cat([past[:, :, :-1] / 16, past[:, :, -1:]], 2) for past in (keys, values)]
    return changed[0], changed[1]


def massive_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The variance summed in the activations' own dtype."""
    return faults_norms.narrow_variance(x, weight, eps)


def reblocked(values: Tensor) -> Tensor:
    """Rows in blocks of 8 interleaved once more than they should be."""
    blocks: Tensor = values.unflatten(1, (-1, 8))
    return blocks.transpose(1, 2).flatten(1, 2)


def narrow_correction(site: Site) -> str:
    """e_score_correction_bias through bfloat16."""
    bias = site.module("mlp.gate").e_score_correction_bias
    bias.copy_(bias.bfloat16().to(bias.dtype))
    return site.path("mlp.gate")


ROUTER = ("router-dtype", "low-precision")
BUGS = (
    PublicBug(
        1,
        "onnxruntime/mobius #548",
        "yarn's mscale_all_dim squared missing",
        fault(("attention-scale",), "deepseek_v3", faults_attention.scaled(faults_attention.without_mscale), 1),
        names_it,
    ),
    PublicBug(
        2,
        "sglang #13495",
        "rope style wrong in the golden itself",
        fault(("rope-style",), "llama", faults_rope.turned(layers.interleaved_turn), 2, scope="all", pair="fp32-fp32"),
        doubts_the_golden,
    ),
    PublicBug(
        3,
        "HabanaAI/vllm-fork #2042",
        "MLA rope without the transpose",
        fault(("rope-style",), "deepseek_v3", faults_rope.turned(layers.half_turn), 3, scope="all"),
        names_it,
    ),
    PublicBug(
        4,
        "vllm #11971",
        "the gate's bias leaks into the weights",
        fault(("router-bias",), "deepseek_v3", routed(bias_weighs=True), 4, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        5,
        "vllm #13474",
        "groups by their best; masked to 0",
        fault(("router-groups",), "deepseek_v3", routed(group_score="max"), 5, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        6,
        "sglang #38695",
        "router logits stored in bfloat16",
        fault(ROUTER, "deepseek_v3", routed(stored=torch.bfloat16), 6, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        7,
        "sglang #33764",
        "router product in bfloat16",
        fault(ROUTER, "deepseek_v3", routed(dtype=torch.bfloat16), 7, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        8,
        "sglang #31213",
        "correction bias loaded as bfloat16",
        fault(
            ("router-bias", "router-dtype", "low-precision"),
            "deepseek_v3",
            narrow_correction,
            8,
            layers="sparse",
            scope="all",
            pair="fp32-fp32",
        ),
        names_it,
    ),
    PublicBug(
        9,
        "vllm #38859",
        "renormalisation wrong where all logits are negative",
        fault(("router-renormalisation",), "qwen3_moe", negative_logits, 9),
        names_it,
    ),
    PublicBug(
        10,
        "vllm #47115",
        "weight_scale_inv transposed",
        fault(
            ("scale-transposed",),
            "deepseek_v3",
            faults_weights.read_blocks(faults_weights.O_PROJ, lambda s: s.t()),
            10,
            golden="blocks",
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        11,
        "TensorRT-LLM #16916",
        "KV scales not applied",
        fault(
            ("scale-missing", "kv-cache-stale", "constant-ratio"),
            "llama",
            faults_attention.cached(narrow_cache),
            11,
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        12,
        "TensorRT-Model-Connect #725",
        "recurrent state stored in float16",
        fault(
            ("state-dtype",),
            "qwen3_next",
            faults_state.state(lambda s: s.half().to(s.dtype)),
            12,
            layers="linear",
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        13,
        "vllm-ascend #15503",
        "mask ignored beyond a position",
        fault(("attention-mask",), "qwen3", faults_attention.kernel_beyond, 13, scope="all"),
        names_it,
    ),
    PublicBug(
        14,
        "sglang #27540",
        "variance in bfloat16",
        fault(
            ("low-precision", "norm-cast-order"),
            "llama",
            faults_norms.normed(massive_variance, "input_layernorm"),
            14,
            scope="all",
            pair="bf16-bf16",
        ),
        names_it,
    ),
    PublicBug(
        15,
        "tt-metal #44959",
        "nothing is broken: rounding flips experts",
        Case("bug-15/qwen3_moe", 15, FAMILIES["qwen3_moe"], "fp32-bf16"),
        exonerates,
    ),
    PublicBug(
        16,
        "vllm #28539",
        "the harness adds a BOS token",
        Case("bug-16/llama", 16, FAMILIES["llama"], "fp32-fp32"),
        refuses_other_tokens,
    ),
    PublicBug(
        17,
        "nntrainer #4194",
        "gate and up exchanged by the loader",
        fault(("gate-up-swapped",), "qwen3", faults_parts.swapped_weights, 17, scope="all"),
        names_it,
    ),
    PublicBug(
        18,
        "radixark/miles #1477",
        "experts re-blocked twice on update",
        fault(("weight-permuted", "weight-stale"), "qwen3_moe", stacked(reblocked, "down_proj"), 18),
        names_it,
    ),
)
"""In the order of their list."""
