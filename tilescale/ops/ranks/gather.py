"""``all_gather(x)``: everyone's rows, one rank's behind another's, on every rank.

The smallest go in packets, which are their own signal. Of larger ones each rank's blocks put pieces of x to
all others and copy what arrives into the result; a result that lies in symmetric memory is put into directly.
Of the largest engines put pieces, and kernels copy them on beside the next ones. NCCL's gather is called
where it is asked for, or parts have gigabytes (`choose`): the same bytes arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.ops import host
from tilescale.ops.case import generator, normal
from tilescale.ops.prepared import Plan, signature
from tilescale.ops.ranks import engine, flat
from tilescale.ops.ranks.case import Case, Expected, Pick, RankOp
from tilescale.ops.ranks.flat_kernels import gather, gather_by_packets
from tilescale.ops.ranks.groups import (
    Group,
    filled,
    gather_into,
    library,
    number_of,
    rows_of,
    share,
    team_of,
    total,
)
from tilescale.ops.ranks.said import Said
from tilescale.ops.ranks.workspace import Workspace, workspace

#: bytes of a rank's part, times the other ranks, up to which packets are taken; bytes from which NCCL's
#: gather is. On 2 H100, 2026-11-24 (ranks_2_h100.json), 1 MB took 9.3 µs in packets, 15.7
#: without; 512 MB went at 363 GB/s, NCCL's at 270, by engines into symmetric memory at 379. On 4 H200,
#: 2026-11-26, 1 MB took 22.7 µs in packets, 25.1 without
TINY, LARGE = 3 << 20, 4 << 30
#: bytes from which NCCL's gather is taken where parts are no whole vectors of 16 bytes, which kernels copy
#: number by number into the result, and engines do not pay: of 37 MB it is as fast. 1.4 GB on 2 H100 took
#: 10.2 ms by kernels, 11.6 by NCCL, whose parts are padded and moved again, and 4.7 by engines (2026-11-27)
ODD = 64 << 20
#: bytes of a part from which a gather that is begun early is left to copy engines
BESIDE = 4 << 20
#: bytes of a part up to which there are packets: their blocks are on a GPU at once
PACKETS = 1 << 20

WAYS = ("packets", "kernel", "engine", "library")


def choose(size: int, distributed: bool, world: int = 2, reached: bool = False) -> str:
    """How ``size`` bytes a rank are gathered: "packets", "kernel", "engine", or "library" where there is one.
    ``reached``: into a result that peers write."""
    engines, odd = engine.able() and by_engines_pays(size, world, reached), size % 16 > 0
    if engines and (reached or odd):
        return "engine"
    if distributed and size >= (ODD if odd else LARGE):
        return "library"
    if engines:
        return "engine"
    small = size <= PACKETS and size * (world - 1) <= TINY
    return "packets" if small and size % 4 == 0 else "kernel"


def by_engines_pays(size: int, world: int, reached: bool) -> bool:
    """Whether engines are modelled to be faster than kernels."""
    if world == 1:
        return False
    steps = [(1, 0, 0)] * (world - 1) if reached else engine.gathers(size, world)
    _, low, high = steps[-1]
    return engine.seconds(size, world, len(steps), 2 * (high - low)) < flat.seconds(size, world)


@host.checked
def all_gather(
    x: torch.Tensor,
    *,
    group: Group = None,
    rows: int | None = None,
    out: torch.Tensor | None = None,
    how: str | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """All ranks' x, one behind another along the first axis. Collective.

    Args:
        x: (m, …) of any dtype; alike on all ranks but for m where ``rows`` is given.
        group: who takes part, see `groups.team_of`; all ranks without.
        rows: all ranks' m together, split as torch.chunk does; without it every rank has as many.
        out: (rows, …), contiguous, takes the result; in symmetric memory (`comm.empty`) it is written without
            a copy. x may be this rank's rows of it, which are copied first unless by engines, else they share
            no memory.
        how: "packets" (of rows of whole words of four bytes), "kernel", "engine" (copy engines, where peers'
            memory is addressed) or "library" where the choice by size is not wanted.
        blocks: multiprocessors that the kernel keeps at most; without it as the size asks for. Packets go by
            as many blocks as a part has kilobytes, and are not chosen where this is given.

    Raises:
        TileValueError, TileTypeError: what does not fit; a library without a process group.
    """
    team = team_of(group)
    space, torch_group = workspace(team), library(group, team, x)
    blocks = flat.bound(blocks)
    rows = None if rows is None else number_of(rows, "rows")
    reached = out is not None and symmetric(out, team)
    given = signature(x), signature(out)
    key = ("all_gather", *given, torch_group is not None, reached, rows, how, blocks)
    plan = space.plans.of(key, lambda: _plan(team, x, torch_group, rows, out, reached, how, blocks))
    form, first = "x that is this rank's rows of out (in place)", team.rank * share(plan.shape[0], team.size)
    own = flat.in_place("all_gather", x, out, form, lambda o: (x, o.narrow(0, first, len(x))))
    made: torch.Tensor = plan.run(space, x, out, torch_group, own)
    return made


def _plan(
    team: Team, x: torch.Tensor, torch_group: Any, rows: int | None, out: torch.Tensor | None, reached: bool,
    how: str | None, blocks: int | None,
) -> Plan:  # fmt: skip
    """What `all_gather` does: of the team's memory, x, ``out``, torch's group, and whether x is this rank's
    rows of ``out``. It gives the result."""
    if x.dim() == 0:
        raise TileValueError("all_gather of a number", expected="a tensor of one axis at least")
    M, world, dtype = total(rows, x.shape[0], team, "x"), team.size, x.dtype
    shape = (M, *x.shape[1:])
    host.taking(out, shape, dtype)
    each = share(M, world)
    inner = math.prod(x.shape[1:])
    size = each * inner * x.element_size()
    kept = flat.kept(team, "all_gather", x, blocks, size=size)
    # Only the last ranks have fewer rows: the result is the front of n equal parts.
    fits = out is not None and M == each * world and flat.begins(out)
    reached = reached and fits
    able = {
        "packets": inner * x.element_size() % 4 == 0 and flat.resident(size, host.units(x.device)),
        "kernel": True,
        "engine": engine.able(),
        "library": torch_group is not None,
    }
    choice = flat.allowed(kept, WAYS, torch_group)
    way = how or choice or choose(size, torch_group is not None, world, reached)
    if how is not None and not (able.get(how, False) or (how in WAYS and M * inner == 0)):
        raise TileValueError(
            f"how={how!r} of rows of {inner * x.element_size()} bytes",
            expected='"kernel"; "packets" of rows of whole words of 4 bytes, up to a megabyte; "engine" '
            "where memory of other ranks is addressed, without TILESCALE_REMOTE; "
            '"library" where torch has a process group of these ranks',
        )
    if M * inner == 0:
        return Plan(
            shape, dtype, lambda space, x, out, torch_group, own: x.new_empty(shape) if out is None else out
        )
    if not able[way] or (way == "packets" and how is None and kept["blocks"] is not None):
        way = "kernel"
    told = Said("all_gather of", M, "rows of", inner, host.dtype_of(dtype), "numbers,", way)
    if way == "engine":
        units = flat.multiprocessors(x.device, kept["blocks"])

        def by_copies(
            space: Workspace, x: torch.Tensor, out: torch.Tensor | None, torch_group: Any, own: bool
        ) -> torch.Tensor:
            told(space)
            c = x.new_empty(shape) if out is None else out
            if reached:
                engine.push(x.contiguous(), c, space.team)
            else:
                by_engines(x, c, size, space.team, units)
            return c

        return Plan(shape, dtype, by_copies)
    cross = gathering(each, inner, dtype, x.device, M, team, way, reached, kept["blocks"])
    padded = (each * world, *x.shape[1:])

    def run(
        space: Workspace, x: torch.Tensor, out: torch.Tensor | None, torch_group: Any, own: bool
    ) -> torch.Tensor:
        if way != "library":
            told(space)
        whole = out if fits and out is not None else x.new_empty(padded)
        if own and whole is out:  # kernels write these rows, too; engines copy them onto x
            x = x.clone()
        cross(space, x.contiguous(), whole, torch_group)
        if out is None:
            return whole if M == len(whole) else whole[:M]
        return out if whole is out else out.copy_(whole[:M])

    return Plan(shape, dtype, run)


def gathering(
    each: int, inner: int, dtype: torch.dtype, device: torch.device, rows: int, team: Team, way: str,
    reached: bool, blocks: int | None,
) -> Callable[[Workspace, torch.Tensor, torch.Tensor, Any], None]:  # fmt: skip
    """What puts everyone's x, ``each`` rows of ``inner`` numbers, at its part of ``whole``, of which ``rows``
    rows are someone's: of the team's memory, x, ``whole``, which peers write where ``reached``, and torch's
    group."""
    if way == "library":
        return lambda space, x, whole, torch_group: gather_into(whole, filled(x, each), torch_group)
    world, size, front = team.size, each * inner * dtype.itemsize, rows * inner * dtype.itemsize
    target = host.target_of(device)
    if way == "packets":
        boxes, words = flat.boxes(size), flat.EACH // 4
        what = {"world": world, "P": words, "blocks": boxes, "threads": 128, "dtype": "int32"}
        align = math.gcd(16, size, front) // 4
        kernel = host.kernel(gather_by_packets, target, **what, align=align)

        def by_packets(space: Workspace, x: torch.Tensor, whole: torch.Tensor, torch_group: Any) -> None:
            a, c = flat.row(x, torch.int32), flat.row(whole, torch.int32).view(world, -1)
            kernel(a, space.box(a, boxes * (words + 4)), c)

        return by_packets
    kind, align = flat.words(size, front)
    cut = flat.cut(size, kind.itemsize, flat.multiprocessors(device, blocks), world)
    # Rows that begin anywhere would be put number by number.
    direct = reached and size % 16 == 0
    what = {"world": world, "Q": cut.Q, "blocks": cut.blocks, "threads": cut.threads}
    what |= {"dtype": host.dtype_of(kind), "align": align, "direct": direct, "givers": cut.givers}
    kernel, padded = (
        host.kernel(gather, target, **what),
        (world, flat.padded(size // kind.itemsize, kind.itemsize)),
    )

    def run(space: Workspace, x: torch.Tensor, whole: torch.Tensor, torch_group: Any) -> None:
        a, c = flat.row(x, kind), flat.row(whole, kind).view(world, -1)
        arrived = space.counters(world, cut.givers or cut.blocks)
        if direct:
            kernel(a, c, arrived)
        else:
            (g,) = space.tensors(x, (padded, kind))
            kernel(a, g, arrived, c)

    return run


def by_engines(x: torch.Tensor, out: torch.Tensor, size: int, team: Team, units: int) -> None:
    """Everyone's x, ``size`` bytes but of the last ranks, into ``out`` in any memory, by the workspace: what
    one step of copies has brought is copied on beside the next one's, the own rows beside the first's."""
    a, c = flat.row(x, torch.uint8), flat.line(out).view(torch.uint8)
    world, rank = team.size, team.rank
    (space,) = workspace(team).tensors(x, ((world, flat.padded(size, 1)), torch.uint8))
    plan = engine.gathers(size, world)
    steps = [
        [(comm.peer(space, (rank + hop) % world)[rank, low : min(high, len(a))], a[low:high])]
        for hop, low, high in plan
    ]
    arrived = engine.cross(steps, team, space)
    engine.fill(c[rank * size :][: len(a)], a, units)
    for hop, low, high in (plan[k] for k in arrived):
        source = (rank - hop) % world
        to = c[source * size + low : source * size + high]  # ends where the last ranks' rows do
        engine.fill(to, space[source, low : low + len(to)], units)


def begin(x: torch.Tensor, rows: int, group: Group = None, least: int = BESIDE) -> Callable[[], torch.Tensor]:
    """`all_gather` beside what the caller launches until he calls what this returns, which gives the result.
    It may lie in the group's symmetric memory, and is there until the next one is begun. Parts of ``least``
    bytes and more cross by copy engines; others are gathered when they are asked for. Collective, and so is
    the end; one at a time.

    Args:
        x: (m, …), this rank's part of ``rows`` rows, split as torch.chunk does.
        group: who takes part, see `groups.team_of`.
    """
    team, x = team_of(group), x.contiguous()
    each = share(rows, team.size)
    size = each * math.prod(x.shape[1:]) * x.element_size()
    if team.size == 1 or size < max(1, least) or not engine.able():
        return lambda: all_gather(x, group=group, rows=rows)
    whole = workspace(team).tensors(x, ((each * team.size, *x.shape[1:]), x.dtype), apart="gather")[0]
    end = engine.begin(x, whole, team)

    def result() -> torch.Tensor:
        end()
        return whole[:rows]

    return result


def symmetric(tensor: Any, team: Team) -> bool:
    """Whether peers of the team reach a tensor. Ranks must agree on that, as on all symmetric memory."""
    backend = comm.behind()
    found = None if backend is None else backend.find(tensor.data_ptr())
    return found is not None and found[0].team is team


# ---- what is right, and what it is measured against


def draw(
    rows: int,
    columns: int,
    dtype: str = "bfloat16",
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """A rank's rows of so many in all."""
    g = generator(device, 1000 * seed + rank)
    mine = rows_of(rank, rows, world)
    if dtype.startswith(("int", "uint")):
        x = torch.randint(0, 100, (mine, columns), generator=g, device=device).to(getattr(torch, dtype))
    else:
        x = normal((mine, columns), dtype, g)
    return {"x": x, "rows": rows, **more}


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    whole = torch.cat([a["x"] for a in everyone]).double()
    return [Expected(whole, torch.zeros_like(whole)) for _ in everyone]


