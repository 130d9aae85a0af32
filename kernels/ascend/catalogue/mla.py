"""What comes before multi-head latent attention: projections, norms, rope and the write into the caches."""

from __future__ import annotations

from collections.abc import Callable

import torch

from porter.kernels.ascend.catalogue.cache import unique_slots
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, POWERS_OF_TWO, Call, Rule, VendorOp

HIDDEN_SIZES = (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)
QUERY_RANKS = (1536, 2048)
"""What npu_mla_prolog_v3 takes."""

SECOND_SCHEMA = (
    "(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor weight_dkv_kr, Tensor "
    "rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor cache_index, Tensor "
    "kv_cache, Tensor kr_cache, *, Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor? "
    "dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, Tensor? "
    "quant_scale_ckr=None, Tensor? smooth_scales_cq=None, float rmsnorm_epsilon_cq=1e-05, float "
    'rmsnorm_epsilon_ckv=1e-05, str cache_mode="PA_BSND") -> (Tensor, Tensor, Tensor, Tensor, Tensor)'
)
THIRD_SCHEMA = (
    "(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor weight_dkv_kr, Tensor "
    "rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, Tensor(a!) kv_cache, "
    "Tensor(b!) kr_cache, *, Tensor? cache_index=None, Tensor? dequant_scale_x=None, Tensor? "
    "dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, Tensor? "
    "quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None, Tensor? "
    "actual_seq_len=None, Tensor? k_nope_clip_alpha=None, float rmsnorm_epsilon_cq=1e-05, float "
    'rmsnorm_epsilon_ckv=1e-05, str cache_mode="PA_BSND", bool query_norm_flag=False, int weight_quant_mode=0, '
    "int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, int "
    "tile_size=128, float qc_qr_scale=1., float kc_scale=1., int? token_x_dtype=None, int? weight_dq_dtype=None, "
    "int? weight_uq_qr_dtype=None, int? weight_dkv_kr_dtype=None, int? kv_cache_dtype=None) -> (Tensor, Tensor, "
    "Tensor, Tensor, Tensor)"
)


def _sized(shapes: Callable[[Call], bool]) -> Rule:
    return that(
        "token_x [.., He], weight_dq [He, Hcq], weight_uq_qr [Hcq, N * (D + Dr)], weight_uk [N, D, Hckv], "
        "weight_dkv_kr [He, Hckv + Dr], gammas [Hcq] and [Hckv], rope_sin and rope_cos [.., Dr], caches [blocks, block "
        "size, 1, Hckv] and [.., Dr] that fit together",
        shapes,
        *("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rope_sin", "kv_cache", "kr_cache"),
    )


def _shapes_fit(call: Call) -> bool:
    x, uk, sin = call["token_x"], call["weight_uk"], call["rope_sin"]
    kv, kr = call["kv_cache"], call["kr_cache"]
    if x.dim() not in (2, 3) or uk.dim() != 3 or kv.dim() != 4:
        return False
    (hidden, rank_q), (heads, nope, rank_kv), rope = call["weight_dq"].shape, uk.shape, sin.shape[-1]
    return (
        x.shape[-1] == hidden
        and tuple(call["weight_uq_qr"].shape) == (rank_q, heads * (nope + rope))
        and tuple(call["weight_dkv_kr"].shape) == (hidden, rank_kv + rope)
        and tuple(call["rmsnorm_gamma_cq"].shape) == (rank_q,)
        and tuple(call["rmsnorm_gamma_ckv"].shape) == (rank_kv,)
        and tuple(sin.shape) == tuple(call["rope_cos"].shape) == (*x.shape[:-1], rope)
        and tuple(kv.shape[2:]) == (1, rank_kv)
        and tuple(kr.shape) == (*kv.shape[:2], 1, rope)
    )


def _index_fits(call: Call) -> bool:
    index = call["cache_index"]
    return index is not None and index.dtype == torch.int64 and index.shape == call["token_x"].shape[:-1]


def _size(says: str, value: Callable[[Call], int], *allowed: int) -> Rule:
    return that(f"{says} {', '.join(map(str, allowed))}", lambda call: value(call) in allowed, "token_x", "weight_uk")


