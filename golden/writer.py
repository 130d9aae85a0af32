"""Writing a golden: append-only files whose every prefix is a golden, and a manifest that says when it is whole.

Tensor bytes are flushed before the index line that names them, and index lines before the records that use them, so
whatever a crash leaves behind, a record on disk never names a tensor that is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch import Size, Tensor, dtype

from porter.errors import PorterError
from porter.golden.digest import content_digest
from porter.golden.format import (
    ALIGNMENT,
    HEADER,
    INDEX,
    MANIFEST,
    RECORDS,
    SCHEMA,
    TENSORS,
    Stored,
    dtype_name,
    dtype_of,
    host_bytes,
    read_json,
    write_json,
)
from porter.golden.node import JsonText, json_text, quoted
from porter.golden.schema import read_records, read_stored
from porter.golden.store import summary

_BUFFER = 1 << 16
"""Tensors beyond this go to the system without being copied in between."""


def host_tensor(tensor: Tensor) -> Tensor:
    """The elements of a tensor, row-major, in host memory; no copy for a contiguous CPU tensor."""
    if tensor.is_cpu and not tensor.is_complex() and tensor.is_contiguous():
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def check_directory(path: Path) -> None:
    """PorterError if a golden must not be written to ``path``: it is a file, or holds files that are not a golden's."""
    if path.exists() and not path.is_dir():
        raise PorterError(f"{path}: is a file; choose a directory for the golden")
    foreign = path.is_dir() and [file.name for file in path.iterdir() if not file.name.endswith(".writing")]
    if foreign and HEADER not in foreign:
        raise PorterError(f"{path}: already holds files that are not a golden's; choose another directory")


