"""Eighteen bugs that were public issues, each reproduced in miniature: what porter says of them.

`python -m benchmarks.drift.public_bugs`. A miniature keeps the mistake and the kind of module; sizes are the small
models' of DriftBench, so a boundary at 512 tokens lies at 16.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import porter
from benchmarks.drift import faults_attention, faults_parts, faults_state, faults_weights, layers
from benchmarks.drift.case import Case, Fault
from benchmarks.drift.families import FAMILIES
from benchmarks.drift.faults_moe import routed, stacked
from benchmarks.drift.judge import candidate_of, over_the_floor
from benchmarks.drift.run import quiet
from benchmarks.drift.site import Site
from benchmarks.drift.workshop import Workshop
from porter.errors import PorterError

Answer = tuple[bool, str]


@dataclass(frozen=True)
class PublicBug:
    """One public bug: `case` is its miniature, `ask` judges what porter says of it."""

    number: int
    where: str
    what: str
    case: Case
    ask: Callable[[PublicBug, Workshop], Answer]


def said(report: Any) -> str:
    """A report in one line."""
    first = report.first_drift.module if report.first_drift else "-"
    return f"{report.verdict} at {first}: {', '.join(cause.kind for cause in report.causes) or 'no cause'}"


def aligned(bug: PublicBug, workshop: Workshop) -> tuple[Any, tuple[tuple[str, ...], ...]]:
    """porter's report of the miniature, and where the fault is."""
    prepared = workshop.prepared(bug.case)
    model, expectation = candidate_of(bug.case, workshop)
    if bug.case.fault is not None:
        expectation, _ = over_the_floor(bug.case, workshop, model, expectation)
    return porter.align(prepared.golden, model, source=copy.deepcopy(prepared.source)), expectation.modules


