"""``broadcast(x, root)``: one rank's tensor on every rank.

The smallest go in packets, which are their own signal. Others the root puts to all, or, where they are
large, each piece to one rank, in turn, which puts it to the others: as many bytes leave every rank as the
tensor has, instead of n − 1 times as many the root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.ops import host
from tilescale.ops.case import generator, normal
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.case import Case, Expected, Pick, RankOp
from tilescale.ops.ranks.flat_kernels import spread, spread_by_packets
from tilescale.ops.ranks.groups import Group, library, number_of, team_of
from tilescale.ops.ranks.said import said
from tilescale.ops.ranks.workspace import workspace

#: bytes, times the other ranks, up to which packets are taken; bytes up to which one trip is faster than two;
#: from which the library's pipeline is taken, which has not been compared yet
TINY, SMALL, LARGE = 1 << 20, 256 << 10, 256 << 20

#: bytes of a put at most: what a block puts last is copied into the result when all has arrived. On 2 H100
#: 64 MB took 208 µs in pieces of 256 KB, 197 in these
PIECE = 32 << 10

WAYS = ("packets", "direct", "relayed", "library")


def choose(size: int, world: int, distributed: bool) -> str:
    """How ``size`` bytes are sent: "packets", "direct", "relayed", or "library" where there is one, which is
    faster than two trips of ours."""
    if distributed and size >= LARGE:
        return "library"
    if size * (world - 1) <= TINY and size % 4 == 0:
        return "packets"
    if size <= SMALL or world <= 2:
        return "direct"
    # On 4 H200, 2026-11-26, 855 KB took 22.5 µs relayed, 17.4 by NCCL; 85 MB 352 and 281.
    return "library" if distributed else "relayed"


@host.checked
def broadcast(
    x: torch.Tensor,
    root: int = 0,
    *,
    group: Group = None,
    out: torch.Tensor | None = None,
    how: str | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """The root's x, on every rank. Collective.

    Args:
        x: of any shape and dtype, alike on all ranks; read on the root alone.
        root: a rank of the group, alike on all ranks.
        group: who takes part, see `groups.team_of`; all ranks without.
        out: of x's shape, contiguous, takes the result; x itself is overwritten in place, else they share no
            memory. Without it the root gets x, the others new memory.
        how: "packets" (of whole words of four bytes, up to a megabyte), "direct", "relayed" or "library"
            where the choice by size is not wanted.
        blocks: multiprocessors that the kernel keeps at most; without it as the size asks for. Packets go by
            as many blocks as a tensor has kilobytes, and are not chosen where this is given.

    Raises:
        TileValueError, TileTypeError: what does not fit; a library without a process group.
    """
    team = team_of(group)
    if (root := number_of(root, "root")) >= team.size:
        raise TileValueError(f"root={root} of {team.size} ranks", expected=f"0 to {team.size - 1}")
    mine = team.rank == root
    if out is None and mine and x.is_contiguous():
        c = x
    else:
        c = host.result(out, tuple(x.shape), x.dtype, x)
    flat.in_place("broadcast", x, out, "out that is x (in place)", lambda o: (x, o))
    torch_group = library(group, team, x)
    size = x.numel() * x.element_size()
    kept = flat.kept(team, "broadcast", x, blocks, size=size)
    way = how or flat.allowed(kept, WAYS, torch_group) or choose(size, team.size, torch_group is not None)
    packable = size % 4 == 0 and flat.resident(size, host.units(x.device))
    if how is None and way == "packets" and (not packable or kept["blocks"] is not None):
        way = "direct"
    if way not in WAYS or (way == "library" and torch_group is None) or (way == "packets" and not packable):
        raise TileValueError(
            f"how={how!r} of {size} bytes",
            expected='"packets" of whole words of 4 bytes, up to a megabyte; "direct"; "relayed"; "library" '
            "where torch has a process group of these ranks",
        )
    if size > 0 and team.size > 1:
        sent(x.contiguous() if mine else c, root, team, way, torch_group, kept["blocks"])
    if mine and c is not x:  # when the others have it
        c.copy_(x)
    return c


def sent(x: torch.Tensor, root: int, team: Team, way: str, torch_group: Any, blocks: int | None) -> None:
    """The root's x into the others'."""
    size, mine = x.numel() * x.element_size(), team.rank == root
    if way == "library":
        torch.distributed.broadcast(x, team.members[root], group=torch_group)
        return
    said("broadcast of", size, "bytes from rank", root, way)(workspace(team))
    landing = flat.row(x) if mine else flat.landing(x)
    if way == "packets":
        a, each, boxes = landing.view(torch.int32), flat.EACH // 4, flat.boxes(size)
        cut_up = {"world": team.size, "P": each, "blocks": boxes, "threads": 128, "dtype": "int32"}
        box = workspace(team).box(a, boxes * each + 4)
        host.launch(spread_by_packets, (a, box, root), **cut_up, align=math.gcd(16, size) // 4)
        if not mine:
            flat.landed(landing, x)
        return
    kind, align = flat.words(size)
    a = landing.view(kind)
    cut = flat.cut(size, a.element_size(), flat.multiprocessors(x.device, blocks))
    cut = replace(cut, Q=min(cut.Q, PIECE // a.element_size()))
    space = workspace(team)
    (g,) = space.tensors(x, ((flat.padded(a.numel(), a.element_size()),), kind))
    what: dict[str, Any] = {"world": team.size, "Q": cut.Q, "blocks": cut.blocks, "threads": cut.threads}
    what |= {"dtype": host.dtype_name(a), "align": align, "relayed": way == "relayed"}
    host.launch(spread, (a, g, space.counters(team.size, cut.blocks), root), **what)
    if not mine:
        flat.landed(landing, x)


# ---- what is right, and what it is measured against


def draw(
    size: int,
    dtype: str = "bfloat16",
    root: int = 0,
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """One of ``world`` tensors; the root's number counts modulo their number."""
    g = generator(device, 1000 * seed + rank)
    if dtype.startswith("int"):
        x = torch.randint(0, 100, (size,), generator=g, device=device).to(getattr(torch, dtype))
    else:
        x = normal((size,), dtype, g)
    return {"x": x, "root": root % world, **more}


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    whole = everyone[everyone[0]["root"]]["x"].double()
    return [Expected(whole, torch.zeros_like(whole)) for _ in everyone]


