"""Configs: fields that change the numbers, position ranges, and the dtypes declared for caches and states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from porter.alignment.contract_lint.contract import Contract
from porter.alignment.contract_lint.kinds import KINDS, is_narrower
from porter.alignment.report import LintFinding

NUMERIC = re.compile(
    r"_eps$|^eps|theta$|^rope_(parameters|scaling|interleave)$|routed_scaling_factor|norm_topk_prob|^n_group$|^topk_group$"
    r"|num_experts_per_tok|sliding_window|hidden_act|softcap|partial_rotary_factor|attention_bias|query_pre_attn_scalar"
    r"|scoring_func|layer_types|embedding_multiplier|residual_multiplier|logits_scaling|softmax_in_fp32|head_dim$"
)
"""Fields of a config that change what a model computes."""

CACHE_DTYPES = ("kv_cache_dtype", "cache_dtype", "kv_cache_quant_algo")
STATE_DTYPES = ("mamba_ssm_dtype", "ssm_state_dtype", "recurrent_state_dtype", "router_dtype", "moe_router_dtype")
WIDE_NAMES = ("auto", "none", "float32", "bfloat16", "float16", "model", "")
TABLE = re.compile(r"(^|[._])(cos|sin)(_cached|_cache)?$|cos_sin_cache$|freqs_cis$")


def declared_differences(golden: Contract, candidate: Contract) -> Iterator[LintFinding]:
    """Fields of both configs that change the numbers and differ, and dtypes declared narrower."""
    for name, theirs in golden.config.items():
        mine = candidate.config.get(name)
        if name in candidate.config and NUMERIC.search(name) and mine != theirs:
            for field, one, other in _leaves(name, theirs, mine):
                yield LintFinding("config", "", field, str(one), str(other), False, KINDS["config"])
    yield from _caches(golden, candidate)
    for name in STATE_DTYPES:
        one, other = (_dtype(side.config.get(name)) for side in (golden, candidate))
        if one is not None and other is not None and is_narrower(other, one):
            kind = "router-dtype" if "router" in name else "state-dtype"
            yield LintFinding(kind, "", name, str(one)[6:], str(other)[6:], False, KINDS[kind])


def _leaves(name: str, golden: Any, candidate: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(golden, Mapping) and isinstance(candidate, Mapping):
        for key in dict.fromkeys((*golden, *candidate)):
            if golden.get(key) != candidate.get(key):
                yield from _leaves(f"{name}.{key}", golden.get(key), candidate.get(key))
    else:
        yield name, golden, candidate


def _dtype(value: Any) -> torch.dtype | None:
    found = getattr(torch, str(value).removeprefix("torch."), None) if value else None
    return found if isinstance(found, torch.dtype) else None


def _caches(golden: Contract, candidate: Contract) -> Iterator[LintFinding]:
    for name in CACHE_DTYPES:
        mine = str(candidate.config.get(name) or "")
        theirs = str(golden.config.get(name) or "")
        if mine.lower().removeprefix("torch.") not in WIDE_NAMES and mine != theirs:
            yield LintFinding("kv-cache-dtype", "", name, theirs or "the model's", mine, False, KINDS["kv-cache-dtype"])
    quantization = candidate.config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if scheme and not (golden.config.get("quantization_config") or {}).get("kv_cache_scheme"):
        shown = f"{scheme.get('num_bits')} bits" if isinstance(scheme, Mapping) else str(scheme)
        yield LintFinding("kv-cache-dtype", "", "kv_cache_scheme", "the model's", shown, False, KINDS["kv-cache-dtype"])
    if candidate.config.get("cache_implementation") == "quantized":
        yield LintFinding(
            "kv-cache-dtype", "", "cache_implementation", "dynamic", "quantized", False, KINDS["kv-cache-dtype"]
        )


def position_range(golden: Contract, candidate: Contract, longest: int) -> Iterator[LintFinding]:
    """Tables of cosines shorter than the `longest` sequence of the golden (certain) or than the positions declared.

    A config that declares fewer positions than the golden's is a warning: rotary angles may still be computed beyond.
    """
    declared = int(golden.config.get("max_position_embeddings") or 0)
    for name, held in candidate.tensors.items():
        if not TABLE.search(name) or len(held.shape) < 2:
            continue
        rows = max(held.shape[:-1])
        if rows < max(longest, declared):
            owner, _, leaf = name.rpartition(".")
            wanted = f"{longest} positions recorded" if rows < longest else f"{declared} positions declared"
            yield LintFinding("rope-range", owner, leaf, wanted, f"{rows} rows", rows < longest, KINDS["rope-range"])
    mine = int(candidate.config.get("max_position_embeddings") or 0)
    if mine and mine < max(declared, longest):
        yield LintFinding(
            "rope-range",
            "",
            "max_position_embeddings",
            str(max(declared, longest)),
            str(mine),
            False,
            KINDS["rope-range"],
        )
