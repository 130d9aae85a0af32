"""Trains multi-token prediction layers together with the model (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

WEIGHT = 0.3
"""lambda of the paper's first 10T tokens."""


class PredictionTraining:
    """The weighted cross-entropy of the token after the next one, predicted by one prediction layer (equation 25).

    `layers` are transformers' own; embedding and head are the model's. Models without prediction layers have none.
    Use as a context around training: it keeps the model's last hidden states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.count = int(getattr(model.config, "num_mtp_layers", None) or 0)
        self.mtp: Any = MtpModel(model, self.count) if self.count else None
        self._hidden: torch.Tensor | None = None
        self._handle: Any = None

    @property
    def layers(self) -> nn.ModuleList:
        """One module per prediction layer."""
        return self.mtp.layers if self.count else nn.ModuleList()

    def __enter__(self) -> PredictionTraining:
        if self.count:
            decoder: Any = self.model.get_decoder()
            self._handle = decoder.register_forward_hook(self._keep)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self._handle.remove()

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """For `rows` [batch, length + 1] of ids whose first `length` the model was just given; 0 without layers."""
        if not self.count or self._hidden is None:
            return torch.zeros(())
        inputs, targets = rows[:, 1:-1], rows[:, 2:]
        positions = torch.arange(1, inputs.shape[1] + 1)[None]
        hidden = self.mtp.forward_layer(0, self._hidden[:, :-1], positions, None, input_ids=inputs)
        logits = self.mtp._project_to_logits(hidden)
        return WEIGHT * F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def state(self) -> dict[str, torch.Tensor]:
        """The layers' tensors under the names of DeepSeek's checkpoints, with the copies of embedding and head that
        these hold."""
        state = {}
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{int(self.model.config.num_hidden_layers) + index}."
            for name, tensor in layer.state_dict().items():
                name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
                state[prefix + name] = tensor
            state[f"{prefix}embed_tokens.weight"] = self.mtp.embed_tokens.weight
            state[f"{prefix}shared_head.head.weight"] = self.mtp.shared_head.weight
        return state

    def _keep(self, module: nn.Module, inputs: object, output: Any) -> None:
        self._hidden = output.last_hidden_state
