"""Which operators of the vendor's an Op becomes on an Ascend chip, judged on shapes alone."""

from __future__ import annotations

from functools import cache

import torch

from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry

CASES = 12
"""Generated cases of an Op that are looked at: odd shapes come first in every generator."""


@cache
def vendor_calls(name: str, variant: str, chip: str) -> tuple[str, ...]:
    """Names of torch_npu's operators that the Op's bfloat16 cases call on `chip`, in order of first use; empty where
    the Ascend provider has no kernel, takes none of the cases, or calls torch's own operators alone."""
    provider, found = AscendProvider(), dict[str, None]()
    for _, case in zip(range(CASES), default_registry().op(name, variant).inputs(torch.bfloat16), strict=False):
        refused, calls = provider.calls(name, variant, chip, case.arguments)
        if refused is None:
            found |= dict.fromkeys(call.op.name for call in calls)
    return tuple(found)
