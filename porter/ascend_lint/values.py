"""What the run itself showed: shared tensors that changed, and where the first number went bad."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from porter.ascend_lint.evidence import Evidence
from porter.ascend_lint.finding import LintedFault


def shared(evidence: Evidence) -> Iterator[LintedFault]:
    """Masks, angles, tables and buffers that somebody changed in place between two calls."""
    for name, what in evidence.trace.changed:
        remedy = "work on a copy: other layers and later steps read the same memory"
        yield LintedFault("shared-buffer", name, what, "what it was", "changed in place between calls", remedy)


def origin(evidence: Evidence) -> Iterator[LintedFault]:
    """The first module that makes NaN or Inf of finite inputs, and whether rows past the valid ones are all it is."""
    for passed in evidence.trace.passed:
        if not passed.finite_before or not bool(passed.bad_rows.any()):
            continue
        rows = passed.bad_rows.nonzero().flatten().tolist()
        undefined = [t.op for t in evidence.trace.calls if t.name.startswith(passed.name) and _undefined_rows(t.result)]
        if undefined:
            rule, remedy = "nan-in-undefined-rows", (
                f"{undefined[0]} leaves rows past the valid count undefined, and 0 * NaN is NaN: use masked_fill"
            )
        elif rows[0] > 0 and rows == list(range(rows[0], len(passed.bad_rows))):
            rule, remedy = "nan-in-padding", f"only rows from {rows[0]} on: rows that hold no token reach the output"
        else:
            rule, remedy = "nan-origin", "its inputs are finite: look at its operators' ranges"
        found = f"NaN or Inf in {len(rows)} of {len(passed.bad_rows)} rows"
        yield LintedFault(rule, passed.name, "the output", "finite", found, remedy)
        return


def _undefined_rows(result: object) -> bool:
    """Whether a result's last rows are NaN, as the emulator writes rows that the vendor leaves undefined."""
    for tensor in result if isinstance(result, (list, tuple)) else [result]:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel():
            if bool(torch.isnan(tensor.reshape(-1, tensor.shape[-1])[-1]).all()):
                return True
    return False
