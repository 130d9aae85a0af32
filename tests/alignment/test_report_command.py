"""`porter align` refuses what it cannot do before any work, in one line and with exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from porter.cli.app import run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pass", "everything"], "--pass: 'everything' is no pass; choose one of weights"),
        (["--dtype", "int9"], "--dtype: 'int9' is no precision"),
        (["--factor", "0.5"], "--factor: 0.5 must be at least 1"),
        (["--factor", "nan"], "--factor: nan must be at least 1"),
        (["--html", "{missing}/report.html"], "no such directory"),
        (["--junit", "{here}"], "is a directory"),
        (["--sarif", "{missing}/findings.sarif"], "no such directory"),
        ([], "porter:"),
    ],
)
def test_bad_usage_is_one_line_and_status_two(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [option.format(missing=tmp_path / "missing", here=tmp_path) for option in options]
    assert run(["align", str(tmp_path / "golden"), str(tmp_path / "candidate"), *given]) == 2
    captured = capsys.readouterr()
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("porter: ") and said in last
    assert captured.out == "" and "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == [], "nothing was written"
