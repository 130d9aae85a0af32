"""Compiles the CPU kernels at first use and keeps the result in a cache.

The C++ sources are looked for in the directory given to `set_source_directory`, else beside this file. An exported
model, whose Python files are copied into Hugging Face's module cache without the C++ ones, calls
`set_source_directory(checkpoint_directory)` before its first kernel call.

One shared library per instruction set goes to `$PORTER_CACHE` or `~/.cache/porter`, in a folder named by the digest of
sources, flags and compiler version. `$CXX` names the compiler, `$PORTER_CPU_ISA` forces the instruction set (avx512,
avx2 or generic).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

SOURCES = (
    "norm", "rope", "activation", "linear", "linear_int8", "attention", "mla", "experts", "router", "program",
    "measure", "causal_conv1d", "gates", "delta_rule", "indexer", "sparse_mla",
    "variable_length", "hyper_connection", "compressor",
)  # fmt: skip
HEADERS = ("simd", "abi", "rows", "int8", "digits", "gemm", "attend", "absorb", "selection", "kernels")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w")

REQUIRED_FEATURES = {
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "generic": (),
}
"""Instruction sets from best to last, and the names in /proc/cpuinfo of what each needs."""

OPTIONAL_FEATURES = {"avx512": ("avx512_vnni", "avx512_bf16")}

_sources: list[Path] = []


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why in one line."""


def set_source_directory(path: str | Path) -> None:
    """Look for the C++ sources in `path` first. Must be called before the first kernel is used."""
    _sources[:] = [Path(path)]


def source_directory() -> Path:
    """Where the C++ sources are. Raises BuildError when they are nowhere."""
    candidates = [*_sources, Path(__file__).parent]
    for candidate in candidates:
        if all((candidate / f"{name}.cpp").is_file() for name in SOURCES):
            return candidate
    raise BuildError(f"the C++ sources of the CPU kernels are in none of {', '.join(map(str, candidates))}")


def cpu_features() -> frozenset[str]:
    """The processor's feature flags as Linux names them; empty where it does not list any."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def available_isas(features: frozenset[str] | None = None) -> list[str]:
    """The instruction sets that this processor can run, best first."""
    features = cpu_features() if features is None else features
    return [isa for isa, needed in REQUIRED_FEATURES.items() if features.issuperset(needed)]


def selected_isa() -> str:
    """The instruction set to use: `$PORTER_CPU_ISA`, else the best. Raises BuildError when it cannot run here."""
    isas = available_isas()
    chosen = os.environ.get("PORTER_CPU_ISA") or isas[0]
    if chosen not in isas:
        raise BuildError(f"PORTER_CPU_ISA={chosen}: this processor runs {', '.join(isas)}")
    return chosen


def isa_flags(isa: str, features: frozenset[str]) -> list[str]:
    """Compiler flags for an instruction set, with the optional features that `features` names."""
    names = [*REQUIRED_FEATURES[isa], *(f for f in OPTIONAL_FEATURES.get(isa, ()) if f in features)]
    return [f"-m{name.replace('avx512_', 'avx512')}" for name in names]


def find_compiler() -> list[str]:
    """The C++ compiler's command: `$CXX`, else the first found. Raises BuildError when there is none."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX names {command[0]}, which is not on the path")
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}); install one or set CXX")


def cache_directory() -> Path:
    """`$PORTER_CACHE`, else `~/.cache/porter`."""
    return Path(os.environ.get("PORTER_CACHE") or Path.home() / ".cache" / "porter")


def openmp_flags(compiler: list[str]) -> tuple[list[str], list[str]]:
    """Flags to compile and to link with OpenMP; empty where the compiler has none (one thread then).

    Links to the OpenMP library that this process has loaded already, which is torch's: two thread pools on the same
    cores would wait for each other.
    """
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text("#include <omp.h>\nextern \"C\" int probe() { return omp_get_max_threads(); }\n")
        run = [*compiler, "-fopenmp", "-fPIC", "-shared", str(probe), "-o", str(Path(folder) / "probe.so")]
        if subprocess.run(run, capture_output=True).returncode != 0:
            return [], []
    return ["-fopenmp"], ["-Wl,--as-needed", *_loaded_openmp(), "-fopenmp"] if platform.system() == "Linux" else []


def _loaded_openmp() -> list[str]:
    try:
        words = Path("/proc/self/maps").read_text().split()
    except OSError:
        return []
    return sorted({word for word in words if Path(word).name.startswith("libgomp") and Path(word).is_file()})[:1]


def build(isa: str) -> Path:
    """The shared library for an instruction set, compiled unless the cache has it whole. Raises BuildError."""
    compiler, sources = find_compiler(), source_directory()
    compile_flags, link_flags = openmp_flags(compiler)
    flags = [*FLAGS, *isa_flags(isa, cpu_features()), *compile_flags]
    folder = cache_directory() / _digest(sources, compiler, [*flags, *link_flags])
    library = folder / f"porter_cpu_{isa}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{isa}.lock"):
            if not _is_whole(library):
                _compile(compiler, flags, link_flags, sources, library)
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache {folder}: {error.strerror}") from error
    return library


def _digest(sources: Path, compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256("\0".join([*compiler, *flags]).encode())
    digest.update(subprocess.run([*compiler, "--version"], capture_output=True).stdout)
    for name in [*(f"{s}.cpp" for s in SOURCES), *(f"{h}.h" for h in HEADERS)]:
        digest.update((sources / name).read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; where the system has no file locks the final rename alone keeps the library whole."""
    with open(path, "w") as handle:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_whole(library: Path) -> bool:
    """Whether the library is there and is what was compiled: loading a damaged one can kill the process."""
    record = library.with_suffix(".sha256")
    if not (library.is_file() and record.is_file()):
        return False
    return hashlib.sha256(library.read_bytes()).hexdigest() == record.read_text()


def _compile(compiler: list[str], flags: list[str], link_flags: list[str], sources: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{name}.o" for name in SOURCES]
        jobs = [
            [*compiler, *flags, "-c", str(sources / f"{name}.cpp"), "-o", str(target)]
            for name, target in zip(SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        linked = Path(folder) / library.name
        _run([*compiler, "-shared", *map(str, objects), *link_flags, "-o", str(linked)])
        library.with_suffix(".sha256").write_text(hashlib.sha256(linked.read_bytes()).hexdigest())
        os.replace(linked, library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.splitlines() or ["no output"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} failed on the CPU kernels: {first}")
