"""`tilescale bench`: operations of several ranks beside their peers, as a table and as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tilescale import cuda, ops
from tilescale.launch import held_out, ranks
from tilescale.launch.program import Program

#: operations by the names that people call them
NAMES = {name: module for name, module in ops.HOME.items() if module in ops.RANK_MODULES}
PEERS = {"nccl": ("NCCL", "NCCL + cuBLAS"), "gloo": ("gloo", "gloo + torch")}


def shape_of(text: str) -> dict[str, Any]:
    """``M=512,N=1024,dtype=float16,bias=true`` as the words of an operation's cases.

    Raises:
        click.BadParameter: something else.
    """
    made: dict[str, Any] = {}
    known: dict[str, Any] = {"true": True, "false": False}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name.strip().isidentifier() and equals and value.strip()):
            raise click.BadParameter(f"{part!r}: expected NAME=VALUE", param_hint="--shape")
        word = value.strip()
        number = word.removeprefix("-").isdecimal()
        made[name.strip()] = int(word) if number else known.get(word.lower(), word)
    return made


@click.command("bench")
@click.option(
    "-n", "--ranks", "count", type=click.IntRange(1, 64), required=True, help="How many ranks to start."
)
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
    help="auto: this machine's GPUs, or its processors where there are none.",
)  # fmt: skip
@click.option("--only", multiple=True, metavar="TEXT", help="Only cases with this in them, such as M=512.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="M=…,N=…", help="These shapes instead of the list's."
)
@click.option(
    "--held-out",
    "held",
    type=click.IntRange(1),
    metavar="N",
    help="Instead N random shapes of each operation, within a factor of two of the list's; tells those below "
    f"{held_out.BAR} of the fastest peer.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of --held-out.")
@click.option("--seconds", type=click.FloatRange(0), help="Begin no further case behind so many.")
@click.option("--replays", type=click.IntRange(1), default=20, show_default=True, help="Of each variant.")
@click.option("--every-way", is_flag=True, help="Time every way that an operation knows, beside its choice.")
@click.option("--tune", is_flag=True, help="First find the fastest choice for each shape, and keep it.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="A file for the figures."
)
@click.argument("names", nargs=-1, metavar="[OP …]")
@click.pass_context
def command(
    ctx: click.Context,
    count: int,
    device: str,
    only: tuple[str, ...],
    shapes: tuple[str, ...],
    held: int | None,
    seed: int,
    seconds: float | None,
    replays: int,
    every_way: bool,
    tune: bool,
    file: Path | None,
    names: tuple[str, ...],
) -> None:
    """Measure operations of N ranks (OP …; default: all): ours, the library's collective and product,
    PyTorch's fused operation, the product alone and what the links allow.

    One harness for all of them: ranks aligned on the device, graph replay, the median over replays of the
    slowest rank, inputs rotated past the L2 cache, with flags, clearing and every copy inside the timing. On
    processors the table says that things work, not how fast GPUs are. Exit code 1: a result was wrong.
    """
    wrong = [n for n in names if n not in NAMES]
    if wrong:
        raise click.UsageError(f"there is no operation {wrong[0]!r}; there are {', '.join(sorted(NAMES))}")
    if held and (shapes or tune):
        raise click.UsageError("--held-out draws shapes for choices as they are: without --shape and --tune")
    if file is not None and not file.absolute().parent.is_dir():  # not when all has been measured
        raise click.BadParameter(f"there is no folder {file.parent}", param_hint="--json")
    plan = {
        "device": chosen(device),
        "modules": [NAMES[n] for n in names or (held_out.NAMES if held else sorted(NAMES))],
        "held_out": held,
        "seed": seed,
        "seconds": seconds,
        "only": list(only),
        "shapes": [shape_of(s) for s in shapes],
        "replays": replays,
        "every_way": every_way,
        "tune": tune,
        "progress": sys.stderr.isatty(),
    }
    os.environ["TILESCALE_TARGET"] = str(plan["device"])
    if plan["device"] == "cuda":
        if not cuda.CUDA.may_be_here():  # not once a rank
            raise click.ClickException(
                "this machine has no GPU: the NVIDIA driver's device file is missing "
                f"({' or '.join(cuda.FILES)}); --device cpu measures small cases here"
            )
        os.environ.setdefault("TILESCALE_HEAP_SIZE", "8G")
    folder, owner = tempfile.mkdtemp(prefix="tilescale-bench-"), os.getpid()
    found = Path(folder, "figures.json")
    try:
        program = Program("module", "tilescale.launch.bench_ranks", (json.dumps(plan), str(found)))
        code = ranks.run(program, count)
        figures = json.loads(found.read_text()) if found.exists() else None
    finally:
        if os.getpid() == owner:  # a forked rank comes by here too (fork.Forked)
            found.unlink(missing_ok=True)
            os.rmdir(folder)
    if figures is not None:
        if not figures["drawn"]:
            raise click.UsageError(f"no case has {' or '.join(only)} in it")
        show(figures, count)
        if held:
            show_held_out(figures)
        if file is not None:
            file.write_text(json.dumps(recorded(figures, count), indent=2, ensure_ascii=False) + "\n")
    ctx.exit(code)


def show_held_out(figures: dict[str, Any]) -> None:
    """What is below the bar, a line each."""
    lines = [line for line in figures["cases"] if "failed" not in line]
    below = [line for line in lines if held_out.fastest_peer(line)[1] < held_out.BAR]
    for line in sorted(below, key=lambda line: held_out.fastest_peer(line)[1]):
        peer, ratio = held_out.fastest_peer(line)
        shape = " ".join(f"{k}={v}" for k, v in line["shape"].items())
        theirs, ours = line["us"][peer]["median"], line["us"]["ours"]["median"]
        print(f"{ratio:.2f} {line['op']} {shape}: {ours:.1f} µs ({line['way']}), {peer} {theirs:.1f}")
    drawn, failed = figures.get("drawn", 0), len(figures["cases"]) - len(lines)
    print(
        f"{len(below)} of {len(lines)} shapes are below {held_out.BAR} of the fastest peer; {failed} failed, "
        f"{drawn - len(figures['cases'])} were not measured in the time"
    )


def chosen(device: str) -> str:
    """ "cuda" or "cpu"."""
    if device != "auto":
        return device
    from tilescale.devices import machine

    return machine()


def recorded(figures: dict[str, Any], count: int) -> dict[str, Any]:
    """The figures with what is needed to measure again."""
    packages = ("torch", "apache-tvm", "apache-tvm-ffi", "numpy")
    return {
        "name": "bench_ranks",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"processor": platform.machine(), "ranks": count, **figures["machine"]},
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in packages},
        "command": shlex.join(["tilescale", *sys.argv[1:]]),
        "figures": {"backend": figures["backend"], "cases": figures["cases"]},
    }


def show(figures: dict[str, Any], count: int) -> None:
    """The table, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    library, both = PEERS[figures["backend"]]
    table = Table(title=f"{count} ranks, {figures['machine'].get('gpu', 'processors')}; microseconds")
    for name in ("operation", "shape", "ours", library, "PyTorch", "alone", "link"):
        table.add_column(name, justify="left" if name in ("operation", "shape") else "right")
    for name in (f"× {library}", "of best", "GB/s", "SMs", "way"):
        table.add_column(name, justify="right" if name != "way" else "left")
    for line in figures["cases"]:
        shape = " ".join(f"{k}={v}" for k, v in line["shape"].items())
        if "failed" in line:
            table.add_row(line["op"], shape, f"[red]{line['failed']}[/red]")
            continue
        median = {name: t["median"] for name, t in line["us"].items()}
        ratio = f"{line['ratio_to_library']:.2f}"
        marks = [] if line["right"] else [f"[red]wrong by {line['difference']:.1e}[/red]"]
        marks += [f"faster: {line['fastest_way']}"] if line["fastest_way"] not in (None, line["way"]) else []
        table.add_row(
            line["op"],
            shape,
            *(f"{median[k]:.1f}" if k in median else "–" for k in ("ours", "library", "torch", "alone")),
            f"{line['link_us']:.3g}",
            f"[red]{ratio}[/red]" if line["slower"] else ratio,
            f"{line['share_of_best']:.2f}",
            f"{line['gbytes_per_s']:.3g}",
            "–" if line["blocks"] is None else str(line["blocks"]),
            " ".join([line["way"], *(["(tuned)"] if line["tuned"] else []), *marks]),
        )
    console.print(table)
    console.print(
        f"{library}: {both} where there is a product. best: the longer of the product alone and the links at "
        "370 GB/s. Below 1 the library is faster."
    )
    slower = [line for line in figures["cases"] if line.get("slower")]
    if slower:
        console.print(f"{len(slower)} of {len(figures['cases'])} are slower than {library}")
