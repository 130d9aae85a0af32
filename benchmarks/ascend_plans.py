"""Plans of released models on Ascend: `python -m benchmarks.ascend_plans` prints docs/ascend_plans.md.

With --markdown FILE it is written there. Every plan is made from a config alone; time and memory are those of the whole
command in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

from porter.adaptation import plan_port
from porter.chips.catalogue import Chip, load_catalogue
from porter.cli.plan_view import print_deployment
from porter.errors import PorterError, Refusal
from porter.plan_cards import Planner
from porter.plan_deployment import deployment
from porter.plan_memory import Load

MODELS = ("deepseek-v3", "deepseek-v3.2", "qwen3-235b-a22b", "qwen3-32b", "qwen3-next-80b-a3b")
CHIPS = ("ascend-910b", "ascend-910c", "ascend-950")
SCHEMES = ("bf16", "w8a8", "w4a8", "deepseek-w8a8", "fp8", "mxfp8", "mxfp4")
LOAD = Load(context=8192, batch=16)
WORKED = ("deepseek-v3", "ascend-910b", "w8a8")

PREFACE = f"""# Plans on Ascend

`python -m benchmarks.ascend_plans --markdown docs/ascend_plans.md` writes this file; `porter adapt MODEL --target CHIP
--plan [--scheme S] [--tp N] [--ep N] [--context N] [--batch N]` prints any of these plans with its arithmetic. All are
for {LOAD.batch} sequences of {LOAD.context} tokens.

None of this ran on a chip. Cards are the fewest, in powers of two, that hold the model with 10 % of their memory left
and meet every documented constraint; tokens per second are bounds, from the chip's published bandwidth and peaks and
from nothing else (experts drawn evenly, communication in no time). Figures and their sources are in the chip's file;
a 910C is planned by the die, as npu-smi lists it. `native`: the vendor has products in that format on the chip;
`fallback`: it has none, and weights are held in bfloat16; `undocumented`: the chip knows the format, and the page of
an operator does not list the chip. Refused Ops run as plain torch: each line of the second table is an Op of the port,
at the widths of one card of that plan, that the vendor's documents do not allow.
"""


def cell(plan: dict[str, Any]) -> list[str]:
    """The figures of one plan, in the order of `HEADINGS`."""
    layout, sums = plan["layout"], {part: sum(r["value"] for r in plan[part]) for part in ("weights", "workspace")}
    sizes = [sums["weights"], plan["cache"][-1]["value"], sums["workspace"]]
    rates = [f"{regime['tokens_per_second']:,.0f} ({regime['bound']})" for regime in plan["roofline"]]
    verdicts = "; ".join(f"{k['use']} {k['format']} {k['verdict']}" for k in plan["kernels"])
    return [
        str(layout["cards"]),
        f"{layout['tp']} / {layout['ep']}",
        " + ".join(f"{size / 1e9:.1f}" for size in sizes) + f" of {plan['memory']['usable_bytes'] / 1e9:.1f}",
        *rates,
        verdicts,
    ]


HEADINGS = (
    "model",
    "scheme",
    "cards",
    "TP / EP",
    "GB a card: weights + cache + workspace",
    "decode, batch 1, tokens/s",
    f"decode, batch {LOAD.batch}",
    f"prefill of {LOAD.context}",
    "low-bit products",
)


def plans(planners: dict[str, Planner], chip: Chip) -> Iterator[tuple[str, str, dict[str, Any] | str]]:
    """(model, scheme, plan or why there is none) on one chip; schemes that do not apply to a model are left out."""
    for model, planner in planners.items():
        there = planner.on(chip)
        for scheme in SCHEMES:
            try:
                yield model, scheme, deployment(there, scheme).to_json()
            except Refusal as refusal:
                yield model, scheme, str(refusal)
            except PorterError:
                continue


def table(headings: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def refusals(found: list[tuple[str, str, dict[str, Any] | str]]) -> list[list[str]]:
    """One row for each Op that is refused, and each constraint that no document settles."""
    rows: dict[tuple[str, str], list[str]] = {}
    for model, scheme, plan in found:
        if isinstance(plan, str):
            continue
        for op in plan["ops"]:
            if op["refused"]:
                key = (
                    f"{op['op']}/{op['variant']}, {op['regime']}",
                    op["refused"].partition("; ")[0].replace("|", "\\|"),
                )
                rows.setdefault(key, []).append(f"{model} {scheme}")
        for constraint in plan["constraints"]:
            if constraint["met"] is None:
                rows.setdefault((constraint["needs"], constraint["numbers"]), []).append(f"{model} {scheme}")
    return [[what, why, ", ".join(dict.fromkeys(where))] for (what, why), where in rows.items()]


def measured(model: str, chip: str) -> list[str]:
    """Seconds and peak memory of `porter adapt MODEL --target CHIP --plan` in a process of its own."""
    command = [sys.executable, "-m", "porter", "adapt", model, "--target", chip, "--plan", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    return [model, str(process.returncode), f"{seconds:.1f} s", f"{usage.ru_maxrss / 2**20:.2f} GiB"]


def worked(planners: dict[str, Planner]) -> list[str]:
    """One plan as the command prints it."""
    model, chip, scheme = WORKED
    planner = planners[model].on(load_catalogue().get(chip))
    plan = dataclasses.replace(deployment(planner, scheme), alternatives=planner.alternatives())
    page = io.StringIO()
    print_deployment(Console(file=page, width=200), plan.to_json())
    lines = [line.rstrip() for line in page.getvalue().strip().splitlines()]
    return [f"## {model} on {chip} in {scheme}, worked out", "", "```", *lines, "```"]


def document() -> str:
    """The text of docs/ascend_plans.md."""
    with contextlib.redirect_stdout(sys.stderr):
        planners = {model: Planner(plan_port(model, CHIPS[0]), LOAD) for model in MODELS}
        lines = [PREFACE]
        for chip in CHIPS:
            found = list(plans(planners, load_catalogue().get(chip)))
            rows = [[m, s, *(cell(p) if not isinstance(p, str) else [p])] for m, s, p in found]
            lines += [f"## {chip}", "", *table(HEADINGS, rows), ""]
            against = refusals(found)
            said = "Refused, or not settled by a document:" + ("" if against else " nothing.")
            lines += [said, "", *(table(("what", "why", "plans"), against) if against else []), *[""] * bool(against)]
        lines += [*worked(planners), "", "## What a plan costs", ""]
        lines += table(("plan", "exit", "CPU time", "peak memory"), [measured(m, CHIPS[0]) for m in MODELS])
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the document, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="the file to write instead of printing")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    text = document()
    if arguments.markdown is None:
        print(text, end="")
    else:
        arguments.markdown.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
