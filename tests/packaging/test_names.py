"""From the repository's root, where a folder is called `kernels`, transformers still looks for Hugging Face's own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TINY_MODEL = """
import sys
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import is_kernels_available
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=64)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads))
print(tuple(model(torch.tensor([[1, 2, 3]])).logits.shape), is_kernels_available())
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("models", "golden", "alignment", "cli")))
"""


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.mark.skipif(installed("kernels"), reason="the folder cannot be mistaken for a package that is installed")
def test_transformers_does_not_take_our_kernels_folder_for_hugging_faces() -> None:
    done = subprocess.run([sys.executable, "-c", TINY_MODEL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(1, 3, 64) False", "[]"]


def test_the_kernels_folder_claims_no_version() -> None:
    # transformers reads kernels.__version__ when there is no such distribution.
    assert "__version__" not in (ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8")


def test_porter_imports_by_its_own_names_only() -> None:
    script = (
        "import sys, porter.models, porter.kernels, porter.golden, porter.alignment, porter.cli;"
        "print([name for name in ('models', 'kernels', 'golden', 'alignment', 'cli') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
