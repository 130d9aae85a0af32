"""What of the golden's model has no counterpart in the candidate: compared with nothing, so never counted as fine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from porter.alignment.pairing import Pairing
from porter.alignment.report import Skipped

LACKING = "the candidate has no such module"


@dataclass(frozen=True)
class Counterparts:
    """The source's parameters as they were before any was replaced by the candidate's: name to (identity, elements);
    tied ones have several names."""

    parameters: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, source: nn.Module) -> Counterparts:
        """Those of a model, streamed or in memory."""
        named = source.named_parameters(remove_duplicate=False)
        return cls({name: (id(parameter), parameter.numel()) for name, parameter in named})

    def missing(self, met: Collection[str]) -> list[str]:
        """The parameters no name of which is among `met`."""
        known = {self.parameters[name][0] for name in met if name in self.parameters}
        return [name for name, (identity, _) in self.parameters.items() if identity not in known]

    def share(self, missing: Collection[str]) -> float:
        """The share of the elements that are not `missing`."""
        sizes = dict(self.parameters.values())
        gone = dict(self.parameters[name] for name in missing)
        return 1.0 - sum(gone.values()) / max(1, sum(sizes.values()))


def recorded_share_met(pairing: Pairing) -> float:
    """The share of the recorded modules that have a counterpart: all that can be said without the source."""
    paired = len({source for pair in pairing.pairs for source in pair.sources})
    return paired / max(1, paired + len(pairing.unmatched_golden))


def lacking(pairing: Pairing, missing: Collection[str]) -> list[Skipped]:
    """The recorded modules without counterpart that hold `missing` parameters, each with what is inside it."""
    alone = set(pairing.unmatched_golden)
    found = []
    for name in pairing.unmatched_golden:
        above = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if alone.intersection(above) or not any(each.startswith(f"{name}.") for each in missing):
            continue
        inside = sum(each.startswith(f"{name}.") for each in alone)
        found.append(Skipped(name, f"{LACKING}, nor the {inside} inside it" if inside else LACKING))
    return found
