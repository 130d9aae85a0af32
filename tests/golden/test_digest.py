"""Fingerprints: one bit anywhere shows, and every way of computing them gives the same."""

from __future__ import annotations

import pytest
import torch

from porter.golden.digest import BLOCK, content_digest, fingerprint, fingerprint_by_numpy
from porter.golden.native import kernels
from porter.kernels.cpu.build import available_isas
from porter.kernels.cpu.library import KernelLibrary

SIZES = [0, 1, 3, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77, 129 * BLOCK, 300 * BLOCK + 5]


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_kernels_and_numpy_agree(size: int) -> None:
    assert fingerprint(_bytes(size)) == fingerprint_by_numpy(_bytes(size))


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set_agrees(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = KernelLibrary(isa)
    if library.load() is not None:
        pytest.skip(str(library.reason))
    monkeypatch.setattr("porter.golden.digest.kernels", lambda: library)
    for size in (1, 65, BLOCK, 130 * BLOCK + 3):
        assert fingerprint(_bytes(size)) == fingerprint_by_numpy(_bytes(size))


@pytest.mark.skipif(kernels() is None, reason="no compiler")
def test_threads_do_not_matter() -> None:
    content = _bytes(700 * BLOCK)
    threads = torch.get_num_threads()
    prints = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        prints.append(fingerprint(content))
    torch.set_num_threads(threads)
    assert len(set(prints)) == 1


@pytest.mark.parametrize("size", [1, 64, BLOCK + 1, 200 * BLOCK])
def test_any_bit_shows(size: int) -> None:
    content = _bytes(size)
    whole = fingerprint(content)
    for place in {0, size // 3, size // 2, size - 1}:
        for bit in (1, 128):
            content[place] ^= bit
            changed = fingerprint(content)
            # Every word of the four must see it, not one alone.
            assert all(whole[word : word + 8] != changed[word : word + 8] for word in range(0, 32, 8))
            content[place] ^= bit
    assert fingerprint(content) == whole


def test_swaps_shifts_and_lengths_show() -> None:
    content = torch.zeros(3 * BLOCK, dtype=torch.uint8)
    content[0], content[BLOCK] = 1, 2
    variants = [content, content.roll(1), content.roll(BLOCK), content.view(-1, 8).flip(0).view(-1).contiguous()]
    variants += [torch.zeros(length, dtype=torch.uint8) for length in (0, 1, 63, 64, 65, BLOCK, 2 * BLOCK)]
    assert len({content_digest(variant) for variant in variants}) == len(variants)


def test_many_similar_contents_differ() -> None:
    digests = set()
    content = torch.zeros(512, dtype=torch.float32)
    for place in range(512):
        for value in (1.0, -1.0, 1.0 + 2.0**-23, 2.0**-149):
            content[place] = value
            digests.add(content_digest(content))
        content[place] = 0
    assert len(digests) == 512 * 4


def test_shape_and_dtype_do_not_matter() -> None:
    content = torch.randn(6, 10)
    assert content_digest(content) == content_digest(content.view(60).view(torch.int32))
