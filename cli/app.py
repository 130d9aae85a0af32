"""The `porter` command: finds the subcommand, runs it, and turns whatever happens into one line and an exit status.

0: done, or aligned. 1: the answer is no. 2: bad usage, bad input, or an unexpected error.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from porter import __version__ as porter_version
from porter.checkpoint.strict_json import shown
from porter.cli.output import only_result_on_stdout, say
from porter.errors import PorterError

COMMANDS: tuple[tuple[str, str], ...] = (
    ("doctor", "porter.cli.doctor:doctor"),
    ("chips", "porter.cli.chips:chips"),
    ("models", "porter.cli.models:models"),
    ("adapt", "porter.cli.adapt:adapt"),
    ("golden", "porter.cli.golden:app"),
    ("align", "porter.cli.align:align"),
    ("bisect", "porter.cli.bisect:bisect"),
    ("eval", "porter.cli.eval:evaluate"),
    ("run", "porter.cli.run:run"),
    ("bench", "porter.cli.bench:bench"),
)
"""(command, "module:function"), in the order of the help. A function is one command; a `typer.Typer` is a group."""

ABOUT = """Ports DeepSeek and Qwen models to new chips, and names the module and the cause when the numbers drift.

Example: porter adapt tiny-deepseek-v3 --target cpu --output port"""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as a shell reports it."""

READER_GONE = 141
"""Exit status when whoever read stdout went away: 128 + SIGPIPE."""

NO_LIBRARY_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "1")
"""Environment variable, read when transformers is imported, that keeps its progress bars out of logs."""

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback when something fails.")]

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's UsageError, from whichever click this typer was built on."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point: run porter on `arguments` (default: the process's own) and exit with its status."""
    if not sys.stderr.isatty():
        os.environ.setdefault(*NO_LIBRARY_BARS)
    status = run(list(sys.argv[1:] if arguments is None else arguments))
    if status == READER_GONE:
        # Python flushes stdout once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status; errors become one line on stderr, tracebacks need --debug."""
    return guarded(lambda: _status(arguments), debug="--debug" in arguments)


def guarded(work: Callable[[], int], debug: bool) -> int:
    """The exit status of `work`, with any error turned into one line on stderr and a status."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except PorterError as error:
        return _fail(str(error), error.exit_code, debug)
    except UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "porter"
        message = getattr(error, "format_message", error.__str__)().rstrip(".")
        return _fail(f"{message}. Try '{where} --help'", 2, debug)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED, debug)
    except BrokenPipeError:
        return READER_GONE
    except SystemExit as error:
        # This is how typer ends on a broken pipe, with a status that means "no" here.
        if isinstance(error.__context__, BrokenPipeError):
            return READER_GONE
        # Nothing of porter exits here: code of a checkpoint or a candidate must not pass for success.
        return _fail(f"code that was run ended porter (SystemExit: {shown(str(error.code))})", 2, debug)
    except OSError as error:
        where = f"{shown(str(error.filename))}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}; name a path that can be used", 2, debug)
    except Exception as error:
        hint = "" if debug else "; rerun with --debug for the traceback"
        return _fail(f"{type(error).__name__}: {error}{hint}", 2, debug)


def _status(arguments: list[str]) -> int:
    words = [word for word in arguments if not word.startswith("-")]
    app = build(words[0] if words else None)
    if not arguments or (arguments == words[:1] and is_group(words[0])):
        arguments = [*arguments, "--help"]
    outcome = typer.main.get_command(app).main(args=arguments, prog_name="porter", standalone_mode=False)
    if outcome == INTERRUPTED:  # what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    return outcome if isinstance(outcome, int) else 0


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    say("porter: " + " ".join(message.split()))
    return status


def build(selected: str | None) -> typer.Typer:
    """The command tree in which only `selected` is imported: the others are there for the help, by their first line."""
    app = typer.Typer(name="porter", help=ABOUT, add_completion=False, rich_markup_mode="rich")

    @app.callback()
    def porter(
        version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
    ) -> None: ...

    porter.__doc__ = ABOUT
    for name, target in COMMANDS:
        if name == selected:
            _register(app, name, _load(target))
        else:
            app.command(name, help=_first_line(target))(_not_selected)
    return app


def _show_version(asked: bool) -> None:
    """Print porter's version and that of what it ports with."""
    if not asked:
        return
    for name in ("porter", "torch", "transformers"):
        try:
            print(name, porter_version if name == "porter" else metadata.version(name))
        except metadata.PackageNotFoundError:
            print(name, "is not installed")
    raise typer.Exit


def is_group(name: str) -> bool:
    """Whether the command `name` has subcommands of its own."""
    return dict(COMMANDS).get(name, "").endswith(":app")


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _register(app: typer.Typer, name: str, command: Any) -> None:
    if not isinstance(command, typer.Typer):
        app.command(name)(_with_debug(command))
        return
    group = typer.Typer(help=command.info.help, rich_markup_mode="rich")

    @group.callback()
    def subcommands() -> None: ...

    subcommands.__doc__ = command.info.help if isinstance(command.info.help, str) else None
    for entry in command.registered_commands:
        if entry.callback is not None:
            group.command(entry.name, help=entry.help)(_with_debug(entry.callback))
    app.add_typer(group, name=name)


def _with_debug(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --debug, which `run` reads, and keep its stdout clean under --json."""
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    parameters = [each.replace(annotation=hints.get(name, Any)) for name, each in signature.parameters.items()]

    @functools.wraps(command)
    def wrapper(**values: Any) -> Any:
        values = {name: value for name, value in values.items() if name in signature.parameters}
        with only_result_on_stdout() if values.get("json_output") else contextlib.nullcontext():
            return command(**values)

    if "debug" not in signature.parameters:
        hints["debug"] = DebugOption
        parameters.append(
            inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=DebugOption)
        )
    wrapper.__dict__["__signature__"] = signature.replace(parameters=parameters)
    wrapper.__annotations__ = hints
    del wrapper.__dict__["__wrapped__"]
    return wrapper


def _first_line(target: str) -> str:
    """What the help says of a command: the first line of its function's docstring, or its group's `help`.

    Read from the source, so that the help imports nothing.
    """
    module, _, attribute = target.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if ast.unparse(node.targets[0]) != attribute:
                continue
            return next((str(ast.literal_eval(each.value)) for each in node.value.keywords if each.arg == "help"), "")
    return ""


def _not_selected() -> None:
    raise AssertionError("only the selected command runs")
