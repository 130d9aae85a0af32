"""The candidate: what is compared with the golden, wherever it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.alignment.correspondence_file import read_correspondence
from porter.alignment.python_candidate import from_python
from porter.alignment.rank_candidate import Layout, open_ranks
from porter.alignment.rank_files import rank_checkpoints
from porter.alignment.rank_shards import RankShards
from porter.alignment.streaming import cast, stream_of
from porter.alignment.streaming_files import CannotStream, class_of, placeholders_for_parameters, stream_from
from porter.checkpoint.reader import Checkpoint
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.environment import environment
from porter.golden.format import HEADER, MANIFEST, dtype_of
from porter.golden.store import Golden
from porter.models.auto_class import auto_class


@dataclass(frozen=True)
class Candidate:
    """A model to replay and run (`model`), or a recording of one (`golden`); exactly one of the two is there."""

    name: str
    kind: str
    model: nn.Module | None = None
    golden: Golden | None = None
    correspondence: Correspondence = field(default_factory=Correspondence)
    environment: Mapping[str, Any] = field(default_factory=dict)
    shards: RankShards | None = None
    """Of a candidate that lies on parallel ranks."""


def load_candidate(
    given: Any,
    *,
    correspondence: Any = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    layout: Layout = None,
) -> Candidate:
    """The candidate behind `given`: a module, a Golden, or the path of one of

    a directory that `porter adapt` wrote, a checkpoint directory, one of the shards of parallel ranks (see
    `rank_candidate.open_ranks`, also for `layout`), a golden, or `FILE.py:FUNCTION`, whose function returns a module.
    `correspondence` is a Correspondence, its JSON, or the path of its JSON, and replaces the directory's own.
    PorterError for anything else, naming the path.
    """
    table = read_correspondence(correspondence)
    if layout is not None and not (isinstance(given, str | Path) and rank_checkpoints(Path(given))):
        raise PorterError(f"--layout: {given} is no directory of the shards of ranks; leave it out")
    if isinstance(given, Golden):
        return _recorded(given, table)
    if isinstance(given, nn.Module):
        return _placed(type(given).__name__, "module", given, table, device, dtype)
    text = str(given)
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        return _placed(text, "python", from_python(Path(file), function), table, device, dtype)
    path = Path(text)
    if not path.is_dir():
        raise PorterError(f"{path}: no such directory; give a port, a checkpoint, a golden, or FILE.py:FUNCTION")
    if (path / MANIFEST).exists() or (path / HEADER).exists():
        return _recorded(Golden.open(path), table)
    if (path / "port.json").exists():
        return _port(path, table, device, dtype, trust_remote_code)
    opened = open_ranks(path, layout, table, torch.device(device), _dtype(dtype))
    if opened is not None:
        placed = _placed(text, "shards of ranks", opened[0], Correspondence(), device, dtype)
        return replace(placed, shards=opened[1], environment={**placed.environment, "ranks": len(opened[1].ranks)})
    if not (path / "config.json").exists():
        raise PorterError(f"{path}: no config.json, port.json or {MANIFEST}: neither checkpoint, port nor golden")
    return _placed(
        text, "checkpoint", _from_checkpoint(path, dtype, trust_remote_code, torch.device(device)), table, device, dtype
    )


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that most of the model's floating-point elements have; for int8 weights, that of the rest."""
    counts: Counter[torch.dtype] = Counter()
    declared = getattr(getattr(model, "config", None), "dtype", None)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not name.endswith("_scale"):
            counts[parameter.dtype] += parameter.numel()
    if isinstance(declared, torch.dtype) and declared in counts:
        return declared
    return counts.most_common(1)[0][0] if counts else torch.float32


def _recorded(golden: Golden, table: Correspondence | None) -> Candidate:
    described = {"dtype": golden.manifest["dtype"], **golden.manifest.get("environment", {})}
    return Candidate(str(golden.path), "golden", None, golden, table or Correspondence(), described)


