"""The two ways porter says no: bad input (exit 2) and a negative answer (exit 1)."""

from __future__ import annotations


class PorterError(Exception):
    """Bad usage or bad input: one line naming the file, the field, what was expected and what to do. Exit status 2."""

    exit_code = 2


class Refusal(PorterError):
    """The answer is no: a proof failed, drift was found, the model does not fit. Exit status 1."""

    exit_code = 1