def _prolog_rules(hidden: tuple[int, ...], ranks: tuple[int, ...], nope: tuple[int, ...]) -> tuple[Rule, ...]:
    quantized = (
        "dequant_scale_x dequant_scale_w_dq dequant_scale_w_uq_qr dequant_scale_w_dkv_kr quant_scale_ckv "
        "quant_scale_ckr smooth_scales_cq"
    ).split()
    tensors = (
        "token_x weight_dq weight_uq_qr weight_uk weight_dkv_kr rmsnorm_gamma_cq rmsnorm_gamma_ckv rope_sin rope_cos "
        "kv_cache kr_cache"
    )
    return (
        absent(*quantized, why="quantize inside the operator: not modelled by porter"),
        dtypes(tensors, "/".join(["bf16"] * len(tensors.split()))),
        contiguous(*tensors.split(), "cache_index"),
        _sized(_shapes_fit),
        _size("a hidden size He of", lambda call: call["weight_dq"].shape[0], *hidden),
        _size("a query rank Hcq of", lambda call: call["weight_dq"].shape[1], *ranks),
        _size("a head count N of", lambda call: call["weight_uk"].shape[0], *POWERS_OF_TWO),
        _size("a head size D of", lambda call: call["weight_uk"].shape[1], *nope),
        _size("a key rank Hckv of", lambda call: call["weight_uk"].shape[2], 512),
        _size("a rope size Dr of", lambda call: call["rope_sin"].shape[-1], 64),
        one_of("cache_mode", "PA_BSND"),
        that("cache_index int64, one slot for each token", _index_fits, "cache_index", "token_x"),
    )


def _slots_exist(call: Call) -> bool:
    blocks, block_size = call["kv_cache"].shape[:2]
    return unique_slots(call["cache_index"], blocks * block_size, 0)


SLOTS = that("slots of cache_index in the cache, each once", _slots_exist, "cache_index", "kv_cache")


def _queries(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    x, uk, rope = call["token_x"], call["weight_uk"], call["rope_sin"].shape[-1]
    heads = (*x.shape[:-1], uk.shape[0])
    return x.new_empty(*heads, uk.shape[2]), x.new_empty(*heads, rope)


def _second(call: Call) -> tuple[torch.Tensor, ...]:
    caches = (torch.empty_like(call[name]) for name in ("kv_cache", "kr_cache"))
    return (*_queries(call), *caches, call["token_x"].new_empty(1, dtype=torch.float32))


def _third(call: Call) -> tuple[torch.Tensor, ...]:
    x = call["token_x"]
    normed = x.new_empty((*x.shape[:-1], call["weight_dq"].shape[1]) if call["query_norm_flag"] else (0,))
    nothing = [x.new_empty(0, dtype=torch.float32) for _ in range(2)]
    return (*_queries(call), nothing[0], normed, nothing[1])


EPSILONS = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv")
NZ = ("weight_dq", "weight_uq_qr", "weight_dkv_kr")
NOTE = (
    "rope_sin comes before rope_cos. weight_dq, weight_uq_qr and weight_dkv_kr must be in FRACTAL_NZ. Rope takes "
    "neighbouring pairs and returns halves. Writes the caches in place"
)
MODES = "weight_quant_mode kv_cache_quant_mode query_quant_mode ckvkr_repo_mode quant_scale_repo_mode".split()
RESERVED = "token_x_dtype weight_dq_dtype weight_uq_qr_dtype weight_dkv_kr_dtype kv_cache_dtype".split()

OPS = (
    VendorOp(
        name="npu_mla_prolog_v2",
        schema=SECOND_SCHEMA,
        page=PAGES + "torch_npu-npu_mla_prolog_v2.md",
        chips=(A2, A3),
        outputs=_second,
        rules=(
            *_prolog_rules((7168,), (1536,), (128,)),
            that("blocks of 16 or 128", lambda call: call["kv_cache"].shape[1] in (16, 128), "kv_cache"),
            that(
                "at most 16 tokens a sequence",
                lambda c: c["token_x"].dim() == 2 or c["token_x"].shape[1] <= 16,
                "token_x",
            ),
        ),
        value_rules=(SLOTS,),
        explicit=EPSILONS,
        nz=NZ,
        note=NOTE + ", though the schema does not say so",
    ),
    VendorOp(
        name="npu_mla_prolog_v3",
        schema=THIRD_SCHEMA,
        page=PAGES + "torch_npu-npu_mla_prolog_v3.md",
        chips=(A2, A3, A5),
        outputs=_third,
        rules=(
            *(one_of(name, 0) for name in MODES),
            absent(*RESERVED, why="belong to formats that are not modelled by porter"),
            absent("actual_seq_len", "k_nope_clip_alpha"),
            *(one_of(name, 1.0) for name in ("qc_qr_scale", "kc_scale")),
            *_prolog_rules(HIDDEN_SIZES, QUERY_RANKS, (128, 192)),
            that(
                "blocks of 16 n up to 1024",
                lambda call: call["kv_cache"].shape[1] % 16 == 0 < call["kv_cache"].shape[1] <= 1024,
                "kv_cache",
            ),
        ),
        value_rules=(SLOTS,),
        explicit=EPSILONS,
        nz=NZ,
        note=NOTE,
    ),
)
