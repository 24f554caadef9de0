"""``all_to_all(x, sizes)``: each rank's rows in parts, one for each rank; what came, in the order of ranks.

How many rows go where is read on the device alone, so that a CUDA graph replays with other numbers; the
result has room for ``rows``. Few bytes go in packets, which need no flags around a launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import host
from tilescale.ops.case import Case, Expected, generator, normal
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.case import Pick, RankOp
from tilescale.ops.ranks.exchange_kernels import exchange, exchange_by_packets
from tilescale.ops.ranks.groups import Group, number_of, share, team_of
from tilescale.ops.ranks.said import said
from tilescale.ops.ranks.workspace import workspace

#: ways of `all_to_all`
WAYS = ("packets", "kernel")
#: bytes of a part, times the other ranks, up to which packets are taken; of a row, from which they are: a
#: block has one piece of a row at a time
TINY, LEAST = 2 << 20, 256
#: rows of a put, at most
MOST = 1024


@host.checked
def all_to_all(
    x: torch.Tensor,
    sizes: torch.Tensor | None = None,
    *,
    rows: int | None = None,
    group: Group = None,
    out: torch.Tensor | None = None,
    how: str | None = None,
    blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first sizes[0] rows of x go to rank 0, the next sizes[1] to rank 1, …. Collective.

    Args:
        x: (m, …) of any dtype; m may differ between ranks, the other extents may not.
        sizes: (ranks,) of int32 or int64, on x's device; together m at most. Without it all parts are equal.
        rows: how many rows could come to a rank at most, alike on all ranks; needed with ``sizes``.
        group: who takes part, see `groups.team_of`; all ranks without.
        out: (rows, …), contiguous, takes the result; it shares no memory with x.
        how: "packets" (of rows of whole words of four bytes) or "kernel" where the choice by size is not
            wanted.
        blocks: multiprocessors that the kernel keeps at most. Packets go by as many blocks as a part has
            kilobytes, and are not chosen where this is given.

    Returns:
        (rows, …): what came, rank 0's first, undefined behind it; and (ranks,) of int32: how many rows came
        from each rank. A launch that brings more than ``rows`` fails.

    Raises:
        TileValueError, TileTypeError: what does not fit.
    """
    team = team_of(group)
    if x.dim() == 0:
        raise TileValueError("all_to_all of a number", expected="a tensor of one axis at least")
    if sizes is None:
        if x.shape[0] % team.size:
            raise TileValueError(
                f"all_to_all of {x.shape[0]} rows among {team.size} ranks", expected="equal parts, or sizes="
            )
        rows = x.shape[0] if rows is None else rows
        each = x.shape[0] // team.size
        sizes = torch.full((team.size,), each, dtype=torch.int32, device=x.device)
    if sizes.shape != (team.size,) or sizes.device != x.device:
        raise TileValueError(
            f"sizes {tuple(sizes.shape)} on {sizes.device}", expected=f"({team.size},) on {x.device}"
        )
    if sizes.dtype not in (torch.int32, torch.int64):
        raise TileTypeError(f"sizes of {host.dtype_name(sizes)}", expected="int32 or int64")
    if rows is None:
        raise TileValueError("rows=None", expected="how many rows could come to a rank, with sizes=")
    rows = number_of(rows, "rows")
    c = host.result(out, (rows, *x.shape[1:]), x.dtype, x)
    flat.in_place("all_to_all", x, out, "")  # a part that came would lie where one is still read
    inner = math.prod(x.shape[1:]) * x.element_size()
    if rows * inner == 0:
        return c, torch.zeros(team.size, dtype=torch.int32, device=x.device)
    way = how or choose(rows * inner // team.size, inner, team.size, blocks)
    if way not in WAYS or (way == "packets" and inner % 4):
        raise TileValueError(
            f"how={how!r} of rows of {inner} bytes",
            expected='"kernel", or "packets" of rows of whole words of 4 bytes',
        )
    got = torch.empty(team.size, dtype=torch.int32, device=x.device)
    exchanged(x, host.narrowed(sizes), c, got, inner, team, way, blocks)
    return c, got


def choose(size: int, inner: int, world: int, blocks: int | None = None) -> str:
    """How parts of ``size`` bytes go, of rows of ``inner`` bytes: "packets" or "kernel"."""
    small = 1 < world and size * (world - 1) <= TINY
    return "packets" if small and inner >= LEAST and inner % 4 == 0 and blocks is None else "kernel"


def cut_up(rows: int, inner: int, units: int, world: int) -> tuple[int, flat.Cut]:
    """How many of a part's ``rows``, of ``inner`` bytes, are put together; and how blocks share them."""
    cut = flat.cut(rows * inner, 1, units, world)
    group = max(1, min(MOST, cut.Q // inner))
    return group, replace(cut, blocks=max(1, min(units, share(rows, group))))


def exchanged(
    x: torch.Tensor, sizes: torch.Tensor, c: torch.Tensor, got: torch.Tensor, inner: int, team: Team,
    way: str, blocks: int | None,
) -> None:  # fmt: skip
    """c and ``got`` as `all_to_all` gives them."""
    said("all_to_all of rows of", inner, "bytes,", way)(workspace(team))
    kind, _ = flat.words(inner)
    landing, space, world = flat.landing(c).view(kind).view(len(c), -1), workspace(team), team.size
    (rows, H), size = landing.shape, kind.itemsize
    a = flat.row(x.contiguous(), kind).view(len(x), H)
    box, units = space.box(sizes, -(-world // 4) * 4), flat.multiprocessors(x.device, blocks)
    what: dict[str, Any] = {"H": H, "world": world, "dtype": host.dtype_name(a)}
    if way == "packets":
        wide = min(flat.EACH, -(-inner // 8) * 8) // size
        pieces = rows * -(-H // wide)
        room, count = flat.power(pieces), flat.power(share(pieces, world))
        while count > max(1, 8 * units):  # blocks that wait are resident together
            count //= 2
        what |= {"wide": wide, "room": room, "blocks": count, "threads": 128}
        args = (a, sizes, box, space.box(a, room * wide), landing, got)
        host.launch(exchange_by_packets, args, **what)
    else:
        group, cut = cut_up(share(rows, world), inner, units, world)
        count = cut.blocks
        givers = count * flat.GIVERS // 4 if cut.givers and world > 1 else 0
        what |= {"group": group, "blocks": count, "threads": cut.threads, "givers": givers}
        (there,) = space.tensors(x, (landing.shape, kind))
        arrived = space.counters(world, givers or count)
        host.launch(exchange, (a, sizes, box, there, arrived, landing, got), **what)
    flat.landed(landing.view(-1).view(x.dtype), c)


# ---- what is right, and what it is measured against


def draw(
    rows: int,
    columns: int,
    dtype: str = "bfloat16",
    uneven: bool = True,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """A rank's parts, of ``rows`` rows each where they are even, else of any number up to that, also none."""
    g = generator(device, 1000 * seed + rank)
    sizes = torch.full((world,), rows, dtype=torch.int32, device=device)
    if uneven:
        sizes = torch.randint(0, rows + 1, (world,), generator=g, device=device, dtype=torch.int32)
    # as many rows as there could be, so that a graph replays with other parts
    return {"x": normal((world * rows, columns), dtype, g), "sizes": sizes, "rows": world * rows, **more}


def whole(out: torch.Tensor | None = None, **drawn: Any) -> torch.Tensor:
    """What came, with zeros behind it; what tests compare."""
    found = seen(all_to_all(**drawn))
    return found if out is None else out.copy_(found)


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    found = []
    for r in range(len(everyone)):
        parts = [
            a["x"].split([*a["sizes"].tolist(), len(a["x"]) - int(a["sizes"].sum())])[r] for a in everyone
        ]
        value = torch.zeros(everyone[0]["rows"], *everyone[0]["x"].shape[1:], dtype=torch.float64)
        came = torch.cat(parts).double()
        value = value.to(came.device)
        value[: len(came)] = came
        found.append(Expected(value, torch.zeros_like(value)))
    return found


def timed(out: torch.Tensor | None = None, **drawn: Any) -> Callable[[], Any]:
    """The call that is timed."""
    return lambda: all_to_all(**drawn, out=out)


def seen(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What came, with zeros behind it."""
    rows, got = found
    there = torch.arange(len(rows), device=rows.device) < got.sum()
    return rows.where(there.view(-1, *[1] * (rows.dim() - 1)), rows.new_zeros(()))


def by_library(x: torch.Tensor, sizes: torch.Tensor, rows: int, group: Any, **_: Any) -> Callable[[], Any]:
    """torch.distributed's, whose parts the host knows before."""
    given, come = sizes.tolist(), torch.empty_like(sizes)
    torch.distributed.all_to_all_single(come, sizes, group=group)
    got, out = come.tolist(), x.new_zeros(rows, *x.shape[1:])

    def call() -> Any:
        torch.distributed.all_to_all_single(out[: sum(got)], x[: sum(given)], got, given, group=group)
        return out

    return call


def pick(
    world: int, rows: int, columns: int, dtype: str = "bfloat16", units: int = 132, how: str | None = None,
    blocks: int | None = None, **_: Any,
) -> Pick:  # fmt: skip
    inner = columns * getattr(torch, dtype).itemsize
    way = how or choose(rows * inner, inner, world, blocks)
    if way == "packets":
        return Pick(way, min(units, rows * -(-inner // flat.EACH)))
    return Pick(way, cut_up(rows, inner, min(units, blocks or units), world)[1].blocks)


OP = RankOp(
    name="all_to_all",
    run=whole,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=lambda rows, columns, dtype="bfloat16", **_: {
        **({"packets": {"how": "packets"}} if columns * getattr(torch, dtype).itemsize % 4 == 0 else {}),
        "kernel": {"how": "kernel"},
    },
    base=lambda **_: {"blocks": None},
    knobs=lambda **_: (flat.BLOCKS,),
    cases=(
        Case({"rows": 9, "columns": 20}, small=True),
        Case({"rows": 1, "columns": 3, "dtype": "float16"}, small=True),
        Case({"rows": 20, "columns": 5, "dtype": "float32", "uneven": False, "blocks": 1}, small=True),
        Case({"rows": 3, "columns": 1100}, small=True),
        Case({"rows": 9, "columns": 20, "how": "packets"}, small=True),
        Case({"rows": 7, "columns": 600, "how": "packets", "dtype": "float32"}, small=True),
        Case({"rows": 300, "columns": 300, "how": "kernel"}, small=True),
        *(Case({"rows": rows, "columns": 7168}, bar=1.0) for rows in (32, 512, 4096)),
        Case({"rows": 4096, "columns": 4096, "uneven": False}, bar=1.0),
    ),
    peers={"library": by_library},
    remote=lambda world, rows, columns, dtype="bfloat16", uneven=True, **_: (
        (world - 1) * rows * columns * float(getattr(torch, dtype).itemsize) * (0.5 if uneven else 1)
    ),
    timed=timed,
    seen=seen,
)
