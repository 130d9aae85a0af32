"""File names and version of AscendV1 (msmodelslim save/ascendv1.py)."""

from __future__ import annotations

DESCRIPTION = "quant_model_description.json"
STEM = "quant_model_weights"
VERSION = "1.0.0"
SHARD_BYTES = 4 * 1024**3
"""Bytes of one file of weights: the saver's part_file_size of 4."""

FIELDS = frozenset(
    {
        "version", "model_quant_type", "group_size", "metadata", "optional", "kv_quant_type", "kv_cache_type",
        "fa_quant_type", "indexer_quant_type", "reduce_quant_type", "ascend_quant_method", "is_optional",
    }
)  # fmt: skip
"""Keys of the description that are no tensors."""
