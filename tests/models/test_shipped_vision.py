"""The shipped vision-language model reads what its images show, and porter ports it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import porter
from porter.models.presets import shipped_directory
from porter.models.shipped import train_vision
from porter.models.shipped.recipes import RECIPES
from porter.models.shipped.rendered_numbers import CELL, COLOURS, LONGEST, Picture, picture

NAME = "tiny-qwen3-vl"
SEED = 4321


def directory() -> Path:
    found = shipped_directory(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory()).eval()


def pictures(count: int, seed: int = SEED) -> list[Picture]:
    generator = torch.Generator().manual_seed(seed)
    return [picture(generator) for _ in range(count)]


def test_it_reads_images_that_it_has_not_seen_and_the_card_says_how_well(model: Any) -> None:
    card = (directory() / "README.md").read_text()
    claimed = float(re.findall(r"\| accuracy \| ([\d.]+)% of", card)[0]) / 100
    assert claimed > 0.8
    # A share of 60 images lies within 0.2 of the mean of 300 but for one run in thousands.
    assert train_vision.accuracy(model, RECIPES[NAME](), SEED, 60) > claimed - 0.2


def test_what_it_says_comes_from_the_image(model: Any) -> None:
    shown = pictures(8)
    blank = [Picture(torch.zeros_like(each.pixels), each.caption) for each in shown]
    said = train_vision.read(model, blank, RECIPES[NAME]())
    assert sum(text == each.caption for text, each in zip(said, shown, strict=True)) <= 1


def test_configuration_is_the_recipes_and_the_files_are_small() -> None:
    stored, recipe = AutoConfig.from_pretrained(directory()), RECIPES[NAME]().config
    for part in ("text_config", "vision_config"):
        ours, theirs = (getattr(c, part).to_dict() for c in (stored, recipe))
        for written_on_saving in ("dtype", "transformers_version", "_name_or_path", "architectures"):
            ours.pop(written_on_saving, None), theirs.pop(written_on_saving, None)
        assert ours == theirs
    assert sum(file.stat().st_size for file in directory().iterdir()) < 3_500_000


def test_patches_are_in_the_order_of_the_squares_that_are_merged() -> None:
    shown = Picture(torch.arange(3 * 2 * CELL * CELL).reshape(3, 2 * CELL, CELL).float(), "")
    rows = shown.patches().view(-1, 3, 2, 8, 8)
    assert shown.grid == (1, 4, 2) and shown.tokens == 2
    places = [(0, 0), (0, 8), (8, 0), (8, 8), (16, 0), (16, 8), (24, 0), (24, 8)]
    for row, (top, left) in zip(rows, places, strict=True):
        assert torch.equal(row[:, 0], row[:, 1])
        assert torch.equal(row[:, 0], shown.pixels[:, top : top + 8, left : left + 8])


def test_pictures_are_of_every_kind() -> None:
    shown = pictures(60)
    assert {each.caption.split()[1] for each in shown} == set(COLOURS)
    assert {len(each.caption.split()[0]) for each in shown} == set(range(1, LONGEST + 1))
    assert {each.grid[1] for each in shown} == {2, 4}


def test_the_port_reads_as_the_original_does(model: Any, tmp_path: Path) -> None:
    porter.adapt(NAME, output=tmp_path / "port")
    ported, shown = porter.load(tmp_path / "port"), pictures(24)
    theirs, ours = (train_vision.read(each, shown, RECIPES[NAME]()) for each in (model, ported))
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 23


def test_the_port_is_aligned_on_images_of_several_sizes(tmp_path: Path) -> None:
    wide = AutoModelForImageTextToText.from_pretrained(directory(), dtype=torch.float32).eval()
    given = train_vision.inputs_of(pictures(3), RECIPES[NAME](), with_captions=False)
    with porter.recording(wide, tmp_path / "golden"):
        wide.generate(**given, max_new_tokens=6, do_sample=False)
    porter.adapt(NAME, scheme="fp32", output=tmp_path / "port")
    report = porter.align(tmp_path / "golden", tmp_path / "port")
    assert report.verdict == "aligned", report.first_drift
    assert report.coverage.parameters == 1.0
