"""The Ascend provider: each Op as calls of torch_npu, refused by the catalogue where the vendor documents otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porter.kernels.ascend.activation import KERNELS as ACTIVATION
from porter.kernels.ascend.attention import KERNELS as ATTENTION
from porter.kernels.ascend.attention_on_950 import KERNELS as ATTENTION_ON_950
from porter.kernels.ascend.catalogue.vendor_op import A2, A5, CHIPS, Call
from porter.kernels.ascend.delta_net import EVIDENCE as DELTA_NET_EVIDENCE
from porter.kernels.ascend.delta_net import KERNELS as DELTA_NET
from porter.kernels.ascend.dry_run import Kernel, dry_run, signature
from porter.kernels.ascend.experts import KERNELS as EXPERTS
from porter.kernels.ascend.gates import EVIDENCE as GATES_EVIDENCE
from porter.kernels.ascend.gates import KERNELS as GATES
from porter.kernels.ascend.hyper_connection import KERNELS as HYPER_CONNECTION
from porter.kernels.ascend.linear import EVIDENCE as LINEAR_EVIDENCE
from porter.kernels.ascend.linear import KERNELS as LINEAR
from porter.kernels.ascend.mla_attention import KERNELS as MLA_ATTENTION
from porter.kernels.ascend.norm import KERNELS as NORM
from porter.kernels.ascend.norm import ON_950 as NORM_ON_950
from porter.kernels.ascend.rope import KERNELS as ROPE
from porter.kernels.ascend.router import KERNELS as ROUTER
from porter.kernels.ascend.sparse_attention import KERNELS as SPARSE_ATTENTION
from porter.kernels.ascend.vendor import device_type, load_torch_npu
from porter.kernels.contract import Evidence, Implementation

KERNELS: dict[tuple[str, str], Kernel] = {
    **ATTENTION,
    **MLA_ATTENTION,
    **ACTIVATION,
    **ROPE,
    **NORM,
    **LINEAR,
    **SPARSE_ATTENTION,
    **DELTA_NET,
    **GATES,
    **HYPER_CONNECTION,
    **ROUTER,
    **EXPERTS,
}
"""(op, variant) to the function that makes the calls; its first argument is torch_npu."""
CHIP_KERNELS: dict[str, dict[tuple[str, str], Kernel]] = {A5: {**NORM_ON_950, **ATTENTION_ON_950}}
"""What a chip has in place of KERNELS, where its operators are others."""

EMULATED = Evidence(
    "emulated",
    "the vendor's documented semantics on the CPU, its constraints enforced; schemas those of torch_npu 2.13.0",
    date="2026-11-30",
)
WITHOUT_CALLS = {**LINEAR_EVIDENCE, **DELTA_NET_EVIDENCE, **GATES_EVIDENCE}
"""The evidence of kernels that call no operator of the vendor's."""
REMEMBERED = 4096
"""Shapes of calls whose verdict a kernel keeps; a longer history than any batch needs is forgotten whole."""


class AscendProvider:
    """Kernels of torch_npu. Needs nothing of the vendor's until a kernel is called."""

    name = "ascend"

    def __init__(self) -> None:
        # Layers share an implementation, so that a shape that is new with every token is judged once a token.
        self._made: dict[tuple[str, str, str], Implementation | None] = {}

    def supported(self, chip_name: str) -> str | None:
        """None for Ascend chips, on any machine: what runs there can be planned anywhere."""
        return None if chip_name in CHIPS else f"the kernels run on {', '.join(CHIPS)}, not on {chip_name}"

    def implementation(self, name: str, variant: str, chip_name: str = A2) -> Implementation | None:
        """The kernel of an Op, which accepts what the vendor documents for `chip_name`; None when there is none."""
        key = name, variant, chip_name
        if key not in self._made:
            kernel = kernel_of(*key)
            evidence = WITHOUT_CALLS.get((name, variant), EMULATED)
            made = None if kernel is None else Implementation(_call(kernel), _accepts(kernel, chip_name), evidence)
            self._made[key] = made
        return self._made[key]

    def prepare(self) -> None:
        """Nothing to load ahead: torch_npu loads with the first call."""

    def calls(
        self, name: str, variant: str, chip: str, arguments: tuple[Any, ...]
    ) -> tuple[str | None, tuple[Call, ...]]:
        """(why not, or None, and the vendor calls) of the Op on `chip` for `arguments` of any device."""
        kernel = kernel_of(name, variant, chip)
        if kernel is None:
            return f"has no kernel for {name}/{variant}", ()
        return dry_run(kernel, chip, arguments)


def kernel_of(name: str, variant: str, chip_name: str) -> Kernel | None:
    """The function that makes the calls of an Op on `chip_name`, or None."""
    return CHIP_KERNELS.get(chip_name, {}).get((name, variant)) or KERNELS.get((name, variant))


def _call(kernel: Kernel) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return kernel(load_torch_npu(), *arguments)

    return call


def _accepts(kernel: Kernel, chip_name: str) -> Callable[..., str | None]:
    verdicts: dict[tuple[Any, ...], str | None] = {}

    def accepts(*arguments: Any) -> str | None:
        wanted = device_type()
        if any(isinstance(a, torch.Tensor) and a.device.type != wanted for a in arguments):
            return f"a tensor is not on {wanted}"
        key = signature(arguments)
        if key not in verdicts:
            if len(verdicts) >= REMEMBERED:
                verdicts.clear()
            verdicts[key], _ = dry_run(kernel, chip_name, arguments)
        return verdicts[key]

    return accepts
