"""A candidate that lies on tensor-parallel or expert-parallel ranks: transformers' class, streamed from all of them.

Nothing is gathered on disk: a weight is put together when it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.alignment.correspondence_file import read_correspondence
from porter.alignment.rank_files import rank_checkpoints
from porter.alignment.rank_shards import RankShards
from porter.alignment.streaming_files import CannotStream, class_of, layout_of, placeholders_for_parameters, stream_from
from porter.checkpoint.reader import Checkpoint
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.shard_layout import Rule, read_layout, rules_of

Layout = str | Path | Sequence[Mapping[str, Any]] | None


def open_ranks(
    directory: Path, layout: Layout, correspondence: Any, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, RankShards] | None:
    """The model whose weights lie on the ranks in `directory`, and their shards; None for any other directory.

    `layout` are the rules of `porter golden gather`, or their file. `correspondence` names the fused weights; by
    default it is that of the family's port. PorterError naming what is missing or does not fit.
    """
    ranks = rank_checkpoints(directory)
    if not ranks:
        return None
    rules = read_layout(Path(layout)) if isinstance(layout, str | Path) else rules_of(layout)
    config = _config(directory, ranks)
    kind = class_of(config)
    if kind is None:
        raise PorterError(f"{directory}: transformers has no class of its own for model_type {config.model_type!r}")
    kept = dtype or config.dtype or torch.float32
    with placeholders_for_parameters(kept):
        model = kind._from_config(config, dtype=kept)
    model.tie_weights()
    try:
        shards = _shards(ranks, rules, read_correspondence(correspondence), model, config)
        return stream_from(model, shards, device, kept), shards
    except CannotStream as error:
        raise PorterError(f"{directory}: {error}; name fused weights with --correspondence") from error


def _config(directory: Path, ranks: Sequence[Checkpoint]) -> Any:
    from transformers import AutoConfig

    found = [folder for folder in (directory, ranks[0].directory) if (folder / "config.json").is_file()]
    if not found:
        raise PorterError(f"{directory}: no config.json; copy that of the whole model beside the shards")
    try:
        config = AutoConfig.from_pretrained(found[0], local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise PorterError(f"{found[0]}/config.json: transformers cannot read it: {first}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise PorterError(f"{found[0]}/config.json: quantization_config: shards of quantized weights are not read")
    return config


def _shards(
    ranks: Sequence[Checkpoint], rules: tuple[Rule, ...], table: Correspondence | None, model: nn.Module, config: Any
) -> RankShards:
    wholes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    for entry in layout_of(model):
        shape = wholes[entry.target]
        wholes |= {name: entry.source_shape(index, shape) for index, name in enumerate(entry.sources)}
    shards = RankShards(ranks, rules, (table or Correspondence()).modules(), wholes)
    return shards if table is not None or not shards.unknown else RankShards(ranks, rules, _ported(config), wholes)


def _ported(config: Any) -> Correspondence:
    """The fused names of the family's port, which engines share: qkv_proj, gate_up_proj."""
    from porter.models.family import family_of

    family = family_of(str(config.model_type))
    return family.correspondence(config, family.port(config)).modules()
