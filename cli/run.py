"""`porter run`: generate text with a ported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from porter.cli.output import JsonOption, emit, say


def run(
    directory: Annotated[Path, typer.Argument(help="Directory that `porter adapt` wrote.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "Once upon a time",
    new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 32,
    stream: Annotated[bool, typer.Option("--stream", help="Print tokens as they come.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse an Op's fallback to the reference.")] = False,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the directory's code.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="First compare every weight with port.json.")] = False,
    json_output: JsonOption = False,
) -> int:
    """Generate greedily over a contiguous key-value cache.

    Example: porter run port "The capital of France is" --new-tokens 8
    """
    from porter.errors import PorterError, Refusal
    from porter.generation import generate, stop_tokens
    from porter.kernels.contract import StrictFallback
    from porter.kernels.dispatch import usage
    from porter.runtime import load
    from porter.tokenization import encode, tokenizer_of

    if new_tokens < 1:
        raise PorterError(f"--new-tokens {new_tokens}: must be at least 1")
    tokens, seconds, printed = [], [], ""
    try:
        model = load(directory, strict=strict, trust_remote_code=trust_remote_code, verify=verify)
        tokenizer = tokenizer_of(directory)
        input_ids = encode(tokenizer, prompt)
        if stream and not json_output:
            typer.echo(prompt, nl=False)
        for step in generate(model, input_ids, new_tokens, stop=stop_tokens(model)):
            tokens.append(int(step.tokens[0]))
            seconds.append(step.seconds)
            if stream and not json_output:
                printed = _print_more(tokenizer.decode(tokens, skip_special_tokens=True), printed)
    except StrictFallback as error:
        raise Refusal(f"--strict: {error}; leave --strict out to use the reference there") from error
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    fallbacks = [row for row in usage(model) if row["fallbacks"]]
    result: dict[str, Any] = {
        "prompt": prompt,
        "text": text,
        "tokens": tokens,
        "time_to_first_token": seconds[0],
        "time_per_output_token": sum(seconds[1:]) / len(seconds[1:]) if len(seconds) > 1 else None,
        "fallbacks": fallbacks,
    }
    emit(result, json_output, lambda console: typer.echo(text[len(printed) :] if stream else prompt + text))
    for line in _fallback_lines(fallbacks):
        say(line)
    return 0


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
