"""A checkpoint with its own code: adapted, exported, run without porter, aligned, and a planted fault found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lark import greedy, lark, with_weights
from transformers import AutoModelForCausalLM

import porter
from porter.errors import PorterError
from porter.generation import generate
from porter.golden.capture import capture

IDS = torch.tensor([[72, 101, 32, 115, 97, 105, 100]])
WITHOUT_PORTER = """
import sys, torch
class Blocked:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "porter":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
print(model.generate(torch.tensor([[72, 101, 32, 115, 97, 105, 100]]), max_new_tokens=8, do_sample=False).tolist())
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights(lark(tmp_path_factory.mktemp("own") / "lark"))


@pytest.fixture(scope="module")
def port(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ported") / "port"
    porter.adapt(original, output=directory, trust_remote_code=True)
    return directory


def upstream(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()


def test_generation_is_that_of_the_original(original: Path, port: Path) -> None:
    model = porter.load(port, trust_remote_code=True)
    tokens = [int(step.tokens[0]) for step in generate(model, IDS, 16)]
    assert tokens == greedy(upstream(original), IDS, 16) and len(set(tokens)) > 2


def test_its_code_runs_only_where_it_is_trusted(port: Path) -> None:
    with pytest.raises(PorterError, match="the original checkpoint's own code; pass --trust-remote-code"):
        porter.load(port)


def test_the_export_loads_without_porter(original: Path, port: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PORTER, str(port)], capture_output=True, text=True, check=True, cwd=port.parent
    )
    assert run.stdout.strip().endswith(str([IDS[0].tolist() + greedy(upstream(original), IDS, 8)]))


def test_it_is_aligned_and_a_planted_fault_is_found_by_name(original: Path, port: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    capture(upstream(original), IDS, golden, new_tokens=3)
    report = porter.align(golden, port, trust_remote_code=True)
    assert report.verdict == "aligned" and report.coverage.parameters == 1.0
    faulty: Any = porter.load(port, trust_remote_code=True)
    original_forward = faulty.model.blocks[1].attn.attention
    faulty.model.blocks[1].attn.__dict__["attention"] = lambda q, k, v, mask, scaling, window: original_forward(
        q, k, v, mask, 1.5 * scaling, window
    )
    blamed = porter.align(golden, faulty, trust_remote_code=True)
    assert blamed.verdict == "drift"
    assert blamed.first_drift is not None and blamed.first_drift.module == "model.blocks.1.attn"


@pytest.mark.parametrize("scheme", ["bf16", "w8a16", "w8a8"])
def test_schemes_and_a_tied_head(scheme: str, tmp_path: Path) -> None:
    directory = with_weights(lark(tmp_path / "lark", tie_word_embeddings=True))
    ported = porter.adapt(directory, output=tmp_path / "port", scheme=scheme, trust_remote_code=True)
    assert ported.config.porter["quantized"].get("head", "w8a16" if scheme == "w8a8" else scheme) in (scheme, "w8a16")
    model = porter.load(tmp_path / "port", trust_remote_code=True)
    with torch.no_grad():
        ours, theirs = model(IDS).logits.float(), upstream(directory)(IDS).logits
    assert float((ours - theirs).norm() / theirs.norm()) < 0.05


def test_a_cache_under_its_old_name(tmp_path: Path) -> None:
    old = (
        ("attention_mask=None, cache=None, use_cache=None, **kwargs", "attention_mask=None, past_key_values=None, "
         "use_cache=None"),
        ("x, cache = self.model(input_ids, attention_mask, cache, use_cache)",
         "x, past_key_values = self.model(input_ids, attention_mask, past_key_values, use_cache)"),
        ("logits=self.head(x), cache=cache", "logits=self.head(x), past_key_values=past_key_values"),
    )  # fmt: skip
    directory = with_weights(lark(tmp_path / "lark", *old))
    ported = porter.adapt(directory, output=tmp_path / "port", trust_remote_code=True)
    assert not ported.source.proof.skipped
    model = porter.load(tmp_path / "port", trust_remote_code=True)
    assert [int(s.tokens[0]) for s in generate(model, IDS, 8)] == greedy(upstream(directory), IDS, 8)
