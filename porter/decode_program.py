"""Decoding without Python between kernels: one step is recorded, checked against the model, and replayed.

While a step is recorded every kernel call is kept with its memory, and every torch operation between them must be a
view, an allocation, a sum of two equal shapes or a write to the key-value cache; anything else refuses the recording
by name, and decoding goes on through the model. What changes from step to step is the token, its position, and the
length of the cache: the first two go through the model's own embeddings, the last is patched into the commands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache

from porter.kernels.cpu.layout import threads_for
from porter.kernels.cpu.program import Program
from porter.models.cache_argument import cache_keyword, forward_parameters
from porter.step_recorder import NotRecordable, StepRecorder, kernel_library


class _Attends(NamedTuple):
    """Where an attention kernel keeps its shape, the number of keys in that shape, and its threads if these
    depend on the number of keys."""

    shape: int
    keys: int
    threads: int | None


ATTENDS = {"attention": _Attends(6, 5, 11), "mla": _Attends(8, 5, None)}


class DecodeProgram:
    """One decode step of `model` on [batch, 1] tokens over a cache of ContiguousLayers, as a program of kernels."""

    def __init__(self, model: nn.Module, cache: Cache, recorder: StepRecorder, logits: torch.Tensor) -> None:
        """`recorder`: what happened in the step that gave `logits` [batch, 1, vocabulary]. Raises NotRecordable."""
        self.model, self.cache, self.logits = model, cache, logits
        self.layers: list[Any] = list(cache.layers)
        self.program = recorder.program
        # Kernels are handed addresses: weights that are replaced meanwhile must not be freed under them.
        for weight in (*model.parameters(), *model.buffers()):
            self.program.keep(weight.detach())
        self.hidden_states, self.position_embeddings = recorder.inputs()
        self.program.finish()
        self._follow_position(recorder)

    def _follow_position(self, recorder: StepRecorder) -> None:
        """Note where the program holds first + step * position, and where it holds threads."""
        program, start = self.program, recorder.start
        growing: list[tuple[int, int, int]] = []
        threads: list[int] = []
        for command, name in enumerate(program.names):
            if command in recorder.writes:
                place, step = program.argument(command, 1), recorder.writes[command]
                growing.append((place, int(program.memory[place]) - step * start, step))
            elif name in ATTENDS:
                slots = ATTENDS[name]
                growing.append((self._keys(command, slots, start), 1, 1))
                threads += [] if slots.threads is None else [program.argument(command, slots.threads)]
        self._places, self._firsts, self._steps = torch.tensor(growing, dtype=torch.int64).reshape(-1, 3).T
        self._threads = torch.tensor(threads, dtype=torch.int64)
        keys, values = self.layers[0].keys, self.layers[0].values
        # As the attention kernel counts, so that a replayed step splits its work as the model would.
        self._bytes_per_key = 2 * keys.shape[0] * keys.shape[1] * (keys.shape[3] + values.shape[3])

    def _keys(self, command: int, slots: _Attends, start: int) -> int:
        """Where the number of keys stands that an attention kernel sees."""
        program = self.program
        place = program.array(command, slots.shape) + slots.keys
        if program.memory[place] != start + 1:
            raise NotRecordable("attention sees other keys than those of the cache")
        return place

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append `tokens` [batch, 1]; their logits [batch, 1, vocabulary], which the next step overwrites.

        Raises IndexError when the cache is full.
        """
        position = self.layers[0].length
        if position >= self.layers[0].max_length:
            raise IndexError(f"the key-value cache holds {position} tokens and is full")
        embedded = self.model.get_input_embeddings()(tokens)  # type: ignore[operator]
        self.hidden_states.copy_(embedded)
        rotary = self.model.base_model.rotary_emb  # type: ignore[union-attr]
        angles = rotary(embedded, torch.tensor([[position]]))  # type: ignore[operator]
        for buffer, value in zip(self.position_embeddings, angles, strict=True):
            buffer.copy_(value)
        self.program.memory[self._places] = self._firsts + self._steps * position
        self.program.memory[self._threads] = threads_for(self._bytes_per_key * (position + 1))
        self.program.run()
        for layer in self.layers:
            layer.length = position + 1
        return self.logits


def model_step(model: nn.Module, cache: Cache, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [batch, 1, vocabulary] of the last of `tokens` [batch, length], through the model."""
    kept = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(model) else {}
    logits: torch.Tensor = model(tokens, **{cache_keyword(model): cache}, use_cache=True, **kept).logits
    return logits[:, -1:]


def record_step(model: nn.Module, cache: Cache, tokens: torch.Tensor) -> tuple[DecodeProgram | str, torch.Tensor]:
    """Run a step on `tokens` [batch, 1], recorded: the program, or the reason why there is none; and the logits."""
    start = int(cache.get_seq_length())
    try:
        recorder = StepRecorder(Program(kernel_library(model, cache)), model, cache)
        with recorder:
            logits = model_step(model, cache, tokens)
        return DecodeProgram(model, cache, recorder, logits), logits.clone()
    except NotRecordable as refusal:
        _rewind(cache, start)
        return str(refusal), model_step(model, cache, tokens)


def checked_step(program: DecodeProgram, tokens: torch.Tensor) -> tuple[DecodeProgram | str, torch.Tensor]:
    """Run a step replayed and through the model: the program if both gave the same bits, else what differs."""
    cache, position = program.cache, program.layers[0].length
    replayed = program.step(tokens).clone()
    written = [(layer.keys[:, :, position].clone(), layer.values[:, :, position].clone()) for layer in program.layers]
    _rewind(cache, position)
    logits = model_step(program.model, cache, tokens)
    for index, (layer, (keys, values)) in enumerate(zip(program.layers, written, strict=True)):
        if not (_same(layer.keys[:, :, position], keys) and _same(layer.values[:, :, position], values)):
            return f"replaying writes other keys and values than the model in layer {index}", logits
    if not _same(logits, replayed):
        return "replaying gives other logits than the model", logits
    return program, logits


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _rewind(cache: Cache, length: int) -> None:
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        layer.length = length
