"""Sums over the ranks of a parallel layout that were not taken, or taken once too often."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import experts, parts
from porter.alignment.hypotheses.surgery import map_output, set_parameter
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
"""Linear layers whose columns are spread over the ranks: their outputs are partial sums."""
SUMMED = (*ROW_PARALLEL, "experts", "mlp", "self_attn", "linear_attn", "embed_tokens")
"""Modules whose output a parallel layout sums over the ranks."""
RANKS = (2, 4, 8)


def _only(path: str, names: tuple[str, ...], dim: int, start: int, stop: int) -> Change:
    """Zero everything of the parameters outside [start, stop) of `dim`."""

    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        for name in names:
            kept = torch.zeros_like(whole := owner.get_parameter(name))
            kept.narrow(dim, start, stop - start).copy_(whole.narrow(dim, start, stop - start))
            set_parameter(owner, name, kept)

    return change


def _spread(drift: Drift) -> Iterator[tuple[str, str, tuple[str, ...], int, int]]:
    """(path, name, parameters, dimension, size) of what a parallel layout spreads over ranks and sums."""
    leaf = drift.source.rpartition(".")[2]
    for path, part in parts(drift.source_module, drift.forced):
        name = path.rpartition(".")[2] if path else leaf
        weight = part._parameters.get("weight")
        if weight is not None and weight.dim() == 2 and name in ROW_PARALLEL:
            yield path, name, ("weight",), 1, weight.shape[1]
        elif isinstance(part, nn.Embedding):
            yield path, name, ("weight",), 0, part.num_embeddings
    for path, part in experts(drift.source_module, drift.forced):
        yield path, "experts", ("down_proj",), 0, part.get_parameter("down_proj").shape[0]


def _missing(drift: Drift) -> Iterator[Trial]:
    for path, name, names, dim, size in _spread(drift):
        unit = {"experts": "experts"}.get(name, "rows of the table" if dim == 0 else "columns")
        for ranks in (r for r in RANKS if size % r == 0 and size > r):
            share = size // ranks
            for rank in range(ranks):
                start, stop = rank * share, (rank + 1) * share
                says = (
                    f"{name} puts out rank {rank}'s partial sum alone ({unit} {start} to {stop - 1}, of {ranks} ranks):"
                    " sum over the ranks (all-reduce) after it"
                )
                yield Trial("reduction-missing", says, _only(path, names, dim, start, stop), part=path)


def _times(path: str, factor: float) -> Callable[[nn.Module], None]:
    return lambda module: map_output(module.get_submodule(path), lambda output: factor * output)


def _doubled(drift: Drift) -> Iterator[Trial]:
    leaf = drift.source.rpartition(".")[2]
    for path, part in parts(drift.source_module):
        if any(path.startswith(f"{forced}.") for forced in drift.forced):
            continue
        name = path.rpartition(".")[2] if path else leaf
        if name not in SUMMED and not (path == "" and "," in drift.source):
            continue
        if isinstance(part, nn.ModuleList):
            continue
        for ranks in RANKS:
            says = (
                f"{name}'s output is exactly {ranks} times the source's: it is summed over the ranks once too often, "
                f"or whole on each of {ranks} ranks and summed all the same"
            )
            yield Trial("reduction-doubled", says, _times(path, float(ranks)), part=path)


MISSING = TrialHypothesis(("reduction-missing",), _missing)
DOUBLED = TrialHypothesis(("reduction-doubled",), _doubled)
