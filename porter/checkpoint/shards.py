"""Which files of a directory hold its tensors, and whether those files may be opened at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from porter.checkpoint.strict_json import listed, read_object, shown
from porter.errors import PorterError

STEM = "model"
"""What the names of a checkpoint's files begin with; quantized formats have others."""


def single_name(stem: str) -> str:
    """The file of a checkpoint that is not split."""
    return f"{stem}.safetensors"


def index_name(stem: str) -> str:
    """The file that says which shard holds a tensor."""
    return f"{stem}.safetensors.index.json"


SINGLE = single_name(STEM)
INDEX = index_name(STEM)
INDEX_LIMIT = 200_000_000
"""Bytes; the index of DeepSeek-V3, with 91,991 tensors, has 9 MB."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
REMEDY = "download the checkpoint again, or save it again with save_pretrained"


def find_shards(directory: Path) -> tuple[dict[str, Path], dict[str, str] | None]:
    """(shard name -> its file, tensor name -> shard name as the index says or None without an index).

    Raises PorterError for a directory without safetensors weights, an index that names a file outside the directory,
    or one that is missing.
    """
    if not directory.is_dir():
        raise PorterError(f"{directory}: is not a directory; name the folder that holds config.json and *.safetensors")
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        weight_map = read_weight_map(index)
        names = sorted(set(weight_map.values()))
        if single.is_file() and names != [SINGLE]:
            raise PorterError(f"{directory}: holds both {SINGLE} and {INDEX}; remove the one that is stale")
        return {name: shard_path(directory, name, index) for name in names}, weight_map
    if single.exists() or single.is_symlink():
        return {SINGLE: shard_path(directory, SINGLE, directory)}, None
    raise PorterError(_why_no_weights(directory))


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name of a model.safetensors.index.json. Its metadata.total_size is informative only."""
    data = read_object(index, REMEDY, INDEX_LIMIT)
    weight_map: Any = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PorterError(f"{index}: weight_map: expected a non-empty object of tensor name to file name; {REMEDY}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or not _is_plain(file):
            raise PorterError(
                f"{index}: weight_map[{shown(name)}] is {shown(str(file))}; expected a plain *.safetensors file name "
                f"in the same directory; {REMEDY}"
            )
    return weight_map


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0:") and name.isprintable()


def shard_path(directory: Path, name: str, origin: Path) -> Path:
    """The real file of shard `name`.

    It must lie in `directory`. The one exception is the Hub's cache, whose snapshots/REVISION holds links to the
    blobs folder of the same repository. Raises PorterError otherwise, and where it is missing or no regular file.
    """
    path = directory / name
    home = directory.resolve()
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise PorterError(f"{origin}: {shown(name)} is missing in {directory}; {REMEDY}") from error
    allowed = {home} | ({home.parent.parent / "blobs"} if home.parent.name == "snapshots" else set())
    if real.parent not in allowed:
        raise PorterError(f"{path}: links to {real}, outside the checkpoint; replace the link by the file")
    if not real.is_file():
        raise PorterError(f"{path}: is not a regular file; {REMEDY}")
    return real


def check_index(index: Path, weight_map: Mapping[str, str], held: Mapping[str, Collection[str]]) -> None:
    """PorterError unless each shard holds exactly the tensors that the index puts there; `held` is shard -> tensors."""
    where = {name: shard for shard, names in held.items() for name in names}
    absent = [name for name, shard in weight_map.items() if name not in held[shard]]
    if absent:
        name = absent[0]
        found = f"it is in {where[name]}" if name in where else "no shard holds it"
        more = f" ({len(absent) - 1} more tensors are not where the index says)" if len(absent) > 1 else ""
        raise PorterError(
            f"{index}: weight_map puts {shown(name)} into {weight_map[name]}, but {found}{more}; {REMEDY}"
        )
    for shard, names in held.items():
        unlisted = [name for name in names if weight_map.get(name) != shard]
        if unlisted:
            raise PorterError(f"{index}: weight_map leaves out {listed(unlisted)}, which {shard} holds; {REMEDY}")


def _why_no_weights(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    safetensors = [name for name in names if name.endswith(".safetensors")]
    pickles = [name for name in names if name.endswith(PICKLES)]
    if any(name.endswith(".incomplete") for name in names):
        return f"{directory}: is an unfinished conversion; run the same `porter adapt` again to finish it"
    if safetensors:
        return f"{directory}: holds {listed(safetensors)} but neither {SINGLE} nor {INDEX}; download the index as well"
    if pickles:
        return (
            f"{directory}: holds only pickled weights ({listed(pickles)}), which may run code when read; porter reads "
            f"safetensors: load them where you trust them and save_pretrained(..., safe_serialization=True)"
        )
    return f"{directory}: holds no weights; expected {SINGLE} or {INDEX}"
