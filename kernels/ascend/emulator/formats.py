"""Which tensors are in the vendor's blocked layout FRACTAL_NZ. The values stay in plain order; the format is noted by
storage, as views share it."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.formats import PLAIN
from porter.kernels.ascend.catalogue.vendor_op import FRACTAL_NZ, Call, VendorRefusal


class Formats:
    """The formats of the tensors that were cast while the emulator is active."""

    def __init__(self) -> None:
        # Storages are kept alive, so that no other tensor comes to lie at the address of a noted one; the number is the
        # bytes of one of its matrices.
        self._blocked: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def of(self, tensor: torch.Tensor) -> int:
        """FRACTAL_NZ or PLAIN."""
        storage = tensor.untyped_storage()
        return FRACTAL_NZ if storage.nbytes() and storage.data_ptr() in self._blocked else PLAIN

    def note(self, tensor: torch.Tensor, acl_format: int) -> None:
        """Remember that `tensor` is in `acl_format` from now on."""
        storage = tensor.untyped_storage()
        if acl_format == FRACTAL_NZ:
            self._blocked[storage.data_ptr()] = storage, _matrix_bytes(tensor)
        else:
            self._blocked.pop(storage.data_ptr(), None)

    def check(self, call: Call) -> None:
        """Raise VendorRefusal where an argument is in FRACTAL_NZ that the operator reads as plain, is plain where it
        reads FRACTAL_NZ, or is a part of a matrix in FRACTAL_NZ, whose blocks lie apart."""
        needed = call.op.must_be_nz(call)
        for name, value in call.arguments.items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(tensor, torch.Tensor):
                    continue
                if self.of(tensor) != FRACTAL_NZ:
                    if name in needed:
                        raise VendorRefusal(
                            f"{call.op.name}: {name} is plain, which this operator reads as FRACTAL_NZ without saying "
                            f"so; pass npu_format_cast({name}, {FRACTAL_NZ})"
                        )
                    continue
                if name not in call.op.nz:
                    raise VendorRefusal(
                        f"{call.op.name}: {name} is in FRACTAL_NZ, which this operator reads as plain; cast only "
                        "weights of matrix products"
                    )
                if _matrix_bytes(tensor) != self._blocked[tensor.untyped_storage().data_ptr()][1]:
                    raise VendorRefusal(
                        f"{call.op.name}: {name} is a part of a matrix in FRACTAL_NZ, whose blocks lie apart; cut "
                        "first, then cast"
                    )


def _matrix_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the last two dimensions, which transposing and seeing bytes as wider integers keep."""
    return tensor.shape[-2:].numel() * tensor.element_size()
