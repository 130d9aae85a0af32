"""Which of transformers' auto classes builds a model: of text alone, or of images and text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from porter.checkpoint.reader import CONFIG_LIMIT
from porter.checkpoint.strict_json import read_object

CAUSAL = "AutoModelForCausalLM"
AUTO_CLASSES: Mapping[str, Mapping[str, Any]] = {
    CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""Auto class -> its classes by model type, in the order in which a type that several build is taken."""


def auto_class_name(model_type: str) -> str:
    """The auto class of a model type; AutoModelForCausalLM for types that only a checkpoint's own code builds.

    Of several, the first whose class takes configs of this very type: for Qwen3.5, AutoModelForCausalLM builds the text
    model alone, which takes the nested config.
    """
    found = [name for name, classes in AUTO_CLASSES.items() if isinstance(classes.get(model_type), str)]
    if len(found) < 2:
        return found[0] if found else CAUSAL
    return next((name for name in found if _takes(AUTO_CLASSES[name][model_type], model_type)), found[0])


def _takes(class_name: str, model_type: str) -> bool:
    config_class = getattr(getattr(transformers, class_name), "config_class", None)
    return getattr(config_class, "model_type", None) == model_type


def auto_class(model_type: str) -> Any:
    """`auto_class_name`, the class itself."""
    return getattr(transformers, auto_class_name(model_type))


def config_fields(directory: Path) -> dict[str, Any]:
    """The fields of a checkpoint's config.json; PorterError where there is no such file or it holds no JSON object."""
    return read_object(directory / "config.json", "save the model again", CONFIG_LIMIT, constants=True)


def model_type_of(directory: Path) -> str:
    """`model_type` of a checkpoint's config.json; PorterError as `config_fields`."""
    return str(config_fields(directory).get("model_type"))


def text_config(config: Any) -> Any:
    """The config of the text model: nested in that of a model which also reads images, else `config` itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def model_class_name(model_type: str) -> str | None:
    """The class that transformers builds for a model type; None where it has none that generates text."""
    found = AUTO_CLASSES[auto_class_name(model_type)].get(model_type)
    return found if isinstance(found, str) else None
