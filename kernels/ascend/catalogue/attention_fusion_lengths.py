"""What the vendor's training attention asks of the lengths of packed sequences, and of values."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.attention_layouts import is_prefix_sum
from porter.kernels.ascend.catalogue.attention_scenarios import is_upper
from porter.kernels.ascend.catalogue.rules import that
from porter.kernels.ascend.catalogue.vendor_op import Call


def _lengths_given(call: Call) -> bool:
    lengths = call["actual_seq_qlen"], call["actual_seq_kvlen"]
    if call["input_layout"] != "TND":
        return lengths == (None, None)
    return None not in lengths and 1 <= len(lengths[0]) == len(lengths[1]) <= 1024


def _lengths_add_up(call: Call) -> bool:
    """Prefix sums of the rows; trailing zeros leave sequences out."""
    if call["input_layout"] != "TND":
        return True
    for name, tensor in (("actual_seq_qlen", "query"), ("actual_seq_kvlen", "key")):
        sums = [int(n) for n in call[name]]
        while sums and sums[-1] == 0:
            sums.pop()
        if not is_prefix_sum(sums) or (sums and sums[-1] > call[tensor].shape[0]):
            return False
    return True


def _lengths_are_tensors(call: Call) -> bool:
    given = [call[name] for name in ("actual_seq_qlen", "actual_seq_kvlen") if call[name] is not None]
    return all(t.dim() == 1 and t.dtype == torch.int64 for t in given)


PREFIX_SUMS = that(
    "lengths as prefix sums up to the rows of query and key", _lengths_add_up, "actual_seq_qlen", "actual_seq_kvlen"
)
LENGTHS = that(
    "actual_seq_qlen and actual_seq_kvlen in TND alone, as many of both and at most 1024",
    _lengths_given,
    "actual_seq_qlen",
    "actual_seq_kvlen",
    "input_layout",
)
LENGTH_TENSORS = that(
    "actual_seq_qlen and actual_seq_kvlen int64 [sequences], on the CPU",
    _lengths_are_tensors,
    "actual_seq_qlen",
    "actual_seq_kvlen",
)
VALUES = (
    that(
        "the compressed mask to be triu(ones, 1): True and 1 are masked out, the opposite of torch",
        lambda c: c["sparse_mode"] < 2 or is_upper(c["atten_mask"]),
        "atten_mask",
    ),
    that(
        "inner_precise 2 where a query is masked from every key",
        lambda c: (
            c["atten_mask"] is None
            or c["sparse_mode"] >= 2
            or c["inner_precise"] == 2
            or not bool(c["atten_mask"].bool().all(dim=-1).any())
        ),
        "inner_precise",
        "atten_mask",
    ),
)
