"""A drift of some calls alone: what is kept of it, and what is left alone."""

from __future__ import annotations

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.drifting_calls import calls_in_words, of_drifting_calls
from porter.alignment.hypotheses.output_relation import TOKENS
from porter.alignment.observation import Observation

SOURCE = torch.arange(1.0, 61.0, dtype=torch.float64).view(5, 12)


def drift(candidate: list[torch.Tensor], module: nn.Module | None = None) -> Drift:
    """A drift of as many calls, whose source gives SOURCE in each."""
    outputs: list[Observation] = [{"output": SOURCE} for _ in candidate]
    return Drift(
        "m", "m", "Linear", "native", "output", 0, 1.0, 1e-6, nn.Linear(2, 2), module, outputs,
        [{"output": each} for each in candidate], keep=[None] * len(candidate),
        run_module=lambda module, inputs: outputs,
    )  # fmt: skip


def test_calls_that_agree_are_left_out_after_running() -> None:
    whole = drift([SOURCE, 2 * SOURCE, SOURCE])
    narrowed = of_drifting_calls(whole)
    assert narrowed is not None and len(narrowed.candidate_output) == len(narrowed.keep) == 1
    assert torch.equal(narrowed.candidate_output[0]["output"], 2 * SOURCE)
    assert len(narrowed.run(nn.Identity())) == 1
    assert "1 of the 3" in calls_in_words(narrowed, whole)


def test_there_is_nothing_to_leave_out_where_all_or_none_drift() -> None:
    assert of_drifting_calls(drift([2 * SOURCE, 3 * SOURCE])) is None
    assert of_drifting_calls(drift([SOURCE, SOURCE])) is None
    bad = of_drifting_calls(drift([SOURCE, SOURCE * torch.nan]))
    assert bad is not None and len(bad.candidate_output) == 1, "what cannot be compared drifts"


def quantized() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("codes", torch.zeros(2, 2, dtype=torch.int8))
    return module


def test_a_factor_for_each_token_is_of_quantized_weights_alone() -> None:
    factors = torch.tensor([40.0, 50.0, 45.0, 60.0, 41.0], dtype=torch.float64)[:, None]
    found = TOKENS.explain(drift([factors * SOURCE], quantized()))
    assert found is not None and found.kind == "scale-missing" and "40 to 60" in found.says and found.confidence > 0.9
    assert TOKENS.applies(drift([factors * SOURCE], quantized()))
    assert not TOKENS.applies(drift([factors * SOURCE], nn.Linear(2, 2)))
    assert TOKENS.explain(drift([2.0 * SOURCE], quantized())) is None, "one factor for all is another cause"
