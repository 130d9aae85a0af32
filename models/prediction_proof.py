"""Float64 proof that a ported prediction layer computes what transformers' own, on upstream's decoder layer, does."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_layers import MtpLayer

from porter.errors import Refusal
from porter.kernels.dispatch import using_reference
from porter.models.port import PortedSource
from porter.models.prediction import extended_config, layer_text
from porter.models.proof import BOUND, CANNOT_RUN, one_thread, relative_error
from porter.models.proof_parts import TOKENS
from porter.models.reduce import randomise, reduced_config
from porter.models.search import correspondence_of
from porter.precision import float64_mode

FEEDS = ((TOKENS,), (TOKENS - 4, 2, 1, 1))
"""How the proof feeds the tokens: at once without a cache, and as drafting does, in pieces over one."""


def with_prediction_layer(source: PortedSource, config: Any) -> PortedSource:
    """`source` with the class of its prediction layer at the end, proven at reduced width.

    Raises Refusal where it does not compute what transformers' MtpLayer does.
    """
    small = reduced_config(config)
    with one_thread():
        model: Any = getattr(importlib.import_module(source.module), source.class_name)(small).double().eval()
        decoder, norm = type(model.model.layers[-1]), type(model.model.norm)
        longer = dataclasses.replace(source, text=source.text + layer_text(decoder.__name__, norm.__name__))
        extended, index = extended_config(small, 1, like=config), int(small.num_hidden_layers)
        theirs: Any = randomise(MtpLayer(extended, decoder, norm, index).double(), seed=3).eval()
        ours: Any = longer.load().PredictionLayer(extended, index).double().eval()
        chosen = {c.name: c.candidate for c in source.classes}
        state = correspondence_of(theirs, chosen).convert(theirs.state_dict())
        ours.load_state_dict({in_checkpoint(name): tensor for name, tensor in state.items()})
        error = max(_error(ours, theirs, model, extended, sizes) for sizes in FEEDS)
    if not error <= BOUND:
        raise Refusal(f"{source.class_name}: the prediction layer differs from upstream's by {error:.1e}")
    return dataclasses.replace(longer, prediction_error=error)


def in_checkpoint(name: str) -> str:
    """The name in a DeepSeek checkpoint's layer of a tensor of transformers' MtpLayer."""
    return name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")


def _error(ours: Any, theirs: Any, model: Any, config: Any, sizes: tuple[int, ...]) -> float:
    """Of the layer's states for TOKENS tokens that are fed in pieces of `sizes`; infinite where ours cannot run."""
    with torch.no_grad(), float64_mode(), using_reference(ours):
        wanted = _states(theirs, model, config, sizes)
        try:
            return relative_error(_states(ours, model, config, sizes), wanted)
        except CANNOT_RUN:
            return math.inf


def _states(layer: Any, model: Any, config: Any, sizes: tuple[int, ...]) -> torch.Tensor:
    """[2, TOKENS, hidden] of random tokens and states, through a cache where the pieces are several."""
    generator = torch.Generator().manual_seed(4)
    shape = (2, TOKENS, int(config.hidden_size))
    embedded, hidden = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    positions = torch.arange(1, TOKENS + 1)[None]
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    cache = DynamicCache(config=config) if len(sizes) > 1 else None
    cos, sin = model.model.rotary_emb(embedded, positions)
    found = []
    for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
        new = slice(end - size, end)
        keywords = {
            "position_embeddings": (cos[:, new], sin[:, new]),
            "attention_mask": mask[..., new, :end],
            "position_ids": positions[:, new],
        }
        found.append(layer(embedded[:, new], hidden[:, new], **keywords, cache=cache))
    return torch.cat(found, dim=1)
