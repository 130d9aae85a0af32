"""The checkpoint that a dump was made of: what rebuilds the model, names its classes, and checks dumped weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from porter.correspondence import Entry
from porter.errors import PorterError
from porter.golden.file_digest import file_digest
from porter.golden.importers.dump import Call, Held
from porter.golden.node import class_path
from porter.golden.source import source_directory

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class Reference:
    """``described``: the manifest's ``model``. ``kinds``: class name per module, empty where the model is unknown."""

    described: dict[str, Any]
    root: str
    kinds: dict[str, str] = field(default_factory=dict)
    checkpoint: Path | None = None
    config: Any = None

    def unfused(self, call: Call) -> list[Call]:
        """The calls of the source modules that a fused projection (qkv_proj, gate_up_proj) stands for, by the
        correspondence of porter's own port; the call as it is for any other module."""
        if not self.kinds or call.module in self.kinds:
            return [call]
        entry = self._fusions.get(call.module)
        output = call.output
        if entry is None or not isinstance(output, Tensor) or output.shape[-1:] != (sum(entry.sizes),):
            return [call]
        parts = output.split(list(entry.sizes), dim=-1)
        return [replace(call, module=name, output=part) for name, part in zip(entry.sources, parts, strict=True)]

    @cached_property
    def _fusions(self) -> dict[str, Entry]:
        """What a port of this model fuses; nothing for a family that porter does not port."""
        from porter.models.family import family_of

        try:
            family = family_of(self.config.model_type)
            correspondence = family.correspondence(self.config, family.port(self.config))
        except PorterError:
            return {}
        return {entry.target: entry for entry in correspondence.modules().entries}


def unreferenced(root: str | None) -> Reference:
    """Of a model of which the dump says no more than the class name, if that."""
    described: dict[str, Any] = {
        "class": root or "unknown", "config": None, "attn_implementation": None, "parameters": 0, "checkpoint": None,
        "digests": None, "unverified": [], "weights": False, "tied": {},
    }  # fmt: skip
    return Reference(described, root or "unknown")


def reference_of(name: str) -> Reference:
    """Of the checkpoint directory (or shipped model) ``name``; nothing but its config and file digests is read.

    PorterError where it is none, or not of a class of transformers.
    """
    from porter.models.auto_class import auto_class
    from porter.models.presets import read_config

    directory = source_directory(name)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise PorterError(f"{directory}: no *.safetensors; an oracle is rebuilt from safetensors alone")
    config: Any = read_config(directory)
    with torch.device("meta"):
        model: nn.Module = auto_class(config.model_type).from_config(config)
    modules = dict(model.named_modules())
    kinds = {path: type(module).__name__ for path, module in modules.items() if not isinstance(module, _CONTAINERS)}
    described = {
        "class": class_path(type(model)),
        "config": json.loads(config.to_json_string(use_diff=False)),
        "attn_implementation": None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checkpoint": str(directory.resolve()),
        "digests": {file.name: file_digest(file) for file in files},
        "unverified": [],
        "weights": False,
        "tied": {},
    }
    return Reference(described, type(model).__name__, kinds, directory, config)


def check_parameters(dumped: Mapping[str, Held], reference: Reference) -> None:
    """PorterError where a weight that was dumped along is not the checkpoint's of that name.

    Names that the checkpoint does not have (transformers may rename while loading) are listed as unverified.
    """
    assert reference.checkpoint is not None, "only a checkpoint holds weights"
    left = dict(dumped)
    for file in sorted(reference.checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys() & left.keys():
                tensor = left.pop(name).read()
                held = opened.get_tensor(name).to(tensor.dtype)
                if held.shape != tensor.shape or not torch.equal(held, tensor):
                    raise PorterError(
                        f"{reference.checkpoint}: {name} is not the weight that the dump was made with; name the "
                        "checkpoint that was dumped with --model"
                    )
    reference.described["unverified"] = sorted(left)
