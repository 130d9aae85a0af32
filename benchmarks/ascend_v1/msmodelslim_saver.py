"""Give msmodelslim's own AscendV1Saver the codes of a directory that porter wrote, and compare what it writes.

    PYTHONPATH=UNPACKED_WHEEL:ITS_DEPENDENCIES python benchmarks/ascend_v1/msmodelslim_saver.py DIRECTORY MODEL WORK

DIRECTORY was written by `porter adapt MODEL --format ascend-v1`. WORK is a new directory. Needs the wheel of
msmodelslim (26.1.0 was run) and no chip: the saver and its linears are plain torch. Every tensor and every entry is
compared; the saver's float32 arithmetic may put quant_bias one off, and scale_bias a last place.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from porter.ascend_v1.codes import deq_value, unpack_rows


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's *.safetensors files."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def linear(kind: str, parts: dict[str, torch.Tensor]) -> nn.Module:
    """msmodelslim's fake-quantized linear of that type, holding porter's codes and scales."""
    import msmodelslim.ir as qir
    from msmodelslim.ir.qal import QDType, QParam, QScheme, QScope, QStorage

    per_row, bias = QScheme(QScope.PER_CHANNEL, QDType.INT8, True), parts.get("bias")
    inputs = QParam(QScheme(QScope.PER_TENSOR, QDType.INT8, False))
    if kind == "W8A8":
        inputs.ext = {"scale": parts["input_scale"], "offset": parts["input_offset"].to(torch.int32)}
        scale = deq_value(parts["deq_scale"]) / parts["input_scale"]
        weight = QParam(per_row, {"scale": scale})
        return qir.W8A8StaticFakeQuantLinear(inputs, weight, QStorage(QDType.INT8, parts["weight"]), bias)
    weight = QParam(per_row, {"scale": parts["weight_scale"][:, 0], "offset": parts["weight_offset"][:, 0]})
    if kind == "W4A8_DYNAMIC":
        codes = QStorage(QDType.INT4, unpack_rows(parts["weight"]))
        return qir.W4A8DynamicFakeQuantLinear(inputs, weight, codes, bias)
    made = {
        "W8A8_DYNAMIC": qir.W8A8DynamicPerChannelFakeQuantLinear,
        "W8A16": qir.W8A16StaticPerChannelFakeQuantLinear,
    }[kind]
    return made(inputs, weight, QStorage(QDType.INT8, parts["weight"]), bias)


def model_of(directory: Path) -> nn.Module:
    """A tree of modules with the names on disk, float ones holding their tensors as parameters."""
    types, stored = json.loads((directory / "quant_model_description.json").read_text()), tensors_of(directory)
    root = nn.Module()
    for name in stored:
        prefix, _, suffix = name.rpartition(".")
        kind = types.get(f"{prefix}.weight", "FLOAT")
        if kind != "FLOAT" and suffix != "weight":
            continue
        owner = root
        *path, last = prefix.split(".")
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if kind != "FLOAT":
            parts = {n.rpartition(".")[2]: t for n, t in stored.items() if n.rpartition(".")[0] == prefix}
            owner.add_module(last, linear(kind, parts))
            continue
        if last not in dict(owner.named_children()):
            owner.add_module(last, nn.Module())
        owner.get_submodule(last).register_parameter(suffix, nn.Parameter(stored[name], requires_grad=False))
    return root


def save(model: nn.Module, source: Path, target: Path, dtype: torch.dtype) -> None:
    """Write `model` by the saver."""
    from msmodelslim.core.quant_service.modelslim_v1.save.ascendv1 import AscendV1Config, AscendV1Saver
    from msmodelslim.core.quant_service.modelslim_v1.save.interface import AscendV1GlobalModelDtypeInterface
    from msmodelslim.model import IModel

    class Adapter(IModel, AscendV1GlobalModelDtypeInterface):
        model_type, model_path, trust_remote_code = "porter", source, False

        def get_global_model_torch_dtype(self) -> torch.dtype:
            return dtype

    config = AscendV1Config()
    config.set_save_directory(str(target))
    AscendV1Saver(model, config, Adapter()).post_run()


def compare(ours: Path, theirs: Path) -> list[str]:
    """What differs, in words."""
    read = [json.loads((d / "quant_model_description.json").read_text()) for d in (ours, theirs)]
    skipped = {"metadata", "optional"}
    wrong = [
        f"description {key}: {read[0].get(key)!r}, the saver has {read[1].get(key)!r}"
        for key in sorted((read[0].keys() | read[1].keys()) - skipped)
        if read[0].get(key) != read[1].get(key)
    ]
    mine, its = tensors_of(ours), tensors_of(theirs)
    wrong += [f"{name}: only one side has it" for name in sorted(mine.keys() ^ its.keys())]
    counts: Counter[str] = Counter()
    for name in sorted(mine.keys() & its.keys()):
        a, b = mine[name], its[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            wrong.append(f"{name}: {a.dtype} {list(a.shape)}, the saver has {b.dtype} {list(b.shape)}")
            continue
        off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        close = {"quant_bias": 1.0, "scale_bias": 2e-6 * float(a.double().abs().max() + 1)}
        suffix = name.rpartition(".")[2]
        if suffix == "deq_scale":
            first, second = deq_value(a), deq_value(b)
            off, close["deq_scale"] = float((first / second - 1).abs().max()), 3e-7
        counts[f"{suffix}: " + ("equal bits" if off == 0 else "within rounding")] += 1
        if off > close.get(suffix, 0.0):
            wrong.append(f"{name}: differs by {off:.3g}")
    for row, count in sorted(counts.items()):
        print(f"{row}: {count}")
    return wrong


def main(arguments: list[str]) -> int:
    """Run the saver on DIRECTORY's codes and print the comparison; 1 where something differs."""
    ours, model, work = (Path(argument) for argument in arguments)
    config: dict[str, Any] = json.loads((ours / "config.json").read_text())
    name = config.get("dtype", config.get("torch_dtype"))
    save(model_of(ours), model, work, getattr(torch, name))
    wrong = compare(ours, work)
    print("\n".join(wrong) or "nothing else differs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
