"""Load a directory by vllm-ascend's own quantization code, run its methods under the emulator, and compare outputs.

    python benchmarks/ascend_v1/vllm_ascend_loader.py SOURCE_OF_VLLM_ASCEND DIRECTORY MODEL

SOURCE_OF_VLLM_ASCEND is a checkout, of which the package vllm_ascend/quantization runs unchanged (182b75e was run).
What it imports from vLLM and from the rest of vllm-ascend is replaced: those modules give empty classes, and vLLM's
copying of shards into fused parameters is written out below. torch_npu is porter's emulator, on the CPU. Nothing ran
on a chip, and vLLM itself did not run.

Per type: for random inputs, the relative error of every fused layer's output against the float64 product of MODEL's
weights, which is the error of quantization where everything is loaded as it was meant.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from porter.ascend_v1.fused_groups import groups_of
from porter.kernels.ascend.emulator.grouped_matmul import int4_product, unpacked
from porter.kernels.ascend.emulator.quantization import float_bits
from porter.kernels.ascend.emulator.stand_in import emulated_npu

Tensors = dict[str, torch.Tensor]
ROWS = 33
REAL = ("vllm_ascend.quantization",)


class Stub(ModuleType):
    """A module of which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **keywords: None})
        setattr(self, name, made)
        return made


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM, and of vllm-ascend what is not in REAL."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "vllm_ascend", "regex") or name.startswith(REAL):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        module = Stub(spec.name)
        module.__path__ = [str(self.root / "vllm_ascend")] if spec.name == "vllm_ascend" else []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Set the few names that the methods compute with."""
        if module.__name__ == "vllm.logger":
            module.logger = SimpleNamespace(**{n: print for n in ("error", "warning")})
            for quiet in ("info", "debug", "info_once", "warning_once"):
                setattr(module.logger, quiet, lambda *args: None)
        elif module.__name__ == "vllm.config":
            module.get_current_vllm_config = lambda: CONFIG
            module.CompilationMode = SimpleNamespace(VLLM_COMPILE=3)
        elif module.__name__ == "vllm.distributed":
            module.get_tensor_model_parallel_world_size = lambda: 1
        elif module.__name__ == "vllm.model_executor.layers.quantization":
            module.register_quantization_config = lambda name: lambda made: made
        elif module.__name__ == "vllm_ascend.utils":
            module.maybe_trans_nz = lambda weight: weight
            module.ASCEND_QUANTIZATION_METHOD, module.COMPRESSED_TENSORS_METHOD = "ascend", "compressed-tensors"
            module.FP8_METHOD, module.ACL_FORMAT_FRACTAL_NZ = "fp8", 29
            module.enable_dsa_cp = lambda: False
        elif module.__name__ == "vllm_ascend.ascend_config":
            module.get_ascend_config = lambda: SimpleNamespace(
                eplb_config=SimpleNamespace(dynamic_eplb=False), enable_fused_mc2=0
            )
        elif module.__name__ == "regex":
            module.findall = importlib.import_module("re").findall


CONFIG = SimpleNamespace(
    use_v2_model_runner=False,
    parallel_config=SimpleNamespace(enable_expert_parallel=True, enable_eplb=False),
    compilation_config=SimpleNamespace(mode=None),
    model_config=SimpleNamespace(enforce_eager=True, dtype=torch.bfloat16),
    kv_transfer_config=None,
    quant_config=SimpleNamespace(quant_description={}),
)


def tensors_of(directory: Path) -> Tensors:
    """Every tensor of a directory's *.safetensors files."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def linear_error(scheme: Any, members: list[str], stored: Tensors, source: Tensors, torch_npu: Any) -> float:
    """Of one fused linear: load its shards, let the method prepare them, and multiply."""
    rows = [source[f"{name}.weight"].shape[0] for name in members]
    columns, layer = source[f"{members[0]}.weight"].shape[1], nn.Module()
    dtype = CONFIG.model_config.dtype
    made = scheme.get_weight(columns, sum(rows), dtype) | scheme.get_perchannel_param(sum(rows), dtype)
    shared = scheme.get_pertensor_param(dtype, layer_type="others")
    for suffix, tensor in (made | shared).items():
        layer.register_parameter(suffix, nn.Parameter(tensor.zero_(), requires_grad=False))
    start = 0
    for name, count in zip(members, rows, strict=True):
        for suffix in (*made, *shared):
            loaded = stored.get(f"{name}.{suffix}")
            if loaded is None:
                continue
            parameter = getattr(layer, suffix).data
            (parameter if suffix in shared else parameter[start : start + count]).copy_(loaded)
        start += count
    layer.params_dtype, layer.prefix = dtype, members[0]
    scheme.process_weights_after_loading(layer)
    x = (torch.rand(ROWS, columns) * 7.4 - 3.3).to(dtype)
    bias = [source.get(f"{name}.bias") for name in members]
    whole = torch.cat([b.to(dtype) for b in bias if b is not None]) if bias[0] is not None else None
    found = scheme.apply(layer, x, whole, 0)
    weight = torch.cat([source[f"{name}.weight"] for name in members]).double()
    wanted = x.double() @ weight.T + (0.0 if whole is None else whole.double())
    return float((found.double() - wanted).norm() / wanted.norm())


