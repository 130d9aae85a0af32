"""What an export says of itself: its manifest, and the certificate that alignments enter."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

from porter import __version__
from porter.adaptation import Port
from porter.export_readme import calls_of
from porter.integrity import text_digest
from porter.kernels.ascend.layout import worth_laying_out
from porter.models.generated import own_package


def manifest_of(
    port: Port, files: dict[str, str], digests: dict[str, str], written: dict[str, Any] | None
) -> dict[str, Any]:
    """port.json: where the port comes from, what serves each Op, and the digests of all files. `digests` are of the
    source's files, `written` is the record of the port's own weights, None where there are none."""
    return {
        "schema": "porter.port/1",
        "source": {
            "model": port.reference.name,
            "module": port.source.module,
            "own_code": bool(own_package(port.source.module)),
            "sha256": digests,
        },
        "chip": port.chip.name,
        "scheme": port.scheme,
        "ops": [dataclasses.asdict(op) | calls_of(port, op) for op in port.plan.ops],
        "fallbacks": [f"{op.op}/{op.variant}" for op in port.plan.ops if op.provider == "reference"],
        "quantized": port.config.porter["quantized"],
        "formats": formats_of(port),
        "calibration": None if port.calibration is None else port.calibration.to_json(),
        "correspondence": port.correspondence.to_json(),
        "rewrites": list(port.plan.ported),
        "near_misses": port.plan.near_misses,
        "versions": {"porter": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "files": {name: text_digest(text) for name, text in files.items()},
        "weights": written,
    }


def formats_of(port: Port) -> dict[str, list[str]]:
    """The parameters that are to be cast once they are on the chip, by the vendor's format; files hold plain ones."""
    return {"FRACTAL_NZ": worth_laying_out(port.skeleton())} if port.chip.device == "npu" else {}


def certificate_of(port: Port) -> dict[str, Any]:
    """What is known before an alignment ran: the float64 proof and the kernels' checks. `certify` adds the rest."""
    return {
        "schema": "porter.certificate/1",
        "proof": {"dtype": "float64", "width": "reduced", "bound": port.source.proof.bound, **port.source.proof.errors},
        "modules": {c.name: c.error for c in port.source.classes} | _prediction_proof(port),
        "kernels": [dataclasses.asdict(check) for check in port.checks],
        "alignment": None,
        "says": "proven in float64 at reduced width; run `porter align GOLDEN DIR` to compare this directory's weights",
    }


def _prediction_proof(port: Port) -> dict[str, float]:
    """The proof of the prediction layer's class, where the port has one."""
    error = port.source.prediction_error
    return {} if port.prediction is None or error is None else {"PredictionLayer": error}
