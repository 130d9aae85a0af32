"""The emulator of the 910B, and the module torch_npu that it puts in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from porter.kernels.ascend.catalogue.vendor_op import A2
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A2) as active:
        yield active


@pytest.fixture
def npu(emulator: Emulator) -> Any:
    import torch_npu

    return torch_npu
