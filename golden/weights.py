"""How the recorded model can be rebuilt: its class, its config, and its parameters, by reference or stored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from porter.errors import PorterError
from porter.golden.file_digest import file_digest
from porter.golden.format import host_bytes
from porter.golden.node import class_path

StoreWeights = bool | Literal["auto"]

_SHARD_BYTES = 2 << 30


def describe_model(model: nn.Module, store: StoreWeights) -> dict[str, Any]:
    """The manifest's ``model``: class, config, dtype, and ``checkpoint`` with digests or ``weights`` true.

    With ``auto`` the weights are referenced where the directory that the model was loaded from still holds them: every
    parameter found there under its own name must equal the model's. ``unverified`` lists those that are not there
    under their own name (a conversion while loading renames them); they are taken to be the checkpoint's.
    """
    config: Any = getattr(model, "config", None)
    described: dict[str, Any] = {
        "class": class_path(type(model)),
        "config": json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else None,
        "attn_implementation": getattr(config, "_attn_implementation", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checkpoint": None,
        "digests": None,
        "unverified": [],
        "weights": False,
        "tied": {},
    }
    unverified = None if store is True else _verified_against(checkpoint_files(config), model)
    if unverified is not None:
        files = checkpoint_files(config)
        described["checkpoint"] = str(files[0].parent.resolve())
        described["digests"] = {file.name: file_digest(file) for file in files}
        described["unverified"] = unverified
    elif store:
        described["weights"] = True
        described["tied"] = _tied(plain_state(model))
        described["digests"] = _state_digests(model)
    return described


def plain_name(name: str) -> str:
    """A module's or parameter's name without the level that `torch.compile(module)` puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def plain_state(model: nn.Module) -> dict[str, Any]:
    """The state dict under the names that it has where nothing is compiled."""
    return {plain_name(name): value for name, value in model.state_dict().items()}


def checkpoint_files(config: Any) -> list[Path]:
    """The safetensors files of the local directory that a config names as its origin; empty if there is none."""
    name = getattr(config, "_name_or_path", None) or getattr(config, "name_or_path", None)
    return sorted(Path(name).glob("*.safetensors")) if isinstance(name, str) and name and Path(name).is_dir() else []


def write_weights(path: Path, model: nn.Module, tied: dict[str, str]) -> None:
    """Write the state dict as ``weights-*.safetensors`` of at most 2 GiB, one name for tied tensors, each file whole or
    not at all."""
    shard: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in plain_state(model).items():
        if not isinstance(tensor, Tensor) or name in tied:
            continue
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            number += 1
            _write_shard(path, number, shard)
            shard, size = {}, 0
        # clone: two parameters may be views of one storage, which safetensors refuses to write.
        shard[name] = tensor.detach().cpu().contiguous().clone()
        size += tensor.nbytes
    _write_shard(path, number + 1, shard)


def read_weights(path: Path, described: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the manifest's ``model`` names, one at a time (see ``Golden.weights``)."""
    if described["weights"]:
        files = sorted(path.glob("weights-*.safetensors"))
        if not files:
            raise PorterError(f"{path}: weights-*.safetensors is missing; record the golden again")
        aliases: dict[str, list[str]] = {}
        for alias, name in described["tied"].items():
            aliases.setdefault(name, []).append(alias)
        return ((alias, tensor) for name, tensor in _tensors(files) for alias in (name, *aliases.get(name, ())))
    if described["checkpoint"]:
        return _tensors(_unchanged_files(Path(described["checkpoint"]), described["digests"]))
    raise PorterError(f"{path}: recorded without weights; record with store_weights=True to replay the source")


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def _unchanged_files(directory: Path, digests: dict[str, str]) -> list[Path]:
    files = [directory / name for name in sorted(digests)]
    for file in files:
        if not file.exists():
            raise PorterError(f"{file}: the golden's weights are gone; put the checkpoint back or record again")
        if file_digest(file) != digests[file.name]:
            raise PorterError(f"{file}: changed since the golden was recorded; record again or restore the file")
    return files


def _verified_against(files: list[Path], model: nn.Module) -> list[str] | None:
    """The names of the model's tensors that the files do not hold; None if a tensor differs or none is held."""
    state = {name: tensor for name, tensor in plain_state(model).items() if isinstance(tensor, Tensor)}
    tied = _tied(state)
    missing = set(state) - set(tied)
    for name, held in _tensors(files):
        if name not in state:
            continue
        tensor = state[name].detach()
        if tensor.is_meta:
            continue  # its values are read from disk when they are needed
        if held.shape != tensor.shape or not torch.equal(held.to(tensor.dtype), tensor.cpu()):
            return None
        missing.discard(name)
    return sorted(missing) if files and len(missing) < len(state) - len(tied) else None


def _tied(state: dict[str, Any]) -> dict[str, str]:
    """Of names that share one tensor, every later name to the first."""
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor) or tensor.numel() == 0:
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in first:
            tied[name] = first[place]
        else:
            first[place] = name
    return tied


def _state_digests(model: nn.Module) -> dict[str, str]:
    """One digest over all tensors: a capture is only resumed with the weights it began with."""
    digest = hashlib.sha256()
    for name, tensor in plain_state(model).items():
        if isinstance(tensor, Tensor):
            digest.update(name.encode())
            digest.update(host_bytes(tensor.detach().cpu().contiguous()))
    return {"state_dict": digest.hexdigest()}


def _write_shard(path: Path, number: int, shard: dict[str, Tensor]) -> None:
    aside = path / f".weights-{number:05d}.writing"
    save_file(shard, aside)
    aside.replace(path / f"weights-{number:05d}.safetensors")
