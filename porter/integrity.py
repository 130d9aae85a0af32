"""Whether an exported directory still holds what `porter adapt` wrote into it, by the digests in its port.json.

The config is compared whole at every load. Weights are compared by size and header, which costs no reading of them;
`verify_weights` reads them all. The digests find damage and edits; they are no signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from porter.checkpoint.header import read_header, tensor_bytes
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.strict_json import listed, shown
from porter.checkpoint.writer import CheckpointWriter
from porter.errors import PorterError

CONFIG = "config.json"
REMEDY = "restore the file, or adapt the model again"


def text_digest(text: str) -> str:
    """SHA-256 of a text file's bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def weight_record(writer: CheckpointWriter) -> dict[str, Any]:
    """port.json's `weights`, from what was known while writing: no byte is read again.

    `shards` is file name -> bytes and SHA-256 of the header with the 8 bytes of its length; `tensors` is name ->
    SHA-256 of the tensor's bytes.
    """
    return {
        "shards": {
            shard.name: {"bytes": shard.size, "header": hashlib.sha256(shard.header).hexdigest()}
            for shard in writer.layout.shards
        },
        "tensors": dict(sorted(writer.digests.items())),
    }


def config_differs(directory: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether config.json is not the one that was written."""
    recorded: object = manifest["files"].get(CONFIG)
    return recorded != hashlib.sha256((directory / CONFIG).read_bytes()).hexdigest()


def check_weight_files(directory: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint in `directory`, whose shards have the sizes and headers that were written.

    Raises PorterError naming the shard that is missing, added or changed, and where no weights were ever written.
    """
    if manifest["weights"] is None:
        raise PorterError(
            f"{directory}: holds a port's code and conversion recipe but no weights; convert a checkpoint with "
            f"porter adapt {manifest['source']['model']} --target {manifest['chip']} --weights CHECKPOINT --output DIR"
        )
    checkpoint = Checkpoint.open(directory)
    recorded = manifest["weights"]["shards"]
    for name in sorted(recorded.keys() ^ set(checkpoint.shards)):
        state = "is missing" if name in recorded else "is not among the weights that port.json lists"
        raise PorterError(f"{directory / name}: {state}; {REMEDY}")
    for name, wanted in recorded.items():
        header = read_header(directory / name)
        found = {"bytes": header.file_bytes, "header": hashlib.sha256(header.raw).hexdigest()}
        if found != wanted:
            field = "bytes" if found["bytes"] != wanted["bytes"] else "header"
            raise PorterError(
                f"{directory / name}: its {field} differ from port.json's (weights.shards.{field}): it was changed "
                f"after `porter adapt` wrote it; {REMEDY}"
            )
    return checkpoint


def verify_weights(directory: Path, manifest: Mapping[str, Any], workers: int = 4) -> int:
    """Read every tensor and compare it with port.json's digest; how many there are.

    Raises PorterError naming the tensors that differ. Memory: one tensor per worker.
    """
    checkpoint = check_weight_files(directory, manifest)
    recorded: dict[str, object] = manifest["weights"]["tensors"]

    def differs(name: str) -> bool:
        return recorded.get(name) != hashlib.sha256(tensor_bytes(checkpoint.load(name))).hexdigest()

    with ThreadPoolExecutor(workers) as pool:
        wrong = [name for name, bad in zip(checkpoint.names, pool.map(differs, checkpoint.names), strict=True) if bad]
    wrong += sorted(recorded.keys() - set(checkpoint.names))
    if wrong:
        where = f"{directory / checkpoint.info(wrong[0]).shard}" if wrong[0] in checkpoint else str(directory)
        raise PorterError(
            f"{where}: {len(wrong)} of {len(recorded)} tensors differ from port.json's digests ({listed(wrong)}); "
            f"{REMEDY}"
        )
    return len(checkpoint)


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """PorterError naming the field of a port.json that porter reads and that is missing or of the wrong type."""
    source = manifest.get("source")
    for field, value, kind in (
        ("chip", manifest.get("chip"), str),
        ("scheme", manifest.get("scheme"), str),
        ("source.model", source.get("model") if isinstance(source, dict) else None, str),
        ("files", manifest.get("files"), dict),
        ("quantized", manifest.get("quantized"), dict),
        ("correspondence", manifest.get("correspondence"), list),
    ):
        if not isinstance(value, kind):
            words = {str: "a string", dict: "an object", list: "a list"}[kind]
            raise PorterError(
                f"{path}: {field} is {shown(repr(value))}, expected {words}; adapt the model again with this porter"
            )
    if not _is_weight_record(manifest.get("weights", False)):
        raise PorterError(
            f"{path}: weights: expected the shards and tensors that were written, or null; adapt the model again with "
            "this porter"
        )


def _is_weight_record(value: Any) -> bool:
    if value is None:
        return True
    parts = [value.get("shards"), value.get("tensors")] if isinstance(value, dict) else [None]
    return all(isinstance(part, dict) for part in parts)
