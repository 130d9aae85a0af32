"""The rewrites that porter knows, in the order in which they are tried."""

from __future__ import annotations

from porter.models.rewrite import Rewrite
from porter.models.rewrites.attention import GroupedQueryAttention
from porter.models.rewrites.compressor import Compressor
from porter.models.rewrites.decoder_layer import DecoderLayer
from porter.models.rewrites.experts import StackedExperts
from porter.models.rewrites.fused_mlp import FusedGatedMLP
from porter.models.rewrites.gated_attention import GatedAttention
from porter.models.rewrites.gated_delta_net import GatedDeltaNet
from porter.models.rewrites.gated_mlp import GatedMLP
from porter.models.rewrites.gated_norm import GatedRMSNorm
from porter.models.rewrites.grouped_linear import GroupedLinear
from porter.models.rewrites.grouped_softmax_router import GroupedSoftmaxRouter
from porter.models.rewrites.hybrid_layer import HybridLayer
from porter.models.rewrites.hyper_connection import HyperConnection, HyperLayer
from porter.models.rewrites.mla import MultiHeadLatentAttention
from porter.models.rewrites.norm import RMSNorm
from porter.models.rewrites.sandwich_layer import SandwichLayer
from porter.models.rewrites.score_router import ScoreRouter
from porter.models.rewrites.shared_expert import GatedSharedExpert
from porter.models.rewrites.shared_kv_attention import SharedKVAttention
from porter.models.rewrites.sigmoid_router import GroupedSigmoidRouter, SigmoidRouter
from porter.models.rewrites.sink_attention import SinkAttention
from porter.models.rewrites.softmax_router import SoftmaxRouter
from porter.models.rewrites.sparse_attention import LightningIndexer, SparseLatentAttention
from porter.models.rewrites.unweighted_norm import UnweightedRMSNorm
from porter.models.rewrites.vision_attention import VisionAttention

REWRITES: tuple[Rewrite, ...] = (
    GatedRMSNorm(),
    RMSNorm(),
    UnweightedRMSNorm(),
    GroupedLinear(),
    GatedMLP(),
    FusedGatedMLP(),
    GatedDeltaNet(),
    GatedAttention(),
    SinkAttention(),
    GroupedQueryAttention(),
    VisionAttention(),
    MultiHeadLatentAttention(),
    LightningIndexer(),
    SparseLatentAttention(),
    Compressor(),
    SharedKVAttention(),
    ScoreRouter(),
    GroupedSigmoidRouter(),
    GroupedSoftmaxRouter(),
    SigmoidRouter(),
    SoftmaxRouter(),
    StackedExperts(),
    GatedSharedExpert(),
    HyperConnection(),
    HyperLayer(),
    DecoderLayer(),
    HybridLayer(),
    SandwichLayer(),
)
