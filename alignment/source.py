"""The source model of a golden, rebuilt: the oracle of every module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.streaming_files import (
    CannotStream,
    checkpoint_of,
    placeholders_for_parameters,
    stream_from,
)
from porter.errors import PorterError
from porter.golden.format import dtype_of
from porter.golden.store import Golden
from porter.models.generated import OWN_CODE
from porter.original import original_model

TRUSTED = "transformers."


def open_source(golden: Golden, device: torch.device) -> nn.Module:
    """The model that a golden recorded, as `rebuild_source` gives it, but streamed: its weights stay on disk.

    Where transformers converts them while loading in a way that porter does not follow, they are loaded whole.
    """
    described, kind = _described(golden)
    golden.weights()  # checks the digests before anything is built
    try:
        model = _stored(golden, kind, described, device) if described["weights"] else None
        model = model or _referenced(golden, kind, described, device)
    except CannotStream:
        return rebuild_source(golden).to(device)
    return _as_recorded(model)


def trusted_source(golden: Golden) -> nn.Module | None:
    """The model of a golden whose class is a checkpoint's own code, which runs since the user trusts it; None where the
    class is another. PorterError where the golden names no checkpoint, or its code defines another class now."""
    described = golden.manifest["model"]
    if not str(described["class"]).startswith(OWN_CODE) or not described["checkpoint"]:
        return None
    golden.weights()  # checks the digests before anything is built
    model = original_model(Path(described["checkpoint"]), dtype_of(golden.manifest["dtype"]), trust_remote_code=True)
    if type(model).__name__ != str(described["class"]).rpartition(".")[2]:
        where, name = described["checkpoint"], described["class"]
        raise PorterError(f"{where}: its code no longer defines {name}; record it again")
    return _as_recorded(model)


def rebuild_source(golden: Golden, trust_remote_code: bool = False) -> nn.Module:
    """The model that a golden recorded: class, config and weights, on the CPU, in the dtype it was recorded in.

    The class must be one of transformers' own: a golden is data and must not make porter import arbitrary code, unless
    with `trust_remote_code`, and then only that of the checkpoint which the golden names. The experts run one by one
    and the attention as recorded. PorterError where class or weights cannot be had.
    """
    trusted = trusted_source(golden) if trust_remote_code else None
    if trusted is not None:
        return trusted
    described, kind = _described(golden)
    weights = golden.weights()  # checks the digests before anything is built
    if described["checkpoint"]:
        dtype = dtype_of(golden.manifest["dtype"])
        model = kind.from_pretrained(
            described["checkpoint"], dtype=dtype, local_files_only=True, **_implementation(described)
        )
    else:
        model = _assembled(kind, described, weights)
    return _as_recorded(model)


def _as_recorded(model: Any) -> nn.Module:
    model.config._experts_implementation = "eager"
    built: nn.Module = model.eval().requires_grad_(False)
    return built


def _described(golden: Golden) -> tuple[dict[str, Any], Any]:
    described = golden.manifest["model"]
    return described, _model_class(str(described["class"]), described)


def _stored(golden: Golden, kind: Any, described: dict[str, Any], device: torch.device) -> nn.Module:
    """Streamed from the golden's own weights, in the dtypes they are stored in."""
    with placeholders_for_parameters(None):
        model = kind(_config(kind, described))
    checkpoint = checkpoint_of(sorted(golden.path.glob("weights-*.safetensors")))
    return stream_from(model, checkpoint, device, None, described["tied"], stored=True)


def _referenced(golden: Golden, kind: Any, described: dict[str, Any], device: torch.device) -> nn.Module:
    """Streamed from the checkpoint that the golden names, in the dtype it was recorded in."""
    folder = Path(described["checkpoint"])
    dtype = dtype_of(golden.manifest["dtype"])
    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    if getattr(config, "quantization_config", None) is not None:
        raise CannotStream("transformers dequantizes the checkpoint while loading")
    with placeholders_for_parameters(dtype):
        model = kind._from_config(config, dtype=dtype, **_implementation(described))
    model.tie_weights()
    return stream_from(model, checkpoint_of([folder / name for name in sorted(described["digests"])]), device, dtype)


def _model_class(path: str, described: dict[str, Any]) -> Any:
    if not path.startswith(TRUSTED) or path.startswith(OWN_CODE):
        hint = "; --trust-remote-code runs the checkpoint's own" if path.startswith(OWN_CODE) else ""
        raise PorterError(
            f"the golden recorded {path}, which is no class of transformers: its modules have no oracle{hint}"
        )
    if described["config"] is None:
        raise PorterError(f"the golden recorded {path} without a config: its modules have no oracle")
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PorterError(f"this transformers has no {path}; install the version that the golden names") from error
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
        raise PorterError(f"{path} is no module class: record the golden again")
    return kind


def _implementation(described: dict[str, Any]) -> dict[str, Any]:
    name = described.get("attn_implementation")
    return {} if name is None else {"attn_implementation": name}


def _config(kind: Any, described: dict[str, Any]) -> Any:
    config = kind.config_class.from_dict(dict(described["config"]))
    if described.get("attn_implementation") is not None:
        config._attn_implementation = described["attn_implementation"]
    return config


def _assembled(kind: Any, described: dict[str, Any], weights: Iterable[tuple[str, Tensor]]) -> Any:
    """The class built from the config with the stored weights in place; what is computed at init is kept."""
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.no_grad():
        model = kind(_config(kind, described))
    missing = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights:
        _put(model, name, tensor)
        missing.discard(name)
    if missing:
        raise PorterError(f"the golden's weights lack {sorted(missing)[0]} ({len(missing)} in all): record it again")
    return model


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as error:
        raise PorterError(f"the golden's weights hold {name}, which its class does not have") from error
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
