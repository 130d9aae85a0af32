"""JSON files that came with a checkpoint: read with a size limit, without duplicate keys, with one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from porter.errors import PorterError

_SHOWN = 120


def shown(text: str) -> str:
    """`text` fit for one line of an error: names in a hostile file may hold newlines, escapes, or megabytes."""
    short = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return short if short.isprintable() else repr(short)[1:-1]


def listed(names: list[str], limit: int = 3) -> str:
    """The first few names and how many there are more."""
    rest = len(names) - limit
    return ", ".join(shown(name) for name in names[:limit]) + (f" and {rest} more" if rest > 0 else "")


class _Invalid(ValueError):
    """What is wrong with a JSON text beyond its syntax."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Invalid(f"key {shown(twice)} is given twice")
    return result


def _no_constant(text: str) -> NoReturn:
    raise _Invalid(f"{text} is not JSON")


def parse_object(text: bytes, origin: str, remedy: str, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `text`; `origin` and `remedy` begin and end the PorterError where it is none.

    `constants` lets Infinity and NaN pass, which Python's writer puts into config files.
    """
    try:
        keywords: dict[str, Any] = {} if constants else {"parse_constant": _no_constant}
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, **keywords)
    except json.JSONDecodeError as error:
        raise PorterError(
            f"{origin}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; {remedy}"
        ) from error
    except UnicodeDecodeError as error:
        raise PorterError(f"{origin}: not valid JSON: byte {error.start} is not UTF-8; {remedy}") from error
    except RecursionError as error:
        raise PorterError(f"{origin}: not valid JSON: nested too deeply; {remedy}") from error
    except ValueError as error:
        raise PorterError(f"{origin}: not valid JSON: {shown(str(error))}; {remedy}") from error
    if not isinstance(value, dict):
        raise PorterError(f"{origin}: expected a JSON object, got {type(value).__name__}; {remedy}")
    return value


def read_object(path: Path, remedy: str, limit: int, constants: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path` of at most `limit` bytes. Raises PorterError naming the file."""
    try:
        if not path.is_file():
            raise PorterError(f"{path}: is missing or not a regular file; {remedy}")
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except OSError as error:
        raise PorterError(f"{path}: cannot be read: {error.strerror or error}; {remedy}") from error
    if len(text) > limit:
        raise PorterError(f"{path}: is larger than {limit} bytes; {remedy}")
    return parse_object(text, str(path), remedy, constants)
