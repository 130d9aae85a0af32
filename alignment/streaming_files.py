"""Models built from their config with placeholders, and the safetensors files that their tensors come from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from porter.alignment.stream import streamed
from porter.checkpoint.header import read_header
from porter.checkpoint.reader import Checkpoint, TensorInfo
from porter.correspondence import Entry
from porter.errors import PorterError
from porter.models.auto_class import auto_class
from porter.models.checkpoint_layout import checkpoint_layout


class TensorFiles(Protocol):
    """Tensors on disk by name: a checkpoint, or what stands for one."""

    def __contains__(self, name: object) -> bool: ...
    def info(self, name: str) -> TensorInfo: ...
    def load(self, name: str) -> Tensor: ...


class CannotStream(Exception):
    """Why a model has to be loaded whole; not an error of the user's."""


@dataclass(frozen=True)
class Files:
    """The tensors of a model by the model's own names.

    `entries` are the tensors that the files hold in pieces; `aliases` name the tensor that the files hold for one that
    they do not.
    """

    checkpoint: TensorFiles
    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]

    def __call__(self, name: str) -> Tensor:
        """A fresh tensor, in the dtype of the files."""
        name = self.aliases.get(name, name)
        entry = self.entries.get(name)
        if entry is None:
            return self.checkpoint.load(name)
        return entry.join([self.checkpoint.load(source) for source in entry.sources])

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that `self(name)` gives."""
        name = self.aliases.get(name, name)
        entry = self.entries.get(name)
        return self.checkpoint.info(name if entry is None else entry.sources[0]).torch_dtype


def checkpoint_of(files: Sequence[Path]) -> Checkpoint:
    """The safetensors `files` as one checkpoint, headers read and checked."""
    return Checkpoint(files[0].parent, {f.name: f for f in files}, {f.name: read_header(f) for f in files})


@contextmanager
def placeholders_for_parameters(dtype: torch.dtype | None) -> Iterator[None]:
    """Models built within have parameters without storage, in `dtype` where they name none, and real buffers: tables
    computed at start are not in a checkpoint."""
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers.initialization import no_init_weights

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter
        return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)

    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(no_init_weights())
        handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
        stack.callback(handle.remove)
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(dtype or default)
        yield


def class_of(config: Any) -> Any:
    """transformers' own class for a config; None where it has none or the checkpoint brings its own."""
    mapping = auto_class(config.model_type)._model_mapping
    known = type(config) in mapping and not getattr(config, "auto_map", None)
    return mapping[type(config)] if known else None


def stream_from(
    model: nn.Module,
    checkpoint: TensorFiles,
    device: torch.device,
    dtype: torch.dtype | None,
    tied: Mapping[str, str] | None = None,
    stored: bool = False,
) -> nn.Module:
    """`model`, built with placeholders, streamed from `checkpoint`.

    `stored`: in the dtypes of the files; else in the dtypes of the model, as `from_pretrained(dtype=...)` would give.
    `tied` maps names to those that the files hold. Raises CannotStream, saying why, where the files do not hold every
    tensor under its name.
    """
    files = _files(model, checkpoint, tied or {})
    names = frozenset(model.state_dict(keep_vars=True))
    wide = _kept_wide(model, dtype)
    for owner, table, leaf, name in _tensors(model):
        if name in names:
            tensor = table[leaf]
            wanted = files.dtype(name) if stored else torch.float32 if wide(name) else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=wanted, device="meta")
            table[leaf] = nn.Parameter(empty, requires_grad=False) if leaf in owner._parameters else empty
    _retie(model, files.aliases)
    return streamed(model, files, device, names)


def _files(model: nn.Module, checkpoint: TensorFiles, tied: Mapping[str, str]) -> Files:
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    held = {name for name in state if name in checkpoint}
    in_pieces = [e for e in layout_of(model) if e.target not in held and all(s in checkpoint for s in e.sources)]
    entries = {entry.target: entry for entry in in_pieces}
    held |= set(entries)
    by_identity = {id(state[name]): name for name in held}
    aliases = {n: by_identity[id(t)] for n, t in state.items() if n not in held and id(t) in by_identity}
    aliases |= {name: target for name, target in tied.items() if name not in held and target in held}
    for name, tensor in state.items():
        if name not in held and name not in aliases:
            raise CannotStream(f"the files do not hold {name} under that name")
        if name in held and name not in entries and checkpoint.info(name).shape != tuple(tensor.shape):
            raise CannotStream(f"the files hold {name} in another shape")
    return Files(checkpoint, entries, aliases)


def layout_of(model: nn.Module) -> list[Entry]:
    """How released checkpoints of this model store its tensors. CannotStream for what no entry can say."""
    try:
        return list(checkpoint_layout(model).entries)
    except PorterError as error:
        raise CannotStream(str(error)) from error


def _kept_wide(model: nn.Module, dtype: torch.dtype | None) -> Any:
    """Whether transformers keeps a tensor of that name in float32 when it loads the model in `dtype`."""
    plan = getattr(model, "_get_dtype_plan", None)
    patterns = [] if plan is None or dtype is None else [re.escape(str(p)).replace(r"\*", ".*") for p in plan(dtype)]
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any], str, str]]:
    for path, owner in model.named_modules():
        for table in (owner._parameters, owner._buffers):
            for leaf in [leaf for leaf, tensor in table.items() if tensor is not None]:
                yield owner, table, leaf, f"{path}.{leaf}" if path else leaf


def _retie(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Tied parameters are one object again."""
    for name, target in aliases.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._parameters[leaf] = model.get_parameter(target)
