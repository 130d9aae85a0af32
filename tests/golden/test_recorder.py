"""Recording sees what modules see, changes nothing, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_calls import recorded
from torch import Tensor, nn

from porter.errors import PorterError
from porter.golden.recorder import recording
from porter.golden.store import Golden
from porter.golden.unseen import NEVER_SEEN

Build = Callable[..., nn.Module]
TOKENS = torch.tensor([[5, 1, 7, 2, 11]])


def _hook_count(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("detail", ["full", "sketch", "stats"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_logits_are_bit_equal_with_and_without_hooks(
    family: str, detail: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(family)()
    with torch.no_grad():
        bare = model(TOKENS).logits
        with recording(model, tmp_path / "golden", detail=detail):
            hooked = model(TOKENS).logits
    assert torch.equal(bare, hooked)
    assert _hook_count(model) == 0


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_every_module_and_replay_from_the_golden(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(family)()
    golden = recorded(model, tmp_path / "golden", (TOKENS,))
    called = {record.module for record in golden.records}
    missed = {entry["module"] for entry in golden.manifest["missed"]}
    callable_modules = {n for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)}
    assert called | missed == callable_modules and not called & missed
    assert golden.records[-1].module == "" and golden.complete
    replayed = 0
    for record in golden.records:
        if any(True for _ in model.get_submodule(record.module).children()):
            continue
        inputs, outputs = golden.value(record.inputs), golden.value(record.outputs)
        with torch.no_grad():
            again = model.get_submodule(record.module)(*inputs["args"], **inputs["kwargs"])
        for ours, theirs in zip(_flat(again), _flat(outputs), strict=True):
            assert torch.equal(ours, theirs), record.module
        replayed += 1
    assert replayed > 20


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for item in value for tensor in _flat(item)]


def test_children_come_before_their_parent(qwen3: Build, tmp_path: Path) -> None:
    names = [record.module for record in recorded(qwen3(), tmp_path / "golden", (TOKENS,)).records]
    assert names.index("model.layers.0.self_attn.q_proj") < names.index("model.layers.0.self_attn")
    assert names.index("model.layers.0") < names.index("model.layers.1.input_layernorm")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.alias = self.inner
        self.unused = nn.Linear(2, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(self.inner(hidden))  # type: ignore[no-any-return]


def test_calls_steps_aliases_and_modules_never_called(tmp_path: Path) -> None:
    golden = recorded(Twice(), tmp_path / "golden", (torch.ones(1, 3),), (torch.zeros(1, 3),))
    assert [(r.step, r.call, r.module) for r in golden.records] == [
        (0, 0, "inner"), (0, 1, "inner"), (0, 0, ""), (1, 0, "inner"), (1, 1, "inner"), (1, 0, ""),
    ]  # fmt: skip
    assert golden.manifest["missed"] == [{"module": "unused", "why": NEVER_SEEN}]
    assert golden.manifest["shared"] == {"alias": "inner"}
    assert (golden.steps, [batch.first_step for batch in golden.batches]) == (2, [0, 1])


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, hidden: Tensor, catch: bool = False) -> Tensor:
        hidden = self.good(hidden)
        try:
            return self.bad(hidden)  # type: ignore[no-any-return]
        except RuntimeError:
            if not catch:
                raise
            return hidden


def test_exceptions_remove_the_hooks_and_leave_an_incomplete_golden(tmp_path: Path) -> None:
    model = Fails()
    with pytest.raises(RuntimeError), recording(model, tmp_path / "golden"):
        model(torch.ones(1, 2))
    assert _hook_count(model) == 0
    golden = Golden.open(tmp_path / "golden")
    assert not golden.complete and [record.module for record in golden.records] == ["good"]
    assert golden.manifest["incomplete"] == "the recording stopped in step 0, after the module 'good'"


def test_exception_caught_inside_the_model(tmp_path: Path) -> None:
    golden = recorded(Fails(), tmp_path / "golden", (torch.ones(1, 2), True))
    assert golden.complete and [record.module for record in golden.records] == ["good", ""]
    assert golden.value(golden.records[1].inputs)["args"][0].shape == (1, 2) and golden.records[1].call == 0
    assert golden.value(golden.records[1].inputs)["args"][1] is True
    assert golden.manifest["missed"] == [{"module": "bad", "why": NEVER_SEEN}]


def test_script_and_compiled_modules_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU()), nn.Sequential(nn.Linear(2, 2)))
    model[2] = torch.compile(model[2], backend="eager")
    golden = recorded(model, tmp_path / "golden", (torch.ones(1, 2),))
    why = {entry["module"]: entry["why"] for entry in golden.manifest["missed"]}
    assert set(why) == {"1", "2.0"} and "2" in {record.module for record in golden.records}
    assert "ScriptModule" in why["1"] and why["2.0"].startswith("inside 2, which is compiled")
    for root in (torch.compile(nn.Linear(2, 2), backend="eager"), torch.jit.script(nn.ReLU())):
        with pytest.raises(PorterError, match="cannot be recorded"), recording(root, tmp_path / "other"):
            pass
        assert not (tmp_path / "other").exists()


def test_module_pattern(qwen3: Build, tmp_path: Path) -> None:
    golden = recorded(qwen3(), tmp_path / "golden", (TOKENS,), modules=r"layers\.1\.mlp")
    assert {record.module for record in golden.records} == {
        "", *(f"model.layers.1.mlp{part}" for part in ("", ".gate_proj", ".up_proj", ".down_proj", ".act_fn"))
    }  # fmt: skip
    assert golden.manifest["missed"] == []


def test_submodules_called_without_the_root(qwen3: Build, tmp_path: Path) -> None:
    model = qwen3()
    with torch.no_grad(), recording(model, tmp_path / "golden"):
        model.lm_head(torch.ones(1, 32))
    golden = Golden.open(tmp_path / "golden")
    assert golden.complete and [(record.step, record.module) for record in golden.records] == [(0, "lm_head")]


def test_refusals(qwen3: Build, tmp_path: Path) -> None:
    model = qwen3()
    recorded(model, tmp_path / "golden", (TOKENS,))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "golden", {}, "already holds a golden"),
        (tmp_path / "other", {}, "not a golden's"),
        (tmp_path / "file", {}, "is a file"),
        (tmp_path / "new", {"detail": "everything"}, "expected one of full, sketch, stats"),
        (tmp_path / "new", {"modules": "("}, "not a regular expression"),
        (tmp_path / "empty", {}, "no module that matches was called"),
    ]
    for path, settings, message in cases:
        with pytest.raises(PorterError, match=message), recording(model, path, **settings):
            pass
        assert _hook_count(model) == 0
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_gradients_still_flow(qwen3: Build, tmp_path: Path) -> None:
    model = qwen3()
    with recording(model, tmp_path / "golden"):
        model(TOKENS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
