"""A checkpoint in DeepSeek's FP8 blocks, made of a float one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP8_MAX = 448.0
QUANTIZED = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj",
             "down_proj", "k_proj", "v_proj")  # fmt: skip


def block_quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn [N, K], scale float32 [blocks, blocks]): absmax of a block / 448, element by element."""
    wide = weight.double()
    height, width = block
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, columns = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = max(float(wide[rows, columns].abs().max()) / FP8_MAX, 1e-12)
            codes[rows, columns] = (wide[rows, columns] / scale[i, j].double()).float().to(torch.float8_e4m3fn)
    return codes, scale


def block_dequantize(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The weights in float64, element by element."""
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    return codes.to(torch.float32).double() * scale.double()[rows][:, columns]


def fp8_copy(source: Path, target: Path, block: tuple[int, int], split: bool = False) -> dict[str, torch.Tensor]:
    """Write `source` in FP8 blocks to `target`, scales in another shard if `split`; the float64 weights by name."""
    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.removesuffix(".weight").rpartition(".")[2] not in QUANTIZED:
            tensors[name] = tensor
            exact[name] = tensor.double()
            continue
        codes, scale = block_quantize(tensor, block)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
        exact[name] = block_dequantize(codes, scale, block)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }
    (target / "config.json").write_text(json.dumps(config))
    _save(tensors, target, split)
    return exact


def _save(tensors: dict[str, torch.Tensor], target: Path, split: bool) -> None:
    if not split:
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        return
    scales = {n: t for n, t in tensors.items() if n.endswith("_scale_inv")}
    shards = {"model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if n not in scales}}
    shards["model-00002-of-00002.safetensors"] = scales
    for shard, held in shards.items():
        save_file(held, target / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: shard for shard, held in shards.items() for n in held}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
