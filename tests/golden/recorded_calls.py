"""Recording a few calls of a model, and reading one back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.golden.recorder import recording
from porter.golden.store import Golden


def recorded(model: nn.Module, path: Path, *calls: tuple[Any, ...], **settings: Any) -> Golden:
    """The golden of these calls, without gradients."""
    with torch.no_grad(), recording(model, path, **settings):
        for arguments in calls:
            model(*arguments)
    return Golden.open(path)


def only(golden: Golden, module: str) -> Any:
    """Inputs and outputs of the module's first call."""
    (found,) = [r for r in golden.records if (r.module, r.call, r.step) == (module, 0, 0)]
    return golden.value(found.inputs), golden.value(found.outputs)