def by_library(x: torch.Tensor, group: Any, rows: int | None = None, **_: Any) -> Callable[[], Any]:
    """torch.distributed's gather, on equal parts."""
    world = torch.distributed.get_world_size(group)
    rows = world * x.shape[0] if rows is None else rows
    part = share(rows, world)
    out = x.new_empty(part * world, *x.shape[1:])
    padded = filled(x, part)

    def call() -> Any:
        gather_into(out, padded, group)
        return out[:rows]

    return call


def timed(out: torch.Tensor, symmetric: bool = False, **drawn: Any) -> Callable[[], torch.Tensor]:
    """The call that is timed; ``symmetric``: into memory that peers reach."""
    out = comm.empty(tuple(out.shape), out.dtype) if symmetric else out
    return lambda: all_gather(**drawn, out=out)


def ways(world: int, units: int = 132, **shape: Any) -> dict[str, dict[str, Any]]:
    size = _size(world, **shape)
    found: dict[str, dict[str, Any]] = {"packets": {"how": "packets"}} if size <= PACKETS else {}
    found |= {"kernel": {"how": "kernel"}, "library": {"how": "library"}}
    found |= {"engine": {"how": "engine"}} if engine.able() else {}
    if shape["rows"] % world == 0:
        found["kernel, symmetric"] = {"how": "kernel", "symmetric": True}
        found |= {"engine, symmetric": {"how": "engine", "symmetric": True}} if engine.able() else {}
    return found


