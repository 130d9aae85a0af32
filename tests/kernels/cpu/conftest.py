"""The CPU provider on every instruction set that this processor runs."""

from __future__ import annotations

import pytest

from porter.kernels.cpu.build import available_isas
from porter.kernels.cpu.provider import CpuProvider

PROVIDERS = {isa: CpuProvider(isa) for isa in available_isas()}


@pytest.fixture(scope="module", params=list(PROVIDERS))
def provider(request: pytest.FixtureRequest) -> CpuProvider:
    found = PROVIDERS[request.param]
    assert found.library.load() is None, found.library.reason
    return found
