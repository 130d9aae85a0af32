"""Greedy decoding with tokens drafted by a prediction layer and checked by the model, several in one step.

The model is given its last token and the drafted ones, and chooses a token after each. Drafted tokens that it would
have chosen are kept, and with them the one that it chooses after the last of these; the cache forgets the rest. Every
token is thus the model's own choice: in exact arithmetic the text is that of `generate`, and drafts only save steps.
In bfloat16, rounding in steps of several tokens may turn choices that are all but equal.

A recurrent state cannot forget its last tokens. Where a model has any, its states are kept before each step with
drafts; when one of these is refused, the whole cache goes back to before the step, and the next step is given the
tokens that were accepted once more, before the last one. Every step adds a token all the same, so that there are never
more steps than without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from porter.errors import PorterError
from porter.generation import check_prompt, refuse_not_finite
from porter.kernels.dispatch import OpCall
from porter.kv_cache import ContiguousLayer, StateLayer, States, cache_for
from porter.models.prediction import extended_config

MOST_AGAIN = 4
"""Tokens that are given to the model once more beside drafted ones; with more of them, a step goes without drafts."""


@dataclass(frozen=True)
class SpeculativeStep:
    """The tokens [batch, n] that one step added, n of 1 to drafts + 1, and the seconds since it began.

    Of the `drafted` tokens per sequence, `accepted` were kept: those that every sequence of the batch accepts.
    """

    tokens: torch.Tensor
    seconds: float
    drafted: int = 0
    accepted: int = 0


class Drafter:
    """Drafts tokens with a prediction layer, whose keys and values are in the layer of `cache` after the model's."""

    def __init__(self, model: Any, layer: nn.Module, cache: Cache) -> None:
        self.model, self.layer, self.cache = model, layer, cache
        self.number = int(model.config.num_hidden_layers)
        self._greedy = OpCall("sampling", "greedy")

    def __call__(self, following: torch.Tensor, hidden_states: torch.Tensor, drafts: int) -> torch.Tensor:
        """[batch, drafts] tokens after the last of `following`.

        `hidden_states` [batch, length, hidden] are the model's for the tokens before `following` [batch, length]; they
        come after those of the last call. From the second draft on, the layer is given its own output instead.
        """
        states: Any = self.cache.layers[self.number]
        known = states.get_seq_length() + following.shape[1]
        drafted: list[torch.Tensor] = []
        for _ in range(drafts):
            hidden_states = self._predict(following, hidden_states)[:, -1:]
            following = self._greedy(self.model.get_output_embeddings()(hidden_states[:, 0]))[:, None]
            drafted.append(following)
        states.crop(known - states.get_seq_length())
        return torch.cat(drafted, dim=1)

    def _predict(self, following: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(following)
        # Numbered as the tokens are, of which the first has no state before it.
        first = int(self.cache.get_seq_length(self.number)) + 1
        positions = torch.arange(first, first + following.shape[1])[None]
        mask = create_causal_mask(
            config=self.model.config,
            inputs_embeds=embedded,
            attention_mask=None,
            cache=self.cache,
            position_ids=positions,
            layer_idx=self.number,
        )
        return self.layer(  # type: ignore[no-any-return]
            embedded,
            hidden_states,
            position_embeddings=self.model.base_model.rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
        )


def speculative_cache(config: Any, max_length: int) -> Cache:
    """A cache for `max_length` tokens of the model and its prediction layer, which can forget its last tokens, or go
    back to states that were kept.

    Raises PorterError where a layer of the model can do neither.
    """
    cache = cache_for(extended_config(config, 1), max_length)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, ContiguousLayer | StateLayer):
            raise PorterError(
                f"layer {index} keeps its past in a {type(layer).__name__}, which cannot forget tokens that were "
                "drafted in vain: this model is not decoded speculatively"
            )
    return cache


@torch.inference_mode()
def generate_speculatively(
    model: Any,
    layer: nn.Module,
    input_ids: torch.Tensor,
    new_tokens: int,
    *,
    drafts: int = 1,
    stop: frozenset[int] = frozenset(),
) -> Iterator[SpeculativeStep]:
    """As `generate`, with up to `drafts` tokens a step drafted by prediction layer `layer`; the first step is the
    prefill.

    Raises as `generate` does, and PorterError for models whose cache cannot go back.
    """
    check_prompt(model, input_ids, new_tokens)
    if drafts < 1:
        raise PorterError(f"{drafts} drafted tokens a step; give at least 1")
    cache = speculative_cache(model.config, input_ids.shape[1] + new_tokens)
    steps = _Steps(model, cache, Drafter(model, layer, cache), input_ids)
    finished = torch.zeros(input_ids.shape[0], dtype=torch.bool)
    left = new_tokens
    while left:
        step = steps.next(min(drafts, left - 1))
        kept = 0
        for column in step.tokens.unbind(1):
            kept += 1
            finished |= torch.tensor([int(token) in stop for token in column])
            if bool(finished.all()):
                break
        left -= kept
        yield SpeculativeStep(step.tokens[:, :kept], step.seconds, step.drafted, min(step.accepted, kept))
        if bool(finished.all()):
            return


