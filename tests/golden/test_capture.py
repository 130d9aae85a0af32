"""Capturing generates what transformers generates, resumes without running anything twice, and refuses bad requests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from porter.errors import PorterError
from porter.golden.capture import capture, left_padded
from porter.golden.store import Golden

Build = Callable[..., nn.Module]
ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_generates_what_transformers_generates(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model: Any = request.getfixturevalue(family)()
    golden = capture(model, ROWS, tmp_path / "golden", new_tokens=4)
    tokens, mask = left_padded(ROWS, 0)
    expected = model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    (batch,) = golden.batches
    assert batch.generated is not None and batch.tokens is not None and batch.attention_mask is not None
    assert torch.equal(batch.generated, expected[:, tokens.shape[1] :])
    assert torch.equal(batch.tokens, tokens) and torch.equal(batch.attention_mask, mask)
    assert (golden.steps, golden.manifest["new_tokens"], len(golden.generated)) == (4, 4, 4)
    assert golden.manifest["tokens"] == tokens.tolist()


def test_padding_does_not_change_a_row(qwen3: Build, tmp_path: Path) -> None:
    alone = capture(qwen3(), [ROWS[0]], tmp_path / "alone", new_tokens=3)
    padded = capture(qwen3(), ROWS[:2], tmp_path / "padded", new_tokens=3)
    roots = [padded.value(record.inputs)["kwargs"] for record in padded.records if record.module == ""]
    assert roots[0]["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert roots[2]["position_ids"].tolist() == [[4], [6]] and roots[2]["attention_mask"].shape == (2, 7)
    for step in range(3):
        (one,), (two,) = ([r for r in g.records if r.module == "lm_head" and r.step == step] for g in (alone, padded))
        ours, theirs = padded.value(two.outputs)[0, -1], alone.value(one.outputs)[0, -1]
        # The same sums in another order, through two layers in float32.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_batches_start_with_an_empty_cache(qwen3: Build, tmp_path: Path) -> None:
    golden = capture(qwen3(), ROWS, tmp_path / "golden", new_tokens=2, batch_size=3)
    assert [(batch.first_step, batch.steps) for batch in golden.batches] == [(0, 2), (2, 2)]
    assert {record.batch for record in golden.records if record.step >= 2} == {1}
    assert golden.manifest["tokens"] == [[0, 0, 1, 2, 3], [4, 5, 6, 7, 8], [0, 0, 0, 0, 9], [10, 11]]
    assert [batch["attention_mask"] is None for batch in golden.manifest["batches"]] == [False, True]


def test_prompts_given_with_a_mask_or_as_lists_are_the_same(qwen3: Build, tmp_path: Path) -> None:
    tokens, mask = left_padded(ROWS, 0)
    first = capture(qwen3(), tokens, tmp_path / "mask", attention_mask=mask)
    assert first.records == capture(qwen3(), ROWS, tmp_path / "lists").records


def test_the_model_is_left_as_it_was(qwen3: Build, tmp_path: Path) -> None:
    model = qwen3()
    model.train()
    model.get_submodule("model.norm").eval()
    capture(model, [[1]], tmp_path / "golden")
    assert model.training and not model.get_submodule("model.norm").training
    assert torch.is_grad_enabled() and not any(module._forward_hooks for module in model.modules())


def _calls_until(limit: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == limit:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("detail", ["full", "sketch", "stats"])
@pytest.mark.parametrize("stop", [1, 3, 4, 7, 8])
def test_resumes_after_the_last_whole_batch(stop: int, detail: str, qwen3: Build, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(new_tokens=2, batch_size=1, detail=detail)
    whole = capture(qwen3(), ROWS, tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        capture(qwen3(), ROWS, tmp_path / "golden", progress=_calls_until(stop), **settings)
    partial = Golden.open(tmp_path / "golden")
    assert not partial.complete and partial.records == whole.records[: len(partial.records)]
    runs: list[int] = []
    golden = capture(qwen3(), ROWS, tmp_path / "golden", progress=lambda done, total: runs.append(done), **settings)
    assert runs == list(range((stop - 1) // 2 * 2 + 1, 9))
    assert golden.complete and golden.records == whole.records and golden.generated == whole.generated
    assert {**golden.manifest, "created": ""} == {**whole.manifest, "created": ""}
    capture(qwen3(), ROWS, tmp_path / "golden", progress=_calls_until(1), **settings)


_KILLED = """
import os, signal, sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from porter.golden.capture import capture
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
                                     num_attention_heads=4, num_key_value_heads=2, head_dim=8))
stop = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done == 4 else None
capture(model, [[1, 2, 3], [4, 5, 6, 7, 8], [9]], sys.argv[1], new_tokens=2, batch_size=1, progress=stop)
"""


def test_killed_process(qwen3: Build, tmp_path: Path) -> None:
    path = tmp_path / "golden"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    outcome = subprocess.run([sys.executable, "-c", _KILLED, str(path)], env=environment, timeout=120)
    assert outcome.returncode == -signal.SIGKILL
    partial = Golden.open(path)
    assert not partial.complete and partial.steps == 4 and partial.records[-1].module == ""
    runs: list[int] = []
    rows = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    golden = capture(qwen3(), rows, path, new_tokens=2, batch_size=1, progress=lambda done, _: runs.append(done))
    assert runs == [3, 4, 5, 6] and golden.complete and golden.steps == 6


def test_another_request_does_not_continue_a_golden(qwen3: Build, tmp_path: Path) -> None:
    path = tmp_path / "golden"
    capture(qwen3(), ROWS, path, new_tokens=2)
    others: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
        (qwen3(), ROWS[:2], {"new_tokens": 2}, "request"),
        (qwen3(), ROWS, {"new_tokens": 3}, "new_tokens"),
        (qwen3(), ROWS, {"new_tokens": 2, "detail": "stats"}, "detail"),
        (qwen3(seed=1), ROWS, {"new_tokens": 2}, "model"),
        (qwen3().double(), ROWS, {"new_tokens": 2}, "dtype, model"),
    ]
    for model, rows, settings, field in others:
        with pytest.raises(PorterError, match=f"recorded with another {field}"):
            capture(model, rows, path, **settings)


class NoCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)  # type: ignore[no-any-return]


def test_any_module_that_takes_tokens(tmp_path: Path) -> None:
    golden = capture(NoCache(), [[1, 2]], tmp_path / "golden")
    assert [record.module for record in golden.records] == ["embed", ""]
    with pytest.raises(PorterError, match="takes no cache"):
        capture(NoCache(), [[1, 2]], tmp_path / "other", new_tokens=2)


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 61]], {}, "prompt 0: token id 61 is outside the model's vocabulary of 61"),
        ([[-1]], {}, "token id -1"),
        (torch.ones(3, dtype=torch.int64), {}, r"expected integers \[batch, sequence\]"),
        (torch.ones(1, 3), {}, r"expected integers \[batch, sequence\]"),
        (torch.ones(1, 3, dtype=torch.int64), {"attention_mask": torch.ones(1, 2)}, "the shape of input_ids"),
        ([[1]], {"new_tokens": -1}, "expected 0 or more"),
        ([[1]], {"detail": "some"}, "expected one of full, sketch, stats"),
    ],
)
def test_refusals(rows: Any, settings: dict[str, Any], message: str, qwen3: Build, tmp_path: Path) -> None:
    with pytest.raises(PorterError, match=message):
        capture(qwen3(), rows, tmp_path / "golden", **settings)
    assert not (tmp_path / "golden").exists()
