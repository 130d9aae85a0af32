"""DeepSeek-V4's hyper-connections by torch_npu, on the 950."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.dry_run import Kernel


def collapse(
    torch_npu: Any,
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """npu_mhc_pre, and npu_mhc_sinkhorn on its logits."""
    read, post, logits = torch_npu.npu_mhc_pre(
        streams, fn, scale, base, gamma=None, norm_eps=norm_eps, hc_eps=eps, out_flag=0, inner_precise=0
    )[:3]
    return post, torch_npu.npu_mhc_sinkhorn(logits, eps=eps, num_iters=iterations, out_flag=0)[0], read


def expand(
    torch_npu: Any, streams: torch.Tensor, output: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """npu_mhc_post, whose h_res is the Op's comb as it stands."""
    written: torch.Tensor = torch_npu.npu_mhc_post(streams, comb, output, post)
    return written


KERNELS: dict[tuple[str, str], Kernel] = {
    ("hyper_connection", "collapse"): collapse,
    ("hyper_connection", "expand"): expand,
}
