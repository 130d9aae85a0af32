"""What is kept of one pair of modules once its replay is over: numbers and a sketch per step, no tensor of the model.

It is all that later modules and passes need, so that a comparison which was interrupted continues from it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from porter.alignment.budget import Verdict
from porter.alignment.calls import Recorded
from porter.alignment.free_watch import sketch_of
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.report import Cause, FirstDrift, ModuleRow, Skipped
from porter.alignment.verdict import Drifted
from porter.golden.format import dtype_name, dtype_of, host_bytes
from porter.golden.node import tensor_nodes


@dataclass(frozen=True)
class Settled:
    """The outcome of one pair's replay.

    `drifts` are those that count: none where a child brought the error in. `tensors` are the verdicts of the native
    lane, per call. `sketches` holds, by step, that of the output of the first call. `dtypes` are the precisions that
    the source, run in the candidate's, gave its outputs (by the golden's tensor id); `returns_tuple` says what the
    candidate returned, None where it was not run.
    """

    pair: Pair
    rows: Sequence[ModuleRow]
    drifts: Sequence[Drifted]
    drifted: bool
    compared: bool
    failed: bool
    why: str
    tensors: Sequence[Sequence[Verdict]]
    decisions: int = 0
    flips: int = 0
    benign: int = 0
    causes: Sequence[Cause] = ()
    sketches: Mapping[int, Tensor] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    returns_tuple: bool | None = None
    refused: Sequence[Skipped] = ()
    """What of the module, or of its children while it was explained, could not be run."""

    @property
    def explicable(self) -> bool:
        """Whether the module itself drifted, so that it is worth looking for a cause."""
        return self.drifted and self.rows[-1].status != "inherited"

    def remind(self, recorded: Recorded) -> None:
        """Make `recorded` know what the replay of this pair taught it."""
        recorded.native_dtypes.update(self.dtypes)
        if self.returns_tuple is not None:
            recorded.returns_tuple[self.pair.module] = self.returns_tuple

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite are kept as Python's json writes them."""
        return {
            "module": self.pair.module,
            "rows": [asdict(row) for row in self.rows],
            "drifts": [{"position": drifted.position, **asdict(drifted.drift)} for drifted in self.drifts],
            "drifted": self.drifted,
            "compared": self.compared,
            "failed": self.failed,
            "why": self.why,
            "tensors": [[astuple(verdict) for verdict in call] for call in self.tensors],
            "routing": [self.decisions, self.flips, self.benign],
            "causes": [asdict(cause) for cause in self.causes],
            "sketches": {str(step): _packed(sketch) for step, sketch in self.sketches.items()},
            "dtypes": {name: dtype_name(dtype) for name, dtype in self.dtypes.items()},
            "returns_tuple": self.returns_tuple,
            "refused": [asdict(each) for each in self.refused],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any], pair: Pair, device: torch.device) -> Settled:
        """Read `to_json`'s data of `pair`. Raises KeyError, TypeError or ValueError where it is anything else."""
        if content["module"] != pair.module:
            raise ValueError(f"{content['module']} where {pair.module} comes next")
        decisions, flips, benign = (int(count) for count in content["routing"])
        return Settled(
            pair,
            [ModuleRow(**row) for row in content["rows"]],
            [_drifted(**drifted) for drifted in content["drifts"]],
            bool(content["drifted"]),
            bool(content["compared"]),
            bool(content["failed"]),
            str(content["why"]),
            [[Verdict(*verdict) for verdict in call] for call in content["tensors"]],
            decisions,
            flips,
            benign,
            [Cause(**cause) for cause in content["causes"]],
            {int(step): _unpacked(packed).to(device) for step, packed in content["sketches"].items()},
            {name: dtype_of(dtype) for name, dtype in content["dtypes"].items()},
            content["returns_tuple"],
            [Skipped(**each) for each in content["refused"]],
        )


def settled(result: ModuleResult, recorded: Recorded, rows: Sequence[ModuleRow], drifts: Sequence[Drifted]) -> Settled:
    """What is kept of `result`, whose rows and drifts are given; without causes."""
    known = [flips for flips in result.flips if flips is not None]
    record_ids = {
        node["tensor"]
        for source in result.pair.sources
        for record in recorded.records.get(source, ())
        for node in tensor_nodes(record.outputs)
    }
    return Settled(
        result.pair,
        rows,
        drifts,
        result.drifted,
        result.compared,
        result.failed,
        result.why,
        result.tensors,
        sum(each.flipped.numel() for each in known),
        sum(int(each.flipped.sum()) for each in known),
        sum(int(each.benign.sum()) for each in known),
        sketches=_sketches(result),
        dtypes={name: recorded.native_dtypes[name] for name in record_ids & recorded.native_dtypes.keys()},
        returns_tuple=recorded.returns_tuple.get(result.pair.module),
    )


def _sketches(result: ModuleResult) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for call, seen in zip(result.calls, result.candidate_native, strict=False):
        tensor = seen.tensors.get("output")
        if tensor is not None and call.step not in found:
            found[call.step] = sketch_of(tensor)
    return found


def _drifted(position: Sequence[int], **drift: Any) -> Drifted:
    step, place = position
    return Drifted((int(step), int(place)), FirstDrift(**drift))


def _packed(sketch: Tensor) -> list[str]:
    values = sketch.detach().cpu().contiguous()
    return [dtype_name(values.dtype), base64.b64encode(host_bytes(values)).decode()]


def _unpacked(packed: Sequence[str]) -> Tensor:
    dtype, values = packed
    return torch.frombuffer(bytearray(base64.b64decode(values, validate=True)), dtype=dtype_of(dtype))
