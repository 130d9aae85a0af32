"""What is said of the launches of the Triton kernels, checked without triton: names, grids, blocks, refusals."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.ascend_triton.mutations import MUTATIONS, Mutation
from benchmarks.ascend_triton.tools import SOURCES
from benchmarks.ascend_triton.wider_cases import WIDER
from porter.kernels.contract import Case, tensors
from porter.kernels.registry import default_registry
from porter.kernels.triton.launch import Launch, NotServed, blocks, power_of_two, rows_of
from porter.kernels.triton.plans import PLANNERS, plan

ROOT = Path(__file__).parents[2]
PROGRAMS = 3
SERVED = (torch.float32, torch.float16, torch.bfloat16)


def parameters(source: str, kernel: str) -> dict[str, bool]:
    """Names of a kernel's parameters, and whether each is a compile-time constant."""
    tree = ast.parse((SOURCES / f"{source}.py").read_text(encoding="utf-8"))
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == kernel)
    return {a.arg: a.annotation is not None and ast.unparse(a.annotation) == "tl.constexpr" for a in function.args.args}


def cases(key: tuple[str, str], dtype: torch.dtype) -> list[Case]:
    return [*default_registry().op(*key).inputs(dtype), *WIDER[key](dtype)]


@pytest.mark.parametrize("dtype", SERVED, ids=str)
@pytest.mark.parametrize("key", PLANNERS, ids="/".join)
def test_every_case_is_planned(key: tuple[str, str], dtype: torch.dtype) -> None:
    op = default_registry().op(*key)
    for case in cases(key, dtype):
        made = plan(*key, case.arguments, PROGRAMS)
        expected = tensors(op.fake(*case.arguments))
        assert [(t.shape, t.dtype) for t in made.outputs] == [(t.shape, t.dtype) for t in expected], case.label
        written = {id(tensor) for launch in made.launches for tensor in launch.written()}
        if all(output.numel() for output in made.outputs):
            assert written >= {id(output) for output in made.outputs}, case.label
        for launch in made.launches:
            check_launch(launch)


def check_launch(launch: Launch) -> None:
    wanted = parameters(launch.source, launch.kernel)
    assert set(launch.arguments) == {name for name, constant in wanted.items() if not constant}
    assert set(launch.constants) == {name for name, constant in wanted.items() if constant}
    assert min(launch.grid) > 0 and len(launch.grid) == 2
    for tensor in (a for a in launch.arguments.values() if isinstance(a, torch.Tensor)):
        # The kernels have no stride of the last dimension.
        assert tensor.shape[-1] <= 1 or tensor.stride(-1) == 1
    for name in {"BLOCK", "HEADS", "HALF", "TAIL", "EXPERTS", "GROUPS", "MEMBERS", "PICKS", "KEYS", "VALUES"}:
        size = launch.constants.get(name, 1)
        assert size == power_of_two(size), (name, size)


@pytest.mark.parametrize("key", PLANNERS, ids="/".join)
def test_wider_cases_need_a_last_block_that_is_partial(key: tuple[str, str]) -> None:
    (case,) = WIDER[key](torch.float32)
    grids = [launch.grid for launch in plan(*key, case.arguments, PROGRAMS).launches]
    if key[0] not in ("rms_norm", "add_rms_norm"):
        assert any(grid[1] > 1 for grid in grids), grids
    assert any(math.prod(grid) > 1 for grid in grids)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("key", "arguments", "reason"),
    [
        (("linear", "standard"), (), "no Triton kernel for linear/standard"),
        (("swiglu", "standard"), (empty(2, 4, dtype=torch.float64),), "float64"),
        (("rms_norm", "standard"), (empty(2, 8193), empty(8193), 1e-6), "rows of more than 8192"),
        (("swiglu", "standard"), (empty(2**17, 2**15),), "offsets of 2\\^31 elements and more"),
        (("swiglu", "standard"), (empty(1, 2**30),), "more than 65535 programs"),
        (("rope", "interleaved"), (*[empty(1, 1, 1, 8)] * 2, *[empty(1, 1, 4)] * 2), "neighbouring pairs in a part"),
        (("router", "softmax"), (empty(1, 8), empty(1025, 8), 2, True), "more than 1024 experts"),
        (
            ("router", "grouped_sigmoid"),
            (empty(1, 8), empty(8, 8), empty(8), 3, 4, 1, True, 1.0),
            "more picks than experts in the groups kept",
        ),
        (
            ("gated_delta_rule", "recurrent"),
            (*[empty(1, 1, 1, 257)] * 2, empty(1, 1, 1, 8), *[empty(1, 1, 1)] * 2, None),
            "keys of more than 256",
        ),
    ],
)
def test_what_no_kernel_takes_is_named(key: tuple[str, str], arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(NotServed, match=reason):
        plan(*key, arguments)


def test_rows_are_copied_only_where_one_stride_does_not_reach_them() -> None:
    wide = torch.randn(3, 5, 40)
    rows, count, width, stride = rows_of(wide[..., :33])
    assert (count, width, stride) == (15, 33, 40) and rows.data_ptr() == wide.data_ptr()
    rows, count, width, stride = rows_of(wide.transpose(0, 1))
    assert (count, width, stride) == (15, 40, 40) and rows.data_ptr() != wide.data_ptr()
    assert torch.equal(rows, wide.transpose(0, 1).reshape(15, 40))
    assert rows_of(wide[:0])[1] == 0


def test_blocks_cover() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 7168, 8192)] == [1, 1, 2, 4, 8192, 8192]
    assert [blocks(n, 64) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_only_the_kernels_import_triton() -> None:
    kernels = {SOURCES / f"{launch}.py" for launch in {m.source for m in MUTATIONS}}
    importing = {
        path
        for folder in ("porter", "models", "kernels", "golden", "alignment", "cli")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "triton" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton")
    }
    assert importing == kernels


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.source}: {m.what}")
def test_planted_faults_change_the_sources(mutation: Mutation) -> None:
    ast.parse(mutation.text())
    assert mutation.op in PLANNERS


def test_a_fault_that_changes_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="rope has no 'absent'"):
        Mutation("", "rope", "absent", "", ("rope", "half")).text()
