"""The Python and C++ files that an exported model needs, flattened so that it runs where porter is not installed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from porter.chips.catalogue import Chip

IMPORT = re.compile(r"^(?P<indent>\s*)from (?P<module>porter(?:\.\w+)+) import", re.MULTILINE)
SOURCE_ROOT = "porter.kernels.cpu"
PROVIDERS = "porter.kernels.providers"
PROVIDER_CLASSES = {
    "cpu": ("porter.kernels.cpu.provider", "CpuProvider"),
    "ascend": ("porter.kernels.ascend.provider", "AscendProvider"),
}
"""Where the class of each provider is, by the name that chips give it."""


def flat_name(module: str) -> str:
    """porter.kernels.cpu.build -> porter_kernels_cpu_build."""
    return module.replace(".", "_")


def relative_imports(text: str) -> str:
    """`text` with every `from porter.x.y import` turned into `from .porter_x_y import`."""
    return IMPORT.sub(lambda m: f"{m['indent']}from .{flat_name(m['module'])} import", text)


def python_files(modelling_text: str, chip: Chip) -> dict[str, str]:
    """File name -> text of the porter modules that `modelling_text` imports, directly or through each other, with the
    providers of `chip` alone."""
    files: dict[str, str] = {}
    own = providers_text(chip)
    waiting = [m["module"] for m in IMPORT.finditer(modelling_text)]
    while waiting:
        module = waiting.pop()
        name = f"{flat_name(module)}.py"
        if name in files:
            continue
        text = own if module == PROVIDERS else module_path(module).read_text(encoding="utf-8")
        files[name] = relative_imports(text)
        waiting += [m["module"] for m in IMPORT.finditer(text)]
    return dict(sorted(files.items()))


def providers_text(chip: Chip) -> str:
    """What stands for porter.kernels.providers in an export to `chip`: its own providers, and the chip itself."""
    names = ("cpu",) if chip.device == "cpu" else chip.native_providers
    found = [PROVIDER_CLASSES[name] for name in names]
    imports = "".join(f"from {module} import {name}\n" for module, name in found)
    default = "cpu" if chip.device == "cpu" else chip.name
    return f'''"""The provider of this export, and the chip that it was written for."""

from __future__ import annotations

{imports}from porter.kernels.contract import Provider

DEFAULT_CHIP = "{default}"
DEFAULT_PROVIDERS: tuple[str, ...] = {names!r}


def make_providers() -> list[Provider]:
    """A fresh one of each."""
    return [{", ".join(f"{name}()" for _, name in found)}]
'''


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
