"""What a model raises is reported as not compared; what porter raises while a model runs shows itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planted import golden_of, qwen2
from torch import Tensor, nn

from porter.alignment import forcing, free_watch, lanes, oracle_children
from porter.alignment.align import align
from porter.alignment.model_call import CannotRun, called, widened
from porter.alignment.sweep import sweep
from porter.errors import PorterError

DEFECTS = (AttributeError, KeyError, IndexError, TypeError, RuntimeError, ValueError)


class Raises(nn.Module):
    """Raises the error that it is given."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, hidden: Tensor) -> Tensor:
        raise self.error


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    model = qwen2(layers=2)
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden", new_tokens=1)


def only_float32(module: Any) -> None:
    """The module raises in float64, as a kernel does that has no such variant."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if any(tensor.dtype == torch.float64 for tensor in tensors):
            raise NotImplementedError("no kernel for Double")
        return original(*args, **kwargs)

    module.forward = forward


def written_in(place: Any, function: Any) -> Any:
    """`function` as if it stood in that file of porter's."""
    return type(function)(function.__code__, vars(place), closure=function.__closure__)


def given_nothing(place: Any, name: str) -> Any:
    """That function of porter's, called with None in place of what it expects: a defect."""
    original = getattr(place, name)

    def defect(*args: Any) -> Any:
        return original(*(None for _ in args))

    return written_in(place, defect)


def skipped(report: Any, module: str) -> str:
    """Why something of `module` was not compared."""
    return "; ".join(each.why for each in report.coverage.skipped if each.module == module)


@pytest.mark.parametrize("error", [*(kind("unfit") for kind in DEFECTS), AssertionError("unfit"), OSError("unfit")])
def test_whatever_a_model_raises_is_its_own_affair(error: Exception) -> None:
    with pytest.raises(CannotRun, match=f"^{type(error).__name__}: ") as found:
        called(Raises(error), torch.ones(2))
    assert found.value.__cause__ is error


def test_arguments_that_a_model_does_not_take_are_its_own_affair() -> None:
    with pytest.raises(CannotRun, match=r"TypeError: .*unexpected keyword argument 'mask'"):
        called(Raises(ValueError()), torch.ones(2), mask=None)


def test_shapes_that_torch_refuses_are_the_models_affair() -> None:
    with pytest.raises(CannotRun, match="RuntimeError: mat1 and mat2"):
        called(nn.Linear(3, 2), torch.ones(1, 4))


def test_bad_input_stays_bad_input() -> None:
    with pytest.raises(PorterError, match="record it again"):
        called(Raises(PorterError("record it again")), torch.ones(2))


@pytest.mark.parametrize("kind", DEFECTS)
def test_a_hook_of_porter_that_raises_is_a_defect(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*args: Any) -> Any:
        raise kind("defect")

    monkeypatch.setattr(forcing, "handed", written_in(forcing, defect))
    parent = nn.Sequential(nn.Linear(2, 2))
    recorded = {"0": [forcing.ForcedCall(((1, 2),), torch.zeros(1, 2))]}
    with forcing.forcing(parent, recorded), pytest.raises(kind, match="defect"):
        called(parent, torch.ones(1, 2))


def test_torch_refusing_what_a_hook_of_porter_asks_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*args: Any) -> Any:
        return torch_.ones(2) @ torch_.ones(3)

    torch_ = torch
    monkeypatch.setattr(forcing, "input_label", written_in(forcing, defect))
    parent = nn.Sequential(nn.Linear(2, 2))
    recorded = {"0": [forcing.ForcedCall(((1, 2),), torch.zeros(1, 2))]}
    with forcing.forcing(parent, recorded), pytest.raises(RuntimeError, match="inconsistent tensor size"):
        called(parent, torch.ones(1, 2))


def test_a_forced_child_that_raises_is_the_models_affair() -> None:
    parent = nn.Sequential(Raises(KeyError("unfit")))
    recorded = {"0": [forcing.ForcedCall(((9, 9),), torch.zeros(1, 2))]}
    with forcing.forcing(parent, recorded), pytest.raises(CannotRun, match="KeyError"):
        called(parent, torch.ones(1, 2))


def test_a_device_without_float64_is_no_defect() -> None:
    class Refuses(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("the device has no float64")

    with pytest.raises(CannotRun, match="no float64"):
        widened(torch.ones(2).as_subclass(Refuses))


@pytest.mark.parametrize(
    ("place", "name"),
    [(lanes, "seen_of"), (forcing, "handed"), (free_watch, "relative")],
    ids=["after a call", "in a forced child", "in a hook of the free run"],
)
def test_an_alignment_that_is_broken_says_so(
    dense: Any, place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, golden = dense
    monkeypatch.setattr(place, name, given_nothing(place, name))
    with pytest.raises((AttributeError, TypeError)):
        align(golden, copy.deepcopy(model))


def test_a_candidate_without_float64_is_listed(dense: Any) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    only_float32(candidate.model.layers[1].mlp)
    report = align(golden, candidate)
    assert report.verdict == "aligned"
    assert "cannot run in float64" in skipped(report, "model.layers.1.mlp")
    assert "NotImplementedError: no kernel for Double" in skipped(report, "model.layers.1.mlp")
    assert "model.layers.0.mlp" not in {each.module for each in report.coverage.skipped}


def test_a_source_without_float64_is_listed_by_every_pass(dense: Any) -> None:
    model, golden = dense
    source, candidate = copy.deepcopy(model), copy.deepcopy(model)
    only_float32(source.model.layers[1].mlp)
    report = align(golden, candidate, source=source)
    assert "the source cannot be replayed in float64" in skipped(report, "model.layers.1.mlp")
    assert "the source fails in float64" in skipped(report, "")


def test_a_child_that_cannot_explain_its_parent_is_listed(dense: Any) -> None:
    model, golden = dense
    source, candidate = copy.deepcopy(model), copy.deepcopy(model)
    only_float32(source.model.layers[0].self_attn.o_proj)
    original = candidate.model.layers[0].self_attn.forward
    candidate.model.layers[0].self_attn.forward = lambda *a, **k: (1.5 * original(*a, **k)[0], None)
    report = align(golden, candidate, source=source)
    assert report.first_drift is not None and report.first_drift.module == "model.layers.0.self_attn"
    assert oracle_children.GIVEN_AS_RECORDED in skipped(report, "model.layers.0.self_attn.o_proj")


def test_a_sweep_lists_what_it_could_not_measure(dense: Any) -> None:
    model, golden = dense
    source = copy.deepcopy(model)
    only_float32(source.model.layers[1].mlp)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("porter.alignment.sweep.rebuild_source", lambda *_: source)
        report = sweep(golden, copy.deepcopy(model), longest=4)
    assert "the source is not compared with its own prefill" in skipped(report, "")
    assert report.to_json()["sweep"]["failing"] is None


def test_a_sweep_that_is_broken_says_so(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, golden = dense
    monkeypatch.setattr(free_watch, "relative", given_nothing(free_watch, "relative"))
    with pytest.raises(AttributeError):
        sweep(golden, copy.deepcopy(model), longest=1, passes="weights")
