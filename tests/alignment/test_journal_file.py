"""The journal of a comparison: what is written is what is read, and what is damaged is ignored."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from porter.alignment.budget import Verdict
from porter.alignment.journal import KEEP_DAYS, Resumption, journaling
from porter.alignment.pairing import Pair
from porter.alignment.report import Cause, FirstDrift, ModuleRow, Skipped
from porter.alignment.settled import Settled
from porter.alignment.verdict import Drifted
from porter.errors import PorterError

CPU = torch.device("cpu")


def pairs(count: int = 6) -> list[Pair]:
    return [Pair(f"layers.{index}", (f"layers.{index}", "other"), index) for index in range(count)]


def outcome(pair: Pair) -> Settled:
    generator = torch.Generator().manual_seed(pair.position)
    return Settled(
        pair,
        [ModuleRow(pair.module, pair.source, 0, "op", None, math.inf, None, math.nan, 0.1, None, "drift", "why")],
        [Drifted((0, pair.position), FirstDrift(pair.module, pair.source, 0, "output.1"))],
        True,
        True,
        False,
        "why",
        [[Verdict("output", 1 / 3, 1e-300, 0.1, -0.0)], []],
        5,
        2,
        1,
        [Cause("scale", pair.module, 0.1 + 0.2, 1e-9, None, "\u00d7 2")],
        {0: torch.randn(7, generator=generator), 3: torch.randn(1, generator=generator, dtype=torch.float64)},
        {"t1": torch.float32, "t2": torch.bfloat16},
        pair.position % 2 == 0,
        [Skipped(pair.module, "no float64")],
    )


def written(folder: Path, count: int, said: list[str], key: str = "key") -> Path:
    with pytest.raises(InterruptedError), journaling(folder, key, Resumption(say=said.append)) as journal:
        assert journal is not None
        for pair in pairs()[len(journal.resumed(pairs(), CPU)) : count]:
            journal.enter(outcome(pair))
        raise InterruptedError
    return folder / f"{key}.jsonl"


def known(folder: Path, said: list[str], key: str = "key") -> list[Settled]:
    with pytest.raises(InterruptedError), journaling(folder, key, Resumption(say=said.append)) as journal:
        assert journal is not None
        found = journal.resumed(pairs(), CPU)
        raise InterruptedError
    return found


def same(mine: Settled, theirs: Settled) -> bool:
    return repr(mine) == repr(theirs) and all(torch.equal(mine.sketches[k], theirs.sketches[k]) for k in mine.sketches)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path, 2, said)
    written(tmp_path, 5, said)
    found = known(tmp_path, said)
    assert len(found) == 5 and all(same(mine, outcome(pair)) for mine, pair in zip(found, pairs(), strict=False))
    assert said == [f"resuming: {count} of 6 modules were compared before" for count in (2, 5)]
    assert path.stat().st_mode & 0o077 == 0
    with journaling(tmp_path, "key", Resumption(say=said.append)):
        pass
    assert not path.exists()


@pytest.mark.parametrize("cut", [1, 20, 0.5, 0.9, -1, -30])
def test_a_torn_end_is_dropped_and_written_over(tmp_path: Path, cut: float) -> None:
    said: list[str] = []
    path = written(tmp_path, 4, said)
    content = path.read_bytes()
    whole = int(cut * len(content)) if isinstance(cut, float) else cut
    path.write_bytes(content[:whole])
    kept = max(0, content[:whole].count(b"\n") - 1)
    assert [each.pair for each in known(tmp_path, said)] == pairs()[:kept]
    written(tmp_path, 6, said)
    assert [each.pair for each in known(tmp_path, said)] == pairs()
    assert not any("ignored" in line for line in said)


def flipped(content: bytes) -> bytes:
    place = content.index(b"layers.1") + 3
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": flipped,
    "a missing line": lambda content: b"\n".join(line for i, line in enumerate(content.split(b"\n")) if i != 2),
    "lines in another order": lambda content: b"\n".join(
        content.split(b"\n")[i] for i in (0, 2, 1, 3, 4)
    ) + b"\n",
    "no header": lambda content: content[content.index(b"\n") + 1 :],
    "not text": lambda content: bytes(range(256)) * 4 + b"\n",
    "an empty line": lambda content: b"\n" + content,
    "zeros": lambda content: content + b"\0" * 100 + b"\n",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_journal_is_ignored(tmp_path: Path, damage: str) -> None:
    said: list[str] = []
    path = written(tmp_path, 4, said)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert known(tmp_path, said) == []
    assert len(said) == 1 and str(path) in said[0] and "ignored" in said[0]
    written(tmp_path, 2, said)
    assert len(known(tmp_path, said)) == 2, "begun anew"


@pytest.mark.parametrize("field", sorted(outcome(pairs()[0]).to_json()))
@pytest.mark.parametrize("value", [None, 3, "x", [["x"]], {"x": "y"}], ids=str)
def test_another_content_is_ignored(tmp_path: Path, field: str, value: Any) -> None:
    content = {**outcome(pairs()[0]).to_json(), field: value}
    try:
        found = Settled.from_json(json.loads(json.dumps(content)), pairs()[0], CPU)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, PorterError):
        return
    assert field in ("drifted", "compared", "failed", "why", "returns_tuple") or found.to_json()[field] == value


def test_another_key_or_more_modules_than_there_are(tmp_path: Path) -> None:
    said: list[str] = []
    path = written(tmp_path, 6, said)
    path.rename(tmp_path / "other.jsonl")
    assert known(tmp_path, said, "other") == []
    assert "ignored" in said[-1]
    written(tmp_path, 6, said)
    with pytest.raises(InterruptedError), journaling(tmp_path, "key", Resumption(say=said.append)) as journal:
        assert journal is not None and journal.resumed(pairs(3), CPU) == []
        raise InterruptedError
    assert "ignored" in said[-1]


def test_no_place_for_it_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    with journaling(tmp_path / "file" / "folder", "key", Resumption(say=said.append)) as journal:
        assert journal is None
    assert len(said) == 1 and "cannot be continued" in said[0]


def test_a_full_disk_ends_the_journal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def full(self: Any) -> None:
        raise OSError(28, "No space left on device")

    with journaling(tmp_path, "key", Resumption(say=said.append)) as journal:
        assert journal is not None
        journal.resumed(pairs(), CPU)
        journal.enter(outcome(pairs()[0]))
        monkeypatch.setattr(journal, "_file", open("/dev/full", "r+b", buffering=0))
        for pair in pairs()[1:3]:
            journal.enter(outcome(pair))
    assert len(said) == 1 and "No space left on device" in said[0]
    assert not list(tmp_path.iterdir())


def test_forgotten_journals_are_removed(tmp_path: Path) -> None:
    said: list[str] = []
    old, recent = written(tmp_path, 2, said, "old"), written(tmp_path, 2, said, "recent")
    past = old.stat().st_mtime - (KEEP_DAYS + 1) * 86400
    os.utime(old, (past, past))
    written(tmp_path, 1, said, "third")
    assert not old.exists() and recent.exists()
