"""Store weights in fewer bits than a ported model computes in, where its checkpoint's config says so."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall, op_calls
from porter.kernels.reference.experts_w4a8 import scale_groups
from porter.models.linear import Int8Linear, StaticInt8Linear, WideningEmbedding


def apply_schemes(model: nn.Module, config: Any) -> None:
    """Change the modules named in `config.porter["quantized"]`.

    It is {module name: "w8a16" | "w8a8" | "w8a8_static" | "w4a8" | "bf16"}. In int8 linear layers become `Int8Linear`,
    in "w8a8_static" `StaticInt8Linear`; stacked experts keep their class, with int8 weights and float32 scales
    gate_up_proj_scale [E, 2I] and down_proj_scale [E, H], or in "w4a8" with the tensors of the Op experts/w4a8. In
    "bf16" both keep their class over bfloat16 weights, and embeddings become `WideningEmbedding`; what they compute
    stays in the dtype that the model is built in. Ops named in `config.porter["reference_only"]` use the reference by
    choice. Layers in `config.porter["prediction_layers"]` are in the checkpoint beside the model, which therefore does
    not miss them. Models without such a section are left as they are.
    """
    section = getattr(config, "porter", None) or {}
    for name, scheme in section.get("quantized", {}).items():
        module = model.get_submodule(name)
        if scheme == "bf16":
            _store_bfloat16(model, name, module)
        elif isinstance(module, nn.Linear):
            bias = module.bias is not None
            kind = StaticInt8Linear if scheme == "w8a8_static" else Int8Linear
            replacement = kind(module.in_features, module.out_features, bias, scheme, module.weight.dtype)
            model.set_submodule(name, replacement)
        else:
            _quantize_experts(module, scheme)
    if "w4a8" in section.get("quantized", {}).values():
        _keep_integer_scales(model)
    beside = "|".join(str(layer) for layer in section.get("prediction_layers", ()))
    if beside:
        model._keys_to_ignore_on_load_unexpected = [rf"^model\.layers\.({beside})\."]  # type: ignore[assignment]
    reference_only = set(section.get("reference_only", ()))
    for site, call in op_calls(model):
        if {call.name, f"{call.name}/{call.variant}"} & reference_only:
            call.bind(call.chip_name, (), site=site)


def _store_bfloat16(model: nn.Module, name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding):
        model.set_submodule(name, WideningEmbedding(module, torch.bfloat16))
        return
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() > 1:
            narrow = torch.empty_like(parameter, dtype=torch.bfloat16)
            setattr(module, leaf, nn.Parameter(narrow, parameter.requires_grad))


def _quantize_experts(module: nn.Module, scheme: str) -> None:
    for name in ("gate_up_proj", "down_proj"):
        experts, rows, columns = getattr(module, name).shape
        if scheme == "w4a8":
            scales = experts, scale_groups(columns) if name == "down_proj" else 1, rows
            _store(module, name, torch.empty(experts, columns, rows // 2, dtype=torch.int8))
            _store(module, f"{name}_scale", torch.empty(scales, dtype=torch.int64))
            _store(module, f"{name}_scale_bias", torch.empty(experts, rows, dtype=torch.float32))
        else:
            _store(module, name, torch.empty(experts, rows, columns, dtype=torch.int8))
            _store(module, f"{name}_scale", torch.empty(experts, rows, dtype=torch.float32))
    clamped = module.__dict__["experts"].variant.startswith("clamped")
    module.__dict__["experts"] = OpCall("experts", f"clamped_{scheme}" if clamped else scheme)


def _keep_integer_scales(model: nn.Module) -> None:
    """Loading would make floats of whatever has "_scale" in its name; scales of int4 experts are bits in an int64.

    Parameters that no name pins are loaded in the dtype that they were made in, so float scales stay float32 too.
    """
    for module in model.modules():
        if pinned := getattr(module, "_keep_in_fp32_modules_strict", None):
            module._keep_in_fp32_modules_strict = {name for name in pinned if name != "_scale"}  # type: ignore[assignment]


def _store(module: nn.Module, name: str, values: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(values, requires_grad=False))
