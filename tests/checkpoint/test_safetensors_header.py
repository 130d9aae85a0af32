"""Headers: the library's files are read alike, and every malformed one is refused in one helpful line."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_files import entry, raw_file
from safetensors import safe_open
from safetensors.torch import save_file

from porter.checkpoint.header import HEADER_LIMIT, REMEDY, SAFETENSORS_DTYPES, TORCH_DTYPES, read_header
from porter.errors import PorterError

ZEROS = bytes(24)


def refusal(path: Path) -> str:
    with pytest.raises(PorterError) as caught:
        read_header(path)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(path)) and text.endswith(REMEDY)
    return text.removeprefix(f"{path}: ").removesuffix(f"; {REMEDY}")


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_DTYPES, key=str), ids=str)
def test_reads_what_the_library_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.zeros(3, 5, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "empty": torch.zeros(0, 7, dtype=dtype),
    }
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {n: e.shape for n, e in header.tensors.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {TORCH_DTYPES[e.dtype] for e in header.tensors.values()} == {dtype}
    assert all(header.tensors[n].nbytes == t.numel() * t.element_size() for n, t in tensors.items())
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == path.stat().st_size


def test_no_tensors_is_a_file(tmp_path: Path) -> None:
    assert not read_header(raw_file(tmp_path / "x.safetensors", {})).tensors


WRONG_HEADERS: dict[str, tuple[Any, bytes, str | None]] = {
    "unknown dtype": (
        {"w": entry("Q7")},
        ZEROS,
        "tensor w: dtype Q7 is not known; expected one of BOOL, U8, I8, F8_E4M3, F8_E5M2, F8_E8M0, F8_E4M3FNUZ, "
        "F8_E5M2FNUZ, U16, I16, F16, BF16, U32, I32, F32, U64, I64, F64, C64, F4, F6_E2M3, F6_E3M2",
    ),
    "dtype is a list": ({"w": {**entry(), "dtype": ["F32"]}}, ZEROS, None),
    "shape too small for its bytes": (
        {"w": entry(shape=(2, 2))},
        ZEROS,
        "tensor w: F32 of shape [2, 2] needs 16 bytes, but data_offsets give 24",
    ),
    "shape overflows 64 bits": (
        {"w": entry(shape=(2**32, 2**32), offsets=(0, 0))},
        b"",
        "tensor w: shape [4294967296, 4294967296] is not a list of at most 64 sizes whose product is below 2^63",
    ),
    "shape overflows 64 bits beside a zero": ({"w": entry(shape=(0, 2**62, 4), offsets=(0, 0))}, b"", None),
    "negative size": ({"w": entry(shape=(-2, -3))}, ZEROS, None),
    "size is a bool": ({"w": entry(shape=(True, 6))}, ZEROS, None),
    "size is a float": ({"w": entry(shape=(2.0, 3))}, ZEROS, None),
    "too many dimensions": ({"w": entry("U8", shape=(1,) * 65, offsets=(0, 1))}, b"1", None),
    "half a byte": (
        {"w": entry("F4", shape=(3,), offsets=(0, 2))},
        b"12",
        "tensor w: F4 of shape [3] is not a whole number of bytes",
    ),
    "offsets reversed": (
        {"w": entry(offsets=(24, 0))},
        ZEROS,
        "tensor w: data_offsets [24, 0] are not [begin, end] with 0 <= begin <= end",
    ),
    "offsets negative": ({"w": entry(offsets=(-24, 0))}, ZEROS, None),
    "three offsets": ({"w": entry(offsets=(0, 24, 24))}, ZEROS, None),
    "truncated": (
        {"w": entry()},
        ZEROS[:23],
        "tensor w: ends at byte {end}, but the file has {size}: it is truncated",
    ),
    "trailing bytes": ({"w": entry()}, ZEROS + b"evil", "4 bytes follow the last tensor"),
    "gap": (
        {"a": entry("U8", (1,), (0, 1)), "b": entry("U8", (1,), (3, 4))},
        b"1234",
        "tensor b: leaves a gap of 2 bytes after a",
    ),
    "gap before the first": (
        {"a": entry("U8", (1,), (1, 2))},
        b"12",
        "tensor a: leaves a gap of 1 bytes after the header",
    ),
    "overlap": (
        {"a": entry("U8", (4,), (0, 4)), "b": entry("U8", (4,), (2, 6))},
        b"123456",
        "tensor b: overlaps a",
    ),
    "the same bytes twice": ({"a": entry(), "b": entry()}, ZEROS, "tensor b: overlaps a"),
    "field missing": (
        {"w": {"dtype": "F32", "shape": [2, 3]}},
        ZEROS,
        "tensor w: expected the fields dtype, shape and data_offsets",
    ),
    "tensor is a list": ({"w": []}, ZEROS, "tensor w: expected the fields dtype, shape and data_offsets"),
    "metadata of numbers": (
        {"__metadata__": {"a": 1}, "w": entry()},
        ZEROS,
        "header: __metadata__ must map strings to strings",
    ),
    "not an object": (b"[1]", b"", "header: expected a JSON object, got list"),
    "duplicate name": (
        b'{"w":%s,"w":%s}' % (json.dumps(entry()).encode(), json.dumps(entry()).encode()),
        ZEROS,
        "header: not valid JSON: key w is given twice",
    ),
    "duplicate field": (
        b'{"w":{"dtype":"U8","dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}',
        ZEROS,
        "header: not valid JSON: key dtype is given twice",
    ),
    "NaN": (b'{"w":NaN}', b"", "header: not valid JSON: NaN is not JSON"),
    "cut JSON": (b'{"w":', b"", "header: not valid JSON: Expecting value at line 1 column 6"),
    "not UTF-8": (b'{"\xff":1}', b"", "header: not valid JSON: byte 2 is not UTF-8"),
    "nested deeply": (b"[" * 200_000, b"", "header: not valid JSON: nested too deeply"),
    "name with an escape": (
        {"a\n\x1b[2J": entry("Q")},
        ZEROS,
        None,
    ),
}


@pytest.mark.parametrize("case", WRONG_HEADERS)
def test_refuses(tmp_path: Path, case: str) -> None:
    header, data, says = WRONG_HEADERS[case]
    path = raw_file(tmp_path / "x.safetensors", header, data)
    text = refusal(path)
    assert text.isprintable()
    if says is not None:
        size = path.stat().st_size
        assert text == says.format(end=size + 1, size=size)


def test_refuses_impossible_lengths(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"1234567")
    assert refusal(path) == "has 7 bytes, fewer than the 8 of a safetensors length"
    raw_file(path, b"{}", length=3)
    assert refusal(path) == "header length 3 reaches past the end of the file (10 bytes)"
    raw_file(path, b"{}", length=2**63)
    assert refusal(path).startswith(f"header length {2**63} is above the limit of {HEADER_LIMIT} bytes")
    path.write_bytes(b"")
    assert refusal(path) == "has 0 bytes, fewer than the 8 of a safetensors length"


def test_a_sparse_file_of_the_claimed_size_is_not_believed(tmp_path: Path) -> None:
    """A header just above the limit is refused before it is read, though the file is long enough."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", HEADER_LIMIT + 1))
    os.truncate(path, 2 * HEADER_LIMIT)
    assert refusal(path).startswith(f"header length {HEADER_LIMIT + 1} is above the limit")


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_refuses_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    makers: dict[str, Callable[[Path], object]] = {"missing": str, "directory": os.mkdir, "fifo": os.mkfifo}
    makers[kind](path)
    assert refusal(path) == "is missing or not a regular file"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["F32", "U8", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), inner, max_size=4)
    ),
    max_leaves=12,
)
near_right = st.builds(
    entry,
    st.sampled_from(["F32", "U8", "BF16", "F4"]),
    st.lists(st.integers(-1, 5), max_size=3),
    st.lists(st.integers(-1, 30), min_size=1, max_size=3),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.binary(max_size=40)
    | st.dictionaries(st.text(max_size=4), values, max_size=3)
    | st.dictionaries(st.sampled_from("abc"), near_right, max_size=3),
    data=st.integers(0, 30),
)
def test_fuzzed_headers_are_read_as_the_library_reads_them_or_refused(tmp_path: Path, header: Any, data: int) -> None:
    """Nothing but PorterError escapes, and whatever is accepted the library reads with the same shapes."""
    path = raw_file(tmp_path / "x.safetensors", header, bytes(data))
    try:
        mine = read_header(path)
    except PorterError as error:
        assert "\n" not in str(error) and str(error).startswith(str(path))
        return
    with safe_open(path, framework="pt") as file:
        assert {n: e.shape for n, e in mine.tensors.items()} == {
            n: tuple(file.get_slice(n).get_shape()) for n in file.keys()
        }


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int8)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        header = read_header(path)
    except PorterError:
        return
    assert max(e.end for e in header.tensors.values()) == path.stat().st_size
