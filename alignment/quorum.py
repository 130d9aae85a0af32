"""Several goldens of the same tokens: which of them the others agree with, before anything is judged by one of them.

Where a float64 oracle can be rebuilt (from a golden that names its source), every golden's outputs are compared with
it on that golden's own inputs, so that only what a module did itself counts: two goldens agree on a module where both
are within rounding of the oracle, or are off by the same amount. Without an oracle outputs are compared in pairs, and
may differ `quorum_agreement.GAIN` times as much as what the modules were given. The first module on which they split
decides: a majority of all stays, the others are named. Votes go on among those that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from porter.alignment.pairing import execution_order
from porter.alignment.quorum_agreement import by_oracle, in_pairs, oracle_of
from porter.alignment.report import Report, SanityCheck
from porter.errors import PorterError
from porter.golden.store import Golden


@dataclass(frozen=True)
class Vote:
    """What the goldens, by their place, said. ``kept``: those that agree on every module, empty without a majority.

    ``splits``: the modules on which some left the majority, with those that left (all, where no majority was left).
    """

    kept: tuple[int, ...]
    splits: tuple[tuple[str, tuple[int, ...]], ...]
    oracle: bool


def align_by_quorum(
    goldens: Sequence[Golden | str | Path],
    compare: Callable[[Golden], Report],
    factor: float,
    source: nn.Module | None = None,
) -> Report:
    """Let the goldens vote, then ``compare`` the candidate with the first that the majority agrees with.

    The report's sanity checks say who disagreed where. Without a majority it is `incomparable` and nothing is compared.
    PorterError for goldens that were not recorded in full on the same tokens.
    """
    opened = [golden if isinstance(golden, Golden) else Golden.open(golden) for golden in goldens]
    vote = hold_vote(opened, factor, source)
    checks = _told(opened, vote)
    if not vote.kept:
        return Report("incomparable", sanity=checks)
    report = compare(opened[vote.kept[0]])
    report.sanity = [*checks, *report.sanity]
    return report


def hold_vote(goldens: Sequence[Golden], factor: float, source: nn.Module | None = None) -> Vote:
    """Compare the goldens with each other, module by module in execution order."""
    steps = _common_steps(goldens)
    order = execution_order(goldens[0].records)
    held = [{record.module for record in golden.records} for golden in goldens]
    modules = [name for name in order if all(name in names for names in held)]
    oracle = oracle_of(goldens) if source is None else source
    agree = in_pairs(goldens, steps, factor) if oracle is None else by_oracle(goldens, oracle, steps, factor)
    kept = list(range(len(goldens)))
    splits: list[tuple[str, tuple[int, ...]]] = []
    for name in modules:
        largest = max(_groups(kept, partial(agree, name)), key=len)
        if len(largest) == len(kept):
            continue
        if 2 * len(largest) <= len(goldens):
            return Vote((), (*splits, (name, tuple(kept))), oracle is not None)
        splits.append((name, tuple(index for index in kept if index not in largest)))
        kept = largest
    return Vote(tuple(kept), tuple(splits), oracle is not None)


def _common_steps(goldens: Sequence[Golden]) -> set[int]:
    """The steps at which every golden was given the same tokens."""
    first = goldens[0]
    for number, golden in enumerate(goldens):
        if golden.detail != "full":
            raise PorterError(f"{golden.path}: recorded as {golden.detail}; a quorum needs goldens of --detail full")
        if any(golden.path.resolve() == other.path.resolve() for other in goldens[:number]):
            raise PorterError(f"--also {golden.path}: named twice; a golden cannot confirm itself")
        if golden.manifest["tokens"] is None or golden.manifest["tokens"] != first.manifest["tokens"]:
            raise PorterError(f"--also {golden.path}: recorded on other tokens than {first.path}; record both alike")
    steps: set[int] = set()
    for batches in zip(*(golden.batches for golden in goldens), strict=True):
        for step in range(min(batch.steps for batch in batches)):
            fed = [None if batch.generated is None else batch.generated[:, :step] for batch in batches]
            known = fed[0]
            same = known is not None and all(each is not None and torch.equal(each, known) for each in fed)
            if step and not same:
                break
            if len({batch.first_step for batch in batches}) == 1:
                steps.add(batches[0].first_step + step)
    return steps


def _groups(members: Sequence[int], agree: Callable[[int, int], bool]) -> list[list[int]]:
    """Who agrees with whom: the first of a group speaks for it."""
    groups: list[list[int]] = []
    for member in members:
        home = next((group for group in groups if agree(group[0], member)), None)
        if home is None:
            groups.append([member])
        else:
            home.append(member)
    return groups


def _told(goldens: Sequence[Golden], vote: Vote) -> list[SanityCheck]:
    """The vote in words."""
    names = [str(golden.path) for golden in goldens]
    how = "by the float64 oracle" if vote.oracle else "in pairs: no float64 oracle could be rebuilt"
    if not vote.splits:
        return [SanityCheck("quorum", "", "ok", f"all {len(names)} goldens agree ({how})")]
    checks = []
    stayed = len(names)
    for module, left in vote.splits:
        stayed -= len(left)
        who = ", ".join(names[index] for index in left)
        if not stayed:
            says = f"the goldens {who} disagree first at {module or '(model)'} ({how}), and there is no majority"
            checks.append(SanityCheck("quorum", module, "invalid", says))
            continue
        says = f"{stayed} of {len(names)} goldens agree; {who} disagrees first at {module or '(model)'} ({how})"
        if 0 in left and vote.kept:
            says += f": the golden may be the one that is wrong; compared with {names[vote.kept[0]]} instead"
        checks.append(SanityCheck("quorum", module, "note", says))
    return checks
