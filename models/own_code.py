"""The family of a checkpoint that brings its own modelling code, which runs only where the user trusts it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from porter.errors import PorterError
from porter.models.auto_class import CAUSAL, config_fields
from porter.models.family import Family, families, family_of
from porter.models.generated import own_package

RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)
CONSENT = "pass --trust-remote-code to run it"
SPECIAL = "defined by the checkpoint's own code, matched by structure alone"


def own_classes(directory: Path | None) -> dict[str, str]:
    """The auto_map of a checkpoint's config.json: auto class -> module.Class of the checkpoint's own code."""
    if directory is None or not (directory / "config.json").is_file():
        return {}
    mapping = config_fields(directory).get("auto_map")
    return {str(k): str(v) for k, v in mapping.items() if isinstance(v, str)} if isinstance(mapping, dict) else {}


def family_of_checkpoint(config: Any, directory: Path | None, where: str, trusted: bool) -> Family:
    """The family of `config`, from the checkpoint's own code where that is `trusted` and no known family has its type.

    Raises PorterError for a type that neither transformers nor trusted code defines, and for code that does not import.
    """
    reference = own_classes(directory).get(CAUSAL)
    if reference is None or directory is None or config.model_type in families():
        return family_of(config.model_type, where)
    if not trusted:
        if config.model_type in CONFIG_MAPPING:
            return family_of(config.model_type, where)
        raise PorterError(f"{where}: {config.model_type!r} is defined by the checkpoint's code; {CONSENT}")
    kind = _imported(directory, reference)
    return Family(str(config.model_type), str(kind.__module__), str(kind.__name__), expected=(), special=(SPECIAL,))


def _imported(directory: Path, reference: str) -> type[PreTrainedModel]:
    try:
        found = get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    except (Exception, SystemExit) as error:  # the checkpoint's code may raise anything while it is imported
        reason = " ".join(str(error).split())[:300]
        raise PorterError(
            f"{directory}: its {CAUSAL} {reference} cannot be imported ({type(error).__name__}: {reason})"
        ) from error
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PorterError(f"{directory}: its {CAUSAL} {reference} is no model class of transformers")
    return found


def companion_files(module: str, text: str, config: Any) -> dict[str, str]:
    """File name -> text of the checkpoint's own files that the ported modelling file of `module` imports, directly or
    through each other, and of the class of `config`; none for a module of transformers.

    Raises PorterError for files that are missing, or that bear the names of those that porter writes.
    """
    package, config_module = own_package(module), type(config).__module__
    files: dict[str, str] = {}
    waiting = [(package, name) for name in RELATIVE_IMPORT.findall(text)] if package else []
    if package and own_package(config_module):
        # Not the same package where the modelling file does not import the config's.
        waiting.append((own_package(config_module), config_module.rpartition(".")[2]))
    while waiting:
        package, name = waiting.pop()
        if f"{name}.py" not in files:
            spec = importlib.util.find_spec(f"{package}.{name}")
            if spec is None or spec.origin is None:
                raise PorterError(f"{module}: imports {name}, which is not among the checkpoint's files")
            if name.startswith("porter_"):
                raise PorterError(f"{module}: imports {name}: porter writes files of such names; rename it")
            files[f"{name}.py"] = Path(spec.origin).read_text(encoding="utf-8")
            waiting += [(package, each) for each in RELATIVE_IMPORT.findall(files[f"{name}.py"])]
    return files