class _Steps:
    """What one step hands to the next: the tokens that were not given to the model or the drafter yet.

    `given` are those that the cache lacks, of which only the last was not given to the model before.
    """

    def __init__(self, model: Any, cache: Cache, drafter: Drafter, input_ids: torch.Tensor) -> None:
        self.model, self.drafter = model, drafter
        self.cache = cache
        self.past = _Past(cache, drafter.number)
        self.greedy = OpCall("sampling", "greedy")
        self.given = input_ids
        self.hidden_states: torch.Tensor | None = None
        self.following = input_ids[:, 1:]

    def next(self, drafts: int) -> SpeculativeStep:
        """The prefill at first, then a step on the tokens that the cache lacks and `drafts` drafted ones, or none."""
        start = time.perf_counter()
        if self.hidden_states is None:
            return self._prefill(start)
        again = self.given.shape[1] - 1
        if again > MOST_AGAIN:
            drafts = 0
        drafted = self.drafter(self.following, self.hidden_states, drafts) if drafts else self.given[:, :0]
        before = self.past.kept() if drafts else []
        hidden_states = self._forward(torch.cat((self.given, drafted), dim=1))[:, again:]
        logits = self.model.get_output_embeddings()(hidden_states)
        chosen = self.greedy(logits.flatten(0, 1)).view(logits.shape[:2])
        agree = (chosen[:, :drafts] == drafted).long().cumprod(dim=1).sum(dim=1)
        accepted = int(agree.min())
        tokens = chosen[:, : accepted + 1]
        if accepted == drafts or not before:
            self.past.forget(drafts - accepted)
            self.given = tokens[:, -1:]
        else:
            self.past.go_back(before, again + 1 + drafts)
            self.given = torch.cat((self.given, tokens), dim=1)
        self._hand_over(tokens, hidden_states[:, : accepted + 1], drafts > 0)
        return SpeculativeStep(tokens, time.perf_counter() - start, drafts, accepted)

    def _prefill(self, start: float) -> SpeculativeStep:
        hidden_states = self._forward(self.given)
        logits = self.model.get_output_embeddings()(hidden_states[:, -1])
        tokens = self.greedy(logits)[:, None]
        seconds = time.perf_counter() - start
        refuse_not_finite(logits, "the model")
        self.given, self.following = tokens, torch.cat((self.following, tokens), dim=1)
        self.hidden_states = hidden_states
        return SpeculativeStep(tokens, seconds)

    def _hand_over(self, tokens: torch.Tensor, hidden_states: torch.Tensor, drafted: bool) -> None:
        """Keep for the drafter `tokens` and the states that chose them, and what it was not given where it did not
        draft."""
        if drafted or self.hidden_states is None:
            self.following, self.hidden_states = tokens, hidden_states
        else:
            self.following = torch.cat((self.following, tokens), dim=1)
            self.hidden_states = torch.cat((self.hidden_states, hidden_states), dim=1)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self.model.base_model(tokens, cache=self.cache, use_cache=True)
        return output.last_hidden_state  # type: ignore[no-any-return]


class _Past:
    """What the first `layers` layers of a cache, those of the model, keep of the past."""

    def __init__(self, cache: Cache, layers: int) -> None:
        model: list[Any] = list(cache.layers[:layers])
        self.states = [layer for layer in model if isinstance(layer, StateLayer)]
        self.keys = [layer for layer in model if not isinstance(layer, StateLayer)]

    def kept(self) -> list[States]:
        """The recurrent states as they are now; empty for a model without."""
        return [layer.kept() for layer in self.states]

    def forget(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of a model without recurrent states, or none of any."""
        for layer in self.keys:
            layer.crop(-tokens)

    def go_back(self, states: list[States], tokens: int) -> None:
        """Forget the last `tokens` tokens, before which `kept` gave these states."""
        self.forget(tokens)
        for layer, kept in zip(self.states, states, strict=True):
            layer.restore(kept)
