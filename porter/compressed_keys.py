"""What the cache of DeepSeek-V4 holds: compressed keys, which grow, and windows, which do not."""

from __future__ import annotations

from typing import Any

SELECTED, ALL = "compressed_sparse_attention", "heavily_compressed_attention"


def has_compressed_keys(config: Any) -> bool:
    """Whether layers of a model of `config` compress their keys."""
    return bool(getattr(config, "compress_rates", None))


def compressed_bytes_per_token(config: Any, width: int) -> int:
    """Bytes that one token adds on average over all layers, rounded up: an entry for every so many tokens, where an
    indexer selects also one of its own."""
    total = 0.0
    for kind in config.layer_types:
        size = _entry(config, kind)
        total += width * size / config.compress_rates[kind] if size else 0.0
    return -int(-total // 1)


def window_bytes(config: Any, width: int) -> int:
    """Bytes at most that one sequence keeps whatever its length: the keys within the window, which are the values too,
    and keys and gates of the tokens whose window is open or that overlap with the next."""
    total = 0
    for kind in config.layer_types:
        total += (config.sliding_window - 1) * config.head_dim
        parts, size = 2 if kind == SELECTED else 1, _entry(config, kind)
        if size:
            rate = config.compress_rates[kind]
            total += 2 * (rate - 1) * parts * size + (2 * rate * size if kind == SELECTED else 0)
    return total * width


def _entry(config: Any, kind: str) -> int:
    """Values of one entry of a layer of this kind, its indexer's with it."""
    return {SELECTED: int(config.head_dim) + int(config.index_head_dim), ALL: int(config.head_dim)}.get(kind, 0)
