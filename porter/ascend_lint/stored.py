"""Stored tensors: those that nothing reads, dtypes that the chip has not, tables that are too short, layouts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from torch import Tensor

from porter.ascend_lint.evidence import Evidence
from porter.ascend_lint.finding import LintedFault
from porter.kernels.ascend.layout import misplaced

UNREAD: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"norm[^.]*\.bias$"),
        "norm-bias",
        "smoothing left it: the fused norms have no bias, so add it after them",
    ),
    (
        re.compile(r"(q_rot|k_rot|heads_rotation|rotation)(\.weight)?$"),
        "rotation",
        "the weights were turned by it: apply it, and no Hadamard matrix of another maker's",
    ),
    (
        re.compile(r"\.(input_offset|weight_offset|quant_bias|scale_bias|deq_scale|kv_cache_scale)$"),
        "quantization-part",
        "the codes mean nothing without it: give it to the operator",
    ),
)
"""Names of tensors that change the numbers where they are left out, by rule, and what to do."""
FLOATS = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BF16": "bfloat16", "F16": "float16"}
"""Spellings of headers to those of chips; F8_E8M0, scales of blocks, comes with the codes that it belongs to."""
TABLE = re.compile(r"(^|[._])(cos|sin)(_cached|_cache)$|cos_sin_cache$|freqs_cis$")


def unread(evidence: Evidence) -> Iterator[LintedFault]:
    """Tensors of the checkpoint that the model has no place for."""
    held = {name for name, _ in evidence.model.named_parameters(remove_duplicate=False)}
    held |= {name for name, _ in evidence.model.named_buffers(remove_duplicate=False)}
    for name in evidence.stored:
        if name in held:
            continue
        known = [(f"unread-{kind}", words) for pattern, kind, words in UNREAD if pattern.search(name)]
        rule, remedy = known[0] if known else ("unread", "no module has a place for it")
        owner, _, leaf = name.rpartition(".")
        yield LintedFault(rule, owner, leaf, "read", "read by nothing", remedy)


def dtypes(evidence: Evidence) -> Iterator[LintedFault]:
    """Stored dtypes that the chip does not compute in; one finding for each."""
    seen: dict[str, str] = {}
    for name, dtype in evidence.stored.items():
        kind = FLOATS.get(dtype)
        if kind is not None and kind not in evidence.chip.dtypes:
            seen.setdefault(kind, name)
    for kind, name in seen.items():
        has = ", ".join(evidence.chip.dtypes)
        remedy = f"requantize to what {evidence.chip.name} has"
        yield LintedFault("chip-dtype", name.rpartition(".")[0], name.rpartition(".")[2], has, kind, remedy)


def tables(evidence: Evidence) -> Iterator[LintedFault]:
    """Tables of cosines and sines with fewer rows than a sequence may have positions."""
    for path, module in evidence.model.named_modules():
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, table in held.items():
            if isinstance(table, Tensor) and TABLE.search(name) and 0 < len(table) < evidence.positions:
                remedy = "make it as long as the longest position; beyond it the last row, or other memory, is read"
                wanted = f"{evidence.positions} rows"
                yield LintedFault("rope-range", path, name, wanted, f"{len(table)} rows", remedy)


def blocked(evidence: Evidence) -> Iterator[LintedFault]:
    """Parameters in FRACTAL_NZ that no product of the vendor's reads."""
    vendor = sys.modules.get("torch_npu")
    for line in misplaced(vendor, evidence.model) if vendor is not None else ():
        name, _, why = line.partition(": ")
        owner, _, leaf = name.rpartition(".")
        yield LintedFault("nz-format", owner, leaf, "plain", f"in FRACTAL_NZ ({why})", "cast only weights of products")
