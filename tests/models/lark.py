"""Checkpoints of the hand-written model in `own_code/`, as it is or with a few lines of its code replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from porter.adaptation import Port, plan_port
from porter.models.presets import shipped_directory
from porter.models.reduce import randomise

CODE = Path(__file__).parent / "own_code"
AUTO_MAP = {"AutoConfig": "configuration_lark.LarkConfig", "AutoModelForCausalLM": "modeling_lark.LarkForCausalLM"}


def lark(directory: Path, *replaced: tuple[str, str], **fields: Any) -> Path:
    """A checkpoint directory without weights: the code with each first text replaced by the second."""
    directory.mkdir(parents=True)
    shutil.copy(CODE / "configuration_lark.py", directory)
    text = (CODE / "modeling_lark.py").read_text(encoding="utf-8")
    for old, new in replaced:
        assert old in text, old
        text = text.replace(old, new)
    (directory / "modeling_lark.py").write_text(text, encoding="utf-8")
    config = {"model_type": "lark", "architectures": ["LarkForCausalLM"], "dtype": "float32", "auto_map": AUTO_MAP}
    (directory / "config.json").write_text(json.dumps(config | fields))
    return directory


def with_weights(directory: Path) -> Path:
    """Adds weights under which every parameter matters, and the byte tokenizer of tiny-qwen3."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model: Any = randomise(AutoModelForCausalLM.from_config(config, trust_remote_code=True).float())
    if config.tie_word_embeddings:
        model.tie_weights()
    state = {
        n: t.contiguous() for n, t in model.state_dict().items() if not (config.tie_word_embeddings and "head" in n)
    }
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    shipped = shipped_directory("tiny-qwen3")
    assert shipped is not None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, directory)
    return directory


def planned(directory: Path) -> Port:
    """The port of a checkpoint whose code is trusted."""
    return plan_port(str(directory), "cpu", trust_remote_code=True)


def ported(port: Port) -> dict[str, str]:
    """Class -> variant of what was ported."""
    return {c.name: c.candidate.variant for c in port.source.classes}


def greedy(model: Any, ids: torch.Tensor, tokens: int) -> list[int]:
    """The next tokens without a cache."""
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -tokens:].tolist()
