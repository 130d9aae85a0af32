"""A checkpoint against its config: names, shapes, the likely cause, and values that are no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from raw_files import single

from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.validate import CHUNK_ELEMENTS, check_against, check_finite
from porter.errors import PorterError

BASE: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (11, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 6),
    "model.layers.1.mlp.down_proj.weight": (4, 6),
    "lm_head.weight": (11, 4),
}


def checkpoint(directory: Path, **changes: tuple[int, ...] | None) -> Checkpoint:
    """BASE with `changes` (None removes)."""
    shapes = {n: s for n, s in {**BASE, **changes}.items() if s is not None}
    generator = torch.Generator().manual_seed(0)
    return Checkpoint.open(single(directory, {n: torch.randn(s, generator=generator) for n, s in shapes.items()}))


def mismatch(stored: Checkpoint, expected: dict[str, tuple[int, ...]] = BASE) -> str:
    with pytest.raises(PorterError) as caught:
        check_against(expected, stored)
    text = str(caught.value)
    at = f"{stored.directory}: tensors do not match config.json: "
    assert text.startswith(at) and text.isprintable()
    return text.removeprefix(at)


def test_a_match_drops_nothing(tmp_path: Path) -> None:
    assert check_against(BASE, checkpoint(tmp_path)) == ()


def test_counts_and_first_names(tmp_path: Path) -> None:
    names = {f"model.blocks.{i}.weight": (1,) for i in range(5)}
    text = mismatch(checkpoint(tmp_path, **names, **{"model.embed_tokens.weight": (4, 4, 2)}))
    assert text == (
        "5 unexpected (model.blocks.0.weight, model.blocks.1.weight, model.blocks.2.weight and 2 more), 1 misshaped "
        "(model.embed_tokens.weight is [4, 4, 2], expected [11, 4]); check that config.json belongs to these weights"
    )


@pytest.mark.parametrize(
    ("changes", "expected", "hint"),
    [
        ({"lm_head.weight": None}, {}, "set tie_word_embeddings to true in config.json if the output"),
        ({}, {"lm_head.weight": None}, "set tie_word_embeddings to false in config.json if the stored"),
        (
            {"model.layers.1.mlp.down_proj.weight": None},
            {},
            "config.json calls for 2 layers (num_hidden_layers), the weights have 1",
        ),
        (
            {"model.layers.0.mlp.down_proj.weight_scale_inv": (1, 1)},
            {},
            "weight_scale_inv belongs to quantized weights: give the unquantized checkpoint",
        ),
        ({"model.layers.0.mlp.down_proj.weight": (6, 4)}, {}, "looks transposed: save weights as [out_features, in"),
        (
            {"model.embed_tokens.weight": (13, 4), "lm_head.weight": (13, 4)},
            {},
            "config.json says vocab_size 11, the weights have 13",
        ),
        (
            {"model.embed_tokens.weight": None, "embed_tokens.weight": (11, 4)},
            {},
            "stored names lack the prefix model.",
        ),
        (
            {"model.embed_tokens.weight": None, "base.model.embed_tokens.weight": (11, 4)},
            {},
            "stored names begin with the prefix base.",
        ),
    ],
)
def test_hints(
    tmp_path: Path, changes: dict[str, tuple[int, ...] | None], expected: dict[str, None], hint: str
) -> None:
    wanted = {n: s for n, s in BASE.items() if n not in expected}
    assert hint in mismatch(checkpoint(tmp_path, **changes), wanted).rpartition("; ")[2]


def test_ignored_names_are_returned_as_dropped(tmp_path: Path) -> None:
    stored = checkpoint(tmp_path, **{"model.layers.2.eh_proj.weight": (3,), "model.layers.22.x": (1,)})
    with pytest.raises(PorterError, match=r"1 unexpected \(model\.layers\.22\.x\)"):
        check_against(BASE, stored, ignored=[r"model\.layers\.2\..*"])
    with pytest.raises(PorterError, match="2 unexpected"):
        check_against(BASE, stored, ignored=[r"model\.layers\.2"])
    dropped = check_against(BASE, stored, ignored=[r"model\.layers\.(2|22)\..*"])
    assert set(dropped) == {"model.layers.2.eh_proj.weight", "model.layers.22.x"}


def test_a_stored_tied_tensor_must_be_its_twin(tmp_path: Path) -> None:
    wanted = {n: s for n, s in BASE.items() if n != "lm_head.weight"}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(
        PorterError, match=r"ties lm_head.weight to model.embed_tokens.weight, but the checkpoint stores"
    ):
        check_against(wanted, checkpoint(tmp_path / "other"), tied=tied)
    with pytest.raises(PorterError, match=r"ties lm_head.weight"):
        check_against(wanted, checkpoint(tmp_path / "shape", **{"lm_head.weight": (44,)}), tied=tied)
    assert check_against(wanted, checkpoint(tmp_path / "absent", **{"lm_head.weight": None}), tied=tied) == ()
    weight = torch.randn(11, 4)
    same = {n: weight if s == (11, 4) else torch.zeros(s) for n, s in BASE.items()}
    same["lm_head.weight"] = weight.clone()
    assert check_against(wanted, Checkpoint.open(single(tmp_path / "same", same)), tied=tied) == ("lm_head.weight",)


FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_value_anywhere(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(CHUNK_ELEMENTS + 3, dtype=dtype)
    check_finite("w", tensor)
    tensor[-1] = value
    counts = "1 NaN and 0 infinite" if value != value else "0 NaN and 1 infinite"
    with pytest.raises(
        PorterError,
        match=f"^tensor w: holds {counts} of {tensor.numel()} values; repair the checkpoint, or pass --allow-nonfinite",
    ):
        check_finite("w", tensor)
    check_finite("w", tensor, allow_nonfinite=True)


@pytest.mark.parametrize(
    ("dtype", "byte"), [(torch.float8_e4m3fn, 0x7F), (torch.float8_e5m2, 0x7C), (torch.float8_e8m0fnu, 0xFF)], ids=str
)
def test_eight_bit_floats(dtype: torch.dtype, byte: int) -> None:
    content = torch.full((5,), 1, dtype=torch.uint8)
    check_finite("w", content.view(dtype))
    content[2] = byte
    with pytest.raises(PorterError, match="of 5 values"):
        check_finite("w", content.view(dtype))


def test_extremes_and_odd_shapes_are_finite() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        limits = torch.finfo(dtype)
        check_finite("w", torch.tensor([limits.max, limits.min, limits.smallest_normal, 0.0], dtype=dtype))
        check_finite("w", torch.empty(0, 3, dtype=dtype))
        check_finite("w", torch.ones((), dtype=dtype))
        check_finite("w", torch.ones(3, 5, dtype=dtype).t()[::2])
    check_finite("w", torch.tensor([2**62, -1]))
    check_finite("w", torch.tensor([True, False]))
