"""`porter bench`: time a ported model, beside plain transformers if asked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.cli.output import JsonOption, emit
from porter.models.auto_class import text_config


def bench(
    directory: Annotated[Path, typer.Argument(help="Directory that `porter adapt` wrote.")],
    against: Annotated[str | None, typer.Option(help="Original checkpoint, under plain transformers.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated.")] = 64,
    repeats: Annotated[int, typer.Option(help="Timed repeats after one warm-up.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads; 0 keeps torch's choice.")] = 0,
    json_output: JsonOption = False,
) -> int:
    """Time to first token, time per output token, memory, and the share of the memory roofline.

    Example: porter bench port --against checkpoint --threads 2
    """
    import torch

    from porter.adaptation import plan_port
    from porter.benchmark import plain_models, time_plain, time_port
    from porter.errors import PorterError
    from porter.original import original_directory
    from porter.runtime import load, read_manifest

    if min(prompt_tokens, repeats) < 1 or new_tokens < 2:
        raise PorterError("--prompt-tokens and --repeats must be at least 1, --new-tokens at least 2")
    if threads < 0:
        raise PorterError(f"--threads {threads}: must be at least 1, or 0 for torch's choice")
    source = original_directory(against) if against else None
    if threads:
        torch.set_num_threads(threads)
    model = load(directory)
    manifest = read_manifest(directory)
    plan = plan_port(str(directory), manifest["chip"], scheme=manifest["scheme"]).plan
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text_config(model.config).vocab_size, (1, prompt_tokens), generator=generator)
    label = f"porter {manifest['scheme']}"
    rows = [time_port(label, model, ids, new_tokens, repeats, plan.bytes_read_per_token)]
    for name, plain in (plain_models(source) if source else {}).items():
        rows.append(time_plain(name, plain, ids, new_tokens, repeats))
    best = min((r.time_per_output_token for r in rows[1:]), default=None)
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "timings": [r.to_json() for r in rows],
        "speedup": None if best is None else best / rows[0].time_per_output_token,
    }
    emit(result, json_output, lambda console: _render(console, result))
    return 0


def _render(console: Console, result: dict[str, Any]) -> None:
    table = Table("", "TTFT ms", "TPOT ms", "tokens/s", "process peak MB", "MB read/token", "of roofline")
    for row in result["timings"]:
        read, share = row["bytes_read_per_token"], row["share_of_roofline"]
        table.add_row(
            row["label"],
            f"{row['time_to_first_token'] * 1e3:.1f}",
            f"{row['time_per_output_token'] * 1e3:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['peak_memory_bytes'] / 1e6:.0f}",
            f"{read / 1e6:.1f}" if read else "",
            f"{share:.0%}" if share else "",
        )
    console.print(table)
    console.print(f"decode steps of {result['timings'][0]['label']}: {result['timings'][0]['decode']}")
    if result["speedup"] is not None:
        console.print(
            f"decode: {result['speedup']:.2f} times the faster plain transformers, {result['threads']} threads"
        )
