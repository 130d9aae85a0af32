"""The Python and C++ files that an exported model needs, flattened so that it runs where porter is not installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

IMPORT = re.compile(r"^(?P<indent>\s*)from (?P<module>porter(?:\.\w+)+) import", re.MULTILINE)
SOURCE_ROOT = "porter.kernels.cpu"


def flat_name(module: str) -> str:
    """porter.kernels.cpu.build -> porter_kernels_cpu_build."""
    return module.replace(".", "_")


def relative_imports(text: str) -> str:
    """`text` with every `from porter.x.y import` turned into `from .porter_x_y import`."""
    return IMPORT.sub(lambda m: f"{m['indent']}from .{flat_name(m['module'])} import", text)


def python_files(modelling_text: str) -> dict[str, str]:
    """File name -> text of the porter modules that `modelling_text` imports, directly or through each other."""
    files: dict[str, str] = {}
    waiting = [m["module"] for m in IMPORT.finditer(modelling_text)]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name in files:
            continue
        text = module_path(module).read_text(encoding="utf-8")
        files[name] = relative_imports(text)
        waiting += [m["module"] for m in IMPORT.finditer(text)]
    return dict(sorted(files.items()))


def module_path(module: str) -> Path:
    """The file of an installed porter module."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{module} is not installed")
    return Path(spec.origin)


def native_sources() -> dict[str, str]:
    """File name -> text of the C++ sources of the CPU kernels."""
    folder = module_path(SOURCE_ROOT).parent
    return {p.name: p.read_text(encoding="utf-8") for p in sorted(folder.iterdir()) if p.suffix in (".cpp", ".h")}
