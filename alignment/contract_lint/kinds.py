"""The numeric contracts by name: why each matters, and by which parameter names each is recognised."""

from __future__ import annotations

import re

import torch

KINDS: dict[str, str] = {
    "router-dtype": "scores that lie close change order when rounded, and tokens go to other experts",
    "router-bias-dtype": "in bf16 a bias keeps 8 bits: biases that tell experts apart become equal",
    "rope-dtype": "the angle is position times frequency, so a rounded frequency errs in proportion to the position",
    "rope-range": "positions beyond the table read past it or reuse its last row",
    "state-dtype": "a recurrent state is rounded at every step, so its error grows with the length",
    "norm-weight-dtype": "a norm's weight scales every activation of its layer",
    "norm-accumulation": "the mean of squares over thousands of elements loses all small ones in 8 bits",
    "softmax-dtype": "exponentials are summed over the whole context, and 8 bits cannot hold the small ones",
    "bias-dtype": "a bias is added to every output of its layer",
    "kv-cache-dtype": "every later token reads the rounded keys and values, so the error grows with the length",
    "narrower": "stored in fewer bits than the golden's",
    "narrow-cast": "values are rounded on the way, whatever dtype comes out",
    "config": "a field that changes the numbers differs",
    "unread": "nothing is known of its casts",
}
"""Kind of finding to why it matters."""

STORED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("router-bias-dtype", re.compile(r"e_score_correction_bias$|(^|\.)(gate|router)\.bias$")),
    ("router-dtype", re.compile(r"(^|\.)(gate|router)\.weight$")),
    ("rope-dtype", re.compile(r"inv_freq$|(^|[._])(cos|sin)(_cached|_cache)?$|cos_sin_cache$|freqs_cis$")),
    ("state-dtype", re.compile(r"(^|\.)(A_log|dt_bias|D|ssm_state|recurrent_state)$")),
    ("norm-weight-dtype", re.compile(r"norm[^.]*\.(weight|bias)$|(^|\.)ln_[^.]*\.(weight|bias)$")),
    ("bias-dtype", re.compile(r"(^|\.)bias$")),
)
"""Kinds by the name of a parameter or buffer, the first that matches; any other is `narrower`."""

CAUSES = {
    "router-dtype": "router-dtype",
    "router-bias-dtype": "router-dtype",
    "state-dtype": "state-dtype",
    "norm-accumulation": "low-precision",
    "norm-weight-dtype": "low-precision",
    "softmax-dtype": "low-precision",
    "bias-dtype": "low-precision",
    "narrow-cast": "low-precision",
    "narrower": "low-precision",
}
"""The cause that a finding becomes where the replay measures a drift at its module."""

ROUTER = re.compile(r"(^|\.)(gate|router)$")


def kind_of(name: str) -> str:
    """The kind of a parameter or buffer by its name."""
    return next((kind for kind, pattern in STORED if pattern.search(name)), "narrower")


def is_router(name: str, class_name: str) -> bool:
    """Whether a module scores experts, by its own name or its class's."""
    return bool(ROUTER.search(name)) or "router" in class_name.lower()


def precision(dtype: torch.dtype) -> float:
    """The spacing of numbers next to 1; 0 for dtypes that are no floating-point ones."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def is_narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a floating-point `dtype` keeps fewer bits than `other`."""
    return dtype.is_floating_point and other.is_floating_point and precision(dtype) > precision(other)


def short(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
