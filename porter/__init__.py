"""porter: port DeepSeek and Qwen models to new chips, and name the module and the cause when the numbers drift."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from porter.adaptation import Port, adapt
    from porter.alignment.align import align
    from porter.alignment.report import Report
    from porter.golden.capture import capture
    from porter.golden.recorder import recording
    from porter.golden.store import Golden
    from porter.runtime import load

_HOMES = {
    "adapt": "porter.adaptation",
    "Port": "porter.adaptation",
    "align": "porter.alignment.align",
    "Report": "porter.alignment.report",
    "capture": "porter.golden.capture",
    "recording": "porter.golden.recorder",
    "Golden": "porter.golden.store",
    "load": "porter.runtime",
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first used: `import porter` alone does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'porter' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


__all__ = ["Golden", "Port", "Report", "__version__", "adapt", "align", "capture", "load", "recording"]
