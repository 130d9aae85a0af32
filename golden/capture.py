"""Capturing: greedy generation under recording, in batches of prompts of any lengths, resumable between batches."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.errors import PorterError
from porter.golden.format import MANIFEST
from porter.golden.recorder import attached, header
from porter.golden.store import Golden
from porter.golden.weights import StoreWeights, write_weights
from porter.golden.writer import Writer
from porter.models.cache_argument import cache_keyword, makes_its_own_cache

Progress = Callable[[int, int], None]


def capture(
    model: nn.Module,
    input_ids: Tensor | Sequence[Sequence[int]],
    path: str | Path,
    new_tokens: int = 0,
    *,
    detail: str = "full",
    attention_mask: Tensor | None = None,
    modules: str | None = None,
    prompts: Sequence[str] | None = None,
    batch_size: int | None = None,
    store_weights: StoreWeights = "auto",
    progress: Progress | None = None,
) -> Golden:
    """Run ``model`` on the prompts, generate ``new_tokens`` greedily, and record every module into a golden.

    ``input_ids`` is [batch, sequence] int64 (with ``attention_mask`` of the same shape where rows are padded) or token
    lists of any lengths, which are padded on the left within batches of ``batch_size`` (default: one batch). Step 0 of
    a batch is the prefill of the whole prompt; each later step feeds back one token, ``max(1, new_tokens)`` steps in
    all: end-of-text does not stop it, so that every golden of the same request has the same steps.

    A capture that was interrupted and is asked for again runs only the batches that are missing. ``progress(done,
    total)`` is called after each step. PorterError for tokens outside the vocabulary, empty prompts, or a model that
    takes no cache where ``new_tokens`` needs one.
    """
    rows = _token_rows(input_ids, attention_mask, model)
    _check_length(rows, new_tokens, model)
    cache_name = _cache_name(model, new_tokens)
    if batch_size is not None and batch_size < 1:
        raise PorterError(f"batch_size is {batch_size}, expected at least 1")
    size = batch_size or len(rows)
    request = {"rows": _rows_digest(rows), "batch_size": size}
    about = header(model, detail, modules, prompts, store_weights) | {"new_tokens": new_tokens, "request": request}
    writer = Writer(path, about, resume=True)
    if (writer.path / MANIFEST).exists():
        writer.close()
        return Golden.open(path)
    if writer.header["model"]["weights"] and not writer.batches_done:
        write_weights(writer.path, model, writer.header["model"]["tied"])
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    run = _Generation(model, max(1, new_tokens), cache_name, progress, len(batches))
    with _evaluating(model), attached(model, writer) as recorder:
        for number in range(writer.batches_done, len(batches)):
            run.batch(number, batches[number])
            writer.end_batch()
        writer.finish(recorder.produced())
    return Golden.open(path)


class _Generation:
    """Greedy decoding of one batch after another."""

    def __init__(
        self, model: nn.Module, steps: int, cache_name: str | None, progress: Progress | None, batches: int
    ) -> None:
        self._model = model
        self._steps = steps
        self._cache_name = cache_name
        self._progress = progress
        self._total = steps * batches
        self._parameters = inspect.signature(model.forward).parameters
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0

    def batch(self, number: int, rows: list[list[int]]) -> None:
        """Prefill the left-padded rows, then decode."""
        tokens, mask = (tensor.to(self._device) for tensor in left_padded(rows, self._padding))
        padded = not bool(mask.all())
        cache = self._new_cache()
        for step in range(self._steps):
            arguments = self._arguments(tokens, mask if padded else None, cache)
            output = self._model(**arguments) if self._parameters.get("input_ids") else self._model(tokens)
            if self._progress is not None:
                self._progress(number * self._steps + step + 1, self._total)
            if step + 1 < self._steps:
                tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
                mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)

    def _new_cache(self) -> Any:
        if self._steps == 1:
            return None
        from transformers import DynamicCache

        config: Any = self._model.config
        return DynamicCache(config=config)

    def _arguments(self, tokens: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": tokens}
        if cache is not None and self._cache_name is not None:
            arguments |= {self._cache_name: cache, "use_cache": True}
        elif "use_cache" in self._parameters:
            arguments["use_cache"] = False
        if mask is not None:
            # Without explicit positions a padded row would start at its padding, not at its first token.
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            arguments |= {"attention_mask": mask, "position_ids": positions}
            if "position_ids" not in self._parameters and "kwargs" not in self._parameters:
                del arguments["position_ids"]  # code of its own, which counts positions from the mask
        return arguments


def left_padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Token lists as ``(input_ids, attention_mask)``, int64 [batch, longest], padding on the left and masked by 0."""
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[padding] * (longest - len(row)) + list(row) for row in rows], dtype=torch.int64)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], dtype=torch.int64)
    return tokens, mask


def _token_rows(input_ids: Any, attention_mask: Tensor | None, model: nn.Module) -> list[list[int]]:
    """The prompts without padding; PorterError naming the prompt that cannot be run."""
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise PorterError(f"input_ids: expected integers [batch, sequence], got {_described(input_ids)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise PorterError(f"attention_mask: expected the shape of input_ids, got {_described(attention_mask)}")
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        rows = [row[kept.bool()].tolist() for row, kept in zip(input_ids, keep, strict=True)]
    else:
        rows = [list(row) for row in input_ids]
    if not rows:
        raise PorterError("no prompts: give at least one")
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    for number, row in enumerate(rows):
        if not row:
            raise PorterError(f"prompt {number} is empty: every prompt needs at least one token")
        wrong = next((token for token in row if token < 0 or (vocabulary is not None and token >= vocabulary)), None)
        if wrong is not None:
            raise PorterError(f"prompt {number}: token id {wrong} is outside the model's vocabulary of {vocabulary}")
    return rows


def _check_length(rows: list[list[int]], new_tokens: int, model: nn.Module) -> None:
    """PorterError for a prompt that does not fit the model's positions together with the tokens to generate."""
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    number, row = max(enumerate(rows), key=lambda entry: len(entry[1]))
    if type(limit) is int and len(row) + new_tokens > limit:
        raise PorterError(
            f"--new-tokens {new_tokens}: with the {len(row)} tokens of prompt {number} above the model's {limit} "
            "positions (config.json: max_position_embeddings); ask for fewer, or cut prompts with --max-length"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _rows_digest(rows: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _cache_name(model: nn.Module, new_tokens: int) -> str | None:
    """The name of the model's cache argument; PorterError if generation needs one and the model has none."""
    if new_tokens < 0:
        raise PorterError(f"new_tokens is {new_tokens}, expected 0 or more")
    name = cache_keyword(model) or None
    if new_tokens > 1 and name is None:
        raise PorterError(f"{type(model).__name__}.forward takes no cache: it can be captured with new_tokens=0 only")
    if new_tokens > 1 and makes_its_own_cache(model):
        raise PorterError(f"{type(model).__name__} has a cache of its own: it can be captured with new_tokens=0 only")
    return name


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, evaluation mode; every module's training flag is put back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
