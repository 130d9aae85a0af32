"""`porter golden import`: a dump of another tool, written as a golden, with what it lacks listed by name."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from porter.errors import PorterError
from porter.golden.format import dtype_name
from porter.golden.importers.dump import CacheSeen, Call, Dump, Held, Measured, Missing, Unknown
from porter.golden.importers.huggingface import read_huggingface
from porter.golden.importers.msprobe import read_msprobe
from porter.golden.importers.output_class import output_class
from porter.golden.importers.reference import Reference, check_parameters, reference_of, unreferenced
from porter.golden.importers.run_facts import RunFacts, whole_call
from porter.golden.importers.sglang import read_sglang
from porter.golden.node import encode, json_text
from porter.golden.sketch import SEED
from porter.golden.store import Golden
from porter.golden.tensors import TensorEncoder
from porter.golden.writer import Writer, check_directory

READERS: dict[str, Callable[[Path, int | None], Dump]] = {
    "msprobe": read_msprobe,
    "sglang": read_sglang,
    "hf": read_huggingface,
}
"""Per tool: opens a dump, of the given rank where it holds several."""

NOT_DUMPED = "not in the dump"


def import_dump(
    path: str | Path, tool: str, output: str | Path, model: str | None = None, rank: int | None = None
) -> Golden:
    """Read the dump at ``path`` that ``tool`` (a key of ``READERS``) wrote, and write it as a golden to ``output``.

    ``model`` names the checkpoint that was dumped: it makes the float64 oracle possible and names the classes of the
    modules; weights that were dumped along must be its. What the dump lacks is listed in the manifest under
    ``imported`` and, by module, under ``missed``. PorterError for a dump that is damaged or of another tool.
    """
    reader = READERS.get(tool)
    if reader is None:
        raise PorterError(f"--from: {tool!r} is no tool whose dumps are read; choose one of {', '.join(READERS)}")
    source = Path(path)
    if not source.exists():
        raise PorterError(f"{source}: no such file or directory; name the dump")
    check_directory(Path(output))
    dump = reader(source, rank)
    reference = unreferenced(dump.root) if model is None else reference_of(model)
    if model is not None:
        check_parameters(dump.parameters, reference)
    writer = Writer(output, _header(dump, source, reference, rank))
    try:
        produced = _write(dump, writer, reference)
        writer.finish(produced)
    finally:
        writer.close()
    return Golden.open(output)


def _header(dump: Dump, source: Path, reference: Reference, rank: int | None) -> dict[str, Any]:
    missing = [*dump.missing, *_missing_of_model(dump, reference)]
    return {
        "detail": "full" if dump.full else "stats",
        "dtype": None if dump.dtype is None else dtype_name(dump.dtype),
        "device": "unknown",
        "model": reference.described,
        "environment": {"imported_from": dump.tool},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "modules": None,
        "prompts": None,
        "new_tokens": 0,
        "sketch_seed": SEED,
        "imported": {
            "from": dump.tool,
            "dump": str(source.resolve()),
            "missing": [{"what": each.what, "why": each.why} for each in missing],
        },
    } | ({} if rank is None else {"rank": rank})


def _missing_of_model(dump: Dump, reference: Reference) -> list[Missing]:
    if reference.checkpoint is not None:
        return []
    held = (
        f"{len(dump.parameters)} weights are in the dump, the config is not" if dump.parameters else "neither is there"
    )
    return [Missing("config and weights of the model", f"{held}; name the checkpoint with --model")]


def _write(dump: Dump, writer: Writer, reference: Reference) -> dict[str, Any]:
    """Write every step; what the manifest says of the run."""
    detail = writer.header["detail"]
    facts = RunFacts()
    for number, step in enumerate(dump.steps()):
        calls = [part for call in step.calls for part in reference.unfused(call)]
        calls += whole_call(step, reference.root)
        end = facts.end_of(replace(step, calls=calls))
        _write_step(calls, writer, TensorEncoder(writer, detail), reference.kinds, number, facts.batch)
        writer.end_step({"step": number, **end})
    recorded = writer.modules
    names = reference.kinds or dump.lost
    missed = {name: dump.lost.get(name, NOT_DUMPED) for name in names if name not in recorded}
    missed |= {name: why for name, why in dump.lost.items() if name not in recorded}
    return {
        "missed": [{"module": name, "why": why} for name, why in missed.items()],
        "shared": {},
    }


def _write_step(
    calls: list[Call], writer: Writer, encoder: TensorEncoder, kinds: dict[str, str], step: int, batch: int
) -> None:
    counts: Counter[str] = Counter()
    for call in calls:
        inputs = _node({"args": call.args, "kwargs": call.kwargs}, encoder)
        outputs = _output_node(call.output, encoder)
        kind = call.kind or kinds.get(call.module, "unknown")
        given, returned = encoder.resolved(inputs), encoder.resolved(outputs)
        writer.record(step, counts[call.module], call.module, kind, given, returned, batch)
        counts[call.module] += 1


def _output_node(value: Any, encoder: TensorEncoder) -> str:
    """Like ``_node``; named fields become the output class of transformers that they were."""
    kind = output_class(value) if isinstance(value, dict) else None
    text = _node(value, encoder)
    return text if kind is None else f'{text[:-1]}, "class": {json_text(kind)}}}'


def _node(value: Any, encoder: TensorEncoder) -> str:
    """The node of a value, as JSON; ``encoder`` keeps a tensor."""
    if isinstance(value, dict):
        fields = (f"{json_text(str(name))}: {_node(item, encoder)}" for name, item in value.items())
        return f'{{"dict": {{{", ".join(fields)}}}}}'
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return f'{{"{kind}": [{", ".join(_node(item, encoder) for item in value)}]}}'
    if isinstance(value, Held):
        return encoder(value.read())
    if isinstance(value, Measured):
        return json_text(_measured_node(value))
    if isinstance(value, CacheSeen):
        return json_text({"cache": True, "class": "unknown"})
    if isinstance(value, Unknown):
        return json_text({"opaque": "unknown", "repr": value.text[:200]})
    return encoder(value) if isinstance(value, Tensor) else encode(value, encoder)


def _measured_node(value: Measured) -> dict[str, Any]:
    """The digest is one of the statistics: equal for equal tensors, but no proof that they are equal."""
    stride: list[int] = []
    numel = 1
    for size in reversed(value.shape):
        stride.insert(0, numel)
        numel *= size
    about = repr((value.dtype, numel, value.stats)).encode()
    return {
        "tensor": None,
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "stride": stride,
        "digest": "stats:" + hashlib.sha256(about).hexdigest()[:32],
        "stats": value.stats,
    }
