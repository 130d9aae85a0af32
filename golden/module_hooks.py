"""Hooks on every module that write what goes in and what comes out, and change nothing."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from porter.errors import PorterError
from porter.golden.node import encode, is_cache
from porter.golden.tensors import TensorEncoder
from porter.golden.unseen import NEVER_SEEN, being_captured, compiled_forward, why_not_hooked
from porter.golden.weights import plain_name
from porter.golden.writer import Writer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MOST_PENDING = 1024


class Recorder:
    """Hooks on a model's modules that append to a writer; ``attach``, run forwards, ``detach``.

    A record is made when its module returns, so children come before their parent. Records are written at the end of a
    step, by 1024 within a long one. A call of a module outside any call of the root belongs to the step before it (to
    step 0 if there is none).
    """

    def __init__(self, model: nn.Module, writer: Writer, detail: str, modules: str | None) -> None:
        self.model = model
        self._writer = writer
        self._encode_tensor = TensorEncoder(writer, detail)
        self._pattern = compile_pattern(modules)
        self._handles: list[RemovableHandle] = []
        self._step = len(writer.ends) - 1
        self._batch = -1
        self._calls: Counter[str] = Counter()
        self._open_calls: list[tuple[str, int, str]] = []
        self._pending: list[tuple[int, int, str, str, str, str, int]] = []
        self._hooked: set[str] = set()
        self._refused: dict[str, str] = {}
        self._past_length = 0
        self._traced: set[str] = set()
        self._on_cuda = any(parameter.is_cuda for parameter in model.parameters())

    def attach(self) -> None:
        """Hook every module that can be hooked and matches the pattern, and the root in any case."""
        closed: str | None = None
        reason = ""
        for name, module in self.model.named_modules():
            if closed is not None and name.startswith(f"{closed}."):
                self._refused[name] = f"inside {closed}, {reason}"
            elif (why := why_not_hooked(module)) is not None:
                self._refused[name], reason = why, "which takes no hooks"
                closed = name
            else:
                self._hook(name, module)
                if compiled_forward(module):
                    closed, reason = name, "which is compiled: its modules run as one graph, where hooks are lost"

    def detach(self) -> None:
        """Remove every hook and write what is left."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()

    def produced(self) -> dict[str, Any]:
        """What the manifest says of the run: which modules are missing in it, and why."""
        missed = self._refused | {name: self._why_not_called(name) for name in self._hooked - self._writer.modules}
        order = [name for name, _ in self.model.named_modules(remove_duplicate=False)]
        named = {plain_name(name): missed[name] for name in order if name in missed}
        return {
            "missed": [{"module": name, "why": why} for name, why in named.items() if name not in self._writer.modules],
            "shared": _shared_modules(self.model),
        }

    def _why_not_called(self, name: str) -> str:
        """Of a module that was hooked and left no record."""
        if name in self._traced:
            return "called within a graph capture alone, where nothing can be read"
        return NEVER_SEEN

    def _hook(self, name: str, module: nn.Module) -> None:
        if name and (isinstance(module, _CONTAINERS) or not (self._pattern is None or self._pattern.search(name))):
            return

        kind = type(getattr(module, "_orig_mod", module)).__name__

        # The compiler takes hooks into its graph. There they must do nothing: they read every element.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling() and not self._capturing(name):
                self._before(name, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not torch.compiler.is_compiling() and not self._capturing(name):
                self._after(name, kind, output)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        self._hooked.add(name)

    def _capturing(self, name: str) -> bool:
        if not (self._on_cuda and being_captured()):
            return False
        self._traced.add(name)
        return True

    def _before(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not name:
            self._begin_step(args, kwargs)
        inputs = encode({"args": list(args), "kwargs": kwargs}, self._encode_tensor)
        self._open_calls.append((name, self._calls[name], inputs))
        self._calls[name] += 1

    def _after(self, name: str, kind: str, output: Any) -> None:
        # Calls above this one on the stack were left by an exception that their caller caught.
        while (opened := self._open_calls.pop())[0] != name:
            pass
        outputs = encode(output, self._encode_tensor)
        step, batch = max(self._step, 0), max(self._batch, 0)
        self._pending.append((step, opened[1], name, kind, opened[2], outputs, batch))
        if not name:
            self._end_step(output)
        elif len(self._pending) == _MOST_PENDING:
            self.settle()

    def settle(self) -> None:
        """Write the records of the calls that have returned."""
        if not self._pending:
            return
        resolved = self._encode_tensor.resolved
        for step, call, name, kind, inputs, outputs, batch in self._pending:
            self._writer.record(step, call, name, kind, resolved(inputs), resolved(outputs), batch)
        self._pending.clear()
        self._writer.flush()

    def _begin_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open_calls.clear()
        self._calls.clear()
        self.settle()
        self._encode_tensor.forget()
        self._step = len(self._writer.ends)
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        self._past_length = int(caches[0].get_seq_length()) if caches else 0
        if self._past_length == 0 or self._batch < 0:
            self._batch = sum(end["past_length"] == 0 for end in self._writer.ends)
        tokens = kwargs.get("input_ids", args[0] if args else None)
        self._tokens = _integer_rows(tokens)
        self._attention_mask = _integer_rows(kwargs.get("attention_mask"))

    def _end_step(self, output: Any) -> None:
        self.settle()
        self._writer.end_step(
            {
                "step": self._step,
                "past_length": self._past_length,
                "tokens": self._tokens,
                "attention_mask": self._attention_mask,
                "generated": _greedy(output),
            }
        )


def compile_pattern(modules: str | None) -> re.Pattern[str] | None:
    """The pattern that module names are searched for; PorterError for one that is not a regular expression."""
    try:
        return None if modules is None else re.compile(modules)
    except re.error as error:
        raise PorterError(f"--modules {modules!r} is not a regular expression: {error}") from error


def _shared_modules(model: nn.Module) -> dict[str, str]:
    """Further names of a module that is registered twice, to the name under which it is recorded."""
    names = {id(module): name for name, module in model.named_modules()}
    every = model.named_modules(remove_duplicate=False)
    return {name: names[id(module)] for name, module in every if names[id(module)] != name}


def _integer_rows(value: Any) -> list[list[int]] | None:
    """A [batch, sequence] tensor of integers or bools as lists; None for anything else."""
    if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point() or value.is_complex():
        return None
    rows: list[list[int]] = value.to(torch.int64).tolist()
    return rows


def _greedy(output: Any) -> list[int] | None:
    """The most likely next token of every row, where the root returns logits [batch, sequence, vocabulary]."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        return None
    tokens: list[int] = logits[:, -1].argmax(dim=-1).tolist()
    return tokens
