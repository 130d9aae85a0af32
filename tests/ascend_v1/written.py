"""AscendV1 directories for tests: written once per scheme, copied and damaged as a test needs it."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from porter.activation_range import Range
from porter.ascend_v1.writer import plan_ascend_v1, write_ascend_v1

WEIGHTS = "quant_model_weights.safetensors"
DESCRIPTION = "quant_model_description.json"


def measured(home: Path, names: list[str]) -> Mapping[str, Range]:
    """Ranges that differ from linear to linear, as a calibration would give them."""
    seeds = {name: zlib.crc32(name.encode()) for name in names}
    return {name: Range(-1.0 - (seed % 5) / 3, 2.0 + (seed % 7) / 5) for name, seed in seeds.items()}


def write(model: str | Path, output: Path, scheme: str, **options: Any) -> Path:
    """Write `model` as AscendV1."""
    write_ascend_v1(plan_ascend_v1(str(model), scheme=scheme, calibration=measured, **options), output)
    return output


def entries(path: Path) -> dict[str, str]:
    """The description."""
    found: dict[str, str] = json.loads((path / DESCRIPTION).read_text())
    return found


def linears(path: Path, kind: str) -> list[str]:
    """The linears of a type."""
    return [n.removesuffix(".weight") for n, k in entries(path).items() if k == kind and n.endswith(".weight")]


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of packed [N/2, K], by arithmetic on unsigned bytes: the even row is the remainder by 16."""
    byte = packed.to(torch.int64) % 256
    rows = torch.stack([byte % 16, byte // 16], dim=1).reshape(-1, packed.shape[1])
    return torch.where(rows > 7, rows - 16, rows)


@dataclass
class Damaged:
    """A directory taken apart: change it, then `save`."""

    path: Path
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def copy_of(source: Path, target: Path) -> Damaged:
        """A copy of `source`, read."""
        shutil.copytree(source, target)
        return Damaged(
            target,
            load_file(target / WEIGHTS),
            json.loads((target / DESCRIPTION).read_text()),
            json.loads((target / "config.json").read_text()),
        )

    def save(self) -> Path:
        """Write it back."""
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, self.path / WEIGHTS, {"format": "pt"})
        (self.path / DESCRIPTION).write_text(json.dumps(self.description))
        (self.path / "config.json").write_text(json.dumps(self.config))
        return self.path

    def retype(self, match: str, kind: str) -> None:
        """Give every entry whose name contains `match` that type."""
        self.description |= {n: kind for n in self.description if match in n}


Damage = Callable[[Damaged], object]
