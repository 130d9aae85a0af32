"""The README's commands and its Python run as they stand, in order, in one directory."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from porter.cli.app import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of that language ("" for none)."""
    return [text for found, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if found == language]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the README's relative paths are those of a clone."""
    for path in ROOT.iterdir():
        if path.name != "out":
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("porter ")]
    assert len(lines) == 16
    for line in lines:
        arguments = shlex.split(line, comments=True)[1:]
        assert run(arguments) == 0, (line, capfd.readouterr().err)
    assert (clone / "out" / "report.html").is_file()
    assert run(["run", "out/port", "--verify", "--new-tokens", "1"]) == 0


def test_python(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks("python")
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith("aligned None []")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("")), re.M):
        assert f"\n{target}:" in makefile


def test_files_and_commands_named_in_prose_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    from porter.cli.app import COMMANDS

    named = set(re.findall(r"`porter ([a-z]+)", README))
    not_built = {"bisect", "profile"}
    assert named <= {name for name, _ in COMMANDS} | not_built
