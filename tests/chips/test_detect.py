"""Detection of the running machine, on copies of the system's files for machines that are not here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from porter.chips import detect
from porter.errors import PorterError

AVX2_FLAGS = "fpu sse4_2 avx avx2 fma f16c"
AVX512_FLAGS = AVX2_FLAGS + " avx512f avx512bw avx512vl avx512dq"


def cpuinfo(folder: Path, *cores: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text("\n\n".join(f"model name\t: Test CPU\nflags\t\t: {flags}" for flags in cores), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("cores", "chip"),
    [
        ([AVX512_FLAGS], "cpu-x86-avx512"),
        ([AVX2_FLAGS], "cpu-x86-avx2"),
        ([AVX512_FLAGS.replace(" avx512dq", "")], "cpu-x86-avx2"),
        ([AVX512_FLAGS, AVX2_FLAGS], "cpu-x86-avx2"),
    ],
)
def test_x86_chip_follows_the_flags_that_every_core_has(tmp_path: Path, cores: list[str], chip: str) -> None:
    assert detect.running_cpu_chip(cpuinfo(tmp_path, *cores), "x86_64") == chip


def test_a_cpu_that_porter_has_no_chip_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PorterError, match="reports no avx2"):
        detect.running_cpu_chip(cpuinfo(tmp_path, "fpu sse4_2 fma"), "AMD64")
    with pytest.raises(PorterError, match="'riscv64'"):
        detect.running_cpu_chip(cpuinfo(tmp_path, ""), "riscv64")
    with pytest.raises(PorterError, match="avx2, fma"):
        detect.running_cpu_chip(tmp_path / "absent", "x86_64")


@pytest.mark.parametrize("machine", ["arm64", "aarch64"])
def test_arm_needs_no_flags(tmp_path: Path, machine: str) -> None:
    assert detect.running_cpu_chip(tmp_path / "absent", machine) == "cpu-arm64"


def test_memory_is_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n", encoding="utf-8")
    assert detect.memory_bytes(path) == 16384 * 1024
    assert detect.memory_bytes(tmp_path / "absent") is None


def test_vendor_packages_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_npu", "ixformer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (tmp_path / "torch_npu-2.13.0.dist-info").mkdir()
    (tmp_path / "torch_npu-2.13.0.dist-info" / "METADATA").write_text("Name: torch-npu\nVersion: 2.13.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(detect.vendor_packages())
    assert found["torch_npu"] == "2.13.0"
    assert found["ixformer"] == "unknown version"
    assert "torch_npu" not in sys.modules


def test_detect_describes_this_machine() -> None:
    machine = detect.detect()
    assert machine.cores >= 1
    assert machine.chip == detect.running_cpu_chip()
    assert machine.processor
