"""Whether golden and candidate were given the same tokens: what must hold before any of their tensors can agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from porter.alignment.model_call import input_embeddings
from porter.alignment.report import SanityCheck
from porter.errors import PorterError
from porter.golden.store import Golden


def same_tokens(golden: Golden, candidate: Golden) -> Iterator[SanityCheck]:
    """Whether two recordings were given the same prompts; their order, batching and padding may differ."""
    mine, theirs = prompts_of(candidate), prompts_of(golden)
    if mine is None or theirs is None:
        yield SanityCheck("token-ids", "", "note", "a recording does not say which tokens it was given")
        return
    if sorted(mine) == sorted(theirs):
        yield SanityCheck("token-ids", "", "ok", f"both recordings were given the same {len(mine)} prompts")
        return
    yield SanityCheck("token-ids", "", "invalid", _difference(theirs, mine))


def prompts_of(golden: Golden) -> list[list[int]] | None:
    """Every prompt without its padding; None where the root was given something else than token ids."""
    rows: list[list[int]] = []
    for batch in golden.batches:
        if batch.tokens is None:
            return None
        keep = torch.ones_like(batch.tokens) if batch.attention_mask is None else batch.attention_mask
        if keep.shape != batch.tokens.shape:
            return None
        rows += [row[kept.bool()].tolist() for row, kept in zip(batch.tokens, keep, strict=True)]
    return rows


def _difference(golden: Sequence[list[int]], candidate: Sequence[list[int]]) -> str:
    """The first prompt that differs, and what a tokenizer commonly does to bring that about."""
    if len(golden) != len(candidate):
        return f"{len(golden)} prompts in the golden and {len(candidate)} in the candidate: record both on the same"
    number = next(i for i, (one, other) in enumerate(zip(golden, candidate, strict=True)) if one != other)
    one, other = golden[number], candidate[number]
    if one[1:] == other or other[1:] == one:
        side, token = ("golden", one[0]) if one[1:] == other else ("candidate", other[0])
        return f"prompt {number}: only the {side} begins with token {token} (add_bos_token?): record both alike"
    if len(one) != len(other):
        return f"prompt {number}: {len(one)} tokens in the golden and {len(other)} in the candidate"
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return (
        f"prompt {number}: token {place} is {one[place]} in the golden and {other[place]} in the candidate: the "
        "tokenizers or the prompts differ, so outputs cannot agree"
    )


def vocabulary_holds(golden: Golden, model: nn.Module) -> Iterator[SanityCheck]:
    """Whether the candidate embeds every token that the golden was given."""
    rows = getattr(getattr(input_embeddings(model), "weight", None), "shape", None)
    prompts = prompts_of(golden)
    if not rows or not prompts:
        return
    largest = max((max(row, default=0) for row in prompts), default=0)
    if largest >= rows[0]:
        yield SanityCheck(
            "token-ids",
            "",
            "invalid",
            f"the golden's prompts hold token {largest}, but the candidate embeds {rows[0]}: another vocabulary",
        )
    else:
        yield SanityCheck("token-ids", "", "ok", "the candidate is given the golden's own tokens")


def tokenizer_check(golden: Golden, directory: Path) -> list[SanityCheck]:
    """Whether the tokenizer beside a candidate gives the golden's tokens for the golden's prompts.

    The comparison stands either way, since the candidate is given the golden's tokens; but a user's text would reach
    the candidate as other tokens. Nothing where the golden has no prompts as text or the directory no tokenizer.
    """
    texts, rows = golden.manifest.get("prompts"), prompts_of(golden)
    if not texts or rows is None or len(texts) != len(rows) or not directory.is_dir():
        return []
    from porter.tokenization import encode, tokenizer_of

    try:
        tokenizer = tokenizer_of(directory)
        mine: list[list[int]] = [encode(tokenizer, text)[0].tolist() for text in texts]
    except PorterError:
        return []
    # A golden may hold only the beginning of a prompt.
    if all(one[: len(row)] == row for one, row in zip(mine, rows, strict=True)):
        return [SanityCheck("tokenizer", "", "ok", "the candidate's tokenizer gives the golden's tokens")]
    return [SanityCheck("tokenizer", "", "note", f"the candidate's tokenizer differs: {_difference(rows, mine)}")]
