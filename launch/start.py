"""`tilescale launch`: what to run, how often, and on which nodes."""

from __future__ import annotations

from pathlib import Path

import click

from tilescale.launch import hosts, nodes, ranks
from tilescale.launch.program import Program

_FLAGS = {"script": (), "module": ("-m",), "executable": ("--no-python",)}


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n",
    "--ranks",
    "--nproc-per-node",
    "count",
    type=click.IntRange(1, 1024),
    help="How many ranks to start on this node.",
)
@click.option(
    "--nnodes", type=click.IntRange(1, 1024), default=1, help="How many launchers make the job, one a node."
)
@click.option("--node-rank", type=click.IntRange(0), default=0, help="Which of them this one is.")
@click.option(
    "--rendezvous", "--rdzv-endpoint", metavar="HOST:PORT", help="Where they meet: a name of node 0's host."
)
@click.option("--master-addr", metavar="HOST", help="The same, in two options.")
@click.option("--master-port", type=click.IntRange(1, 65535))
@click.option(
    "--hosts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Start one launcher for each line `HOST slots=N` of this file, by ssh.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option("--no-python", is_flag=True, help="PROGRAM is an executable, not a Python script.")
@click.option("--hub-elsewhere", is_flag=True, hidden=True)
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    count: int | None,
    nnodes: int,
    node_rank: int,
    rendezvous: str | None,
    master_addr: str | None,
    master_port: int | None,
    file: Path | None,
    module: bool,
    no_python: bool,
    hub_elsewhere: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM as N ranks on this machine, each with its place in the environment (torch.distributed's
    names too).

    Every line that a rank prints is marked with its number; standard input goes to rank 0. When a rank fails,
    all end within seconds, the last line says why, and the exit code is that of the first rank that failed.
    The ranks share this machine's processors: OMP_NUM_THREADS is set to an equal share unless it is set.
    Ranks of a Python program are forked from one process that has imported what the program imports first (of
    numpy, torch and tilescale), unless TILESCALE_FORK=0.

    Several launchers make one job with --nnodes, --node-rank and --rendezvous, or are started by --hosts.
    """
    if module and no_python:
        raise click.UsageError("-m and --no-python exclude each other")
    if not module and not no_python and not Path(program).exists():
        raise click.UsageError(
            f"there is no file {program!r} (a module: -m {program}; an executable: --no-python {program})"
        )
    place = _endpoint(rendezvous, master_addr, master_port)
    kind = "executable" if no_python else "module" if module else "script"
    if file is not None:
        if count is not None or nnodes > 1 or node_rank:
            raise click.UsageError("--hosts says what -n, --nnodes and --node-rank would say")
        ctx.exit(hosts.run([*_FLAGS[kind], program, *args], hosts.read(file), place))
    if count is None:
        raise click.UsageError("-n, the number of ranks, is missing")
    if node_rank >= nnodes:
        raise click.UsageError(f"--node-rank {node_rank} of --nnodes {nnodes}: it is one of 0 … {nnodes - 1}")
    if nnodes > 1 and place is None:
        raise click.UsageError("--nnodes needs --rendezvous HOST:PORT, where the launchers meet")
    if nnodes == 1 and place is not None:
        raise click.UsageError("--rendezvous is for jobs of several launchers: how many? (--nnodes)")
    several = nodes.Node(node_rank, nnodes, *place, hub=not (node_rank or hub_elsewhere)) if place else None
    ctx.exit(ranks.run(Program(kind, program, args), count, several))


def _endpoint(rendezvous: str | None, host: str | None, port: int | None) -> tuple[str, int] | None:
    if rendezvous is not None:
        if host is not None or port is not None:
            raise click.UsageError("--rendezvous says what --master-addr and --master-port would say")
        return nodes.endpoint(rendezvous)
    if host is None and port is None:
        return None
    if host is None or port is None:
        raise click.UsageError("--master-addr and --master-port are given together")
    return host, port
