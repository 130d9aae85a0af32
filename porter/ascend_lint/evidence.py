"""What a lint looks at: config, chip, the tensors that are stored, the model, and the trace of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from porter.ascend_lint.trace import Trace
from porter.chips.catalogue import Chip


@dataclass(frozen=True)
class Evidence:
    """`config` as in config.json; `stored` is the dtype of each tensor of the checkpoint, by name, as its header writes
    it; `positions` the most that a sequence is to have."""

    model: nn.Module
    config: Mapping[str, Any]
    chip: Chip
    trace: Trace = field(default_factory=Trace)
    stored: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """The config's."""
        return str(self.config.get("model_type", ""))

    @property
    def positions(self) -> int:
        """max_position_embeddings, 0 where the config has none."""
        return int(self.config.get("max_position_embeddings") or 0)
