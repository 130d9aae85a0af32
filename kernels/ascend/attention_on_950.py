"""The attention kernels on 950, whose training operator is npu_fusion_attention: torch_npu's own
scaled_dot_product_attention calls that one there, and its third version on older chips."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.attention import KERNELS as ATTENTION
from porter.kernels.ascend.dry_run import Kernel
from porter.kernels.ascend.mla_attention import KERNELS as MLA_ATTENTION


class FirstVersion:
    """torch_npu with npu_fusion_attention in place of its third version: the same arguments, but lists of lengths."""

    def __init__(self, torch_npu: Any) -> None:
        self._torch_npu = torch_npu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_npu, name)

    def npu_fusion_attention_v3(self, *arguments: Any, **keywords: Any) -> Any:
        """npu_fusion_attention, whose first result is the attention as well."""
        for name in ("actual_seq_qlen", "actual_seq_kvlen"):
            if name in keywords:
                keywords[name] = _listed(keywords[name])
        return self._torch_npu.npu_fusion_attention(*arguments, **keywords)


def _listed(lengths: torch.Tensor) -> list[int]:
    """The lengths, which are on the CPU; zeros where there are no values, as in a dry run."""
    return [0] * lengths.shape[0] if lengths.is_meta else [int(length) for length in lengths.tolist()]


def _on_950(kernel: Kernel) -> Kernel:
    def call(torch_npu: Any, *arguments: Any) -> Any:
        return kernel(FirstVersion(torch_npu), *arguments)

    return call


OLDER: dict[tuple[str, str], Kernel] = {**ATTENTION, **MLA_ATTENTION}
"""The kernels of the chips below 950."""

KERNELS = {key: _on_950(kernel) for key, kernel in OLDER.items()}
