"""The command line.

Owns the list of commands and their exit codes; everything that computes lies elsewhere and is imported when
its command runs.

Exit codes: 0 all is well; 1 what `conform` or `bench techniques` held against each other differs; 2 a wrong
request, in one line on stderr; 130 stopped with Ctrl-C. With `--json` one JSON object goes to stdout and
nothing else does; progress, notes and errors go to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from cbviz.cli import bench, compare, machine, run, terminal

app = typer.Typer(
    name="cbviz",
    help=(
        "A debugger for LLM serving: step a real engine through continuous batching, see what each "
        "iteration did, and why."
    ),
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models = typer.Typer(
    name="model",
    help="Weights: fetch, list, and plan what fits where.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for command in (
    machine.explore,
    machine.lab,
    run.run,
    compare.compare,
    run.show,
    run.export,
    machine.conform,
    machine.calibrate,
    machine.doctor,
):
    app.command()(command)
app.command("import")(run.import_)
for command in (machine.pull, machine.list_, machine.plan):
    models.command(command.__name__.rstrip("_"))(command)
benches = typer.Typer(
    name="bench",
    help=(
        "Measure: against other people's software where it is there, and techniques against doing without; "
        "without a name, the scheduler."
    ),
    rich_markup_mode=None,
)
benches.callback(invoke_without_command=True)(bench.everything)
for command in (
    bench.scheduler,
    bench.engine,
    bench.kernels,
    bench.techniques,
    bench.recording,
    bench.memory,
    bench.record,
):
    benches.command()(command)
app.add_typer(models)
app.add_typer(benches)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    if version:
        from cbviz import __version__

        typer.echo(f"cbviz {__version__}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point; always ends with SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    terminal.debug = "--debug" in args
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="replace"
            )  # a console that lacks a sign shows '?', and nothing fails for it
    app([a for a in args if a != "--debug"], prog_name="cbviz")
    raise SystemExit(0)


__all__ = ["app", "main"]
