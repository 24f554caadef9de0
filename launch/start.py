"""`tilescale launch`: what to run, and how often."""

from __future__ import annotations

from pathlib import Path

import click

from tilescale.launch import ranks
from tilescale.launch.program import Program


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n", "--ranks", "count", type=click.IntRange(1, 1024), required=True, help="How many ranks to start."
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option("--no-python", is_flag=True, help="PROGRAM is an executable, not a Python script.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context, count: int, module: bool, no_python: bool, program: str, args: tuple[str, ...]
) -> None:
    """Run PROGRAM as N ranks on this machine, each with its place in the environment (torch.distributed's
    names too).

    Every line that a rank prints is marked with its number; standard input goes to rank 0. When a rank fails,
    all end within seconds, the last line says why, and the exit code is that of the first rank that failed.
    The ranks share this machine's processors: OMP_NUM_THREADS is set to an equal share unless it is set.
    Ranks of a Python program are forked from one process that has imported what the program imports first (of
    numpy, torch and tilescale), unless TILESCALE_FORK=0.
    """
    if module and no_python:
        raise click.UsageError("-m and --no-python exclude each other")
    if not module and not no_python and not Path(program).exists():
        raise click.UsageError(
            f"there is no file {program!r} (a module: -m {program}; an executable: --no-python {program})"
        )
    kind = "executable" if no_python else "module" if module else "script"
    ctx.exit(ranks.run(Program(kind, program, args), count))
