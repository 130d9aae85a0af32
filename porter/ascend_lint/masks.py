"""Masks of attention calls: polarity, and none at all."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.ascend_lint.arguments import SCALES
from porter.ascend_lint.evidence import Evidence
from porter.ascend_lint.finding import LintedFault
from porter.ascend_lint.trace import TracedCall

LENGTHS = ("actual_seq_lengths", "actual_seq_qlen")

SPARSE = frozenset(("npu_lightning_indexer", "npu_sparse_flash_attention"))
CAUSAL = 3
"""sparse_mode that hides later keys."""


def polarity(evidence: Evidence) -> Iterator[LintedFault]:
    """A full mask that hides from queries their own key, and not all keys: True is masked out, unlike in torch."""
    for traced in evidence.trace.calls:
        mask = traced.call.arguments.get("atten_mask") if traced.op in SCALES else None
        if mask is None or traced.call["sparse_mode"] > 1 or mask.dim() < 2:
            continue
        queries, keys = mask.shape[-2:]
        own = mask.bool().diagonal(max(keys - queries, 0), -2, -1)
        if own.numel() and bool(own.all()) and not bool(mask.bool().all()):
            remedy = "pass the opposite: True and 1 are masked out, where torch's True attends"
            what = f"a query's own key in atten_mask of {traced.op}"
            yield LintedFault("mask-polarity", traced.name, what, "seen", "masked out", remedy)


def missing(evidence: Evidence) -> Iterator[LintedFault]:
    """Several queries without any mask: every key is seen, and packed rows come back as the mean of the values."""
    for traced in evidence.trace.calls:
        if traced.op not in SCALES or _hidden(traced) or _queries(traced) <= 1:
            continue
        layout = str(traced.call["input_layout"])
        remedy = "pass the compressed mask with sparse_mode 3"
        if layout.startswith(("TND", "NTD")):
            remedy = f"packed calls without one were seen to return the mean of the values (#13699): {remedy}"
        what = f"atten_mask of {traced.op} in layout {layout}"
        yield LintedFault("mask-missing", traced.name, what, "a causal mask", "none under sparse_mode 0", remedy)


def sparse(evidence: Evidence) -> Iterator[LintedFault]:
    """Several queries of sparse attention or its indexer in another sparse_mode than the causal one."""
    for traced in evidence.trace.calls:
        if traced.op not in SPARSE or traced.call["sparse_mode"] == CAUSAL:
            continue
        if str(traced.call["layout_query"]) == "TND" or traced.call["query"].shape[1] > 1:
            found, remedy = str(traced.call["sparse_mode"]), "pass sparse_mode=3, or keys of the future are selected"
            yield LintedFault("mask-missing", traced.name, f"sparse_mode of {traced.op}", "3 (causal)", found, remedy)


def _hidden(traced: TracedCall) -> bool:
    biased = any(traced.call.arguments.get(n) is not None for n in ("pse_shift", "pse"))
    return traced.call["atten_mask"] is not None or traced.call["sparse_mode"] != 0 or biased


def _queries(traced: TracedCall) -> int:
    """The queries of the longest sequence of a call."""
    layout, query = str(traced.call["input_layout"]).partition("_")[0], traced.call["query"]
    if layout in ("TND", "NTD"):
        ends = next((traced.call.arguments[n] for n in LENGTHS if traced.call.arguments.get(n)), [query.shape[0]])
        return int(torch.tensor([0, *ends]).diff().max())
    return int(query.shape[2 if layout == "BNSD" else 1])
