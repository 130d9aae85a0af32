"""The bytes of one planned tensor on their way to the disk, appended in row order."""

from __future__ import annotations

import hashlib
from io import FileIO
from pathlib import Path

import torch

from porter.checkpoint.header import tensor_bytes
from porter.checkpoint.layout import TensorPlan
from porter.checkpoint.strict_json import shown
from porter.errors import PorterError

WRITE_BYTES = 1 << 26


class TensorSink:
    """Takes the tensor of `plan` whole, or piece by piece along its first dimension. See `CheckpointWriter.sink`."""

    def __init__(self, directory: Path, plan: TensorPlan, file: FileIO) -> None:
        """`file` stands at the first byte of the tensor; `directory` is named in errors."""
        self._at = f"{directory}: tensor {shown(plan.name)}"
        self._plan = plan
        self._file = file
        self._digest = hashlib.sha256()
        self._rows = 0

    def append(self, piece: torch.Tensor) -> None:
        """The next rows: a tensor of the planned dtype and trailing sizes, on any device, strided or not."""
        shape, planned = tuple(piece.shape), self._plan.shape
        fits = len(shape) == len(planned) and shape[1:] == planned[1:]
        if piece.dtype != self._plan.dtype or not fits or (planned and self._rows + shape[0] > planned[0]):
            behind = f" after {self._rows} rows" if self._rows else ""
            raise PorterError(
                f"{self._at} is {piece.dtype} {list(shape)}{behind}, planned {self._plan.dtype} {list(planned)}; "
                "correct the plan or the tensor"
            )
        self._rows += shape[0] if shape else 1
        data = tensor_bytes(piece.detach().resolve_conj().resolve_neg().cpu().contiguous())
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written : written + WRITE_BYTES])
        except OSError as error:
            raise PorterError(
                f"{self._at}: writing failed: {error.strerror or error}; mend the disk and run again to resume"
            ) from error
        self._digest.update(data)

    def close(self) -> str:
        """SHA-256 of the bytes. Raises PorterError unless every row was appended."""
        rows = self._plan.shape[0] if self._plan.shape else 1
        if self._rows != rows:
            raise PorterError(
                f"{self._at} has {self._rows} of {rows} planned rows {list(self._plan.shape)}; "
                "correct the plan or the tensor"
            )
        return self._digest.hexdigest()
