"""Shared fixtures: small random checkpoints, and an environment with only what an exported model may need."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from porter.models.family import families
from porter.models.reduce import randomise, reduced_config

NEEDED_BY_EXPORTS = ("torch", "transformers", "safetensors")


@pytest.fixture
def random_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """random_checkpoint("qwen3", dtype=..., **config changes) writes an upstream checkpoint at reduced width."""

    def make(model_type: str, name: str = "original", dtype: Any = None, **changes: Any) -> Path:
        family = families()[model_type]
        upstream = getattr(importlib.import_module(family.module), family.class_name)
        config = reduced_config(upstream.config_class(**changes))
        if hasattr(config, "index_topk"):
            # relu leaves keys with equal scores of zero, and which of these are selected is free.
            config.index_topk = 64
        model = randomise(upstream(config))
        directory = tmp_path / name
        (model if dtype is None else model.to(dtype)).save_pretrained(directory)
        return directory

    return make


def requirements(names: tuple[str, ...]) -> set[str]:
    """The installed distributions that `names` need, themselves included, extras left out."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name in found:
            continue
        found.add(name)
        wanted = [r for r in distribution.requires or [] if "extra ==" not in r]
        waiting += [re.split(r"[ ;<>=!~\[(]", r)[0] for r in wanted]
    return found


@pytest.fixture(scope="session")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder that holds torch, transformers, safetensors and their own requirements, and no porter.

    Run `sys.executable -S` with this folder as PYTHONPATH.
    """
    site = tmp_path_factory.mktemp("bare") / "site"
    site.mkdir()
    for name in requirements(NEEDED_BY_EXPORTS):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            top = file.parts[0]
            source = Path(str(distribution.locate_file(top)))
            if top not in ("..", "/") and source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    assert not (site / "porter").exists() and (site / "torch").exists(), sys.path
    return site
