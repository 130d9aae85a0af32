"""Kernels are handed addresses: arguments whose shapes do not fit are refused, and every layout is read as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.cpu.layout import rows_of
from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.registry import default_registry

ROWS = torch.arange(24.0).view(3, 8)
LAYOUTS = {
    "contiguous": ROWS,
    "one row repeated": ROWS[:1].expand(5, 8),
    "a batch repeated": ROWS.expand(2, 3, 8),
    "each row repeated": ROWS[:, None].expand(3, 2, 8),
    "rows apart": torch.arange(60.0).view(3, 20)[:, 2:10],
    "every other row": ROWS[::2],
    "batches apart": torch.arange(96.0).view(2, 6, 8)[:, :3],
    "batches transposed": torch.arange(48.0).view(2, 3, 8).transpose(0, 1),
    "last dimension strided": torch.arange(48.0).view(3, 16)[:, ::2],
    "last dimension repeated": torch.arange(3.0)[:, None].expand(3, 8),
    "one column": torch.arange(24.0).view(3, 8)[:, :1],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_rows_are_found_in_every_layout(layout: str) -> None:
    x = LAYOUTS[layout]
    rows, stride = rows_of(x)
    read = torch.as_strided(rows, (x.numel() // x.shape[-1], x.shape[-1]), (stride, 1), rows.storage_offset())
    assert torch.equal(read, x.reshape(-1, x.shape[-1]))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def int8s(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int8)


INDEX = torch.zeros(3, 2, dtype=torch.int64)
MASK = torch.ones(1, 1, 3, 5, dtype=torch.bool)

# The arguments that fit, and by position the replacements that do not.
FITTING: dict[tuple[str, str], tuple[Any, ...]] = {
    ("rms_norm", "standard"): (floats(3, 8), floats(8), 1e-6),
    ("add_rms_norm", "standard"): (floats(3, 8), floats(3, 8), floats(8), 1e-6),
    ("swiglu", "standard"): (floats(3, 8),),
    ("rope", "half"): (floats(2, 4, 3, 8), floats(2, 1, 3, 8), floats(1, 3, 8), floats(1, 3, 8)),
    ("rope", "complex"): (floats(2, 4, 3, 8), floats(2, 1, 3, 8), floats(1, 3, 4).to(torch.complex64)),
    ("linear", "standard"): (floats(3, 8), floats(5, 8), floats(5)),
    ("linear", "w8a16"): (floats(3, 8), int8s(5, 8), floats(5), None),
    ("linear", "w8a8"): (floats(3, 8), int8s(5, 8), floats(5), None),
    ("attention", "gqa"): (floats(2, 4, 3, 8), floats(2, 2, 5, 8), floats(2, 2, 5, 6), MASK, 0.3, None),
    ("mla_attention", "absorbed"): (
        floats(2, 4, 3, 6), floats(2, 4, 3, 2), floats(2, 1, 5, 7), floats(2, 1, 5, 2), floats(4 * 9, 7), MASK, 0.3,
    ),
    ("indexer", "lightning"): (floats(2, 3, 4, 8), floats(2, 5, 8), floats(2, 3, 4), MASK[0], 0.3, 2),
    ("sparse_mla_attention", "absorbed"): (
        floats(2, 4, 3, 6), floats(2, 4, 3, 2), floats(2, 1, 5, 7), floats(2, 1, 5, 2), floats(4 * 9, 7),
        INDEX.expand(2, 3, 2), MASK, 0.3,
    ),
    ("causal_conv1d", "silu"): (floats(2, 3, 8), floats(8, 4), None, floats(2, 8, 4)),
    ("router", "softmax"): (floats(3, 8), floats(4, 8), 2, True),
    ("router", "grouped_softmax"): (floats(3, 8), floats(8, 8), 2, 2, 1, 2.5),
    ("router", "grouped_sigmoid"): (floats(3, 8), floats(8, 8), floats(8), 2, 2, 1, True, 2.5),
    ("experts", "standard"): (floats(3, 8), INDEX, floats(3, 2), floats(4, 12, 8), floats(4, 8, 6)),
    ("experts", "w8a8"): (
        floats(3, 8), INDEX, floats(3, 2), int8s(4, 12, 8), floats(4, 12), int8s(4, 8, 6), floats(4, 8),
    ),
}  # fmt: skip
MISFITS: dict[tuple[str, str], dict[int, tuple[Any, ...]]] = {
    ("rms_norm", "standard"): {0: (floats(3, 9),), 1: (floats(7), floats(1))},
    ("add_rms_norm", "standard"): {1: (floats(1, 8), floats(8)), 2: (floats(1),)},
    ("swiglu", "standard"): {0: (floats(3, 7),)},
    ("rope", "half"): {
        1: (floats(1, 1, 3, 8), floats(2, 1, 4, 8), floats(2, 1, 3, 6)),
        2: (floats(1, 2, 8), floats(3, 3, 8), floats(1, 3, 10)),
        3: (floats(1, 3, 6), floats(2, 3, 8)),
    },
    ("rope", "complex"): {
        1: (floats(1, 1, 3, 8), floats(2, 1, 4, 8), floats(2, 1, 3, 6)),
        2: (
            *(floats(*shape).to(torch.complex64) for shape in ((1, 2, 4), (3, 3, 4), (1, 3, 5), (2, 1, 3, 4))),
            floats(1, 3, 4),
            floats(1, 3, 4).to(torch.complex128),
        ),
    },
    ("linear", "standard"): {0: (floats(3, 9), floats(3, 4)), 2: (floats(4), floats(1))},
    ("linear", "w8a16"): {0: (floats(3, 9),), 2: (floats(1), floats(4)), 3: (floats(1),)},
    ("linear", "w8a8"): {0: (floats(3, 7),), 2: (floats(8),)},
    ("causal_conv1d", "silu"): {1: (floats(8, 0), floats(7, 4)), 3: (floats(2, 8, 3), floats(1, 8, 4))},
    ("attention", "gqa"): {
        0: (floats(3, 4, 3, 8), floats(2, 3, 3, 8), floats(2, 4, 3, 6)),
        1: (floats(1, 2, 5, 8), floats(2, 2, 4, 8), floats(2, 4, 5, 8)),
        2: (floats(1, 2, 5, 6), floats(2, 1, 5, 6)),
        3: (MASK.expand(3, 1, 3, 5), MASK.expand(1, 2, 3, 5), MASK[..., :4], MASK[0]),
        5: (0, -1),
    },
    ("mla_attention", "absorbed"): {
        1: (floats(2, 4, 2, 2), floats(2, 3, 3, 2), floats(2, 4, 3, 4)),
        2: (floats(1, 1, 5, 7), floats(2, 1, 5, 8), floats(2, 4, 5, 7)),
        3: (floats(2, 1, 4, 2), floats(1, 1, 5, 2)),
        4: (floats(4 * 9, 6), floats(4 * 9 + 1, 7), floats(4 * 6, 7)),
        5: (MASK.expand(1, 3, 3, 5),),
    },
    ("indexer", "lightning"): {
        1: (floats(1, 5, 8), floats(2, 5, 7), floats(2, 1, 5, 8)[0]),
        2: (floats(2, 3, 3), floats(1, 3, 4)),
        3: (MASK, MASK[0].expand(3, 3, 5), MASK[0, :, :2]),
        5: (0,),
    },
    ("sparse_mla_attention", "absorbed"): {
        1: (floats(2, 4, 2, 2), floats(2, 4, 3, 4)),
        2: (floats(1, 1, 5, 7), floats(2, 1, 5, 8)),
        4: (floats(4 * 9, 6), floats(4 * 6, 7)),
        5: (INDEX, INDEX.expand(1, 3, 2), INDEX.expand(2, 3, 2).float()),
        6: (MASK.expand(1, 4, 3, 5), MASK[..., :4]),
    },
    ("router", "softmax"): {0: (floats(3, 9), floats(1, 3, 8)), 2: (5, 0)},
    ("router", "grouped_softmax"): {0: (floats(3, 9),), 1: (floats(7, 8),), 2: (9, 0), 3: (3, 0), 4: (3, 0)},
    ("router", "grouped_sigmoid"): {1: (floats(7, 8), floats(2, 8)), 2: (floats(7),), 3: (9,), 4: (3,), 5: (3, 0)},
    ("experts", "standard"): {
        0: (floats(3, 9), floats(4, 8)),
        2: (floats(3, 1),),
        3: (floats(3, 12, 8), floats(4, 10, 8)),
        4: (floats(4, 8, 7), floats(5, 8, 6)),
    },
    ("experts", "w8a8"): {4: (floats(4, 11), floats(12)), 6: (floats(8),)},
}


@pytest.mark.parametrize("key", list(FITTING), ids="-".join)
def test_shapes_that_do_not_fit_are_refused(provider: CpuProvider, key: tuple[str, str]) -> None:
    kernel, arguments = provider.implementation(*key), FITTING[key]
    assert kernel is not None and kernel.accepts(*arguments) is None
    for position, replacements in MISFITS[key].items():
        for replacement in replacements:
            changed = (*arguments[:position], replacement, *arguments[position + 1 :])
            assert kernel.accepts(*changed), (position, getattr(replacement, "shape", replacement))


@pytest.mark.parametrize("index", [5, 2**31 - 1, 2**32 + 1])
def test_selected_keys_that_the_cache_does_not_have(provider: CpuProvider, index: int) -> None:
    arguments = FITTING["sparse_mla_attention", "absorbed"]
    kernel = provider.implementation("sparse_mla_attention", "absorbed")
    assert kernel is not None
    with pytest.raises(IndexError, match=f"key {index} is selected of a cache of 5"):
        kernel.call(*arguments[:5], torch.full((2, 3, 2), index), *arguments[6:])


def test_any_negative_index_selects_no_key(provider: CpuProvider) -> None:
    arguments = FITTING["sparse_mla_attention", "absorbed"]
    kernel = provider.implementation("sparse_mla_attention", "absorbed")
    assert kernel is not None
    assert not kernel.call(*arguments[:5], torch.full((2, 3, 2), -(2**63)), *arguments[6:]).any()


@pytest.mark.parametrize("key", [("rms_norm", "standard"), ("linear", "standard"), ("linear", "w8a8")], ids="-".join)
def test_one_row_repeated_gives_one_result_repeated(provider: CpuProvider, key: tuple[str, str]) -> None:
    kernel, (_, *rest) = provider.implementation(*key), FITTING[key]
    assert kernel is not None
    row = floats(1, 8)
    expected = default_registry().op(*key).reference(row, *rest).expand(4, -1)
    assert torch.allclose(kernel.call(row.expand(4, 8), *rest), expected, rtol=1e-5, atol=1e-6)
