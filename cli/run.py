"""`porter run`: generate text with a ported model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from porter.cli.output import JsonOption, emit


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
    from porter.errors import PorterError
    from porter.generation import generate, stop_tokens
    from porter.kernels.dispatch import usage
    from porter.runtime import load
    from porter.tokenization import encode, tokenizer_of

    if new_tokens < 1:
        raise PorterError(f"--new-tokens {new_tokens}: must be at least 1")
    model = load(directory, strict=strict, trust_remote_code=trust_remote_code, verify=verify)
    tokenizer = tokenizer_of(directory)
    input_ids = encode(tokenizer, prompt)
    tokens: list[int] = []
    printed = ""
    if stream and not json_output:
        typer.echo(prompt, nl=False)
    seconds = []
    for step in generate(model, input_ids, new_tokens, stop=stop_tokens(model)):
        tokens.append(int(step.tokens[0]))
        seconds.append(step.seconds)
        if stream and not json_output:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            if not text.endswith("�"):
                typer.echo(text[len(printed) :], nl=False)
                printed = text
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
    reasons = {(f"{r['op']}/{r['variant']}", f["provider"], f["reason"]) for r in fallbacks for f in r["fallbacks"]}
    for op, provider, reason in sorted(reasons):
        typer.echo(f"fallback to the reference: {op}: {provider} {reason}", err=True)
    return 0
