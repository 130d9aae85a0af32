"""Print family x question, as a table or, with --markdown FILE, as the one that docs/families.md keeps."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

import porter
from benchmarks.families.questions import QUESTIONS, Answer, Ported
from benchmarks.families.subjects import Subject, subjects
from porter.errors import PorterError

PREFACE = """# Families

`python -m benchmarks.families --markdown docs/families.md` asks each family the same questions, in float32: on the
trained checkpoint that porter ships or, where there is none, on transformers' model at reduced width with random
weights.

- float64 proof: the largest error of the whole ported model against transformers, over prefill, cached decoding,
  prefill in pieces and left padding, with images where the family reads them;
- prefill, decode, left-padded: `porter align` against a golden, and the largest share of a module's budget in use;
- greedy tokens: porter's own generation against transformers' `generate`;
- round trip: the tensors of the checkpoint, bit for bit, from those of the port;
- without porter: the exported directory, loaded where porter cannot be imported, predicts the same token.
"""


def answers(subject: Subject, folder: Path) -> dict[str, Answer]:
    """Every question's answer; what stops one is its figure, and the answer is no."""
    try:
        port = porter.adapt(subject.directory, scheme="fp32", output=folder / f"port-{subject.family.model_type}")
    except PorterError as error:
        return {name: Answer(False, str(error)) for name in QUESTIONS}
    ported = Ported(subject, port, folder)
    found = {}
    for name, question in QUESTIONS.items():
        try:
            found[name] = question(ported)
        except Exception as error:  # the table must show a crash as a no, with what crashed
            found[name] = Answer(False, f"{type(error).__name__}: {error}")
    return found


def markdown(rows: list[tuple[Subject, dict[str, Answer]]]) -> str:
    """The text of docs/families.md."""
    lines = [PREFACE, f"| family | checkpoint | {' | '.join(QUESTIONS)} |", "|---" * (len(QUESTIONS) + 2) + "|"]
    for subject, found in rows:
        cells = [f"{'yes' if a.yes else '**no**'} ({a.figure})" for a in found.values()]
        lines.append(f"| {subject.family.model_type} | {subject.weights} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit 1 where an answer is no."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="default: every family that porter knows")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    arguments = parser.parse_args()
    console = Console(width=160)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(arguments.families, Path(folder)):
            rows.append((subject, answers(subject, Path(folder))))
            said = ", ".join(f"{name}: {'yes' if a.yes else 'NO'} ({a.figure})" for name, a in rows[-1][1].items())
            console.print(f"{subject.family.model_type} ({subject.weights}): {said}", soft_wrap=True)
    table = Table("family", *QUESTIONS)
    for subject, found in rows:
        table.add_row(subject.family.model_type, *("yes" if a.yes else "NO" for a in found.values()))
    console.print(table)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows), encoding="utf-8")
    return 0 if all(a.yes for _, found in rows for a in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