def experts_error(scheme: Any, owner: str, count: int, stored: Tensors, source: Tensors, torch_npu: Any) -> float:
    """Of the experts of one layer: both grouped products, after the method prepared the weights."""
    inner, hidden = source[f"{owner}.0.gate_proj.weight"].shape
    dtype, layer = CONFIG.model_config.dtype, nn.Module()
    made = scheme.get_weight(count, inner, hidden, dtype) | scheme.get_dynamic_quant_param(count, inner, hidden, dtype)
    for suffix, tensor in made.items():
        layer.register_parameter(suffix, nn.Parameter(tensor.zero_(), requires_grad=False))
    for expert in range(count):
        for suffix in made:
            fused, _, own = suffix.partition("_")
            parts = ("gate_proj", "up_proj") if fused == "w13" else ("down_proj",)
            loaded = torch.cat([stored[f"{owner}.{expert}.{part}.{own}"] for part in parts])
            getattr(layer, suffix).data[expert].copy_(loaded)
    scheme.process_weights_after_loading(layer)
    worst = 0.0
    for fused, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        weight = getattr(layer, f"{fused}_weight").data
        scale = getattr(layer, f"{fused}_weight_scale").data
        bias = getattr(layer, f"{fused}_scale_bias", None)
        columns = hidden if fused == "w13" else inner
        x = torch.randn(ROWS * count, columns).to(dtype)
        codes, per_token = torch_npu.npu_dynamic_quant(x)
        if bias is None:
            found = torch_npu.npu_grouped_matmul(
                [codes],
                [weight],
                scale=[scale],
                per_token_scale=[per_token],
                group_list=torch.full((count,), ROWS, dtype=torch.int64),
                split_item=2,
                group_type=0,
                group_list_type=1,
                output_dtype=dtype,
            )[0]
        else:
            # The operator documents int4 for scales of 256 inputs each; per channel, its arithmetic is taken alone.
            found = torch.cat(
                [
                    int4_product(
                        codes[e * ROWS : (e + 1) * ROWS],
                        unpacked(weight[e]),
                        float_bits(scale[e].reshape(1, -1)),
                        bias.data[e],
                    )
                    for e in range(count)
                ]
            )
            found = (found * per_token[:, None]).to(dtype)
        dense = torch.stack(
            [torch.cat([source[f"{owner}.{e}.{part}.weight"] for part in parts]).double() for e in range(count)]
        )
        wanted = torch.einsum("erk,enk->ern", x.double().view(count, ROWS, columns), dense).reshape(found.shape)
        worst = max(worst, float((found.double() - wanted).norm() / wanted.norm()))
    return worst


def compare(directory: Path, model: Path, torch_npu: Any) -> dict[str, list[float]]:
    """Type -> the errors of its layers."""
    quantization = importlib.import_module("vllm_ascend.quantization.modelslim_config")
    methods = importlib.import_module("vllm_ascend.quantization.methods.registry")
    for name in ("w8a8_static", "w8a8_dynamic", "w8a16", "w4a8"):
        importlib.import_module(f"vllm_ascend.quantization.methods.{name}")
    description = json.loads((directory / "quant_model_description.json").read_text())
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    config = quantization.AscendModelSlimConfig(description)
    mapping = quantization.get_packed_modules_mapping(model_type) or {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    CONFIG.quant_config.quant_description = description
    stored, source = tensors_of(directory), tensors_of(model)
    linears = [n.removesuffix(".weight") for n in source if n.endswith(".weight") and source[n].dim() == 2]
    grouped = {group.layer: list(group.members) for group in groups_of(linears, model_type)}
    taken = {member for members in grouped.values() for member in members}
    grouped |= {name: [name] for name in linears if name not in taken}
    errors: dict[str, list[float]] = defaultdict(list)
    for prefix, members in grouped.items():
        if config.is_layer_skipped_ascend(prefix, mapping):
            errors["FLOAT"].append(0.0)
            continue
        layer_type = "moe" if prefix.endswith(".experts") else "linear"
        kind = quantization.get_quant_type_for_layer(config.quant_description, prefix, layer_type, mapping)
        scheme = methods.get_scheme_class(kind, layer_type)()
        if layer_type == "moe":
            count = len(members) // 3
            errors[f"{kind} experts"].append(experts_error(scheme, prefix, count, stored, source, torch_npu))
        else:
            order = {part: i for i, part in enumerate(mapping.get(prefix.rpartition(".")[2], ()))}
            members.sort(key=lambda name: order.get(name.rpartition(".")[2], 0))
            errors[kind].append(linear_error(scheme, members, stored, source, torch_npu))
    return errors


def main(arguments: list[str]) -> int:
    """Print the errors by type; 1 where an output is further off than its number of bits explains."""
    root, directory, model = (Path(argument) for argument in arguments)
    torch.manual_seed(0)
    sys.meta_path.insert(0, Stubs(root))
    with emulated_npu():
        import torch_npu

        for absent in ("float4_e2m1fn_x2", "hifloat8", "float8_e8m0fnu"):
            # Named by methods of other types when they are imported.
            setattr(torch_npu, absent, absent)
        torch.Tensor.npu = lambda tensor: tensor  # type: ignore[attr-defined]
        library = torch.library.Library("vllm", "DEF")
        library.define("quantize(Tensor x, Tensor scale, Tensor reciprocal, Tensor offset) -> Tensor")
        # vllm_ascend/ops/register_custom_ops.py _quantize_impl
        library.impl("quantize", lambda x, s, r, o: torch_npu.npu_quantize(x, r, o, torch.qint8, -1, False), "CPU")
        errors = compare(directory, model, torch_npu)
    bounds = {"W8A8": 0.02, "W8A8_DYNAMIC": 0.02, "W8A8_DYNAMIC experts": 0.02, "W8A16": 0.012, "FLOAT": 0.0}
    bad = 0
    for kind, found in sorted(errors.items()):
        largest = max(found)
        bad |= largest > bounds.get(kind, 0.2)
        mean = sum(found) / len(found)
        print(f"{kind}: {len(found)} layers, relative error {mean:.4f} on average, at most {largest:.4f}")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
