"""The checkpoints that the families are judged on: the trained ones that porter ships, else a randomised one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from porter.models.family import Family, families, family_of
from porter.models.presets import preset_names, resolve, shipped_directory, shipped_names
from porter.models.reduce import TOKEN_FIELDS, randomise, reduced_config
from porter.models.reduce_vision import SPECIAL

PROMPTS = ("Anne hoped she had outlived the age of blushing; but", "Captain Wentworth")


@dataclass(frozen=True)
class Subject:
    """A float32 checkpoint of one family; `weights` says where its values come from, `rows` are two prompts."""

    family: Family
    directory: Path
    weights: str
    rows: tuple[list[int], list[int]]


def subjects(chosen: list[str], folder: Path) -> Iterator[Subject]:
    """One per family (of `chosen` model types, or all that porter knows), built in `folder` where none is shipped."""
    shipped = {str(resolve(name).config.model_type): name for name in shipped_names()}
    for model_type in chosen or list(families()):
        family = family_of(model_type)
        if model_type in shipped:
            directory = shipped_directory(shipped[model_type])
            assert directory is not None
            rows = tuple(list(prompt.encode()) for prompt in PROMPTS)
            yield Subject(family, directory, f"trained, {shipped[model_type]}", (rows[0], rows[1]))
        else:
            yield _randomised(family, folder / model_type)


def _randomised(family: Family, directory: Path) -> Subject:
    """The family's default model at reduced width with every parameter drawn so that it matters."""
    presets = preset_names(family.model_type)
    upstream = getattr(importlib.import_module(family.module), family.class_name)
    config = resolve(presets[0]).config if presets else upstream.config_class()
    small = reduced_config(config)
    model = randomise(upstream(small)).float()
    for name in TOKEN_FIELDS:
        setattr(model.config.get_text_config(), name, 0)
    model.save_pretrained(directory)
    words = small.get_text_config().vocab_size - len(SPECIAL)
    tokens = torch.randint(words, (52,), generator=torch.Generator().manual_seed(3)).tolist()
    return Subject(family, directory, "random, reduced width", (tokens[:35], tokens[35:]))
