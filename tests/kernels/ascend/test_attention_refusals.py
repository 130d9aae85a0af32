"""Calls of the inference attention that the vendor does not document, or gets wrong in silence, and the words that
refuse them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_formulas import normal

from porter.kernels.ascend.catalogue.vendor_op import I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import emulated_npu

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
MANY, ONE = (1, 4, 5, 16), (1, 4, 1, 16)


def _arguments(of: tuple[int, ...] = MANY, over: tuple[int, ...] = (1, 2, 9, 16), **extra: Any) -> dict[str, Any]:
    return {
        "query": normal(*of),
        "key": normal(*over, seed=1),
        "value": normal(*over, seed=2),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": "BNSD",
        "sparse_mode": 0,
        **extra,
    }


def _hides(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _packed(size: int = 128, **extra: Any) -> dict[str, Any]:
    return _arguments(
        (8, 4, size),
        (8, 2, size),
        **{
            "input_layout": "TND",
            "sparse_mode": 3,
            "atten_mask": COMPRESSED,
            "actual_seq_lengths": [3, 8],
            "actual_seq_lengths_kv": [5, 8],
            **extra,
        },
    )


def _paged(**extra: Any) -> dict[str, Any]:
    table = torch.zeros(1, 2, dtype=torch.int32)
    return _arguments(
        ONE,
        (3, 2, 16, 16),
        **{"block_table": table, "block_size": 16, "actual_seq_lengths_kv": [20], **extra},
    )


def _latent(**extra: Any) -> dict[str, Any]:
    rope = {"query_rope": normal(1, 4, 2, 64), "key_rope": normal(1, 1, 9, 64)}
    return _arguments((1, 4, 2, 512), (1, 1, 9, 512), **{"num_key_value_heads": 1, **rope, **extra})


REFUSED = {
    "layout FOO": (_arguments(input_layout="FOO"), "input_layout to be one of BSH, BSND, .*; input_layout is 'FOO'"),
    "rank of the layout": (_arguments(input_layout="TND"), "of the ranks of input_layout"),
    "the default heads": (_arguments(num_heads=1), "num_heads and num_key_value_heads to be the heads"),
    "keys taken for as many heads": (_arguments(num_key_value_heads=0), "to be the heads of query and key"),
    "more than 64 queries a key": (
        _arguments((1, 65, 5, 16), (1, 1, 9, 16), num_heads=65, num_key_value_heads=1),
        "at most 64 times as many",
    ),
    "head size 24": (_arguments((1, 4, 5, 24), (1, 2, 9, 24)), "a multiple of 16"),
    "head size 528": (_arguments((1, 4, 5, 528), (1, 2, 9, 528)), "at most 512"),
    "values of another size": (_arguments(value=normal(1, 2, 9, 32)), "key and value of one shape"),
    "float32": (
        {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in _arguments().items()},
        "query / key / value as f16/f16/f16, bf16/bf16/bf16",
    ),
    "float mask": (_arguments(atten_mask=torch.zeros(1, 1, 5, 9)), "atten_mask as bool, i8, u8"),
    "strided keys": (_arguments(key=normal(1, 2, 20, 16)[:, :, :9]), "contiguous; .*not contiguous"),
    "one query to BSND": (_arguments(ONE, input_layout="BNSD_BSND"), "more than one query"),
    "17 queries to NBSD": (_arguments((1, 4, 17, 16), input_layout="BNSD_NBSD"), "at most 16 where as NBSD"),
    "a length too long": (_arguments(actual_seq_lengths_kv=[10]), "none longer than its tensor"),
    "a mask of two heads": (_arguments(atten_mask=_hides(1, 4, 5, 9)), r"an atten_mask \(1, Q, S\)"),
    "a mask of fewer keys": (_arguments(atten_mask=_hides(1, 1, 5, 8)), r"an atten_mask \(1, Q, S\)"),
    "mask [1, 1, 1, S]": (_arguments(ONE, atten_mask=_hides(1, 1, 1, 9)), "ignored beyond key 512 .*issue 15503"),
    "bias of one head for all": (
        _arguments(ONE, pse_shift=torch.zeros(1, 1, 1, 9, dtype=torch.bfloat16)),
        "accepted and wrong .*15503",
    ),
    "a window for one query": (_arguments(ONE, sparse_mode=4, atten_mask=COMPRESSED), "dropped in silence"),
    "causal without its mask": (_arguments(sparse_mode=3), "the compressed mask, 2048 x 2048"),
    "causal with a full mask": (_arguments(sparse_mode=3, atten_mask=_hides(1, 1, 5, 9)), "the compressed mask"),
    "prefix mode": (_arguments(sparse_mode=5), "sparse_mode 0, 1, 2, 3 or 4"),
    "mode 1 without a mask": (_arguments(sparse_mode=1), "an atten_mask with sparse_mode 1"),
    "packed without a mask": (
        _packed(sparse_mode=0, atten_mask=None),
        "plain mean of the values .*issue 13699",
    ),
    "packed without lengths": (_packed(actual_seq_lengths=None), "as prefix sums"),
    "counts for prefix sums": (_packed(actual_seq_lengths=[5, 3]), "as prefix sums"),
    "packed head size 256": (_packed(256), "head sizes of keys and values 64/64, 128/128, 192/192, 192/128"),
    "packed high performance": (_packed(inner_precise=1), "inner_precise 0, or 0 and 1 in float16"),
    "pages without lengths": (_paged(actual_seq_lengths_kv=None), "actual_seq_lengths_kv beside block_table"),
    "pages of int64": (_paged(block_table=torch.zeros(1, 2, dtype=torch.int64)), "block_table int32"),
    "pages of 24": (_paged(block_size=24), "block_size of 16 n"),
    "pages of another size": (_paged(block_size=32), "pages .*block_size"),
    "a page that is not there": (_paged(block_table=torch.tensor([[0, 3]], dtype=torch.int32)), "every page"),
    "rope of one side": (_latent(key_rope=None), "query_rope and key_rope together"),
    "rope of 32": (_latent(query_rope=normal(1, 4, 2, 32)), "with 64 for the head size"),
    "rope at head size 256": (
        _latent(query=normal(1, 4, 2, 256), key=normal(1, 1, 9, 256), value=normal(1, 1, 9, 256)),
        "512 or 128",
    ),
    "rope over two key heads": (
        _latent(
            key=normal(1, 2, 9, 512), value=normal(1, 2, 9, 512), key_rope=normal(1, 2, 9, 64), num_key_value_heads=2
        ),
        "over one key head",
    ),
    "rope and a sum": (_latent(softmax_lse_flag=True), "no softmax_lse_flag beside rope"),
    "one query, rows mended": (_arguments(ONE, inner_precise=2), "inner_precise 0 or 1 for one query"),
    "half-precision softmax": (
        {k: v.half() if isinstance(v, torch.Tensor) else v for k, v in _arguments(inner_precise=1).items()},
        "not modelled by porter",
    ),
    "quantized keys": (_arguments(antiquant_scale=torch.ones(2)), "quantize inside the operator"),
    "left padding": (_arguments(kv_padding_size=torch.ones(1)), "not modelled"),
    "torch's polarity": (_arguments(sparse_mode=3, atten_mask=~COMPRESSED), "True and 1 are masked out"),
    "a row without keys": (
        _arguments(atten_mask=~_hides(1, 1, 5, 9)),
        "inner_precise 2 or 3 where a query is masked from every key",
    ),
}


def _run(operator: Any, arguments: dict[str, Any]) -> None:
    """Call with query, key and value by position."""
    tensors = {"query", "key", "value"}
    operator(
        *(arguments[name] for name in ("query", "key", "value")),
        **{name: value for name, value in arguments.items() if name not in tensors},
    )


@pytest.mark.parametrize("label", REFUSED)
def test_refused_in_words(npu: Any, label: str) -> None:
    arguments, words = REFUSED[label]
    with pytest.raises(VendorRefusal, match=f"npu_fused_infer_attention_score: needs .*{words}"):
        _run(npu.npu_fused_infer_attention_score, arguments)


@pytest.mark.parametrize("make", [_arguments, _packed, _paged, _latent])
def test_the_calls_that_refusals_start_from_are_taken(npu: Any, make: Any) -> None:
    arguments = make()
    _run(npu.npu_fused_infer_attention_score, arguments)


@pytest.mark.parametrize("name", ["num_heads", "num_key_value_heads", "scale", "input_layout", "sparse_mode"])
def test_defaults_that_fit_no_model_must_be_passed(npu: Any, name: str) -> None:
    arguments = _arguments()
    del arguments[name]
    with pytest.raises(VendorRefusal, match=f"{name} is left out; its default"):
        _run(npu.npu_fused_infer_attention_score, arguments)


def _second(**extra: Any) -> dict[str, Any]:
    renamed = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
    }
    return {renamed.get(name, name): value for name, value in _packed(**extra).items()}


@pytest.mark.parametrize(
    "extra, words",
    [
        ({"learnable_sink": torch.zeros(4)}, "learnable_sink bfloat16"),
        ({"learnable_sink": torch.zeros(3, dtype=torch.bfloat16)}, r"learnable_sink bfloat16 \[heads\]"),
        ({"learnable_sink": torch.zeros(4, dtype=torch.bfloat16), "size": 192}, "values of at most 128"),
        ({"query_quant_mode": 3}, "query_quant_mode to be one of 0"),
        ({"query_dtype": 1}, "are reserved"),
    ],
)
def test_second_version_refuses(npu: Any, extra: dict[str, Any], words: str) -> None:
    arguments = _second(**extra)
    with pytest.raises(VendorRefusal, match=f"npu_fused_infer_attention_score_v2: needs .*{words}"):
        _run(npu.npu_fused_infer_attention_score_v2, arguments)


def test_310p_is_refused() -> None:
    with emulated_npu(I310P):
        import torch_npu

        arguments = _arguments()
        with pytest.raises(VendorRefusal, match="is not documented for ascend-310p"):
            _run(torch_npu.npu_fused_infer_attention_score, arguments)