def _size(world: int, rows: int, columns: int, dtype: str = "bfloat16", **_: Any) -> int:
    return share(rows, world) * columns * getattr(torch, dtype).itemsize


def pick(world: int, units: int = 132, kept: Any = None, how: str | None = None, **shape: Any) -> Pick:
    size, kept = _size(world, **shape), kept or {}
    way = how or kept.get("how") or choose(size, True, world)
    if way == "packets":
        if _size(1, **{**shape, "rows": 1}) % 4 == 0:
            return Pick(way, flat.boxes(size))
        way = "kernel"
    return Pick(way, flat.cut(size, 1, kept.get("blocks") or units).blocks if way == "kernel" else None)


OP = RankOp(
    name="all_gather",
    run=all_gather,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=ways,
    timed=timed,
    base=lambda world, units=132, **shape: {
        "how": choose(_size(world, **shape), True, world),
        "blocks": None,
    },
    knobs=lambda **_: (tuple({"how": way} for way in WAYS if way != "engine" or engine.able()), flat.BLOCKS),
    shape_of=lambda world, **shape: {"size": _size(world, **shape)},
    cases=(
        *(
            Case({"rows": rows, "columns": columns, "dtype": dtype}, small=True)
            for rows, columns, dtype in (
                (24, 64, "bfloat16"),
                (5, 7, "float32"),
                (1, 3, "int8"),
                (7, 1000, "float16"),
                (2000, 33, "bfloat16"),
                (300, 8, "int64"),
                (1301, 401, "bfloat16"),
            )
        ),
        *(
            Case({"rows": rows, "columns": columns, "dtype": dtype, "how": how}, small=True)
            for rows, columns, dtype, how in (
                (24, 64, "bfloat16", "kernel"),
                (7, 1000, "float16", "kernel"),
                (333, 36, "int8", "packets"),
                (2000, 34, "bfloat16", "packets"),
                (24, 64, "bfloat16", "engine"),
                (7, 1000, "float16", "engine"),
                (1301, 401, "bfloat16", "engine"),
                (5, 7, "int8", "engine"),
            )
        ),
        *(Case({"rows": rows, "columns": 8192}) for rows in (5000, 3, 8192)),
        *(Case({"rows": rows, "columns": 8192}, bar=1.0) for rows in (64, 1024, 16384, 131072)),
    ),
    peers={"library": by_library},
    alike=True,
    remote=lambda world, rows, columns, dtype="bfloat16", **_: float(
        (world - 1) * share(rows, world) * columns * getattr(torch, dtype).itemsize
    ),
)
