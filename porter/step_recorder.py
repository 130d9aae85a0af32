"""What happens between the kernels of one decode step, and whether a program can repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from struct import pack
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from porter.kernels.cpu.layout import FLOAT_CODES
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.program import Program, recording
from porter.kernels.dispatch import op_calls
from porter.kv_cache import ContiguousLayer, StateLayer

ALLOCATIONS = frozenset({"aten::empty.memory_format", "aten::empty_like", "aten::new_empty"})

MASK_SLOTS = {"attention": 5, "mla": 7}
"""The argument that is an attention kernel's mask."""


class NotRecordable(Exception):
    """The step does something that a program cannot repeat; the message says what."""


def kernel_library(model: nn.Module, cache: Cache) -> KernelLibrary:
    """The loaded CPU kernels that `model` calls. Raises NotRecordable where a recording cannot even begin."""
    calls = op_calls(model)
    if not calls:
        raise NotRecordable("the model calls no Ops")
    if any(call.name == "indexer" for _, call in calls):
        raise NotRecordable("an indexer selects other keys in every step, which a program cannot follow")
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        raise NotRecordable("modules have hooks, which a program would not run")
    if any(isinstance(layer, StateLayer) for layer in cache.layers):
        raise NotRecordable("layers of linear attention replace their states at each step")
    if not all(isinstance(layer, ContiguousLayer) and layer.is_initialized for layer in cache.layers):
        raise NotRecordable("the key-value cache is not contiguous")
    if not isinstance(getattr(model.base_model, "rotary_emb", None), nn.Module):
        raise NotRecordable("the model has no rotary_emb")
    if any("cpu" not in call.providers for _, call in calls):
        raise NotRecordable("the CPU kernels are not in use")
    library = getattr(calls[0][1].registry.providers.get("cpu"), "library", None)
    if library is None or not library.loaded:
        raise NotRecordable("the CPU kernels are not in use")
    if not isinstance(library, KernelLibrary):
        # Its calls may be numbered otherwise than this porter's: a program would call the wrong kernels.
        raise NotRecordable("the model runs its own copy of the kernels")
    return library


class StepRecorder(TorchDispatchMode):
    """A context in which the model runs one step on [batch, 1] tokens.

    `writes`: by command, the bytes by which the cache entry that it writes moves from one position to the next.
    """

    def __init__(self, program: Program, model: nn.Module, cache: Cache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program, self.model = program, model
        self.start = int(cache.get_seq_length())
        self.writes: dict[int, int] = {}
        layers: list[Any] = list(cache.layers)
        self._buffers = {b.untyped_storage().data_ptr() for x in layers for b in (x.keys, x.values)}
        self._before: list[torch.Tensor] = []
        self._embedded: list[torch.Tensor] = []
        self._angles: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stack = ExitStack()

    def __enter__(self) -> StepRecorder:
        rotary: Any = self.model.base_model.rotary_emb  # type: ignore[union-attr]
        embeddings: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        for module, outputs in ((embeddings, self._embedded), (rotary, self._angles)):
            handle = module.register_forward_hook(lambda m, args, output, kept=outputs: kept.append(output))
            self._stack.callback(handle.remove)
        self._stack.enter_context(recording(self.program.library, self.program))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._stack.close()

    def inputs(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The embedded tokens and (cos, sin) that the kernels read. Raises NotRecordable when they read more."""
        if len(self._embedded) != 1 or len(self._angles) != 1 or not self.program.names:
            raise NotRecordable("the step is not one embedding, one rotary_emb and kernels")
        if any(self.program.value(i, slot) for i, slot in self._masks()):
            raise NotRecordable("attention has a mask")
        known = {t.untyped_storage().data_ptr() for t in (*self._embedded, *self._angles[0])}
        for tensor in self._before:
            storage = tensor.untyped_storage()
            first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if first not in known and self.program.reads(first, last):
                raise NotRecordable("kernels read something that was computed before the first layer")
        return self._embedded[0], self._angles[0]

    def _masks(self) -> Iterator[tuple[int, int]]:
        for index, name in enumerate(self.program.names):
            if name in MASK_SLOTS:
                yield index, MASK_SLOTS[name]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if self.program.names and name == "aten::add.Tensor":
            return self._add(*args, **(kwargs or {}))
        if self.program.names and name == "aten::copy_":
            return self._write(*args)
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for output in outputs:
            self.program.keep(output)
        if name in ALLOCATIONS:
            return result
        views = func.is_view and _views(outputs, args)
        if self.program.names and name == "aten::contiguous" and not views:
            return self._pack(args[0], result)
        if not self.program.names:
            self._before += [] if views else outputs
        elif not views:
            raise NotRecordable(f"{name.replace('aten::', 'torch.')} between kernels")
        return result

    def _add(self, a: torch.Tensor, b: Any, alpha: Any = 1) -> torch.Tensor:
        same = isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and alpha == 1
        if not same or a.dtype not in FLOAT_CODES or not (a.is_contiguous() and b.is_contiguous()):
            raise NotRecordable("a sum of tensors that differ in shape, dtype or layout")
        out = torch.empty_like(a)
        self.program.keep(out)
        self.program.library.add(out.data_ptr(), a.data_ptr(), b.data_ptr(), a.numel(), FLOAT_CODES[a.dtype])
        return out

    def _pack(self, source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if source.dim() > 4 or source.stride(-1) != 1:
            raise NotRecordable("a contiguous copy of more than four dimensions, or of scattered values")
        self.program.library.copy(out.data_ptr(), source.data_ptr(), _copy_shape(out, source))
        return out

    def _write(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        inside = target.untyped_storage().data_ptr() in self._buffers and target.dim() == 4
        if not inside or source.shape != target.shape or source.dtype != target.dtype:
            raise NotRecordable("a copy to elsewhere than the key-value cache")
        if source.stride(3) != 1 and source.shape[3] != 1:
            raise NotRecordable("a copy of states that are not contiguous in the last dimension")
        self.writes[len(self.program.names)] = target.stride(2) * target.element_size()
        self.program.library.copy(target.data_ptr(), source.data_ptr(), _copy_shape(target, source))
        return target


def _copy_shape(target: torch.Tensor, source: torch.Tensor) -> bytes:
    """The shape argument of the copy kernel for two tensors of one shape, of at most four dimensions."""
    size, missing = target.element_size(), 4 - target.dim()
    strides = [s * size for t in (target, source) for s in (*[0] * missing, *t.stride()[:-1])]
    return pack("10q", *[1] * missing, *target.shape[:-1], target.shape[-1] * size, *strides)


def _views(outputs: list[torch.Tensor], args: Any) -> bool:
    """Whether every output shares the memory of an input: reshape and contiguous are called views, and may copy."""
    inputs = {a.untyped_storage().data_ptr() for a in tree_leaves(args) if isinstance(a, torch.Tensor)}
    return all(output.untyped_storage().data_ptr() in inputs for output in outputs)
