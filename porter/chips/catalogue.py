"""The chip catalogue: one TOML file per chip, read into frozen records; every figure names where it was read."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from porter.chips.detect import running_cpu_chip
from porter.errors import PorterError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNITS: Mapping[str, Mapping[str, float]] = {
    "memory": {"GB": 1e9, "GiB": 2.0**30},
    "bandwidth": {"GB/s": 1e9, "TB/s": 1e12, "TiB/s": 2.0**40},
    "peaks": {"TFLOPS": 1e12, "TOPS": 1e12},
    "alignment": {"bytes": 1.0, "elements": 1.0},
}
"""Units that each kind of figure may have, and what one of them is in bytes, bytes/s, operations/s or as it stands."""

DTYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int8", "int4"}
    | {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "hifloat8", "mxfp8", "mxfp4", "nvfp4"}
)
"""Element types that a chip file may name: torch's names, and the block formats that torch has no dtype for."""


@dataclass(frozen=True)
class Figure:
    """A number with its unit and where it was read."""

    value: float
    unit: str
    source: str

    def scaled(self, kind: str) -> float:
        """The value in the base unit of `kind`: bytes, bytes per second, or operations per second."""
        return self.value * UNITS[kind][self.unit]


@dataclass(frozen=True)
class Chip:
    """What one device can do. A figure that no public source gives is None or absent, never a guess."""

    name: str
    title: str
    vendor: str
    device: str
    """torch device type: cpu, cuda, npu, ..."""
    distributed: str
    """torch.distributed backend."""
    dtypes: tuple[str, ...]
    providers: tuple[str, ...]
    """Op providers in order of preference; the reference is last."""
    source: str
    """Where device, backend and dtypes were read."""
    extension: str | None = None
    """Python package that teaches torch this device; None when torch itself does."""
    architecture: str | None = None
    """What a kernel compiler is told."""
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: Figure | None = None
    bandwidth: Figure | None = None
    peaks: Mapping[str, Figure] = field(default_factory=dict, hash=False)
    """Dense peak rate by dtype."""
    alignment: Mapping[str, Figure] = field(default_factory=dict, hash=False)
    """Alignment rules by what they apply to."""

    @property
    def native_providers(self) -> tuple[str, ...]:
        """The providers other than the reference, which every chip has."""
        return self.providers[:-1]

    def memory_bytes(self) -> int | None:
        """Device memory in bytes, or None when no source gives it."""
        return round(self.memory.scaled("memory")) if self.memory else None

    def bandwidth_bytes_per_second(self) -> float | None:
        """Memory bandwidth in bytes per second, or None when no source gives it."""
        return self.bandwidth.scaled("bandwidth") if self.bandwidth else None

    def peak_per_second(self, dtype: str) -> float | None:
        """Dense operations per second in `dtype`, or None when no source gives it."""
        return self.peaks[dtype].scaled("peaks") if dtype in self.peaks else None


class Catalogue:
    """Chips by name and by alias. `cpu` means the machine that asks."""

    def __init__(self, chips: Mapping[str, Chip]) -> None:
        self._chips = dict(chips)
        self._aliases = {alias: chip.name for chip in chips.values() for alias in chip.aliases}

    def __iter__(self) -> Iterator[Chip]:
        return iter(self._chips.values())

    def __len__(self) -> int:
        return len(self._chips)

    def get(self, name: str) -> Chip:
        """The chip called `name`, an alias, or `cpu`; PorterError with the nearest names when there is none."""
        wanted = name.strip().lower()
        wanted = running_cpu_chip() if wanted == "cpu" else self._aliases.get(wanted, wanted)
        if wanted in self._chips:
            return self._chips[wanted]
        names = [*self._chips, *self._aliases, "cpu"]
        near = difflib.get_close_matches(wanted, names, n=3) or sorted(self._chips)
        raise PorterError(f"chip '{name}': not in the catalogue; try {', '.join(near)} (porter chips lists all)")


