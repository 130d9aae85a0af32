"""Importable classes load original checkpoints, generate, and save under the original names."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from porter.models.family import FAMILY_FILES, families
from porter.models.reduce import randomise, reduced_config


def checkpoint(model_type: str, directory: Path) -> Any:
    family = families()[model_type]
    upstream = getattr(importlib.import_module(family.module), family.class_name)
    config = reduced_config(upstream.config_class())
    if hasattr(config, "index_topk"):
        config.index_topk = 64  # relu leaves keys with equal scores of zero, and which of these are selected is free
    model = randomise(upstream(config)).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("model_type", FAMILY_FILES)
def test_original_checkpoint_in_and_out(model_type: str, tmp_path: Path) -> None:
    source = checkpoint(model_type, tmp_path / "original")
    family = families()[model_type]
    ported_class = getattr(importlib.import_module(f"porter.models.{model_type}"), family.class_name)
    ported, report = ported_class.from_pretrained(tmp_path / "original", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]

    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        assert torch.allclose(ported(ids).logits, source(ids).logits, atol=1e-3, rtol=1e-3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ported.generate(ids, **options), source.generate(ids, **options))

    ported.save_pretrained(tmp_path / "saved")
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("original", "saved"))
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == [family.class_name]


def test_loading_leaves_the_registry_as_it_was(tmp_path: Path) -> None:
    from transformers import conversion_mapping

    checkpoint("qwen3", tmp_path)
    conversion_mapping.get_checkpoint_conversion_mapping("qwen3")
    before = set(conversion_mapping._checkpoint_conversion_mapping_cache)
    importlib.import_module("porter.models.qwen3").Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert set(conversion_mapping._checkpoint_conversion_mapping_cache) == before