def names_it(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: a drift, first at the faulty module, the first cause of a right kind."""
    report, modules = aligned(bug, workshop)
    first = report.first_drift.module if report.first_drift else None
    right = report.verdict == "drift" and first in modules[0] and bool(report.causes)
    return right and report.causes[0].kind in bug.case.kinds, said(report)


def exonerates(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: aligned, because nothing is broken."""
    report, _ = aligned(bug, workshop)
    routing = report.routing
    flips = (
        ""
        if routing is None
        else f"; {routing.flips} of {routing.decisions} routing decisions flip, {routing.benign} benign"
    )
    return report.verdict == "aligned", said(report) + flips


def refuses_other_tokens(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: not compared, because the two were given other tokens; no module is accused."""
    prepared = workshop.prepared(bug.case)
    tokens = torch.cat([torch.full((len(prepared.tokens), 1), 256), prepared.tokens], dim=1)
    other = porter.capture(workshop.healthy(bug.case), tokens, workshop.folder / "with-bos", new_tokens=4)
    try:
        report = porter.align(prepared.golden, other, source=copy.deepcopy(prepared.source))
    except PorterError as error:
        return "token" in str(error), str(error)
    checks = " ".join(str(check) for check in getattr(report, "sanity", []) or getattr(report, "checks", []))
    return report.verdict == "incomparable" and "token" in checks, f"{said(report)} {checks[:200]}"


def doubts_the_golden(bug: PublicBug, workshop: Workshop) -> Answer:
    """Right: the golden is the odd one out. The faulty model is the golden; candidate and third are right."""
    prepared = workshop.prepared(bug.case)
    wrong, _ = candidate_of(bug.case, workshop)
    golden = porter.capture(wrong, prepared.tokens, workshop.folder / "wrong-golden", new_tokens=4, store_weights=True)
    try:
        align_quorum = importlib.import_module("porter.alignment.quorum").align_quorum
    except ImportError:
        return False, "needs several goldens with quorum, which this porter does not have"
    report = align_quorum([golden, prepared.golden], workshop.healthy(bug.case))
    return False, str(report)[:200]


def fault(kinds: tuple[str, ...], family: str, plant: Any, number: int, **more: Any) -> Case:
    """The miniature as a case."""
    pair = more.pop("pair", "fp32-bf16")
    made = Fault(f"bug-{number}", kinds, (family,), plant, **more)
    seed = zlib.crc32(made.id.encode())
    return Case(f"{made.id}/{family}", seed, FAMILIES[family], pair, made.golden, made.form, made)


def negative_logits(site: Site) -> str:
    """A softmax whose running maximum starts at zero and whose masses below it are lost: wrong when all logits < 0."""

    def forward(self: Any, original: Any, hidden: Tensor) -> Any:
        logits, _, index = original(hidden)
        kept = logits.gather(1, index).clamp(min=0)
        weights = kept / kept.sum(-1, keepdim=True).clamp(min=1e-6)
        return logits, weights.to(logits.dtype), index

    return site.forward("mlp.gate", forward)


def narrow_cache(key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Past keys and values stored as float8 of x / 16 and read back without the scale: decays with the length."""
    if key.shape[2] > 1:
        return keys, values
    changed = [torch.cat([past[:, :, :-1] / 16, past[:, :, -1:]], 2) for past in (keys, values)]
    return changed[0], changed[1]


def massive_variance(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The variance summed in the activations' own dtype."""
    return faults_parts.narrow_variance(x, weight, eps)


def reblocked(values: Tensor) -> Tensor:
    """Rows in blocks of 8 interleaved once more than they should be."""
    blocks: Tensor = values.unflatten(1, (-1, 8))
    return blocks.transpose(1, 2).flatten(1, 2)


def narrow_correction(site: Site) -> str:
    """e_score_correction_bias through bfloat16."""
    bias = site.module("mlp.gate").e_score_correction_bias
    bias.copy_(bias.bfloat16().to(bias.dtype))
    return site.path("mlp.gate")


ROUTER = ("router-dtype", "low-precision")
BUGS = (
    PublicBug(
        1,
        "onnxruntime/mobius #548",
        "yarn's mscale_all_dim squared missing",
        fault(("attention-scale",), "deepseek_v3", faults_attention.scaled(faults_attention.without_mscale), 1),
        names_it,
    ),
    PublicBug(
        2,
        "sglang #13495",
        "rope style wrong in the golden itself",
        fault(
            ("rope-style",), "llama", faults_attention.turned(layers.interleaved_turn), 2, scope="all", pair="fp32-fp32"
        ),
        doubts_the_golden,
    ),
    PublicBug(
        3,
        "HabanaAI/vllm-fork #2042",
        "MLA rope without the transpose",
        fault(("rope-style",), "deepseek_v3", faults_attention.turned(layers.half_turn), 3, scope="all"),
        names_it,
    ),
    PublicBug(
        4,
        "vllm #11971",
        "the gate's bias leaks into the weights",
        fault(("router-bias",), "deepseek_v3", routed(bias_weighs=True), 4, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        5,
        "vllm #13474",
        "groups by their best; masked to 0",
        fault(("router-groups",), "deepseek_v3", routed(group_score="max"), 5, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        6,
        "sglang #38695",
        "router logits stored in bfloat16",
        fault(ROUTER, "deepseek_v3", routed(stored=torch.bfloat16), 6, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        7,
        "sglang #33764",
        "router product in bfloat16",
        fault(ROUTER, "deepseek_v3", routed(dtype=torch.bfloat16), 7, layers="sparse", scope="all"),
        names_it,
    ),
    PublicBug(
        8,
        "sglang #31213",
        "correction bias loaded as bfloat16",
        fault(
            ("router-bias", "router-dtype", "low-precision"),
            "deepseek_v3",
            narrow_correction,
            8,
            layers="sparse",
            scope="all",
            pair="fp32-fp32",
        ),
        names_it,
    ),
    PublicBug(
        9,
        "vllm #38859",
        "renormalisation wrong where all logits are negative",
        fault(("router-renormalisation",), "qwen3_moe", negative_logits, 9),
        names_it,
    ),
    PublicBug(
        10,
        "vllm #47115",
        "weight_scale_inv transposed",
        fault(
            ("scale-transposed",),
            "deepseek_v3",
            faults_weights.read_blocks(faults_weights.O_PROJ, lambda s: s.t()),
            10,
            golden="blocks",
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        11,
        "TensorRT-LLM #16916",
        "KV scales not applied",
        fault(
            ("scale-missing", "kv-cache-stale", "constant-ratio"),
            "llama",
            faults_attention.cached(narrow_cache),
            11,
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        12,
        "TensorRT-Model-Connect #725",
        "recurrent state stored in float16",
        fault(
            ("state-dtype",),
            "qwen3_next",
            faults_state.state(lambda s: s.half().to(s.dtype)),
            12,
            layers="linear",
            scope="all",
        ),
        names_it,
    ),
    PublicBug(
        13,
        "vllm-ascend #15503",
        "mask ignored beyond a position",
        fault(("attention-mask",), "qwen3", faults_attention.kernel_beyond, 13, scope="all"),
        names_it,
    ),
    PublicBug(
        14,
        "sglang #27540",
        "variance in bfloat16",
        fault(
            ("low-precision", "norm-cast-order"),
            "llama",
            faults_parts.normed(massive_variance, "input_layernorm"),
            14,
            scope="all",
            pair="bf16-bf16",
        ),
        names_it,
    ),
    PublicBug(
        15,
        "tt-metal #44959",
        "nothing is broken: rounding flips experts",
        Case("bug-15/qwen3_moe", 15, FAMILIES["qwen3_moe"], "fp32-bf16"),
        exonerates,
    ),
    PublicBug(
        16,
        "vllm #28539",
        "the harness adds a BOS token",
        Case("bug-16/llama", 16, FAMILIES["llama"], "fp32-fp32"),
        refuses_other_tokens,
    ),
    PublicBug(
        17,
        "nntrainer #4194",
        "gate and up exchanged by the loader",
        fault(("gate-up-swapped",), "qwen3", faults_parts.swapped_weights, 17, scope="all"),
        names_it,
    ),
    PublicBug(
        18,
        "radixark/miles #1477",
        "experts re-blocked twice on update",
        fault(("weight-permuted", "weight-stale"), "qwen3_moe", stacked(reblocked, "down_proj"), 18),
        names_it,
    ),
)
"""In the order of their list."""


def examine(numbers: Sequence[int], seed: int = 0) -> list[dict[str, Any]]:
    """What porter says of each bug."""
    quiet()
    rows = []
    with tempfile.TemporaryDirectory(prefix="porter-bugs-") as folder:
        workshop = Workshop(Path(folder), seed)
        for bug in (bug for bug in BUGS if not numbers or bug.number in numbers):
            right, says = bug.ask(bug, workshop)
            rows.append({"number": bug.number, "where": bug.where, "what": bug.what, "right": right, "says": says})
            print(f"{bug.number:2} {'right' if right else 'WRONG'} {bug.where}: {says}", file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table; exit status 1 where fewer than 16 of 18 are named rightly."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift.public_bugs", description=__doc__)
    parser.add_argument("--only", default="", help="numbers, separated by commas")
    parser.add_argument("--json", type=Path, help="write the answers here")
    given = parser.parse_args(arguments)
    rows = examine([int(number) for number in given.only.split(",") if number])
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print("| | bug | mistake | porter says | named |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['number']} | {row['where']} | {row['what']} | {row['says']} | {'yes' if row['right'] else 'no'} |"
        )
    right = sum(row["right"] for row in rows)
    print(f"\n{right} of {len(rows)} named rightly.")
    return 0 if len(rows) - right <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