def load_catalogue(directory: Path | None = None) -> Catalogue:
    """Read every `*.toml` of `directory` (default: the chips that porter ships) and check them against each other."""
    folder = directory if directory is not None else Path(__file__).parent
    owners: dict[str, Path] = {}
    chips: dict[str, Chip] = {}
    for path in sorted(folder.glob("*.toml")):
        chip = read_chip(path)
        for name in (chip.name, *chip.aliases):
            if name in owners or name == "cpu":
                other = owners[name].name if name in owners else "the running machine's own chip"
                raise PorterError(f"{path}: key 'aliases': '{name}' is taken by {other}; choose another")
            owners[name] = path
        chips[chip.name] = chip
    if not chips:
        raise PorterError(f"{folder}: no chip files (*.toml) in this folder")
    return Catalogue(chips)


def providers_of(name: str) -> tuple[str, ...]:
    """The providers of the chip called `name`, in order of preference, the reference last."""
    return load_catalogue().get(name).providers


def read_chip(path: Path) -> Chip:
    """Read one chip file; PorterError names the file, the key, and what was expected."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PorterError(f"{path}: not valid TOML: {error}") from error
    reader = _Reader(path)
    values = {key: reader.value(key, table[key]) for key in table}
    for key in REQUIRED:
        if key not in values:
            reader.refuse(key, "missing")
    chip = Chip(**values)
    if chip.name != path.stem:
        reader.refuse("name", f"is '{chip.name}' but the file is called {path.name}")
    for dtype in chip.dtypes:
        if dtype not in DTYPES:
            reader.refuse("dtypes", f"'{dtype}' is not one of {', '.join(sorted(DTYPES))}")
    for dtype in chip.peaks:
        if dtype not in chip.dtypes:
            reader.refuse(f"peaks.{dtype}", "a peak for a dtype that 'dtypes' does not list")
    if not chip.providers or chip.providers[-1] != "reference":
        reader.refuse("providers", "must end with 'reference', the provider that always works")
    return chip


REQUIRED = ("name", "title", "vendor", "device", "distributed", "dtypes", "providers", "source")
TEXTS = frozenset({*REQUIRED, "extension", "architecture"} - {"dtypes", "providers"})
LISTS = frozenset({"dtypes", "providers", "aliases", "notes"})
FIGURES = frozenset({"memory", "bandwidth"})
TABLES = frozenset({"peaks", "alignment"})


@dataclass(frozen=True)
class _Reader:
    path: Path

    def refuse(self, key: str, why: str) -> None:
        raise PorterError(f"{self.path}: key '{key}': {why}")

    def value(self, key: str, raw: Any) -> Any:
        if key in TEXTS:
            return self.text(key, raw)
        if key in LISTS:
            if not isinstance(raw, list):
                self.refuse(key, f"expected a list of strings, got {type(raw).__name__}")
            return tuple(self.text(key, each) for each in raw)
        if key in FIGURES:
            return self.figure(key, key, raw)
        if key in TABLES:
            if not isinstance(raw, dict):
                self.refuse(key, f"expected a table of figures, got {type(raw).__name__}")
            return {name: self.figure(f"{key}.{name}", key, each) for name, each in raw.items()}
        known = ", ".join(sorted(TEXTS | LISTS | FIGURES | TABLES))
        return self.refuse(key, f"unknown; a chip file has: {known}")

    def text(self, key: str, raw: Any) -> str:
        if not isinstance(raw, str) or not raw.strip():
            self.refuse(key, f"expected text, got {raw!r}")
        return str(raw)

    def figure(self, key: str, kind: str, raw: Any) -> Figure:
        if not isinstance(raw, dict):
            self.refuse(key, "expected a table { value, unit, source }")
        for name in raw:
            if name not in ("value", "unit", "source"):
                self.refuse(f"{key}.{name}", "unknown; a figure has value, unit, source")
        number = raw.get("value")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < float("inf"):
            self.refuse(f"{key}.value", f"expected a positive number, got {number!r}")
        if raw.get("unit") not in UNITS[kind]:
            self.refuse(f"{key}.unit", f"expected one of {', '.join(UNITS[kind])}, got {raw.get('unit')!r}")
        source = raw.get("source")
        if not isinstance(source, str) or not source.strip():
            self.refuse(f"{key}.source", "missing; say where the figure was read, or leave the figure out")
        return Figure(float(raw["value"]), str(raw["unit"]), str(source))
