"""`porter run`: generate text with a ported model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from porter.cli.emulation import EmulateOption, emulation
from porter.cli.output import JsonOption, emit, say


def run(
    directory: Annotated[Path, typer.Argument(help="Directory that `porter adapt` wrote.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "Once upon a time",
    new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 32,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    speculative: Annotated[
        bool, typer.Option("--speculative", help="Draft tokens with the model's prediction layer.")
    ] = False,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to draft a step, with --speculative (default: 1).")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse an Op's fallback to the reference.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the directory's code.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="First compare every weight with port.json.")] = False,
    emulate: EmulateOption = False,
    json_output: JsonOption = False,
) -> int:
    """Generate greedily over a contiguous key-value cache.

    With --speculative, a multi-token prediction layer drafts tokens that the model then checks, several in a step:
    the text is the model's own, and the share of drafts that it accepted is printed.

    Example: porter run port "The capital of France is" --new-tokens 8
    """
    from porter.errors import PorterError, Refusal
    from porter.generation import stop_tokens
    from porter.kernels.contract import StrictFallback
    from porter.kernels.dispatch import usage
    from porter.prediction_layer import load_prediction_layer
    from porter.runtime import load
    from porter.tokenization import encode, tokenizer_of

    if new_tokens < 1:
        raise PorterError(f"--new-tokens {new_tokens}: must be at least 1")
    if draft_tokens is not None and not speculative:
        raise PorterError("--draft-tokens: tokens are drafted with --speculative; add it, or leave this out")
    drafts = 1 if draft_tokens is None else draft_tokens
    if drafts < 1:
        raise PorterError(f"--draft-tokens {drafts}: must be at least 1")
    tokens, steps, printed = [], [], ""
    try:
        with emulation(directory, emulate):
            model = load(directory, strict=strict, trust_remote_code=trust_remote_code, verify=verify)
            tokenizer = tokenizer_of(directory)
            input_ids = encode(tokenizer, prompt)
            if stream and not json_output:
                typer.echo(prompt, nl=False)
            layer = load_prediction_layer(directory, model, strict=strict) if speculative else None
            for step in _generated(model, layer, input_ids, new_tokens, drafts, stop_tokens(model)):
                tokens += step.tokens.view(-1).tolist()
                steps.append(step)
                if stream and not json_output:
                    printed = _print_more(tokenizer.decode(tokens, skip_special_tokens=True), printed)
    except StrictFallback as error:
        raise Refusal(f"--strict: {error}; leave --strict out to use the reference there") from error
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    fallbacks = [row for part in (model, layer) if part is not None for row in usage(part) if row["fallbacks"]]
    after = sum(step.seconds for step in steps[1:])
    result: dict[str, Any] = {
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "time_to_first_token": steps[0].seconds,
        "time_per_output_token": after / (len(tokens) - 1) if len(tokens) > 1 else None,
        "fallbacks": fallbacks,
        "speculation": _speculation(steps) if speculative else None,
    }
    emit(result, json_output, lambda console: typer.echo(text[len(printed) :] if stream else prompt + text))
    if speculative:
        say(_speculation_line(result["speculation"]))
    for line in _fallback_lines(fallbacks):
        say(line)
    return 0


def _generated(
    model: Any, layer: Any, input_ids: Any, new_tokens: int, drafts: int, stop: frozenset[int]
) -> Iterator[Any]:
    """Steps with drafts of the prediction `layer`, or without where it is None."""
    from porter.generation import generate
    from porter.speculation import generate_speculatively

    if layer is None:
        return generate(model, input_ids, new_tokens, stop=stop)
    return generate_speculatively(model, layer, input_ids, new_tokens, drafts=drafts, stop=stop)


def _speculation(steps: list[Any]) -> dict[str, Any]:
    """How many tokens were drafted and accepted, over all steps; the rate is None where none were drafted."""
    drafted, accepted = sum(s.drafted for s in steps), sum(s.accepted for s in steps)
    return {
        "steps": len(steps),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
    }


def _speculation_line(result: dict[str, Any]) -> str:
    share = f"{result['acceptance_rate']:.1%}" if result["drafted"] else "nothing to accept"
    return f"{result['accepted']} of {result['drafted']} drafted tokens accepted ({share}), in {result['steps']} steps"


def _print_more(text: str, printed: str) -> str:
    """Print what `text` adds to `printed`, unless it ends within a character; what is printed now."""
    if text.endswith("�"):
        return printed
    typer.echo(text[len(printed) :], nl=False)
    return text


def _fallback_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One line for each reason of a provider, with the Ops that it refused."""
    refused: dict[str, set[str]] = {}
    for row in rows:
        for fallback in row["fallbacks"]:
            why = f"{fallback['provider']} refuses: {fallback['reason']}"
            refused.setdefault(why, set()).add(f"{row['op']}/{row['variant']}")
    return [f"fallback to the reference: {', '.join(sorted(ops))}: {why}" for why, ops in sorted(refused.items())]
