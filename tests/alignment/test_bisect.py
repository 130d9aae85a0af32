"""Planted faults of kernels, modules and weights: the smallest set that, put back, restores the golden's tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import bfloat16, golden_of, qwen2

import porter
from porter.alignment.bisect import Bisection, bisect
from porter.alignment.bisect_search import minimal
from porter.errors import PorterError
from porter.golden.store import Golden
from porter.kernels.dispatch import op_calls


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Golden]:
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Golden, Path]:
    """A golden of a checkpoint with 2 layers, and its port."""
    folder = tmp_path_factory.mktemp("ported")
    model = qwen2(layers=2)
    model.save_pretrained(folder / "checkpoint")
    porter.adapt(str(folder / "checkpoint"), target="cpu", scheme="bf16", output=folder / "port")
    source: Any = type(model).from_pretrained(folder / "checkpoint", dtype=torch.float32, attn_implementation="eager")
    return golden_of(source.eval(), folder / "golden"), folder / "port"


def found(golden: Golden, candidate: Any) -> Bisection:
    result = bisect(golden, candidate)
    json.dumps(result.to_json(), allow_nan=False)
    assert result.matches == (result.baseline is not None and result.limit.met_by(result.baseline))
    if result.parts:
        assert result.restored is not None and result.limit.met_by(result.restored)
    return result


def break_kernel(model: Any, place: str, op: str) -> str:
    """The kernel of one place is off by a fifth; its reference is right. Returns the place."""
    call = dict(op_calls(model))[place]
    assert call.name == op and call.preferred() != "reference"
    provider, accepts, kernel = call._resolve()[0]

    def broken(*arguments: Any) -> Any:
        output = kernel(*arguments)
        return tuple(each * 1.2 for each in output) if isinstance(output, tuple) else output * 1.2

    call._chain = ((provider, accepts, broken),)
    return place


def wrap(module: Any, change: Callable[..., Any]) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def names(result: Bisection) -> set[tuple[str, str]]:
    return {(part.kind, part.name) for part in result.parts}


def place_of(model: Any, op: str, layer: int) -> str:
    return next(site for site, call in op_calls(model) if call.name == op and f"layers.{layer}." in site)


@pytest.mark.parametrize("op", ["attention", "swiglu", "rms_norm", "rope"])
def test_one_kernel_of_one_layer(ported: tuple[Golden, Path], op: str) -> None:
    golden, port = ported
    model = porter.load(port)
    place = break_kernel(model, place_of(model, op, 1), op)
    result = found(golden, model)
    assert names(result) == {("kernel", place)}
    assert result.parts[0].op is not None and result.parts[0].op.startswith(f"{op}/")
    assert result.parts[0].provider == "cpu"
    assert result.baseline is not None and result.restored is not None
    assert result.baseline.kl_mean > 10 * result.restored.kl_mean
    assert op in result.says() and result.runs < 25


def test_port_as_written_matches(ported: tuple[Golden, Path]) -> None:
    golden, port = ported
    result = found(golden, str(port))
    assert result.matches and not result.parts and result.restored is None
    assert result.runs == 3, "two of the source for the yardstick, one of the candidate"


def test_kernel_and_module_at_once(ported: tuple[Golden, Path]) -> None:
    golden, port = ported
    model = porter.load(port)
    place = break_kernel(model, place_of(model, "attention", 0), "attention")
    wrap(model.model.layers[1].mlp.down_proj, lambda output: output * 1.3)
    assert names(found(golden, model)) == {("kernel", place), ("module", "model.layers.1.mlp.down_proj")}


def test_fused_module_of_a_port_is_put_back_from_its_parts(ported: tuple[Golden, Path]) -> None:
    golden, port = ported
    model = porter.load(port)
    wrap(model.model.layers[0].self_attn.qkv_proj, lambda output: output.roll(1, dims=-1))
    result = found(golden, model)
    assert names(result) == {("module", "model.layers.0.self_attn.qkv_proj")}
    assert result.parts[0].source == ", ".join(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def test_wrong_module(dense: tuple[Any, Golden]) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    wrap(candidate.model.layers[1].mlp, lambda output: -output)
    assert names(found(golden, candidate)) == {("module", "model.layers.1.mlp")}


def test_module_that_raises(dense: tuple[Any, Golden]) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    candidate.model.layers[2].mlp.up_proj = torch.nn.Linear(7, 3)
    result = found(golden, candidate)
    assert result.baseline is None and names(result) == {("module", "model.layers.2.mlp.up_proj")}


def test_two_interacting_faults(dense: tuple[Any, Golden]) -> None:
    """The second undoes most of the first: either alone put back leaves the tokens wrong."""
    model, golden = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        candidate.model.layers[0].mlp.up_proj.weight.mul_(-2)
        candidate.model.layers[0].mlp.down_proj.weight.mul_(-0.6)
    expected = {("module", f"model.layers.0.mlp.{name}_proj") for name in ("up", "down")}
    assert names(found(golden, candidate)) == expected


def test_fault_of_weights(dense: tuple[Any, Golden]) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    with torch.no_grad():
        candidate.model.layers[2].self_attn.o_proj.weight.copy_(model.model.layers[1].self_attn.o_proj.weight)
    assert names(found(golden, candidate)) == {("module", "model.layers.2.self_attn.o_proj")}


def test_fault_of_the_roots_own_code_is_not_restored(dense: tuple[Any, Golden]) -> None:
    model, golden = dense
    candidate = bfloat16(model)

    def halve(output: Any) -> Any:
        output.logits = output.logits * 0.5
        return output

    wrap(candidate, halve)
    result = found(golden, candidate)
    assert not result.matches and not result.parts and result.restored is None
    assert "nothing" in result.says()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_legitimate_candidate_matches(dense: tuple[Any, Golden], dtype: torch.dtype) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model).to(dtype)
    candidate.set_attn_implementation("sdpa")
    assert found(golden, candidate).matches


def test_the_candidate_is_left_as_it_was(dense: tuple[Any, Golden]) -> None:
    model, golden = dense
    candidate = bfloat16(model)
    wrap(candidate.model.layers[1].mlp, lambda output: -output)
    before = dict(candidate.named_modules())
    bisect(golden, candidate)
    after = dict(candidate.named_modules())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)


def test_refused_by_name(dense: tuple[Any, Golden], tmp_path: Path) -> None:
    model, golden = dense
    with pytest.raises(PorterError, match="recording"):
        bisect(golden, golden)
    sketched = golden_of(model, tmp_path / "sketch", detail="sketch")
    with pytest.raises(PorterError, match="record it in full"):
        bisect(sketched, model)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_minimal_set_of_every_pair(size: int) -> None:
    items = list(range(size))
    for first in items[:: max(1, size // 7)]:
        for second in items[:: max(1, size // 5)]:
            trials = 0

            def does(some: Any, needed: set[int] = {first, second}) -> bool:  # noqa: B006
                nonlocal trials
                trials += 1
                return needed <= set(some)

            assert sorted(minimal(items, does)) == sorted({first, second})
            assert trials <= 4 + 12 * max(1, size.bit_length())


def test_minimal_of_a_set_in_which_all_are_needed() -> None:
    assert minimal("abcde", lambda some: len(some) == 5) == list("abcde")