def by_library(x: torch.Tensor, group: Any, root: int = 0, **_: Any) -> Callable[[], Any]:
    """torch.distributed.broadcast, in place: the root's own tensor, and memory of its own elsewhere."""
    out = x if torch.distributed.get_rank(group) == root else torch.empty_like(x)
    source = torch.distributed.get_global_rank(group, root)

    def call() -> Any:
        torch.distributed.broadcast(out, source, group=group)
        return out

    return call


def pick(
    world: int,
    size: int,
    dtype: str = "bfloat16",
    units: int = 132,
    kept: Any = None,
    how: str | None = None,
    **_: Any,
) -> Pick:
    total, kept = size * getattr(torch, dtype).itemsize, kept or {}
    way, units = how or kept.get("how") or choose(total, world, True), kept.get("blocks") or units
    if way == "packets":
        return Pick(way, flat.boxes(total))
    return Pick(way, None if way == "library" else flat.cut(total, 1, units).blocks)


def timed(out: torch.Tensor, **drawn: Any) -> Callable[[], torch.Tensor]:
    """The call that is timed: in place on the root, as the library's is."""
    to = drawn["x"] if comm.rank() == drawn["root"] else out
    return lambda: broadcast(**drawn, out=to)


def ways(world: int, size: int, dtype: str = "bfloat16", **_: Any) -> dict[str, dict[str, Any]]:
    """What can be measured."""
    total = size * getattr(torch, dtype).itemsize
    return {way: {"how": way} for way in WAYS if way != "packets" or (total <= TINY and total % 4 == 0)}


OP = RankOp(
    name="broadcast",
    run=broadcast,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=ways,
    timed=timed,
    base=lambda world, size, dtype="bfloat16", units=132, **_: {
        "how": choose(size * getattr(torch, dtype).itemsize, world, True),
        "blocks": None,
    },
    knobs=lambda **_: (tuple({"how": way} for way in WAYS), flat.BLOCKS),
    shape_of=lambda world, size, dtype="bfloat16", **_: {"size": size * getattr(torch, dtype).itemsize},
    alike=True,
    cases=(
        *(
            Case({"size": size, "dtype": dtype, "how": way, "root": root}, small=True)
            for way in ("packets", "direct", "relayed")
            for size, dtype, root in (
                (4096, "bfloat16", 0),
                (5, "float32", 2),
                (1, "int8", 1),
                (30_001, "bfloat16", 1),
                (200_001, "bfloat16", 1),
            )
            if way != "packets" or size * getattr(torch, dtype).itemsize % 4 == 0
        ),
        *(Case({"size": size, "root": 1}) for size in (4096, 10_000_003)),
        *(Case({"size": size}, bar=1.0) for size in (4096, 524_288, 33_554_432)),
    ),
    peers={"library": by_library},
    remote=lambda world, size, dtype="bfloat16", **_: float(
        (world > 1) * size * getattr(torch, dtype).itemsize
    ),
)
