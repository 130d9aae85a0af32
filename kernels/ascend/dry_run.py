"""Whether a kernel's calls of torch_npu are documented for given arguments: the kernel itself, run on shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import Call, VendorRefusal

Kernel = Callable[..., Any]


class DryVendor:
    """Stands where a kernel expects torch_npu: checks each call against the catalogue and gives empty outputs.

    `calls` holds the calls made so far.
    """

    def __init__(self, chip: str) -> None:
        self.chip = chip
        self.calls: list[Call] = []

    def get_npu_format(self, tensor: torch.Tensor) -> int:
        """2, the plain layout: shapes carry no format."""
        return 2

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = catalogue().get(name)
        if op is None:
            raise VendorRefusal(f"{name}: is not in the catalogue")

        def call(*positional: Any, **keywords: Any) -> Any:
            bound = op.bind(self.chip, positional, keywords)
            if (forgotten := op.left_out(bound)) is not None:
                raise VendorRefusal(forgotten)
            op.check(bound)
            self.calls.append(bound)
            return op.outputs(bound)

        return call


def dry_run(kernel: Kernel, chip: str, arguments: tuple[Any, ...]) -> tuple[str | None, tuple[Call, ...]]:
    """(why the kernel cannot be called with `arguments` on `chip`, or None, and the vendor calls that it makes)."""
    vendor = DryVendor(chip)
    try:
        with torch.no_grad():
            kernel(vendor, *map(shape_only, arguments))
    except VendorRefusal as refusal:
        return str(refusal), tuple(vendor.calls)
    return None, tuple(vendor.calls)


def signature(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a dry run depends on: shapes, strides and dtypes of tensors, and every other argument."""
    return tuple(
        (a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else tuple(a) if isinstance(a, list) else a
        for a in arguments
    )


def shape_only(argument: Any) -> Any:
    """A tensor without values in place of a tensor; anything else as it is."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
