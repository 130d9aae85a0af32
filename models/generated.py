"""Import the text of a generated modelling file."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from types import ModuleType

from porter.kernels.cpu.build import cache_directory

OWN_CODE = "transformers_modules."
"""The package in which transformers imports the code that checkpoints bring along."""


def own_package(module: str) -> str:
    """The package of a module that a checkpoint brought along; empty for a module of transformers itself."""
    return module.rpartition(".")[0] if module.startswith(OWN_CODE) else ""


def import_text(text: str, name: str, package: str = "") -> ModuleType:
    """Import `text` as a module whose file lies in the cache, so that tracebacks and inspect show its lines.

    The same text gives the same module object. `name` is the file's stem, for example modeling_qwen3_cpu; `package` is
    the one that its relative imports are from.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    qualified = f"{package}.{name}_{digest}" if package else f"porter_generated_{digest}.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    path = cache_directory() / "generated" / digest / f"{name}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, path)
    spec = importlib.util.spec_from_file_location(qualified, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[qualified]
        raise
    return module
