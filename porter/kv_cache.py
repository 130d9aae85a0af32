"""A key-value cache in one contiguous buffer per layer, allocated once for the longest sequence.

Layers of linear attention keep a state of fixed size instead: what the convolution last saw, and the recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from porter.models.auto_class import text_config

States = tuple[dict[int, torch.Tensor | None], dict[int, torch.Tensor | None]]
"""The states of a convolution and of a recurrence, by their number in the layer."""


class ContiguousLayer(CacheLayerMixin):
    """Keys [batch, heads, max_length, k_head_dim] and values [batch, heads, max_length, v_head_dim].

    `update` writes in place and returns views of the filled part, so decoding copies one token, not the history.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, max_length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_length = max_length
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate both buffers for the shapes of the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads = key_states.shape[:2]
        self.keys = key_states.new_empty(batch, heads, self.max_length, key_states.shape[-1])
        self.values = value_states.new_empty(batch, value_states.shape[1], self.max_length, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **keywords: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, new, dim] states; returns everything so far. Raises IndexError when full."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self.length, self.length + key_states.shape[-2]
        if end > self.max_length:
            raise IndexError(f"the key-value cache holds {self.max_length} tokens; {end} were given")
        self.keys.narrow(2, start, end - start).copy_(key_states)
        self.values.narrow(2, start, end - start).copy_(value_states)
        self.length = end
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after the next update, offset of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self.max_length

    def get_max_cache_shape(self) -> int:
        """Tokens that fit, under transformers' older name."""
        return self.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens: as in transformers, the number is negative.

        Raises ValueError for a positive one, which older versions took for the length that is left.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to forget as a negative one")
        self.length += tokens_to_remove

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.length = 0


class IndexedLayer(ContiguousLayer):
    """A contiguous layer with the keys of a lightning indexer [batch, max_length, index_head_dim] beside it."""

    indexer_keys: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the keys [batch, new, index_head_dim] of the tokens that `update` was last given; returns all."""
        if self.indexer_keys is None:
            batch, _, size = indexer_key_states.shape
            self.indexer_keys = indexer_key_states.new_empty(batch, self.max_length, size)
        new = indexer_key_states.shape[1]
        self.indexer_keys.narrow(1, self.length - new, new).copy_(indexer_key_states)
        return self.indexer_keys.narrow(1, 0, self.length)


class StateLayer(LinearAttentionLayer):
    """Convolution states [batch, channels, kernel] and recurrent states [batch, heads, key_dim, value_dim].

    A new recurrent state is kept as it is given, where transformers copies it into a buffer: the kernels write one of
    their own, and copying it would double what a decode step moves.
    """

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep `recurrent_states`, which the caller must not write to afterwards."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def kept(self) -> States:
        """The states as they are now, for `restore`; those of a convolution are copied, as its layer writes to them."""
        copies = {index: None if state is None else state.clone() for index, state in self.conv_states.items()}
        return copies, dict(self.recurrent_states)

    def restore(self, states: States) -> None:
        """Forget every token since `kept` gave these states, which can be gone back to once."""
        self.conv_states, self.recurrent_states = states


def contiguous_cache(layers: int, max_length: int) -> Cache:
    """A transformers Cache of `layers` contiguous layers for `max_length` tokens."""
    return Cache(layers=[ContiguousLayer(max_length) for _ in range(layers)])


def cache_for(config: Any, max_length: int) -> Cache:
    """A transformers Cache with a layer of the kind that `config.layer_types` names for each layer of the model; that
    of transformers where a kind is not known here, or an indexer compresses keys and so needs their positions."""
    config = text_config(config)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)
    layers: dict[str, Callable[[], Any]] = {
        "full_attention": lambda: ContiguousLayer(max_length),
        "sliding_attention": lambda: ContiguousLayer(max_length),
        "linear_attention": StateLayer,
        "indexed_attention": lambda: IndexedLayer(max_length),
    }
    if not layers.keys() >= set(kinds) or getattr(config, "indexer_compress_ratio", None):
        return DynamicCache(config=config)
    return Cache(layers=[layers[kind]() for kind in kinds])
