"""Reports as JSON, one for each verdict, and what the tests of their renderers share."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from typing import Any

from rich.console import Console

from porter.alignment.report_terminal import print_report

PARTS = ("input_layernorm", "self_attn.qkv_proj", "self_attn.o_proj", "self_attn", "mlp.gate_up_proj", "mlp", "")
FAULT = "model.layers.3.self_attn"


def row(module: str, status: str = "ok", introduced: float | None = 1e-3, **more: Any) -> dict[str, Any]:
    measured = {"introduced": introduced, "inherited": 4e-3, "end_to_end": 5e-3, "budget": 8e-3, "cosine": 0.99999}
    known = {"module": module, "source": module, "step": 0, "op": "linear/standard", "provider": "cpu", "why": ""}
    return {**known, **measured, "status": status, **more}


def aligned(layers: int = 6) -> dict[str, Any]:
    modules = [row("model.embed_tokens")]
    modules += [row(f"model.layers.{i}.{p}".rstrip(".")) for i in range(layers) for p in PARTS]
    modules += [row("model.norm"), row("lm_head"), row("lm_head", step=1)]
    return {
        "schema": "porter.alignment/1",
        "verdict": "aligned",
        "first_drift": None,
        "causes": [],
        "tokens": {"compared": 64, "top1_agreement": 1.0, "kl_mean": 1e-6, "kl_max": 3e-5, "first_divergence": None},
        "routing": {"decisions": 4096, "flips": 3, "benign": 3},
        "coverage": {"modules": 1.0, "parameters": 1.0, "flops": 0.99, "skipped": []},
        "weights": [
            {"parameter": "lm_head.weight", "source": "lm_head.weight", "error": 0.0, "expected": 0.0, "status": "ok"}
        ],
        "modules": modules,
        "unmatched": {"golden": [], "candidate": []},
        "environment": {
            "golden": {"dtype": "bfloat16"},
            "candidate": {"dtype": "float32", "kind": "port", "name": "/ports/my port"},
        },
        "sanity": [
            check("layer-chain", "model.layers", "ok", "golden: out[i] is in[i+1] at 5 of 5 places"),
            check("gap", "model.layers.*.mlp.kernel", "uncovered", "candidate: 6 modules, the first ...: never called"),
        ],
        "lint": [lint(f"model.layers.{i}.mlp.gate") for i in range(layers)],
    }


def check(name: str, module: str, status: str, says: str) -> dict[str, Any]:
    return {"check": name, "module": module, "status": status, "says": says}


def lint(module: str, certain: bool = False) -> dict[str, Any]:
    known = {"kind": "router-dtype", "module": module, "what": "weight", "golden": "float32", "candidate": "bfloat16"}
    return {**known, "certain": certain, "why": "close scores change order"}


def drifted(layers: int = 6) -> dict[str, Any]:
    report = aligned(layers)
    for entry in report["modules"]:
        if entry["module"] == FAULT:
            entry.update(status="drift", introduced=0.22, inherited=3e-3, end_to_end=0.23, why="over its budget")
        elif entry["module"] in ("model.layers.3", "model.norm", "lm_head") or re.match(
            r"model\.layers\.[45]", entry["module"]
        ):
            entry.update(status="inherited", inherited=0.31, end_to_end=0.4)
    cause = {"kind": "rope-style", "module": FAULT, "confidence": 0.99, "before": 0.22, "after": 2e-7}
    report.update(
        verdict="drift",
        first_drift={"module": FAULT, "source": FAULT, "step": 0, "tensor": "output"},
        causes=[{**cause, "says": "Rotary pairs are interleaved here but half-split in the source; use rope/half."}],
    )
    report["tokens"]["first_divergence"] = 17
    return report


def incomparable() -> dict[str, Any]:
    report = aligned()
    report["verdict"] = "incomparable"
    report["coverage"] = {
        "modules": 0.5,
        "parameters": 0.4,
        "flops": None,
        "skipped": [{"module": "model.layers.1.mlp", "why": "not recorded"}],
    }
    report["modules"][3].update(
        status="skipped", introduced=None, inherited=None, end_to_end=None, budget=None, cosine=None, why="not recorded"
    )
    report["unmatched"] = {"golden": ["model.layers.9"], "candidate": ["mtp.0"]}
    report["tokens"] = report["routing"] = None
    return report


REPORTS = {"aligned": aligned, "drift": drifted, "incomparable": incomparable}


def terminal(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=120))
    return stream.getvalue()


class Page(HTMLParser):
    """Checks that tags balance, and keeps what a browser would load or run."""

    VOID = frozenset({"meta", "input", "line", "circle", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