def _placed(
    name: str,
    kind: str,
    model: nn.Module,
    table: Correspondence | None,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
) -> Candidate:
    wanted = _dtype(dtype)
    if stream_of(model) is None:
        _check_holds_values(name, model)
        model = model.to(device)
    if wanted is not None and wanted != compute_dtype(model):
        model = model.to(wanted) if stream_of(model) is None else cast(model, wanted)
    model = model.eval()
    described = {
        "kind": kind,
        "name": name,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "dtype": str(compute_dtype(model)).removeprefix("torch."),
        "weights": "read layer by layer" if stream_of(model) is not None else "in memory",
        "attn_implementation": getattr(getattr(model, "config", None), "_attn_implementation", None),
        **environment(torch.device(device)),
    }
    return Candidate(name, kind, model, None, table or _own_correspondence(model), described)


def _check_holds_values(name: str, model: nn.Module) -> None:
    """Refuse a model built on meta, which has shapes and no values."""
    held = [*model.named_parameters(), *model.named_buffers()]
    empty = next((each for each, tensor in held if tensor.is_meta), None)
    if empty is not None:
        raise PorterError(f"{name}: {empty} is on meta and holds no values; load the weights before comparing")


def _own_correspondence(model: nn.Module) -> Correspondence:
    """That of a ported class of `porter.models`; identity for any other."""
    family = getattr(type(model), "porter_family", None) or _family_of_generated(model)
    if family is None:
        return Correspondence()
    config: Any = model.config
    table: Correspondence = family.correspondence(config, family.port(config)).modules()
    return table


def _family_of_generated(model: nn.Module) -> Any:
    if not type(model).__module__.startswith("porter_generated_"):
        return None
    from porter.models.family import family_of

    return family_of(str(getattr(getattr(model, "config", None), "model_type", None)), type(model).__name__)


def _port(
    path: Path,
    table: Correspondence | None,
    device: str | torch.device,
    dtype: str | torch.dtype | None,
    trust_remote_code: bool,
) -> Candidate:
    from porter.runtime import load, read_manifest

    manifest = read_manifest(path)
    own = table or read_correspondence(manifest.get("correspondence", [])) or Correspondence()
    model = load(path, trust_remote_code=trust_remote_code, build=partial(_streamed, path, torch.device(device)))
    placed = _placed(str(path), "port", model, own.modules(), device, dtype)
    told = {"chip": manifest.get("chip"), "scheme": manifest.get("scheme"), "versions": manifest.get("versions")}
    return Candidate(placed.name, "port", placed.model, None, placed.correspondence, {**placed.environment, **told})


def _streamed(path: Path, device: torch.device, kind: Any, config: Any) -> nn.Module | None:
    """The model of class `kind` with its weights left in the files of `path`; None where they must be loaded whole."""
    dtype = config.dtype if isinstance(getattr(config, "dtype", None), torch.dtype) else None
    try:
        checkpoint = Checkpoint.open(path)
        if dtype is None or getattr(config, "quantization_config", None) is not None:
            return None
        with placeholders_for_parameters(dtype):
            model = kind._from_config(config, dtype=dtype)
        model.tie_weights()
        return stream_from(model, checkpoint, device, dtype)
    except CannotStream:
        return None


def _from_checkpoint(
    path: Path, dtype: str | torch.dtype | None, trust_remote_code: bool, device: torch.device
) -> nn.Module:
    """The checkpoint as transformers' own model: streamed where its files hold every tensor, else loaded whole."""
    from transformers import AutoConfig

    wanted = _dtype(dtype)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        kind = class_of(config) if any(path.glob("*.safetensors")) else None
        if kind is not None:
            config.dtype = wanted or config.dtype
            model = _streamed(path, device, kind, config)
            if model is not None:
                return model
        model = auto_class(config.model_type).from_pretrained(
            path,
            dtype="auto" if wanted is None else wanted,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise PorterError(f"{path}: transformers cannot load it: {first}") from error
    whole: nn.Module = model
    return whole


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    short = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    if dtype in short:
        return short[dtype]
    found = dtype_of(dtype)
    if not found.is_floating_point:
        raise PorterError(f"--dtype: {dtype!r} is no floating-point dtype")
    return found
