"""The stand-ins for CANN build, define every symbol and answer as they say."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from benchmarks.torch_npu_wheel.stub_libraries import ANSWERS, LIBRARIES, SYMBOLS, StubError, build

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


@needs_compiler
def test_libraries_define_every_symbol(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert [path.name for path in built] == [f"lib{name}.so" for name in LIBRARIES]
    symbols = SYMBOLS.read_text(encoding="utf-8").split()
    assert len(symbols) == len(set(symbols)) > 150 and set(ANSWERS) <= set(symbols)
    library = ctypes.CDLL(str(built[0]))
    assert all(hasattr(library, symbol) for symbol in symbols)
    count = ctypes.c_uint(7)
    assert library.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 1
    assert library.aclInit() == 0


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(StubError, match="no-such-compiler: not found"):
        build(tmp_path, compiler="no-such-compiler")
