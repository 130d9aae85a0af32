"""Which of transformers' output classes a dumped set of named fields was: modules read it by attribute."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cache


def output_class(names: Collection[str]) -> str | None:
    """The class path of the model output with these fields and the fewest others; None where no class has them all.

    Further fields are None, as transformers leaves what was not asked for.
    """
    held = set(names)
    fitting = [(len(fields), path) for path, fields in _classes().items() if held <= fields]
    return min(fitting)[1] if held and fitting else None


@cache
def _classes() -> dict[str, frozenset[str]]:
    from transformers import modeling_outputs

    return {
        f"{modeling_outputs.__name__}.{name}": frozenset(field.name for field in dataclasses.fields(kind))
        for name, kind in vars(modeling_outputs).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
