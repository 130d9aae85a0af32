"""What this machine is: its CPU chip, cores, memory, and which vendor torch packages are installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from porter.errors import PorterError

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")

AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
"""What the AVX-512 kernels use; a CPU with fewer of them is an AVX2 CPU to porter."""

AVX2 = frozenset({"avx2", "fma"})

VENDOR_PACKAGES: tuple[tuple[str, str], ...] = (
    ("torch_npu", "torch-npu"),
    ("torch_mlu", "torch-mlu"),
    ("torch_musa", "torch-musa"),
    ("torch_gcu", "torch-gcu"),
    ("ixformer", "ixformer"),
    ("kunlun_ops", "kunlun-ops"),
    ("lightop", "lightop"),
    ("aiter", "amd-aiter"),
    ("triton", "triton"),
)
"""(import name, distribution) of packages that give torch a chip or kernels; found without importing them."""


@dataclass(frozen=True)
class Machine:
    """The machine that runs porter. `chip` is None on a CPU that the catalogue has no chip for."""

    chip: str | None
    processor: str
    cores: int
    memory_bytes: int | None
    packages: tuple[tuple[str, str], ...]
    """(import name, version) of the installed vendor packages."""


def running_cpu_chip(cpuinfo: Path = CPUINFO, machine: str | None = None) -> str:
    """The catalogue name of this machine's CPU; PorterError when porter knows no chip for it."""
    architecture = (machine if machine is not None else platform.machine()).lower()
    if architecture in ("arm64", "aarch64"):
        return "cpu-arm64"
    if architecture in ("x86_64", "amd64"):
        flags = cpu_flags(cpuinfo)
        if flags >= AVX512 | AVX2:
            return "cpu-x86-avx512"
        if flags >= AVX2:
            return "cpu-x86-avx2"
        missing = ", ".join(sorted(AVX2 - flags))
        raise PorterError(f"chip 'cpu': this x86 CPU reports no {missing} in {cpuinfo}; porter needs AVX2 with FMA")
    raise PorterError(f"chip 'cpu': no chip for a '{architecture}' processor; porter knows x86_64 and arm64")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Instruction-set flags that every core of an x86 Linux machine reports; empty where there is no such file."""
    if not cpuinfo.is_file():
        return frozenset()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    cores = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*cores) if cores else frozenset()


def detect() -> Machine:
    """Look at this machine. Imports no vendor package: some of them patch torch when imported."""
    try:
        chip: str | None = running_cpu_chip()
    except PorterError:
        chip = None
    return Machine(
        chip=chip,
        processor=processor_name(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        packages=tuple(vendor_packages()),
    )


def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor's name as the system gives it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes(meminfo: Path = MEMINFO) -> int | None:
    """Memory of the machine in bytes, or None where /proc/meminfo does not exist."""
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def vendor_packages() -> list[tuple[str, str]]:
    """(import name, version) of each installed package of VENDOR_PACKAGES."""
    found = []
    for module, distribution in VENDOR_PACKAGES:
        if importlib.util.find_spec(module) is None:
            continue
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = "unknown version"
        found.append((module, version))
    return found
