"""The header of a safetensors file: parsed and checked before any size in it is believed.

Format (https://huggingface.co/docs/safetensors): 8 bytes, the length n of the header, little-endian; n bytes of JSON,
{name: {"dtype", "shape", "data_offsets": [begin, end]}} with an optional "__metadata__" of strings; then the tensors'
bytes, row-major, at offsets that count from the end of the header and leave no gap.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from porter.checkpoint.strict_json import parse_object, shown
from porter.errors import PorterError

HEADER_LIMIT = 100_000_000
"""Bytes; the safetensors library's own limit. The header of a file of 10,000 tensors has about 1 MB."""

RANK_LIMIT = 64
"""torch works on at most 64 dimensions."""

SIZE_LIMIT = 2**63 - 1

REMEDY = "download the file again, or save it again with safetensors"

BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
        **dict.fromkeys(("U32", "I32", "F32"), 32),
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
        **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    }
)
"""Bits of one element of each safetensors dtype."""

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
"""The dtypes that porter reads and writes: those whose elements are whole bytes."""

SAFETENSORS_DTYPES: Mapping[torch.dtype, str] = MappingProxyType({v: k for k, v in TORCH_DTYPES.items()})


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, row-major, without a copy: writing to them writes the tensor.

    Raises PorterError on a big-endian machine, whose tensors are not the bytes of a safetensors file.
    """
    if sys.byteorder != "little":
        raise PorterError("safetensors files are little-endian, this machine is big-endian; convert on another machine")
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file: dtype as safetensors spells it; bytes [begin, end) counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """A checked header: `tensors` in the order of their bytes, `metadata`, and the header's own bytes for digests."""

    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]
    raw: bytes
    file_bytes: int


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file `path`; reads nothing after it.

    Raises PorterError naming the file, the tensor and what was expected: truncated or overlong files, a header beyond
    `HEADER_LIMIT`, broken JSON, duplicate names, unknown dtypes, and offsets that disagree with the shape, overlap,
    or leave a gap.
    """
    try:
        if not path.is_file():
            raise PorterError(f"{path}: is missing or not a regular file; {REMEDY}")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = _header_length(path, prefix, size)
            text = file.read(length)
    except OSError as error:
        raise PorterError(f"{path}: cannot be read: {error.strerror or error}; {REMEDY}") from error
    if len(text) != length:
        raise PorterError(f"{path}: header of {length} bytes is cut off after {len(text)}; {REMEDY}")
    data = parse_object(text, f"{path}: header", REMEDY)
    metadata = _metadata(path, data.pop("__metadata__", {}))
    entries = [_entry(path, name, fields, 8 + length) for name, fields in data.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_layout(path, entries, 8 + length, size)
    return Header(MappingProxyType({e.name: e for e in entries}), metadata, prefix + text, size)


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise PorterError(f"{path}: has {size} bytes, fewer than the 8 of a safetensors length; {REMEDY}")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > HEADER_LIMIT:
        raise PorterError(
            f"{path}: header length {length} is above the limit of {HEADER_LIMIT} bytes, so this is no safetensors "
            f"file; {REMEDY}"
        )
    if length > size - 8:
        raise PorterError(f"{path}: header length {length} reaches past the end of the file ({size} bytes); {REMEDY}")
    return length


def _metadata(path: Path, value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise PorterError(f"{path}: header: __metadata__ must map strings to strings; {REMEDY}")
    return MappingProxyType(value)


def _entry(path: Path, name: str, fields: Any, data_begin: int) -> HeaderEntry:
    at = f"{path}: tensor {shown(name)}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise PorterError(f"{at}: expected the fields dtype, shape and data_offsets; {REMEDY}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise PorterError(f"{at}: dtype {shown(str(dtype))} is not known; expected one of {', '.join(BITS)}; {REMEDY}")
    if not _are_sizes(shape) or len(shape) > RANK_LIMIT or math.prod(d for d in shape if d) > SIZE_LIMIT:
        raise PorterError(
            f"{at}: shape {shown(str(shape))} is not a list of at most {RANK_LIMIT} sizes whose product is below 2^63; "
            f"{REMEDY}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise PorterError(
            f"{at}: data_offsets {shown(str(offsets))} are not [begin, end] with 0 <= begin <= end; {REMEDY}"
        )
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8:
        raise PorterError(f"{at}: {dtype} of shape {shape} is not a whole number of bytes; {REMEDY}")
    if bits // 8 != offsets[1] - offsets[0]:
        raise PorterError(
            f"{at}: {dtype} of shape {shown(str(shape))} needs {bits // 8} bytes, but data_offsets give "
            f"{offsets[1] - offsets[0]}; {REMEDY}"
        )
    return HeaderEntry(name, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= SIZE_LIMIT for item in value)


def _check_layout(path: Path, entries: list[HeaderEntry], data_begin: int, size: int) -> None:
    """The tensors' bytes must follow one another without gap or overlap up to the end of the file."""
    position, before = data_begin, "the header"
    for entry in entries:
        if entry.begin != position:
            fault = "overlaps" if entry.begin < position else f"leaves a gap of {entry.begin - position} bytes after"
            raise PorterError(f"{path}: tensor {shown(entry.name)}: {fault} {shown(before)}; {REMEDY}")
        position, before = entry.end, entry.name
    if position > size:
        short = next(entry for entry in entries if entry.end > size)
        raise PorterError(
            f"{path}: tensor {shown(short.name)}: ends at byte {short.end}, but the file has {size}: it is truncated; "
            f"{REMEDY}"
        )
    if position < size:
        raise PorterError(f"{path}: {size - position} bytes follow the last tensor; {REMEDY}")
