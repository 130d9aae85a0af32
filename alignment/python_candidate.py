"""A candidate that a function of a Python file builds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from torch import nn

from porter.errors import PorterError


def from_python(file: Path, function: str) -> nn.Module:
    """What FUNCTION of FILE.py returns; naming the file is consent to run it, with its folder on the path."""
    if not file.is_file():
        raise PorterError(f"{file}: no such file; give FILE.py:FUNCTION")
    if not function.isidentifier():
        raise PorterError(f"{file}:{function}: {function!r} is no function name; give FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"porter_candidate_{file.stem}", file.resolve())
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        build = getattr(module, function, None)
        if not callable(build):
            raise PorterError(f"{file}: has no function {function!r}")
        built = build()
    except PorterError:
        raise
    except (Exception, SystemExit) as error:
        raise PorterError(f"{file}:{function}: failed with {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(built, nn.Module):
        raise PorterError(f"{file}:{function}: returned a {type(built).__name__}, expected an nn.Module")
    return built
