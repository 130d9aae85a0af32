"""Where hooks do not fire, or must do nothing: compiled modules, scripted modules, graphs that are being captured."""

from __future__ import annotations

import sys

import torch
from torch import nn

COMPILED = "compiled: its modules run as one graph, where hooks are lost"
NEVER_SEEN = "never called, or only within a compiled function or a replayed graph, where hooks do not run"


def why_not_hooked(module: nn.Module) -> str | None:
    """Why a module's own hooks would not fire as it is called; None where they do."""
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule, which takes no hooks"
    return COMPILED if module._compiled_call_impl is not None else None


def compiled_forward(module: nn.Module) -> bool:
    """Whether what a module does when called is compiled, while its own hooks run outside: `torch.compile(module)`, or
    a forward that was compiled."""
    # torch._dynamo is slow to import, and a compiled module cannot exist before it is.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    forwards = (module.forward, type(module).forward)
    marked = any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)
    return marked or isinstance(module, dynamo.OptimizedModule)


def being_captured() -> bool:
    """Whether what is called now is captured into a CUDA graph, which a copy to the host would break."""
    return torch.cuda.is_current_stream_capturing()
