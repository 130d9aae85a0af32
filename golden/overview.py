"""A golden at a glance: what was run, how much was kept, what is missing, and where numbers stopped being finite."""

from __future__ import annotations

from collections import Counter
from typing import Any

from porter.golden.node import tensor_nodes
from porter.golden.store import Golden

_MANIFEST_FIELDS = (
    "schema", "complete", "incomplete", "detail", "dtype", "device", "created", "modules", "new_tokens", "steps",
    "prompts", "tokens", "missed", "shared", "environment", "imported", "gathered",
)  # fmt: skip


def overview(golden: Golden) -> dict[str, Any]:
    """The manifest without its bulk, sizes on disk in bytes, and calls per module class.

    ``not_finite`` is the first record in execution order whose outputs hold a NaN or infinity, None if there is none.
    """
    manifest = golden.manifest
    described = {name: manifest.get(name) for name in _MANIFEST_FIELDS}
    model = {name: value for name, value in manifest["model"].items() if name not in ("config", "digests", "tied")}
    sizes = {file.name: file.stat().st_size for file in sorted(golden.path.iterdir()) if file.is_file()}
    return {
        "golden": str(golden.path),
        **described,
        "model": model,
        "batches": len(manifest["batches"]),
        "generated": golden.generated,
        "records": len(golden.records),
        "recorded_modules": len({record.module for record in golden.records}),
        "calls": dict(Counter(record.kind for record in golden.records).most_common()),
        "files": sizes,
        "bytes": sum(sizes.values()),
        "not_finite": _not_finite(golden),
    }


def _not_finite(golden: Golden) -> dict[str, Any] | None:
    for record in golden.records:
        counts = [(node["stats"]["nan"], node["stats"]["inf"]) for node in tensor_nodes(record.outputs)]
        nan, inf = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if nan or inf:
            return {"module": record.module, "step": record.step, "call": record.call, "nan": nan, "inf": inf}
    return None