class Writer:
    """Streams one golden into a directory.

    ``header`` is what is known beforehand (schema is added). With ``resume`` a recording that was cut off and has the
    same header continues after its last whole batch (``batches_done``); else the directory must not hold anything.
    """

    def __init__(self, path: str | Path, header: dict[str, Any], resume: bool = False) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {"schema": SCHEMA, **header}
        self.ends: list[dict[str, Any]] = []
        self.batches_done = 0
        """How many batches an earlier, interrupted recording left whole."""
        self.records_written = 0
        self.modules: set[str] = set()
        self._stored: dict[tuple[Any, ...], Stored] = {}
        self._contents: dict[str, tuple[int, int]] = {}
        self._index_lines: list[str] = []
        self._record_lines: list[str] = []
        kept = self._kept_files() if resume else None
        if kept is None:
            self._start_over()
        with self._naming_the_path():
            self._tensors: BinaryIO = (self.path / TENSORS).open("ab", buffering=_BUFFER)
            self._index, self._records = ((self.path / name).open("a", encoding="utf-8") for name in (INDEX, RECORDS))
        self._offset = (self.path / TENSORS).stat().st_size

    def store(self, tensor: Tensor, sketch: dict[str, Any] | None = None) -> Stored:
        """Store a tensor, or the values of a sketch; its place and digest."""
        content = host_tensor(tensor)
        digest = content_digest(content)
        self.write(content, digest)
        return self.entry(digest, tensor.dtype, tensor.shape, sketch)

    def write(self, content: Tensor, digest: str) -> None:
        """Append the bytes of a contiguous CPU tensor unless bytes of that digest are there."""
        if digest in self._contents:
            return
        start = self._offset + -self._offset % ALIGNMENT
        try:
            self._tensors.write(b"\0" * (start - self._offset))
            self._tensors.write(host_bytes(content))
        except OSError as error:
            raise self._failed(error) from error
        self._offset = start + content.nbytes
        self._contents[digest] = start, content.nbytes

    def entry(self, digest: str, dtype: dtype, shape: Size, sketch: dict[str, Any] | None = None) -> Stored:
        """The stored tensor of bytes written before: equal bytes may be known in several dtypes and shapes."""
        about = sketch and (sketch["numel"], sketch["norm"])
        key = digest, dtype, shape, about
        stored = self._stored.get(key)
        if stored is None:
            id = f"t{len(self._stored)}"
            stored = Stored(id, dtype_name(dtype), tuple(shape), *self._contents[digest], digest, sketch)
            self._stored[key] = stored
            self._index_lines.append(json_text(stored.to_json()))
        return stored

    def record(
        self, step: int, call: int, module: str, kind: str, inputs: JsonText, outputs: JsonText, batch: int
    ) -> None:
        """Append one module call, its fields as in ``Record``."""
        self._record_lines.append(
            f'{{"step": {step}, "call": {call}, "module": {quoted(module)}, "kind": {quoted(kind)}, '
            f'"inputs": {inputs}, "outputs": {outputs}, "batch": {batch}}}'
        )
        self.modules.add(module)
        self.records_written += 1

    def end_step(self, end: dict[str, Any]) -> None:
        """Mark that the step's records are all written; ``end`` as ``store.summary`` reads it."""
        self.ends.append({"end": "step", **end})
        self._record_lines.append(json_text(self.ends[-1]))
        self.flush()

    def end_batch(self) -> None:
        """Mark that a batch is whole: a resumed capture does not run it again."""
        self.batches_done += 1
        self._record_lines.append(json_text({"end": "batch"}))
        self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system, in the order that keeps every prefix readable."""
        with self._naming_the_path():
            self._tensors.flush()
            for file, lines in ((self._index, self._index_lines), (self._records, self._record_lines)):
                file.writelines(line + "\n" for line in lines)
                file.flush()
                lines.clear()

    def finish(self, produced: dict[str, Any]) -> None:
        """Write the manifest: from now on the golden is complete."""
        self.close()
        counts = {"complete": True, "records": self.records_written}
        with self._naming_the_path():
            write_json(self.path / MANIFEST, self.header | summary(self.ends) | counts | produced)

    def close(self) -> None:
        """Flush and close; without ``finish`` the golden stays incomplete."""
        if self._records.closed:
            return
        self.flush()
        for file in (self._tensors, self._index, self._records):
            file.close()

    @contextmanager
    def _naming_the_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> PorterError:
        return PorterError(f"{self.path}: writing the golden failed: {error.strerror or error}")

    def _start_over(self) -> None:
        with self._naming_the_path():
            check_directory(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / HEADER).exists():
                raise PorterError(f"{self.path}: already holds a golden; choose another directory or remove it")
            write_json(self.path / HEADER, self.header)

    def _kept_files(self) -> bool | None:
        """Cut the files back to the last whole batch and load their state; None if there is nothing to resume."""
        if not (self.path / HEADER).exists():
            return None
        held = read_json(self.path / HEADER)
        differing = sorted(
            key
            for key in {*held, *self.header}
            if key not in ("created", "environment") and held.get(key) != json.loads(json.dumps(self.header.get(key)))
        )
        if differing:
            raise PorterError(
                f"{self.path}: holds a golden recorded with another {', '.join(differing)}; choose another directory"
            )
        self.header = held
        lines = read_records(self.path / RECORDS)[0]
        last = max((place for place, line in enumerate(lines) if line.get("end") == "batch"), default=-1)
        lines = lines[: last + 1]
        self.ends = [line for line in lines if line.get("end") == "step"]
        self.batches_done = sum(line.get("end") == "batch" for line in lines)
        self.records_written = sum("end" not in line for line in lines)
        self.modules = {line["module"] for line in lines if "end" not in line}
        _rewrite(self.path / RECORDS, lines)
        self._load_index()
        return True

    def _load_index(self) -> None:
        size = (self.path / TENSORS).stat().st_size if (self.path / TENSORS).exists() else 0
        entries = [entry for entry in read_stored(self.path / INDEX) if entry.offset + entry.bytes <= size]
        for entry in entries:
            about = entry.sketch and (entry.sketch["numel"], entry.sketch["norm"])
            self._stored[entry.digest, dtype_of(entry.dtype), Size(entry.shape), about] = entry
            self._contents[entry.digest] = (entry.offset, entry.bytes)
        _rewrite(self.path / INDEX, [entry.to_json() for entry in entries])


def _rewrite(path: Path, lines: list[dict[str, Any]]) -> None:
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text("".join(json_text(line) + "\n" for line in lines), encoding="utf-8")
    aside.replace(path)
