"""Long inputs: far past yarn's original length, past the sliding window, and in pieces through the cache.

A port in float32 may differ from upstream in float64 by what upstream in float32 itself differs, up to `FACTOR`: both
round every product and sum once, in different orders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import porter
from porter.models.presets import shipped_directory
from porter.models.proof import relative_error
from porter.models.reduce import randomise
from porter.precision import float64_mode

FACTOR = 4.0
TEXT = Path(porter.__file__).resolve().parents[1] / "models" / "shipped" / "text" / "persuasion.txt"


def book(length: int, start: int = 5_000) -> torch.Tensor:
    return torch.tensor([list(TEXT.read_bytes()[start : start + length])])


def fed(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits of `ids` given in pieces of `sizes` through one cache."""
    cache, logits = None, []
    with torch.no_grad():
        for piece in ids.split(sizes, dim=1):
            output = model(piece, cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits)
    return torch.cat(logits, dim=1)


def exact_and_floor(directory: Path, ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Upstream's logits in float64, and the relative error of its own float32."""
    upstream = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        rounded = upstream(ids, use_cache=False).logits
        with float64_mode():
            exact = upstream.double()(ids, use_cache=False).logits
    return exact, relative_error(rounded, exact)


@pytest.mark.parametrize("length", [1100, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-deepseek-v3"])
def test_at_once_and_in_pieces(name: str, length: int, tmp_path: Path) -> None:
    """tiny-deepseek-v3's yarn stretches 256 positions: 4096 are sixteen times as far."""
    directory = shipped_directory(name)
    assert directory is not None
    porter.adapt(directory, scheme="fp32", output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    ids = book(length)
    exact, floor = exact_and_floor(directory, ids)
    with torch.no_grad():
        assert relative_error(model(ids, use_cache=False).logits, exact) < FACTOR * floor
    assert relative_error(fed(model, ids, [length - 596, 1, 63, 500, 32]), exact) < FACTOR * floor


@pytest.mark.parametrize("window", [2, 64])
def test_a_sliding_window_much_shorter_than_the_text(window: int, tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=1,
        eos_token_id=0,
    )
    randomise(Qwen2ForCausalLM(config)).save_pretrained(tmp_path / "source")
    porter.adapt(tmp_path / "source", scheme="fp32", output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    ids = book(517)
    exact, floor = exact_and_floor(tmp_path / "source", ids)
    with torch.no_grad():
        assert relative_error(model(ids, use_cache=False).logits, exact) < FACTOR * floor
    assert relative_error(fed(model, ids, [200, *[1] * 70, 247]), exact) < FACTOR * floor
