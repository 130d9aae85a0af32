"""Forward signatures other than transformers' own: kept as they are, with what the ported body calls its inputs."""

from __future__ import annotations

import ast
import inspect
import textwrap

from torch import nn

from porter.models.cache_argument import CACHE_NAMES
from porter.models.rewrite import Adopted, Mismatch

STANDARD = ("position_embeddings", "attention_mask", "cache")
POSITIONS = ("position_embeddings", "freqs_cis", "rotary", "rotary_emb", "rope", "freqs", "cos_sin")
COSINES = (("cos", "sin"), ("rotary_cos", "rotary_sin"), ("cosine", "sine"))
MASKS = ("attention_mask", "mask", "attn_mask", "causal_mask")
CACHES = (*CACHE_NAMES, "past_key_value", "layer_past", "kv_cache")


def adopted(module: nn.Module) -> Adopted | Mismatch | None:
    """How the ported forward of an attention takes the arguments of `module`'s; None where the names are its own.

    A Mismatch where the forward takes no rotary positions that porter knows.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    returned = returns(module)
    if not names:
        return Mismatch("its forward takes no hidden states by name")
    if {"hidden_states", *STANDARD} <= set(names) and rest == "kwargs" and returned == 2:
        return None
    pair = next((p for p in COSINES if set(p) <= set(names)), None)
    given = {
        "hidden_states": names[0],
        "position_embeddings": f"({', '.join(pair)})" if pair else _first(POSITIONS, names),
        "attention_mask": _first(MASKS, names) or "None",
        "cache": _first(CACHES, names) or "None",
        "kwargs": rest or "{}",
    }
    if given["position_embeddings"] is None:
        return Mismatch(f"an attention whose forward takes no rotary positions: {', '.join(names)}")
    return Adopted(tuple(f"{ours} = {theirs}" for ours, theirs in given.items() if ours != theirs), returned)


def _first(known: tuple[str, ...], names: list[str]) -> str | None:
    return next((name for name in known if name in names), None)


def returns(module: nn.Module) -> int:
    """How many values `module`'s forward returns, by its return statements; 1 where it is not a tuple."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward))))
    except (OSError, TypeError, SyntaxError):
        return 1
    sizes = {
        len(node.value.elts) if isinstance(node.value, ast.Tuple) else 1
        for node in ast.walk(tree)
        if isinstance(node, ast.Return) and node.value is not None
    }
    return max(sizes, default=1)
