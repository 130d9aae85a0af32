"""Which of transformers' auto classes builds a model: of text alone, or of images and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

CAUSAL = "AutoModelForCausalLM"
AUTO_CLASSES: Mapping[str, Mapping[str, Any]] = {
    CAUSAL: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""Auto class -> its classes by model type, in the order in which a type that several build is taken."""


def auto_class_name(model_type: str) -> str:
    """The auto class of a model type; AutoModelForCausalLM for types that only a checkpoint's own code builds."""
    return next((name for name, classes in AUTO_CLASSES.items() if isinstance(classes.get(model_type), str)), CAUSAL)


def auto_class(model_type: str) -> Any:
    """`auto_class_name`, the class itself."""
    return getattr(transformers, auto_class_name(model_type))


def model_class_name(model_type: str) -> str | None:
    """The class that transformers builds for a model type; None where it has none that generates text."""
    found = AUTO_CLASSES[auto_class_name(model_type)].get(model_type)
    return found if isinstance(found, str) else None
