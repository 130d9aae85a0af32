"""What the golden recorded of a module's calls, as a replay observes them: the yardstick where there is no oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from porter.alignment.calls import Call, Recorded, child_calls
from porter.alignment.forcing import handed, input_label
from porter.alignment.lanes import outputs_of, without_padding
from porter.alignment.module_result import ModuleResult
from porter.alignment.observation import Observation
from porter.alignment.pairing import Pair, Pairing, relative_name
from porter.golden.format import Record

if TYPE_CHECKING:
    from porter.alignment.replay import Replayer


def recorded_observations(replayer: Replayer, result: ModuleResult) -> list[Observation]:
    """Per call the outputs of the module, and what it handed to those of its children that are forced: the output of a
    module that ends in a forced child is that child's, and says nothing of the module's own mathematics."""
    pair, recorded = result.pair, replayer.recorded
    records = recorded.records[pair.sources[0]]
    return [
        without_padding(_handed(recorded, replayer.pairing, pair, record, call) | outputs_of(call.output), call.keep)
        for record, call in zip(records, result.calls, strict=False)
    ]


def _handed(recorded: Recorded, pairing: Pairing, pair: Pair, record: Record, call: Call) -> Observation:
    found: Observation = {}
    for child in pairing.children(pair):
        name = relative_name(child.module, pair.module)
        if name not in call.forced:
            continue
        for index, made in enumerate(child_calls(recorded, record, child.sources[0])):
            inputs = recorded.value(made.inputs)
            for place, tensor in enumerate(handed(tuple(inputs["args"]), inputs["kwargs"])):
                found[input_label(name, index, place)] = tensor
    return found
