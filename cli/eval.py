"""`porter eval`: perplexity and agreement of a ported model with its original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from porter.cli.emulation import EmulateOption, emulation
from porter.cli.output import JsonOption, emit
from porter.models.auto_class import text_config


def evaluate(
    directory: Annotated[Path, typer.Argument(help="Directory that `porter adapt` wrote.")],
    against: Annotated[str, typer.Option(help="Original checkpoint directory.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text file.")],
    tokens: Annotated[int, typer.Option(help="Most tokens to compare.")] = 2048,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = 512,
    emulate: EmulateOption = False,
    json_output: JsonOption = False,
) -> int:
    """Perplexity, KL divergence, top-1 agreement and first diverging token, teacher-forced on a text.

    Example: porter eval port --against checkpoint --text benchmarks/evaluation_text.txt
    """
    from porter.errors import PorterError
    from porter.evaluation import evaluate as compare
    from porter.original import original_directory, original_model
    from porter.runtime import load
    from porter.tokenization import encode, tokenizer_of

    if tokens < 2 or window < 2:
        raise PorterError("--tokens and --window must be at least 2")
    words = _read(text)
    source = original_directory(str(against))
    reference = original_model(source)
    with emulation(directory, emulate):
        candidate = load(directory)
        if text_config(candidate.config).vocab_size != text_config(reference.config).vocab_size:
            raise PorterError(f"--against {against}: its vocabulary is not {directory}'s; name the port's original")
        ids = encode(tokenizer_of(directory), words)[0, :tokens]
        if ids.numel() < 2:
            raise PorterError(f"{text}: holds {ids.numel()} tokens; at least 2 are needed")
        result: dict[str, Any] = compare(candidate, reference, ids, window).to_json()
    emit(result, json_output, lambda console: _render(console, result))
    return 0


def _read(text: Path) -> str:
    from porter.errors import PorterError

    if not text.is_file():
        raise PorterError(f"--text {text}: not found; name a UTF-8 text file")
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PorterError(
            f"--text {text}: byte {error.start} is not UTF-8 ({error.reason}); save it as UTF-8 text"
        ) from error


def _render(console: Console, result: dict[str, Any]) -> None:
    console.print(
        f"perplexity {result['perplexity']:.4f} against {result['reference_perplexity']:.4f} "
        f"({100 * (result['perplexity_ratio'] - 1):+.3f} %) on {result['tokens']} tokens"
    )
    console.print(
        f"top-1 agreement {result['top1_agreement']:.2%}, KL mean {result['kl_mean']:.2e} max {result['kl_max']:.2e}, "
        f"first divergence: {result['first_divergence']}"
    )
