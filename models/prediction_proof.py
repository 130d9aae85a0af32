"""Float64 proof that a ported prediction layer computes what transformers' own, on upstream's decoder layer, does."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from transformers.modeling_layers import MtpLayer

from porter.errors import Refusal
from porter.kernels.dispatch import using_reference
from porter.models.port import PortedSource
from porter.models.prediction import extended_config, layer_text
from porter.models.proof import BOUND, one_thread, relative_error
from porter.models.proof_parts import TOKENS
from porter.models.reduce import randomise, reduced_config
from porter.models.search import correspondence_of
from porter.precision import float64_mode


def with_prediction_layer(source: PortedSource, config: Any) -> PortedSource:
    """`source` with the class of its prediction layer at the end, proven at reduced width.

    Raises Refusal where it does not compute what transformers' MtpLayer does.
    """
    small = reduced_config(config)
    with one_thread():
        model: Any = getattr(importlib.import_module(source.module), source.class_name)(small).double().eval()
        decoder, norm = type(model.model.layers[-1]), type(model.model.norm)
        longer = dataclasses.replace(source, text=source.text + layer_text(decoder.__name__, norm.__name__))
        extended, index = extended_config(small, 1), int(small.num_hidden_layers)
        theirs: Any = randomise(MtpLayer(extended, decoder, norm, index).double(), seed=3).eval()
        ours: Any = longer.load().PredictionLayer(extended, index).double().eval()
        chosen = {c.name: c.candidate for c in source.classes}
        state = correspondence_of(theirs, chosen).convert(theirs.state_dict())
        ours.load_state_dict({in_checkpoint(name): tensor for name, tensor in state.items()})
        error = _error(ours, theirs, model, int(small.hidden_size))
    if not error <= BOUND:
        raise Refusal(f"{source.class_name}: the prediction layer differs from upstream's by {error:.1e}")
    return dataclasses.replace(longer, prediction_error=error)


def in_checkpoint(name: str) -> str:
    """The name in a DeepSeek checkpoint's layer of a tensor of transformers' MtpLayer."""
    return name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")


def _error(ours: Any, theirs: Any, model: Any, hidden_size: int) -> float:
    generator = torch.Generator().manual_seed(4)
    shape = (2, TOKENS, hidden_size)
    embedded, hidden = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    positions = torch.arange(1, TOKENS + 1)[None]
    mask = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad(), float64_mode(), using_reference(ours):
        angles = model.model.rotary_emb(embedded, positions)
        keywords = {"position_embeddings": angles, "attention_mask": mask, "position_ids": positions, "cache": None}
        return relative_error(ours(embedded, hidden, **keywords), theirs(embedded, hidden, **keywords))
