"""Products of several ranks beside copy engines: engines move rows of one rank after another's, products of
those that are there, or of the next ones, take the multiprocessors meanwhile. What crosses and when is
`engine.cross`'s; here is what is multiplied in front of it and behind it.

All meetings stand on the caller's stream without a product between them, so the products' tails overlap
(`engine.lane`): a meeting is one block, which awaits the first free multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.ops import gemm, host
from tilescale.ops.ranks import engine, flat, gather, scatter
from tilescale.ops.ranks.gemms import Operands
from tilescale.ops.ranks.groups import rows_of, share, span_of
from tilescale.ops.ranks.workspace import workspace


def addressed() -> None:
    """Raises:
    TileValueError: memory of other ranks that is not addressed, which engines need.
    """
    if not engine.able():
        raise TileValueError("engine=True with TILESCALE_REMOTE=nvshmem", expected="memory that is addressed")


def apart_from(c: torch.Tensor, **operands: torch.Tensor | None) -> None:
    """Products of some rows are written while others are still to be read, by engines and by products.

    Raises:
        TileValueError: an operand that lies in c.
    """
    for name, operand in operands.items():
        if operand is not None and host.share_memory(operand, c):
            raise TileValueError(
                f"all_gather_matmul, engine=True: {name} and out share memory",
                expected=f"an out that shares no memory with {name}",
                hint=f"{name}.clone()",
            )


def gathered(
    given: Operands,
    c: torch.Tensor,
    M: int,
    bias: torch.Tensor | None,
    activation: str,
    team: Team,
    whole: bool,
) -> torch.Tensor:
    """The product c of the own rows while copy engines bring the others', one rank's after another's, and
    of each rank's when they have come, beside the next one's. Gives all rows, in the group's memory, the own
    ones where ``whole``."""
    addressed()
    apart_from(c, x=given.x, w=given.w, bias=bias)
    each, world = share(M, team.size), team.size
    (everyone,) = workspace(team).tensors(given.x, ((each * world, given.K), given.x.dtype))

    def rows(hop: int) -> slice:
        """Those of the rank so many places in front of this one, of M."""
        return span_of((team.rank - hop) % world, M, world)

    arrived = engine.cross([[put] for put in engine.puts(given.x, everyone, team)], team, everyone)
    if whole:
        everyone[rows(0)].copy_(given.x)
    with engine.lane(0, c):
        multiplied(given.x, given, c[rows(0)], bias, activation)
    for step in arrived:
        of = rows(step + 1)
        with engine.lane(step + 1, c):
            multiplied(everyone[of], given, c[of], bias, activation)
    engine.merged(c)
    return everyone[:M]


def scattered(
    given: Operands, c: torch.Tensor, M: int, bias: torch.Tensor | None, activation: str, team: Team
) -> None:
    """c = act(this rank's rows of the sum over ranks of x · w + bias). The next rank's rows are multiplied
    first and cross while the one behind it has its own multiplied; this rank's come last, beside the last
    copy. Each part is rounded to x's dtype; they are added in the order of ranks, when all have come."""
    addressed()
    world, each = team.size, share(M, team.size)
    part = given.x.new_empty(M, given.N)

    def products() -> Iterator[Any]:
        """Of each rank's rows, in the order in which they cross."""
        for hop in (*range(1, world), 0):
            of = span_of((team.rank + hop) % world, M, world)
            with engine.lane(hop, part):
                multiplied(given.x[of], given, part[of], None, "")
                yield engine.mark(part)

    a, n = flat.row(part), each * given.N
    scatter.by_engines(a, c, n, part.numel(), team, bias, activation, host.units(c.device), products)


def reduced(
    given: Operands, c: torch.Tensor, M: int, bias: torch.Tensor | None, activation: str, team: Team
) -> None:
    """c = act(the sum over ranks of x · w + bias) on every rank: each one's rows as `scattered` makes them,
    which engines bring to the others."""
    own = c.new_empty(rows_of(team.rank, M, team.size), given.N)
    scattered(given, own, M, bias, activation, team)
    gather.all_gather(own, group=team, rows=M, out=c, how="engine")


def multiplied(
    x: torch.Tensor, given: Operands, c: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> None:
    """c = act(x · w + bias), rows that may begin anywhere: kernels write those that begin at 16 bytes."""
    if not x.shape[0]:
        return
    if not x.shape[1]:  # of a sum over ranks, this one has nothing to add
        c.zero_()
        return
    w = given.w.T if given.trans_b else given.w
    if c.data_ptr() % 16 == 0 and x.data_ptr() % 16 == 0:
        gemm.matmul(x, w, bias, activation, out=c)
    else:
        c.copy_(gemm.matmul(x.clone(), w, bias, activation, out_dtype=c.dtype))
