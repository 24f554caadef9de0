"""The `tilescale` command: a table of subcommands, each in a module that is imported only when it is used.

A new one is a module of this package whose ``command`` is a click command, and its line in COMMANDS.
"""

from __future__ import annotations

import importlib
import sys

import click

import tilescale
from tilescale.errors import TileError
from tilescale.launch import output
from tilescale.launch.fork import Forked

# name → (module of this package, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("start", "Run a program as N ranks on this machine."),
    "check": ("check", "Run a program as N simulated ranks and say what is wrong with its kernels."),
    "trace": (
        "trace",
        "Write who did what when, on simulated ranks or on processes, as a file for Perfetto.",
    ),
    "bench": ("bench", "Measure operations of N ranks beside NCCL, cuBLAS and PyTorch's."),
    "doctor": ("doctor", "Say what this machine has, and what is missing for which feature."),
}


class _Group(click.Group):
    """Subcommands by name, without importing the others: an empty job must start in a fraction of a
    second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"tilescale.launch.{COMMANDS[cmd_name][0]}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(tilescale.__version__, prog_name="tilescale")
def commands() -> None:
    """TileScale: one tile program, from a thread to a machine full of GPUs."""


def main() -> None:
    """The entry point. A refusal is told without a traceback: it already says what to do."""
    output.forgive()
    try:
        commands.main(prog_name="tilescale")
        return
    except TileError as error:
        click.echo(f"tilescale: {error}", err=True)
        sys.exit(1)
    except Forked as rank:
        forked = rank.with_traceback(None)  # of the launcher's frames, and all they hold, nothing stays
    forked.run()
