"""Reading the tensor files of a dump without trusting them: no pickled code, no compression bombs, no way out of the
folder, and nothing but what the description promised."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from porter.checkpoint.strict_json import read_object, shown
from porter.errors import PorterError

JSON_LIMIT = 1 << 31
"""Bytes of the largest description that is read: msprobe writes about 2 KB a module call."""

REMEDY = "dump again"
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError, OSError, AttributeError, TypeError)


class NotTensors(PorterError):
    """A file that torch.save wrote, with something other than tensors and plain values in it."""


def description(path: Path) -> dict[str, Any]:
    """The JSON object of a dump; PorterError naming the file."""
    return read_object(path, REMEDY, JSON_LIMIT, constants=True)


def inside(folder: Path, name: Any, where: str) -> Path:
    """The file called ``name`` in ``folder``; PorterError where the name leads out of it."""
    if not isinstance(name, str) or not name or Path(name).name != name.removeprefix("./"):
        raise PorterError(f"{where}: {shown(repr(name))} is no name of a file in {folder}; {REMEDY}")
    path = folder / Path(name).name
    if path.is_symlink() and folder.resolve() not in path.resolve().parents:
        raise PorterError(f"{path}: is a link out of the dump; {REMEDY}")
    return path


def load_saved(path: Path) -> Any:
    """What torch.save wrote: tensors and plain values, on the CPU. Never runs pickled code.

    PorterError for a file that is missing, damaged, or packed (torch.save never packs: a small file could unfold into
    any amount of memory); NotTensors where only running code would bring the content back.
    """
    if not path.is_file():
        raise PorterError(f"{path}: is missing; {REMEDY}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise PorterError(f"{path}: not a file of torch.save ({shown(str(error))}); {REMEDY}") from error
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise PorterError(f"{path}: claims to hold more than its {path.stat().st_size} bytes; {REMEDY}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise NotTensors(f"{path}: holds objects other than tensors, which are not loaded") from error
    except _UNREADABLE as error:
        raise PorterError(f"{path}: damaged ({type(error).__name__}); {REMEDY}") from error


def load_tensor(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor of a ``.pt`` file that must have this dtype and shape."""
    return checked(load_saved(path), dtype, shape, path)


def load_safetensors(path: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor called ``name`` of a safetensors file, which must have this dtype and shape."""
    if not path.is_file():
        raise PorterError(f"{path}: is missing; {REMEDY}")
    try:
        with safe_open(path, framework="pt") as opened:
            tensor = opened.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise PorterError(f"{path}: not readable as safetensors with a tensor {name!r}; {REMEDY}") from error
    return checked(tensor, dtype, shape, path)


def checked(value: Any, dtype: torch.dtype, shape: tuple[int, ...], path: Path) -> Tensor:
    """``value``, which must be a tensor of this dtype and shape."""
    if not isinstance(value, Tensor):
        raise PorterError(f"{path}: holds a {type(value).__name__}, expected a tensor; {REMEDY}")
    if value.dtype != dtype or tuple(value.shape) != shape:
        raise PorterError(
            f"{path}: holds {value.dtype} {list(value.shape)}, but was described as {dtype} {list(shape)}; {REMEDY}"
        )
    return value.detach()
