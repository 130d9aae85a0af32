"""Triton source to the linalg IR that triton-ascend's frontend emits; no chip, no CANN, no torch_npu."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from benchmarks.ascend_triton.tools import SOURCES, ToolError
from porter.kernels.triton.launch import Launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
MIX_MODE = re.compile(r', mix_mode = "[a-z]*"')
"""An attribute that triton-ascend removes before it calls bishengir-compile, which does not know it."""


@dataclass(frozen=True)
class Lowered:
    """IR of one kernel for one set of types and constants.

    `signature`: type of each run-time argument, in order. `leading`: addresses that come before them. `passes`: what
    makes the IR one of MLIR's own dialects.
    """

    kernel: str
    signature: dict[str, str]
    linalg: str
    leading: int = 0
    passes: tuple[str, ...] = ()


@dataclass
class Frontend:
    """Kernels of a folder of sources, lowered once for each set of types and constants.

    `sources`: porter's own, or a folder with changed copies of some, which are looked up there first.
    """

    sources: Path = SOURCES
    modules: dict[str, ModuleType] = field(default_factory=dict)
    lowered: dict[tuple[Any, ...], Lowered] = field(default_factory=dict)

    def lower(self, launch: Launch) -> Lowered:
        """The linalg IR of a launch's kernel. Raises ToolError where the frontend refuses it."""
        signature = {name: _type(value) for name, value in launch.arguments.items()}
        key = launch.source, launch.kernel, *sorted(signature.items()), *sorted(launch.constants.items())
        if key not in self.lowered:
            function = getattr(self._module(launch.source), launch.kernel)
            taken = [name for name in function.arg_names if name not in launch.constants]
            if set(taken) != set(signature):
                raise ToolError(f"{launch.kernel}: arguments {sorted(set(taken) ^ set(signature))} do not match")
            ordered = {name: signature[name] for name in taken}
            self.lowered[key] = Lowered(launch.kernel, ordered, self._linalg(function, ordered, launch.constants))
        return self.lowered[key]

    def _module(self, source: str) -> ModuleType:
        if source not in self.modules:
            path = self.sources / f"{source}.py"
            path = path if path.exists() else SOURCES / path.name
            spec = importlib.util.spec_from_file_location(f"kernel_source_{source}", path)
            assert spec is not None and spec.loader is not None
            self.modules[source] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.modules[source])
        return self.modules[source]

    @cached_property
    def _backend(self) -> Any:
        return make_backend(GPUTarget("npu", "Ascend910B3", 0))

    def _linalg(self, function: Any, signature: dict[str, str], constants: dict[str, int | bool]) -> str:
        """The stages `ttir` and `ttadapter` of the backend, by hand: the stage after them needs CANN."""
        options = self._backend.parse_options({})
        stages: dict[str, Any] = {}
        self._backend.add_stages(stages, options)
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        source = ASTSource(fn=function, signature=signature, constants=constants)
        codegen, modules = self._backend.get_codegen_implementation(), self._backend.get_module_map()
        metadata = {"hash": "0" * 64, "target": self._backend.target, **vars(options)}
        try:
            module = source.make_ir(options, codegen, modules, context)
            for stage in ("ttir", "ttadapter"):
                module = stages[stage](module, metadata)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode()[-600:]
            raise ToolError(f"triton-adapter-opt refuses {function.__name__}: {said}") from error
        except triton.CompilationError as error:
            raise ToolError(f"triton refuses {function.__name__}: {error}") from error
        return MIX_MODE.sub("", str(module))


def _type(value: torch.Tensor | float) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"
