"""What transformers' loading report must not contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from porter.errors import PorterError

FAULTS = {
    "missing_keys": "not in the checkpoint",
    "mismatched_keys": "of another shape in the checkpoint",
    "unexpected_keys": "in the checkpoint but not in the model",
}


def refuse_made_up(directory: str | Path, information: dict[str, Any], ignore: tuple[str, ...] = ()) -> None:
    """Raise PorterError where loading made parameters up, or left some out; transformers only warns.

    `information` is what `from_pretrained(..., output_loading_info=True)` returns; `ignore` leaves out `FAULTS`.
    """
    for field, what in FAULTS.items():
        names = sorted(str(name) for name in information.get(field, ()) if field not in ignore)
        if names:
            raise PorterError(f"{directory}: {len(names)} parameters are {what}, first {names[0]}; wrong config.json?")
