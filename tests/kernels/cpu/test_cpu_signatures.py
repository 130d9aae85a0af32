"""What Python believes of the C functions: ctypes checks none of it, and a wrong argument is a wrong address."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from porter.kernels.cpu import build
from porter.kernels.cpu.library import RECORDED, SIGNATURES
from porter.kernels.cpu.program import SLOTS

FOLDER = Path(build.__file__).parent
DEFINITION = re.compile(r"PORTER_EXPORT void porter_(\w+)\(([^)]*)\)\s*([{;])")
SCALARS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double}


def declared(files: list[Path]) -> dict[str, tuple[object, ...]]:
    found = {}
    for file in files:
        for name, arguments, _ in DEFINITION.findall(file.read_text(encoding="utf-8")):
            words = [argument.split() for argument in arguments.split(",")]
            found[name] = tuple(ctypes.c_void_p if "*" in " ".join(w) else SCALARS[w[0]] for w in words)
    return found


def test_signatures_are_those_of_the_definitions() -> None:
    assert declared(sorted(FOLDER.glob("*.cpp"))) == SIGNATURES


def test_every_recorded_kernel_is_declared_and_fits_its_slots() -> None:
    kernels = declared([FOLDER / "kernels.h"])
    assert kernels == {name: SIGNATURES[name] for name in RECORDED if name not in ("add", "copy")}
    assert all(len(SIGNATURES[name]) < SLOTS for name in RECORDED)


def test_codes_are_the_places_in_the_program() -> None:
    text = (FOLDER / "program.cpp").read_text(encoding="utf-8")
    cases = re.findall(r"case (\d+): call\(porter_(\w+), slots\)", text)
    assert {int(code): name for code, name in cases} == dict(enumerate(RECORDED))
    assert f"kSlots = {SLOTS};" in text


def test_every_source_file_is_built_and_hashed() -> None:
    assert {file.stem for file in FOLDER.glob("*.cpp")} == set(build.SOURCES)
    assert {file.stem for file in FOLDER.glob("*.h")} == set(build.HEADERS)
