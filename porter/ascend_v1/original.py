"""The original model as AscendV1 names it: its linears one by one, and where the checkpoint at hand stores each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from porter.ascend_v1.quant_type import Linear, Shape
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.models.family import Family
from porter.models.port import source_on_meta, tied_weights
from porter.models.prediction import prediction_layers

FLOAT_LINEARS = frozenset({"kv_b_proj", "shared_expert_gate"})
"""kv_b_proj: MLA multiplies with the halves of its weight itself. shared_expert_gate: one row, loaded as float."""

INDEXER = re.compile(r"\.indexer\.")
"""DeepSeek-V3.2's indexer stays float, as in msmodelslim's recipe (lab_practice/deepseek_v3_2/deepseek_w8a8.yaml)."""

DECODER_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Role = Literal["attention", "mlp", "expert"]


@dataclass(frozen=True)
class Stacked:
    """An expert stack that one tensor on disk holds: `rows` are each part's rows within one expert."""

    source: str
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool


@dataclass(frozen=True)
class Original:
    """What a checkpoint of a config holds.

    `expected` are names on disk and shapes; `linears` those that a scheme may quantize, by their name without
    ".weight"; `stacks` expert stacks stored as one tensor; `tied` what need not be stored; `embeddings` are looked up
    in the description too; `ignored` matches prediction layers.
    """

    model_type: str
    expected: Mapping[str, Shape]
    linears: Mapping[str, Linear]
    stacks: Mapping[str, Stacked]
    tied: Mapping[str, str]
    embeddings: tuple[str, ...]
    ignored: tuple[str, ...]
    prediction_layers: int
    layers: int
    zero_centered: bool = False
    kept: tuple[str, ...] = ()

    @cached_property
    def unstacked(self) -> dict[str, Shape]:
        """`expected` as AscendV1 names it: the linears of an expert stack in its place."""
        names = {n: shape for n, shape in self.expected.items() if n not in self.stacks}
        return names | {
            f"{part}.weight": (self.linears[part].rows, self.linears[part].columns)
            for stack in self.stacks.values()
            for part in stack.parts
        }

    @cached_property
    def _predicting(self) -> re.Pattern[str]:
        return re.compile("|".join(self.ignored))

    def predicts(self, name: str) -> bool:
        """Whether a tensor is of a prediction layer."""
        return self._predicting.fullmatch(name) is not None


def original_of(config: Any, family: Family, stored: Mapping[str, Shape]) -> Original:
    """The names of a model of `config`, in the form that a checkpoint with the tensors `stored` has."""
    if family.model_type == "deepseek_v4":
        raise PorterError("deepseek_v4: AscendV1 is not written or checked of it yet; of v2, v3 and v3.2 it is")
    upstream = source_on_meta(config, family.module, family.class_name)
    layout = family.checkpoint_layout(config, stored)
    tied = tied_weights(config, family.module, family.class_name)
    expected: dict[str, Shape] = {}
    for name, tensor in upstream.state_dict().items():
        if name not in tied or name in stored:
            expected |= layout.source_shapes(name, tuple(tensor.shape))
    linears, stacks = _linears(upstream, layout)
    layers, count = int(config.get_text_config().num_hidden_layers), prediction_layers(config.get_text_config())
    return Original(
        model_type=str(config.model_type),
        expected=expected,
        linears=linears,
        stacks=stacks,
        tied=tied,
        embeddings=_embeddings(upstream, layout),
        ignored=(r"mtp\..*", *(rf"model\.layers\.{n}\..*" for n in range(layers, layers + max(count, 1)))),
        prediction_layers=count,
        layers=layers,
        zero_centered=_zero_centered(upstream),
        kept=tuple(getattr(upstream, "_keep_in_fp32_modules_strict", None) or ()),
    )


def _linears(upstream: Any, layout: Correspondence) -> tuple[dict[str, Linear], dict[str, Stacked]]:
    linears: dict[str, Linear] = {}
    stacks: dict[str, Stacked] = {}
    last = upstream.get_output_embeddings() if hasattr(upstream, "get_output_embeddings") else None
    for name, module in upstream.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not DECODER_LAYER.search(name) or "visual" in name.split("."):
            continue
        if isinstance(module, nn.Linear) and module is not last:
            if name.rpartition(".")[2] in FLOAT_LINEARS or INDEXER.search(name):
                continue
            (disk,) = layout.source_of(f"{name}.weight")
            rows, columns = module.out_features, module.in_features
            prefix = disk.removesuffix(".weight")
            linears[prefix] = Linear(prefix, rows, columns, _role(name), module.bias is not None, name)
        elif {"gate_up_proj", "down_proj"} <= own.keys():
            for parameter in ("gate_up_proj", "down_proj"):
                _experts(f"{name}.{parameter}", own[parameter], layout, linears, stacks)
    return linears, stacks


def _experts(
    name: str, stack: torch.Tensor, layout: Correspondence, linears: dict[str, Linear], stacks: dict[str, Stacked]
) -> None:
    """The linears of one expert stack [experts, rows, columns] of the upstream class, however it is stored."""
    entry = next((e for e in layout.entries if e.target == name), None)
    count, rows, columns = (int(size) for size in stack.shape)
    if entry is not None and entry.kind == "experts":
        for i, disk in enumerate(entry.sources):
            prefix = disk.removesuffix(".weight")
            linears[prefix] = Linear(prefix, entry.sizes[i % len(entry.sizes)], columns, "expert")
        return
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    source = entry.sources[0] if entry is not None else name
    sizes = (rows // len(parts),) * len(parts)
    owner = source.rpartition(".")[0]
    names = tuple(f"{owner}.{e}.{part}" for e in range(count) for part in parts)
    linears |= {n: Linear(n, sizes[0], columns, "expert") for n in names}
    stacks[source] = Stacked(source, names, sizes, entry is not None and entry.kind == "transposed")


def _role(name: str) -> Role:
    return "mlp" if ".mlp." in name else "attention"


def _embeddings(upstream: nn.Module, layout: Correspondence) -> tuple[str, ...]:
    """Embedding and output head on disk: vllm-ascend asks the description for both."""
    found = [n for n, m in upstream.named_modules() if isinstance(m, nn.Embedding) and "visual" not in n.split(".")]
    found += [n for n, _ in upstream.named_modules() if n == "lm_head"]
    return tuple(disk for n in found for disk in layout.source_of(f"{n}.weight"))


def _zero_centered(upstream: nn.Module) -> bool:
    """Whether the norms multiply by 1 + weight, which vLLM runs as GemmaRMSNorm: the one that takes no bias."""
    return any(m.startswith(("Qwen3Next", "Qwen3_5", "Gemma")) for m in {type(m).__name__ for m in upstream.modules()})
