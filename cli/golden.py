"""`porter golden`: record what every module of the source model receives and returns, and look at such a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.cli.output import JsonOption, emit, progress, say

app = typer.Typer(help="Record the source model's tensors, and look at a recording.", no_args_is_help=True)

_BATCH_SIZE = 8


@app.command()
def capture(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or the name of a shipped model.")],
    output: Annotated[Path, typer.Option(help="Directory to write the golden to.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Text, one prompt a line, or JSONL with a `prompt` field.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="JSON: a list of token-id lists; needs no tokenizer.")] = None,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to generate greedily per prompt.")] = 0,
    modules: Annotated[str | None, typer.Option(help="Record only modules whose name matches this regex.")] = None,
    detail: Annotated[str, typer.Option(help="full: whole tensors; sketch: projections; stats: statistics.")] = "full",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), fp32, bf16, fp16 or fp64.")] = "auto",
    device: Annotated[str, typer.Option(help="Torch device to run on.")] = "cpu",
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = _BATCH_SIZE,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut prompts to this many tokens.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's code.")] = False,
    json_output: JsonOption = False,
) -> int:
    """Record a golden of MODEL: every module's inputs and outputs at prefill and at each decode step.

    Run again after an interruption, it continues with the first batch that is missing.

    Example: porter golden capture tiny-qwen3 --output golden --prompt "Once upon a time" --new-tokens 4
    """
    from porter.golden.capture import capture as record
    from porter.golden.overview import overview
    from porter.golden.recorder import check_request
    from porter.golden.source import device_of, load_source, source_directory
    from porter.golden.writer import check_directory

    check_request(detail, modules)
    check_directory(output)
    place = device_of(device)
    directory = source_directory(model, trust_remote_code)
    texts, rows = _requested(directory, prompts, prompt, tokens)
    if max_length is not None and any(len(row) > max_length for row in rows):
        say(f"{sum(len(row) > max_length for row in rows)} of {len(rows)} prompts cut to {max_length} tokens")
        rows = [row[:max_length] for row in rows]
    source = load_source(directory, dtype, place, trust_remote_code)
    batches = -(-len(rows) // batch_size)
    with progress("recording", batches * max(1, new_tokens)) as advance:
        done = 0

        def advanced(now: int, total: int) -> None:
            nonlocal done
            advance(now - done)
            done = now

        golden = record(
            source, rows, output, new_tokens,
            detail=detail, modules=modules, prompts=texts, batch_size=batch_size, progress=advanced,
        )  # fmt: skip
    result = overview(golden)
    emit(result, json_output, lambda console: _print(console, result))
    return 0


@app.command()
def show(
    golden: Annotated[Path, typer.Argument(help="Directory that `porter golden capture` wrote.")],
    json_output: JsonOption = False,
) -> int:
    """Show what a golden holds: the run, its size, missing modules, the first value that is not finite.

    Example: porter golden show golden
    """
    from porter.golden.overview import overview
    from porter.golden.store import Golden

    result = overview(Golden.open(golden))
    emit(result, json_output, lambda console: _print(console, result))
    return 0


@app.command("import")
def import_(
    dump: Annotated[Path, typer.Argument(help="What the tool wrote: a directory, or its JSON file.")],
    tool: Annotated[str, typer.Option("--from", help="msprobe, sglang or hf (model_addition_debugger_context).")],
    output: Annotated[Path, typer.Option(help="Directory to write the golden to.")],
    model: Annotated[
        str | None, typer.Option(help="The checkpoint that was dumped; makes the float64 oracle possible.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank of a dump that holds several.")] = None,
    json_output: JsonOption = False,
) -> int:
    """Read the DUMP of another tool and write it as a golden; what the dump lacks is listed by name.

    Example: porter golden import dump --from msprobe --model checkpoint --output golden
    """
    from porter.golden.importers.importing import import_dump
    from porter.golden.overview import overview

    result = overview(import_dump(dump, tool, output, model, rank))
    emit(result, json_output, lambda console: _print(console, result))
    return 0


@app.command()
def gather(
    ranks: Annotated[list[Path], typer.Argument(help="The goldens of all ranks, in the order of ranks.")],
    output: Annotated[Path, typer.Option(help="Directory to write the golden to.")],
    layout: Annotated[
        Path | None, typer.Option(help="JSON list of rules that say how modules are spread over the ranks.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint of the whole model; for the float64 oracle.")] = None,
    json_output: JsonOption = False,
) -> int:
    """Put the goldens of tensor-parallel or expert-parallel ranks together to one golden of the whole model.

    Column-parallel and row-parallel layers are known by transformers' names; other layouts are given, such as
    [{"module": "qkv_proj$", "output": {"parts": [4, 2, 2]}}].

    Example: porter golden gather rank0 rank1 --output whole --model checkpoint
    """
    from porter.golden.importers.reference import reference_of
    from porter.golden.overview import overview
    from porter.golden.shard_layout import read_layout
    from porter.golden.shards import gather as put_together

    rules = None if layout is None else read_layout(layout)
    described = None if model is None else reference_of(model).described
    result = overview(put_together(ranks, output, rules, described))
    emit(result, json_output, lambda console: _print(console, result))
    return 0


def _requested(
    directory: Path, prompts: Path | None, prompt: str | None, tokens: Path | None
) -> tuple[list[str] | None, list[list[int]]]:
    """The prompts' texts, if there are any, and their token ids."""
    from porter.errors import PorterError
    from porter.golden.prompts import read_prompts, read_tokens, tokenize

    given = [
        name
        for name, value in (("--prompts", prompts), ("--prompt", prompt), ("--tokens", tokens))
        if value is not None
    ]
    if len(given) != 1:
        raise PorterError(f"give exactly one of --prompts, --prompt and --tokens, not {' and '.join(given) or 'none'}")
    if tokens is not None:
        return None, read_tokens(tokens)
    texts = [prompt] if prompt is not None else read_prompts(prompts or Path())
    if not all(text.strip() for text in texts):
        raise PorterError("--prompt is empty; give some text")
    return texts, tokenize(texts, directory)


