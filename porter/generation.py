"""Generate tokens over a contiguous key-value cache, one at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from porter.decoder import Decoder, Way
from porter.errors import PorterError, Refusal
from porter.kernels.dispatch import OpCall
from porter.kv_cache import cache_for
from porter.models.auto_class import text_config
from porter.models.cache_argument import cache_keyword, makes_its_own_cache
from porter.models.images import forget_positions
from porter.tokenization import check_vocabulary


@dataclass(frozen=True)
class Step:
    """One generated token per sequence, and the seconds since the step began.

    `way`: how the step was run, see Decoder; `refusal`: why steps are not replayed, if so.
    """

    tokens: torch.Tensor
    seconds: float
    way: Way = "model"
    refusal: str = ""


def stop_tokens(model: nn.Module) -> frozenset[int]:
    """End-of-sequence ids from the generation config, else the model config."""
    for config in (getattr(model, "generation_config", None), text_config(model.config)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def refuse_not_finite(logits: torch.Tensor, whose: str) -> None:
    """Raise Refusal where `logits` hold NaN or +infinity (-infinity may mask a token)."""
    bad = int((logits.isnan() | logits.isposinf()).sum())
    if bad:
        raise Refusal(
            f"{whose}: {bad} of {logits.numel()} logits are NaN or infinite; `porter golden show` of a recording names "
            "the first module whose values are not finite"
        )


def check_prompt(model: nn.Module, input_ids: torch.Tensor, new_tokens: int) -> None:
    """PorterError for `input_ids` [batch, length] that are empty, unknown to `model`, or too long for its positions
    with `new_tokens` more."""
    config = text_config(model.config)
    total = input_ids.shape[1] + new_tokens
    limit = getattr(config, "max_position_embeddings", None)
    if input_ids.shape[1] == 0 or input_ids.shape[0] == 0:
        raise PorterError("the prompt has no tokens; give at least one")
    if isinstance(limit, int) and total > limit:
        raise PorterError(
            f"{input_ids.shape[1]} prompt tokens and {new_tokens} new ones exceed the model's {limit} positions "
            "(config.json: max_position_embeddings); ask for fewer"
        )
    check_vocabulary(input_ids, config)


def takes_caches(model: nn.Module) -> bool:
    """Whether `model` decodes over a cache that it is given; others make one of their own kind, or have none."""
    return bool(cache_keyword(model)) and not makes_its_own_cache(model)


# The decorator, not a `with` around the loop: the mode would stay on in the caller between steps.
@torch.inference_mode()
def generate(
    model: nn.Module, input_ids: torch.Tensor, new_tokens: int, *, stop: frozenset[int] = frozenset()
) -> Iterator[Step]:
    """Greedy continuation of `input_ids` [batch, length] by up to `new_tokens`; the first Step is the prefill.

    Ends early when every sequence has produced a token in `stop`. Raises PorterError for an empty prompt or one that
    does not fit the model's positions, and Refusal where the prompt's logits are not finite.
    """
    check_prompt(model, input_ids, new_tokens)
    forget_positions(model)
    cache = cache_for(model.config, input_ids.shape[1] + new_tokens) if takes_caches(model) else None
    decode = Decoder(model, cache, new_tokens - 1)
    greedy = OpCall("sampling", "greedy")
    finished = torch.zeros(input_ids.shape[0], dtype=torch.bool)
    tokens = input_ids
    for _ in range(new_tokens):
        start = time.perf_counter()
        logits = decode(tokens)[:, -1]
        chosen = greedy(logits)
        seconds = time.perf_counter() - start
        if tokens is input_ids:
            refuse_not_finite(logits, "the model")
        yield Step(chosen, seconds, decode.way, decode.refusal)
        finished |= torch.tensor([int(t) in stop for t in chosen])
        if bool(finished.all()):
            return
        tokens = chosen[:, None]
