"""Load the prediction layer that `porter adapt` wrote beside a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.checkpoint.reader import Checkpoint
from porter.chips.catalogue import providers_of
from porter.errors import PorterError
from porter.kernels.dispatch import bind_model
from porter.models.prediction import build_layer


def load_prediction_layer(directory: str | Path, model: Any, *, strict: bool = False) -> nn.Module:
    """The first multi-token prediction layer of the exported `directory`, from which `model` was loaded.

    Raises PorterError where the directory holds none. `strict` makes an Op's fallback an error.
    """
    section: dict[str, Any] = getattr(model.config, "porter", None) or {}
    if not section.get("prediction_layers"):
        raise PorterError(
            f"{directory}: holds no prediction layer to draft tokens with: its source has none (config.json: "
            "num_nextn_predict_layers), or was adapted without; DeepSeek-V3's checkpoints have one"
        )
    prefix = f"model.layers.{section['prediction_layers'][0]}."
    with torch.device("meta"):
        layer = build_layer(sys.modules[type(model).__module__], model.config, 0)
    checkpoint = Checkpoint.open(directory)
    state = {n.removeprefix(prefix): checkpoint.load(n) for n in checkpoint.names if n.startswith(prefix)}
    missing, unexpected = layer.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        name = prefix + (missing or unexpected)[0]
        raise PorterError(f"{directory}: tensor {name} does not fit the prediction layer; adapt the model again")
    reference_only = tuple(section.get("reference_only", ()))
    chip = section.get("chip", "cpu")
    bind_model(layer, chip, providers_of(chip), strict=strict, reference_only=reference_only)
    layer.eval().requires_grad_(False)
    return layer
