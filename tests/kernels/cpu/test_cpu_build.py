"""Compiling the CPU kernels: the cache, what happens without a compiler, and where the sources may lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from porter.kernels.cpu import build
from porter.kernels.cpu.build import BuildError
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.provider import CpuProvider

NORM = (torch.ones(1, 4), torch.ones(4), 1e-6)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own, and sources that compile in a second: one kernel instead of all."""
    monkeypatch.setenv("PORTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCES", ("activation",))
    return tmp_path


@pytest.fixture
def sources() -> Iterator[None]:
    yield
    build._sources.clear()


def test_second_build_is_read_from_the_cache(small: Path) -> None:
    first = build.build("generic")
    stamp = first.stat().st_mtime_ns
    assert build.build("generic") == first and first.stat().st_mtime_ns == stamp
    assert first.is_relative_to(small / "cache")


def test_a_damaged_library_is_built_again(small: Path) -> None:
    library = build.build("generic")
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    assert build.build("generic").read_bytes()[:4] == b"\x7fELF"
    assert library.stat().st_size == len(whole)


def test_changed_sources_are_another_library(small: Path, sources: None) -> None:
    before = build.build("generic")
    copy = small / "copy"
    shutil.copytree(Path(build.__file__).parent, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    build.set_source_directory(copy)
    assert build.build("generic") == before
    (copy / "activation.cpp").write_text((copy / "activation.cpp").read_text() + "\n// changed\n")
    assert build.build("generic") != before


def test_sources_beside_an_export_are_preferred(tmp_path: Path, sources: None) -> None:
    for source in Path(build.__file__).parent.glob("*.cpp"):
        shutil.copy(source, tmp_path)
    build.set_source_directory(tmp_path)
    assert build.source_directory() == tmp_path


def test_an_export_without_sources_falls_back_to_those_beside_the_module(tmp_path: Path, sources: None) -> None:
    build.set_source_directory(tmp_path)
    assert build.source_directory() == Path(build.__file__).parent


def test_without_a_compiler_the_provider_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = CpuProvider().supported("cpu")
    assert reason is not None and "no C++ compiler" in reason


def test_a_compiler_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    assert "no-such-compiler" in str(CpuProvider().supported("cpu"))


def test_a_compile_error_is_a_refusal_that_stays(
    monkeypatch: pytest.MonkeyPatch, small: Path, sources: None
) -> None:
    broken = small / "broken"
    shutil.copytree(Path(build.__file__).parent, broken, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (broken / "activation.cpp").write_text("this is not C++;\n")
    build.set_source_directory(broken)
    provider = CpuProvider("generic")
    kernel = provider.implementation("rms_norm", "standard")
    assert provider.supported("cpu") is None and kernel is not None
    reason = kernel.accepts(*NORM)
    assert reason is not None and "error" in reason and "activation.cpp" in reason
    assert kernel.accepts(*NORM) == reason and provider.supported("cpu") == reason
    with pytest.raises(BuildError):
        kernel.call(*NORM)


def test_a_cache_that_cannot_be_written_is_a_refusal(monkeypatch: pytest.MonkeyPatch, small: Path) -> None:
    (small / "file").write_text("")
    monkeypatch.setenv("PORTER_CACHE", str(small / "file"))
    with pytest.raises(BuildError, match="cannot write the kernel cache"):
        build.build("generic")


def test_an_instruction_set_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTER_CPU_ISA", "avx1024")
    assert "avx1024" in str(CpuProvider().supported("cpu"))


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        ({"avx2", "fma", "f16c"}, "avx2"),
        ({"avx2", "fma"}, "generic"),
        ({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}, "avx512"),
        ({"avx2", "fma", "f16c", "avx512f"}, "avx2"),
        (set(), "generic"),
    ],
)
def test_the_best_instruction_set_comes_first(features: set[str], isa: str) -> None:
    assert build.available_isas(frozenset(features))[0] == isa


def test_optional_instructions_are_used_where_the_processor_has_them() -> None:
    assert "-mavx512vnni" not in build.isa_flags("avx512", frozenset())
    assert "-mavx512vnni" in build.isa_flags("avx512", frozenset({"avx512_vnni"}))


def test_the_variable_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTER_CPU_ISA", "generic")
    assert build.selected_isa() == "generic"


def test_nothing_is_compiled_before_a_kernel_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PORTER_CACHE", str(tmp_path))
    provider = CpuProvider()
    assert provider.supported("cpu") is None
    assert provider.implementation("rms_norm", "standard") is not None
    assert not any(tmp_path.iterdir())


def test_other_chips_are_refused() -> None:
    assert "ascend-910b" in str(CpuProvider().supported("ascend-910b"))


def test_an_unknown_attribute_is_not_a_kernel() -> None:
    with pytest.raises(AttributeError):
        _ = KernelLibrary().no_such_kernel
