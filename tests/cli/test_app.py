"""The front door: exit statuses, one-line errors, --json on a clean stdout, --debug, a light help."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import types

import pytest
import typer

import porter
from porter.cli import app
from porter.cli.output import JsonOption, emit, progress
from porter.errors import PorterError, Refusal


def answer(number: int, fail: str = "", json_output: JsonOption = False) -> None:
    """Say a number back.

    Example: porter answer 3
    """
    print("a library talks")
    errors = {"bad": PorterError("x.toml: key\n'y': gone"), "no": Refusal("does not fit"), "bug": KeyError("inner")}
    if fail == "exit":
        raise typer.Exit(1)
    if fail == "interrupt":
        raise KeyboardInterrupt
    if fail:
        raise errors[fail]
    emit(
        {"number": number, "lost": float("nan"), "nested": [float("inf"), {"ok": 1.5}]},
        json_output,
        lambda console: console.print(f"number {number}"),
    )


def first(json_output: JsonOption = False) -> None:
    """The first of a group."""
    emit({"first": True}, json_output, lambda console: console.print("first"))


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("porter_cli_fixture")
    group = typer.Typer(help="A group of two.")
    group.command()(first)
    group.command("second")(first)
    module.__dict__.update(answer=answer, app=group)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(app, "COMMANDS", (("answer", f"{module.__name__}:answer"), ("pair", f"{module.__name__}:app")))
    monkeypatch.setattr(app, "_first_line", lambda target: "line")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = app.run(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("fail", "status", "line"),
    [
        ("bad", 2, "porter: x.toml: key 'y': gone"),
        ("no", 1, "porter: does not fit"),
        ("bug", 2, "porter: KeyError: 'inner'; rerun with --debug for the traceback"),
        ("exit", 1, ""),
        ("interrupt", 130, ""),
    ],
)
def test_every_failure_has_its_status_and_at_most_one_line(
    commands: None, capsys: pytest.CaptureFixture[str], fail: str, status: int, line: str
) -> None:
    got, out, err = run("answer", "3", "--fail", fail, capsys=capsys)
    assert got == status
    assert err.strip() in (line, "porter: interrupted") or fail == "exit"
    assert "Traceback" not in out + err
    assert "number" not in out


def test_debug_shows_the_traceback_of_any_failure(commands: None, capsys: pytest.CaptureFixture[str]) -> None:
    for fail in ("bad", "bug"):
        status, _, err = run("answer", "3", "--fail", fail, "--debug", capsys=capsys)
        assert status == 2
        assert "Traceback" in err and "raise errors[fail]" in err


@pytest.mark.parametrize(
    "arguments",
    [["answer"], ["answer", "three"], ["answer", "3", "--absent"], ["absent"], ["pair", "third"], ["--absent"]],
)
def test_bad_usage_is_one_line_and_exit_2(
    commands: None, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert err.startswith("porter: ") and err.count("\n") == 1 and "--help" in err


def test_json_is_the_only_thing_on_stdout_and_is_strict(commands: None, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run("answer", "3", "--json", capsys=capsys)
    assert status == 0
    assert json.loads(out, parse_constant=pytest.fail) == {"number": 3, "lost": None, "nested": [None, {"ok": 1.5}]}
    assert "a library talks" in err


def test_text_result_and_groups(commands: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("answer", "3", capsys=capsys)[1] == "a library talks\nnumber 3\n"
    assert run("pair", "second", capsys=capsys)[:2] == (0, "first\n")
    assert json.loads(run("pair", "first", "--json", capsys=capsys)[1]) == {"first": True}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["pair"], ["pair", "--help"], ["answer", "--help"]])
def test_help_exits_0(commands: None, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, err) == (0, "")
    assert "Usage" in out


def test_plain_progress_ends_with_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("convert", 3) as advance:
        for _ in range(3):
            advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["convert ...", "convert: 3 of 3"]


def test_the_help_says_what_each_command_does() -> None:
    lines = {name: app._first_line(target) for name, target in app.COMMANDS}
    assert lines["golden"] == "Record the source model's tensors, and look at a recording."
    assert [name for name, line in lines.items() if not line.endswith(".")] == []


def test_version_by_either_name() -> None:
    commands = ([sys.executable, "-m", "porter"], [sys.executable, "-c", "from porter.cli.app import main; main()"])
    for command in commands:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
        assert lines["porter"] == porter.__version__ == importlib.metadata.version("porter")
        assert lines.keys() == {"porter", "torch", "transformers"}


def test_help_of_porter_imports_no_torch() -> None:
    script = (
        "import sys; from porter.cli.app import run; status = run(['--help']);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules], status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize("arguments", [["chips"], ["chips", "--json"], ["--help"]])
def test_a_reader_that_goes_away_is_no_answer(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    script = f"from porter.cli.app import main; main({arguments!r})"
    done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


LEAVES = [
    *((name,) for name, target in app.COMMANDS if not target.endswith(":app")),
    *(("golden", leaf) for leaf in ("capture", "show")),
]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_shows_an_example_and_takes_json_and_debug(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(*words, "--help", capsys=capsys)
    assert status == 0
    for needed in ("Example", f"porter {' '.join(words)}", "--json", "--debug"):
        assert needed in out
