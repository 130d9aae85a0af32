"""Reading the compiler's plan, guarding memory, and what counts as a problem; without triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.ascend_triton.guarded import MARGIN, GuardedPlan, WroteOutside
from benchmarks.ascend_triton.hivm import TARGETS, Compiled, read_plan
from benchmarks.ascend_triton.model_sizes import TOO_LARGE, launches, too_large
from benchmarks.ascend_triton.mutations import MUTATIONS
from benchmarks.ascend_triton.normalised import with_negations
from benchmarks.ascend_triton.report import document, mark, sections
from benchmarks.ascend_triton.results import Findings, Planned, Result, problems
from benchmarks.ascend_triton.tools import ToolError
from porter.kernels.triton.plans import PLANNERS, plan

ROOT = Path(__file__).parents[2]
SWIGLU = ("swiglu", "standard")
MODULE = """
module attributes {dlti.target_system_spec = #dlti.target_system_spec<"NPU" : #hacc.target_device_spec<
 #dlti.dl_entry<"VECTOR_CORE_COUNT", 40 : i32>, #dlti.dl_entry<"UB_SIZE", 1572864 : i32>,
 #dlti.dl_entry<"L1_SIZE", 4194304 : i32>, #dlti.dl_entry<"L0C_SIZE", 1048576 : i32>>>,
 hivm.module_core_type = #hivm.module_core_type<AIV>} {
    %c0_i64 = arith.constant 0 : i64
    %c64_i64 = arith.constant 64 : i64
    %c4096_i64 = arith.constant 4096 : i64
    %0 = hivm.hir.pointer_cast(%c64_i64) : memref<16x8xbf16, #hivm.address_space<ub>>
    %1 = hivm.hir.pointer_cast(%c0_i64, %c4096_i64) : memref<100xf32, #hivm.address_space<ub>>
    %2 = hivm.hir.pointer_cast(%c0_i64) : memref<2x2x16x16xf32, #hivm.address_space<cc>>
"""


def test_the_plan_is_read() -> None:
    read = read_plan(MODULE, "Ascend910B3", ())
    assert (read.core, read.cores) == ("AIV", 40)
    assert read.planned == {"ub": 4096 + 400, "cc": 4096}
    assert read.limits == {"ub": 196608, "cbuf": 524288, "cc": 131072}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [("100xf32", "?xf32", "buffers of a form that is not read"), ('"UB_SIZE"', '"OTHER"', "has no UB_SIZE")],
)
def test_a_plan_of_another_form_is_refused(old: str, new: str, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        read_plan(MODULE.replace(old, new), "Ascend910B3", ())


def test_negations_are_spelled_out() -> None:
    vnot = "    %16 = hfusion.elemwise_unary {fun = #hfusion.unary_fn<vnot>} "
    vnot += "ins(%15 : tensor<8x4xi1>) outs(%7 : tensor<8x4xi1>) -> tensor<8x4xi1>"
    assert with_negations(f"a\n{vnot}\nb").splitlines() == [
        "a",
        "    %one_16 = arith.constant dense<true> : tensor<8x4xi1>",
        "    %16 = arith.xori %15, %one_16 : tensor<8x4xi1>",
        "b",
    ]
    other = vnot.replace("vnot", "exp")
    assert with_negations(other) == other


def guarded() -> GuardedPlan:
    wide = torch.randn(3, 11)
    return GuardedPlan(plan(*SWIGLU, (wide[:, :10],)))


def run(change: Callable[[torch.Tensor, torch.Tensor], object]) -> torch.Tensor:
    made = guarded()
    (launch,) = made.launches
    gate_up, activated = launch.arguments["gate_up"], launch.arguments["activated"]
    assert isinstance(gate_up, torch.Tensor) and isinstance(activated, torch.Tensor)
    change(gate_up, activated)
    return made.outputs()[0]


def beyond(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + offset)


def test_outputs_are_copied_back_and_begin_as_nan() -> None:
    assert run(lambda read, written: None).isnan().all()
    assert (run(lambda read, written: written.fill_(2.0)) == 2.0).all()


def test_memory_beyond_inputs_is_nan() -> None:
    def check(read: torch.Tensor, written: torch.Tensor) -> None:
        assert read.isfinite().all() and read.storage_offset() == MARGIN
        for offset in (-1, 10, 21, 32):
            assert beyond(read, offset).isnan().all(), offset

    run(check)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda read, written: beyond(written, 15).fill_(0), "wrote outside of activated"),
        (lambda read, written: beyond(written, -1).fill_(0), "wrote outside of activated"),
        (lambda read, written: read[1, 1].fill_(0), "wrote in or about gate_up"),
        (lambda read, written: beyond(read, 10).fill_(0), "wrote in or about gate_up"),
    ],
)
def test_writes_elsewhere_are_found(change: Callable[[torch.Tensor, torch.Tensor], object], told: str) -> None:
    with pytest.raises(WroteOutside, match=told):
        run(change)


FITS = tuple(Compiled(t, "AIV", {"ub": 512}, {"ub": 196608, "cbuf": 524288, "cc": 131072}, 40) for t in TARGETS)
OVERFLOWS = tuple(Compiled(t, overflow="ub overflow, requires 9 bits while 8 bits available") for t in TARGETS)


def findings() -> Findings:
    (launch,) = plan(*SWIGLU, (torch.randn(3, 10),)).launches
    planned = Planned("a model", SWIGLU, launch, "float32", FITS)
    right = Result(SWIGLU, torch.float32, "[3, 10]", 1e-8, 1e-7)
    wrong = replace(right, error=1.0)
    large = replace(planned, model="too large", compiled=OVERFLOWS)
    return Findings("triton-ascend 3.2.0", 1, [right], [right], [planned], [large], [(MUTATIONS[0], wrong)])


def test_nothing_is_a_problem_where_everything_is_as_it_must_be() -> None:
    whole = findings()
    assert problems(whole) == []
    text = "\n".join(sections(whole).values())
    for line in (
        "triton-ascend 3.2.0; 1 kernels built",
        "| swiglu/standard | float32 | 1 | 1 |  | 0.10 |",
        "Ascend910B3: 40 vector cores; bytes of a core: UB 196,608, L1 524,288, L0C 131,072.",
        "| AIV | 512 |  |  |  | both |",
        "requires 9 bits while 8 bits available",
        "1 of 1 found.",
    ):
        assert line in text, line


def test_every_kind_of_problem_is_told() -> None:
    whole = findings()
    (right,), (planned,), (large,) = whole.results, whole.planned, whole.too_large
    for changes, told in (
        ({"results": [replace(right, error=1.0)]}, "swiglu/standard float32 [3, 10]: error 1, bound 1e-07"),
        ({"results": [replace(right, error=math.nan)]}, "swiglu/standard float32 [3, 10]: error nan"),
        ({"results": [replace(right, stopped="wrote outside of x")]}, "swiglu/standard float32 [3, 10]: wrote outside"),
        ({"normalised": [replace(right, error=1.0)]}, "after HFusion: swiglu/standard float32 [3, 10]: error 1"),
        ({"planned": [replace(planned, compiled=OVERFLOWS)]}, "ub overflow"),
        ({"planned": [replace(planned, compiled=(), stopped="refused")]}, "refused"),
        ({"too_large": [replace(large, compiled=FITS)]}, "fits, or stopped otherwise"),
        ({"too_large": [replace(large, compiled=(), stopped="refused")]}, "stopped otherwise: refused"),
        ({"mutations": [(MUTATIONS[0], None)]}, "not found: no eps"),
    ):
        found = problems(replace(whole, **changes))
        assert len(found) == 1 and told in found[0], found


def test_a_part_replaces_its_own_tables_alone() -> None:
    text = f"# Title\n\n### First\n\n{mark('plans')}\n\n| old |\n\n### Last\n\n{mark('mutations')}\n\n| old |\n"
    once = document(text, {"plans": "| new |"})
    assert once == text.replace("| old |", "| new |", 1)
    assert document(once, {"plans": "| new |"}) == once
    assert document(once, {"mutations": "| new |"}).count("| new |") == 2
    with pytest.raises(ValueError, match="no <!-- numerics -->"):
        document(text, {"numerics": ""})


def test_the_document_has_a_place_for_each_part() -> None:
    text = (ROOT / "docs" / "ascend_triton.md").read_text(encoding="utf-8")
    parts = sections(findings())
    assert all(text.count(mark(part)) == 1 for part in parts) and len(parts) == 4


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_models_and_largest_blocks_cover_every_op(dtype: torch.dtype) -> None:
    assert {key for _, key, _ in launches(dtype)} == set(PLANNERS)
    large = list(too_large(dtype))
    assert len(large) == len(TOO_LARGE)
    assert all(
        launch.constants[name] == size
        for (_, _, sizes), (_, launch) in zip(TOO_LARGE, large, strict=True)
        for name, size in sizes.items()
    )
