"""Reading what to run: prompts as text, as JSONL, or as token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from porter.checkpoint.strict_json import shown
from porter.errors import PorterError


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: text with one prompt a line, or JSONL (first character ``{``) with a ``prompt`` field.

    PorterError naming the line that is empty or is not what the file's other lines are.
    """
    lines = _read(path, "--prompts").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise PorterError(f"{path}: no prompts; write one a line, or JSONL with a `prompt` field")
    jsonl = lines[0].lstrip().startswith("{")
    prompts = [_prompt_of(line, f"{path}:{number}") if jsonl else line for number, line in enumerate(lines, start=1)]
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise PorterError(f"{path}:{number}: the prompt is empty; remove the line or write a prompt")
    return prompts


def read_tokens(path: Path) -> list[list[int]]:
    """The token-id lists of a JSON file ``[[id, ...], ...]``; PorterError naming the entry that is something else."""
    try:
        content = json.loads(_read(path, "--tokens"))
    except (ValueError, RecursionError) as error:
        raise PorterError(f"{path}: not JSON ({error}); expected a list of token-id lists") from error
    if not isinstance(content, list) or not content or not all(isinstance(row, list) for row in content):
        raise PorterError(f"{path}: expected a non-empty list of token-id lists, such as [[1, 2, 3], [4, 5]]")
    for number, row in enumerate(content):
        if not row:
            raise PorterError(f"{path}: list {number} is empty; every prompt needs at least one token id")
        wrong = next((token for token in row if type(token) is not int), None)
        if wrong is not None:
            raise PorterError(f"{path}: list {number} holds {wrong!r}, expected integers only")
    return content


def tokenize(prompts: list[str], checkpoint: Path) -> list[list[int]]:
    """Token ids of each prompt by the checkpoint's own tokenizer; PorterError if it has none."""
    from porter.tokenization import encode, tokenizer_of

    try:
        tokenizer: Any = tokenizer_of(checkpoint)
    except PorterError as error:
        raise PorterError(f"{error}, or give token ids with --tokens") from error
    rows: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        try:
            rows.append(encode(tokenizer, prompt)[0].tolist())
        except PorterError as error:
            raise PorterError(f"prompt {number} ({shown(prompt)}): {error}") from error
    return rows


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PorterError(f"{where}: not JSON ({error}); expected an object with a `prompt` field") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str):
        raise PorterError(f'{where}: no text in the field `prompt`; expected a line like {{"prompt": "..."}}')
    return prompt


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PorterError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise PorterError(f"{option} {path}: {error.strerror or error}") from error
