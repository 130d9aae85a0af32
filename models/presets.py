"""What a user may call a model: a preset, a shipped checkpoint, a local directory, or a Hub id that is downloaded.

A preset is the configuration of a released model without its weights: `models/presets/NAME.json` holds `config` (the
published config.json; for Qwen3.5, which also reads images, its text_config), `source` (the Hub id it is published
under) and `published_parameters` (the elements of the released checkpoint, tied weights once and multi-token prediction
layers not counted).
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from porter.checkpoint.reader import CONFIG_LIMIT
from porter.checkpoint.strict_json import read_object
from porter.errors import PorterError
from porter.models.config_rules import check_config
from porter.models.family import families
from porter.models.field_rules import check_fields

PRESETS = Path(__file__).parent / "presets"
SHIPPED = Path(__file__).parent / "shipped"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Preset:
    """A released model's configuration: see the module's docstring for the fields."""

    name: str
    source: str
    published_parameters: int
    fields: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        """A fresh configuration object of the family's own class."""
        # transformers moves keys out of the dictionary that it is given (rope_scaling into rope_parameters).
        fields: dict[str, Any] = json.loads(json.dumps(self.fields))
        config: PreTrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        return config


@dataclass(frozen=True)
class ModelReference:
    """What a MODEL argument names.

    `kind` is "preset", "shipped" or "directory"; `directory` holds config, weights and tokenizer, and is None for a
    preset, whose weights are not at hand. A downloaded Hub snapshot is a "directory".
    """

    name: str
    kind: str
    config: PreTrainedConfig
    directory: Path | None


@cache
def _presets() -> dict[str, Preset]:
    presets = {}
    for file in sorted(PRESETS.glob("*.json")):
        entry = json.loads(file.read_text(encoding="utf-8"))
        presets[file.stem] = Preset(file.stem, entry["source"], entry["published_parameters"], entry["config"])
    return presets


def preset(name: str) -> Preset:
    """The preset `name`. Raises PorterError for a name that is none."""
    if name not in _presets():
        raise PorterError(f"{name!r} is not a preset; {_advice(name, list(_presets()))}")
    return _presets()[name]


def preset_names(model_type: str | None = None) -> list[str]:
    """The presets' names, of one family (`deepseek_v3`, `qwen3`, ...) when it is given."""
    return [name for name, entry in _presets().items() if model_type in (None, entry.fields["model_type"])]


def shipped_names() -> list[str]:
    """The checkpoints that come with porter."""
    return sorted(file.parent.name for file in SHIPPED.glob("*/config.json"))


def shipped_directory(name: str) -> Path | None:
    """The directory of the shipped checkpoint `name`; None when porter ships no such checkpoint."""
    return SHIPPED / name if name in shipped_names() else None


def resolve(model: str, trust_remote_code: bool = False) -> ModelReference:
    """What `model` names, in this order: shipped checkpoint, preset, local directory, downloaded Hub id.

    Never reaches the network, and runs a checkpoint's own configuration code only with `trust_remote_code`. A directory
    called like a preset is meant by writing it as a path (`./qwen3-8b`). Raises PorterError saying what is wrong and
    what to do.
    """
    if not model:
        raise PorterError(_unknown(model))
    shipped = shipped_directory(model)
    if shipped is not None:
        return ModelReference(model, "shipped", read_config(shipped), shipped)
    if model in _presets():
        return ModelReference(model, "preset", _presets()[model].config(), None)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelReference(model, "directory", read_config(path, trust_remote_code), path)
    if path.is_file():
        raise PorterError(f"{model}: a file; MODEL is the directory that holds config.json and the weights")
    if HUB_ID.fullmatch(model):
        snapshot = _downloaded_snapshot(model)
        return ModelReference(model, "directory", read_config(snapshot, trust_remote_code), snapshot)
    raise PorterError(_unknown(model))


def read_config(directory: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration in `directory`/config.json, of the checkpoint's own class where that is to be trusted and
    transformers has none. Raises PorterError naming the file and the field that is wrong."""
    file = directory / "config.json"
    if not file.is_file():
        raise PorterError(f"{directory}: no config.json; MODEL is a directory that save_pretrained or the Hub laid out")
    fields = read_object(file, "save it again with save_pretrained", CONFIG_LIMIT, constants=True)
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise PorterError(f'{file}: no `model_type`; add the family\'s name, for example "model_type": "qwen3"')
    own_code = trust_remote_code and "AutoConfig" in (fields.get("auto_map") or {}) and model_type not in families()
    if model_type not in CONFIG_MAPPING and not own_code:
        hint = "; pass --trust-remote-code to run the checkpoint's own code" if "auto_map" in fields else ""
        raise PorterError(
            f"{file}: `model_type` is {model_type!r}, which this version of transformers does not know{hint}"
        )
    check_fields(fields, str(file))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=own_code
        )
    except (Exception, SystemExit) as error:  # whatever the config's class objects to is a fault of the file
        raise PorterError(f"{file}: {_one_line(error)}") from error
    check_config(config, str(file))
    _check_generation_config(directory)
    return config


def _one_line(error: BaseException) -> str:
    """Upstream's message, of any length and number of lines, as one line that fits a terminal or two."""
    return " ".join(str(error).split())[:400]


def _check_generation_config(directory: Path) -> None:
    file = directory / "generation_config.json"
    if not file.exists():
        return
    check_fields(read_object(file, "correct it or remove it", CONFIG_LIMIT, constants=True), str(file))
    try:
        GenerationConfig.from_pretrained(directory, local_files_only=True).validate()
    except Exception as error:  # as above
        raise PorterError(f"{file}: {_one_line(error)}; correct it or remove it") from error


def _downloaded_snapshot(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        names = [name for name, entry in _presets().items() if entry.source.lower() == hub_id.lower()]
        hint = f"; the preset {names[0]} ports its code without weights" if names else ""
        message = (
            f"{hub_id}: neither a directory here nor a downloaded Hub model: run `hf download {hub_id}` first{hint}"
        )
        raise PorterError(message) from error


def _unknown(model: str) -> str:
    if model.startswith((".", "/", "~")) or "/" in model:
        return (
            f"{model}: no such directory; MODEL is one that holds config.json, or a preset (porter models lists them)"
        )
    return f"{model!r} is no preset, shipped checkpoint or directory; {_advice(model, [*_presets(), *shipped_names()])}"


def _advice(name: str, known: list[str]) -> str:
    """Names that look alike, and where the others are listed."""
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}? (porter models lists all)" if close else "porter models lists the names"
