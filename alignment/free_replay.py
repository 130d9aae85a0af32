"""Whether an error of the free run is a fault of state: the source replays what the candidate did to its own inputs.

On golden inputs every module was right by itself, so a wrong free run is either rounding that grew or something that
calls share: a cache, a buffer that is used again, a mask. The candidate's free run is recorded, and each suspect is
compared with the source on the inputs that the candidate gave it, the source with a cache of its own. What rounding
brought in is then on both sides, and only what the module itself did wrong is left.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from porter.alignment.calls import Recorded, cache_after, mapped, new_cache
from porter.alignment.lanes import natively
from porter.alignment.model_call import called
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair
from porter.alignment.quantization_cost import quantizes_activations
from porter.alignment.recorded_candidate import RecordedReplayer
from porter.alignment.replay import Replayer
from porter.golden.recorder import recording
from porter.golden.store import Golden


class FreeReplayer(RecordedReplayer):
    """Replays the live source on a recording of the live candidate's free run, in the candidate's precision."""

    golden_dtype: torch.dtype = torch.float32

    def _to_native(self, tensor: Tensor) -> Tensor:
        native = self.recorded.dtype
        wide = tensor.is_floating_point() and torch.finfo(tensor.dtype).eps < torch.finfo(native).eps
        return tensor.to(native) if wide and tensor.dtype == self.golden_dtype else tensor


@contextmanager
def free_replays(replayer: Replayer, suspects: Sequence[Pair]) -> Iterator[tuple[FreeReplayer, list[ModuleResult]]]:
    """Record the candidate's free run around the suspects and judge each on its own inputs, in execution order.

    Modules that quantize their activations are left out: they hold no state, and the replay has judged them. The
    recording is on disk as long as the context lasts. Raises CannotRun where the candidate raises.
    """
    judged = [p for p in suspects if quantizes_activations(replayer.candidate.get_submodule(p.module)) is None]
    names = {pair.module for pair in judged}
    names |= {child.module for pair in judged for child in replayer.pairing.children(pair)}
    with tempfile.TemporaryDirectory(prefix="porter-free-run-") as folder:
        golden = _recorded(replayer, names, Path(folder) / "free")
        recorded = Recorded(golden, replayer.recorded.dtype, replayer.recorded.device)
        recorded.recorded_dtype = replayer.recorded.dtype
        own = FreeReplayer(recorded, replayer.pairing, replayer.candidate, replayer.source, replayer.factor)
        own.golden_dtype = replayer.recorded.recorded_dtype
        known = [pair for pair in judged if pair.module in recorded.records]
        yield own, [own.replay(pair) for pair in sorted(known, key=lambda pair: pair.position)]


def _recorded(replayer: Replayer, names: set[str], path: Path) -> Golden:
    pattern = f"^({'|'.join(re.escape(name) for name in sorted(names))})$"
    caches: dict[int, Any] = {}
    model, recorded = replayer.candidate, replayer.recorded
    with torch.no_grad(), recording(model, path, modules=pattern, store_weights=False):
        for record in recorded.records.get("", []):
            if record.batch not in caches:
                caches = {record.batch: new_cache(getattr(model, "config", None))}
            inputs = mapped(recorded.value(record.inputs), natively, caches[record.batch])
            output = called(model, *inputs["args"], **inputs["kwargs"])
            caches[record.batch] = cache_after(output, caches[record.batch])
    return Golden.open(path)
