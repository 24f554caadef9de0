"""What the examples share: the device, random data that every rank can make, and the line that says how it
went."""

from __future__ import annotations

import argparse
import functools
import os

import torch

import tilescale.comm as comm


@functools.cache
def device() -> torch.device:
    """Where tensors live: the device of symmetric memory. The first call is collective, as every allocation
    there is."""
    return comm.empty((1,), torch.float32).device


def ranks() -> tuple[int, int]:
    """(own rank, number of ranks). Alone, without a launcher, it is (0, 1). Kernels and symmetric memory go
    to the GPU where torch has one, unless ``--device`` or TILESCALE_TARGET says otherwise."""
    if torch.cuda.is_available():
        os.environ.setdefault("TILESCALE_TARGET", "cuda")
    comm.init()
    device()
    return comm.rank(), comm.world_size()


def randn(*shape: int, seed: int, rank: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers that depend on (seed, rank) alone: any rank can make any other's, so references need no
    communication."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(1_000_003 * seed + rank))
    return (made * scale).to(device())


def poison(t: torch.Tensor) -> torch.Tensor:
    """``t`` filled with NaN: what a kernel forgets to write, or reads before it was written, shows."""
    return t.fill_(float("nan"))


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest absolute difference; infinite where anything is NaN."""
    worst = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
    return worst if worst == worst else float("inf")


def report(what: str, error: float, tolerance: float) -> int:
    """One line on rank 0 with the worst error of all ranks; 0 where it is within ``tolerance``, else 1, on
    every rank alike."""
    mine = comm.full((1,), error, torch.float64)
    comm.barrier()  # everyone's error is written
    worst = max(comm.peer(mine, r).item() for r in range(comm.world_size()))
    comm.barrier()  # everyone has read it
    good = worst <= tolerance
    if comm.rank() == 0:
        count = comm.world_size()
        verdict = "ok" if good else f"MISMATCH, at most {tolerance:.0e} was expected"
        print(f"{what}, {count} rank{'s' if count > 1 else ''}: max error {worst:.1e}, {verdict}", flush=True)
    return 0 if good else 1


def arguments(argv: list[str] | None, doc: str | None, **sizes: int) -> argparse.Namespace:
    """``--name N`` for each size, with its default, and ``--seed``; ``doc``'s first line is the help text."""
    parser = options(doc, **sizes)
    return parser.parse_args(argv)


def options(doc: str | None, **sizes: int) -> argparse.ArgumentParser:
    """The parser behind ``arguments``, for an example that has further options."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().split("\n")[0])
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive,
            default=default,
            metavar="N",
            help=f"default {default}",
        )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random data, default 0")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        action=_Device,
        help="where kernels run, default what the machine has",
    )
    return parser


class _Device(argparse.Action):
    def __call__(self, parser, namespace, value, option=None):
        os.environ["TILESCALE_TARGET"] = value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
