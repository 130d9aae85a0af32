"""Regimes: which lengths, which calls, how far, and the search along them."""

from __future__ import annotations

import torch
from planted import qwen2

from porter.alignment.regimes import Regime, fitted, kinds, lengths, steps, text
from porter.alignment.sweep_budget import Size, extent_of
from porter.alignment.sweep_search import halved


def test_budget_cuts_the_lengths() -> None:
    model = qwen2(layers=1)
    assert extent_of(model, None).longest == 128
    assert extent_of(model, 77).longest == 77
    size = Size(parameters=1000, hidden=8, layers=2, heads=4)
    regime = Regime(10, batch=3)
    assert size.work(regime) == 4 * 30 * (2 * 1000 + 4 * 2 * 8 * 10)
    assert size.bytes(regime) == 4 * 30 * 2 * (20 * 8 + 4 * 10)


def test_every_step_holds_each_token_once_at_its_position() -> None:
    tokens = text(50, 3, 40)
    for kind in kinds(99, routed=True):
        for length in (1, 2, 3, 4, 7, 40):
            regime = fitted(kind, length, 99)
            if regime is None:
                assert length < kind.shortest
                continue
            calls = steps(regime, tokens)
            assert sum(call["input_ids"].shape[1] for call in calls) == length
            past = 0
            for call in calls:
                past += call["input_ids"].shape[1]
                mask = call.get("attention_mask", torch.ones(regime.batch, past, dtype=torch.int64))
                assert mask.shape == (regime.batch, past)
                positions = call.get("position_ids")
                if positions is not None:
                    width = positions.shape[1]
                    expected = regime.offset + mask.cumsum(dim=1)[:, -width:] - 1
                    real = mask[:, -width:].bool()
                    assert torch.equal(positions[real], expected[real]) and int(positions.max()) <= 99
            if regime.tokens == "mixed":
                last = (
                    calls[-1]["attention_mask"] if "attention_mask" in calls[-1] else torch.ones(regime.batch, length)
                )
                row = torch.cat([call["input_ids"] for call in calls], dim=1)
                for index in range(regime.batch):
                    held = row[index][last[index].bool()]
                    assert torch.equal(held, tokens[index, : held.numel()])
                    assert index or held.numel() == length


def test_lengths_surround_powers_of_two() -> None:
    assert lengths(4097)[:7] == [1, 2, 4, 63, 64, 65, 127] and lengths(4097)[-3:] == [4095, 4096, 4097]
    assert lengths(100)[-2:] == [65, 100] and lengths(1) == [1]


def test_halving_finds_neighbours() -> None:
    for boundary in (2, 31, 99):
        assert halved(1, 100, lambda n, at=boundary: n >= at) == (boundary - 1, boundary)
        assert halved(100, 1, lambda n, at=boundary: n < at) == (boundary, boundary - 1)