def _print(console: Console, result: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in _lines(result):
        table.add_row(name, text)
    console.print(table)
    for entry in (result["imported"] or {}).get("missing", ()):
        console.print(f"not in the dump: {entry['what']}: {entry['why']}", markup=False)
    for entry in (result["gathered"] or {}).get("unequal", ()):
        where = f"{entry['module'] or '(root)'} {entry['side']} at step {entry['step']}"
        console.print(f"rank {entry['rank']} differs: {where}, by {entry['error']:.2g}", markup=False)
    for entry in result["missed"] or ():
        console.print(f"missed: {entry['module'] or '(root)'}: {entry['why']}", markup=False)


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    model, bad = result["model"], result["not_finite"]
    weights = model["checkpoint"] or ("stored in the golden" if model["weights"] else "not recorded")
    calls = ", ".join(f"{count} {kind}" for kind, count in list(result["calls"].items())[:6])
    return [
        ("golden", result["golden"]),
        ("state", "complete" if result["complete"] else f"INCOMPLETE: {result['incomplete']}"),
        ("model", f"{model['class']}, {model['parameters']:,} parameters"),
        ("weights", weights),
        ("recorded", f"{result['detail']}, {result['dtype']} on {result['device']}, {result['created']}"),
        ("run", f"{result['batches']} batches, {result['steps']} steps, {result['new_tokens']} new tokens"),
        ("records", f"{result['records']} calls of {result['recorded_modules']} modules: {calls}"),
        ("size", f"{result['bytes'] / 1e6:.1f} MB"),
        ("not finite", "nothing" if bad is None else
            f"step {bad['step']}, {bad['module'] or '(root)'}: {bad['nan']} NaN, {bad['inf']} infinite"),
    ]  # fmt: skip
