"""``reduce_scatter(x)``: of the sum of all ranks' x each rank gets its rows.

Each rank's blocks put what another rank adds to it; that adds the parts in float32, in the order of ranks. Of
the largest engines put pieces, and kernels add those that have come beside the next ones: the same bits.
NCCL adds in an order of its own, so it takes a call only where the caller lets it (``order="any"``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilescale import comm
from tilescale.comm.backend import Team
from tilescale.errors import TileValueError
from tilescale.ops import host
from tilescale.ops.case import generator, normal
from tilescale.ops.gemm_kernels import ceil_div
from tilescale.ops.prepared import Plan, signature
from tilescale.ops.ranks import engine, flat
from tilescale.ops.ranks.case import Case, Expected, Pick, RankOp
from tilescale.ops.ranks.flat_kernels import scatter_arrived, scatter_by_packets, scatter_sum
from tilescale.ops.ranks.gemms import biased
from tilescale.ops.ranks.groups import Group, library, rows_of, scatter_into, share, team_of
from tilescale.ops.ranks.said import Said
from tilescale.ops.ranks.workspace import Workspace, workspace

#: bytes of a rank's result up to which packets are taken, and from which NCCL's is. On 2 H100, 2026-11-24
#: (ranks_2_h100.json), 1 MB took 9.4 µs in packets, 16.8 without; 512 MB went at 357 GB/s,
#: NCCL's at 262. On 4 H200, 2026-11-26, 1 MB took 12.8 µs in packets, 26.0 without
TINY, LARGE = 1 << 20, 4 << 30

WAYS = ("packets", "kernel", "engine", "library")


def choose(size: int, order: str, distributed: bool, world: int = 2, even: bool = True) -> str:
    """How ``size`` bytes a rank are scattered: "packets", which take equal parts, "kernel", "engine", or
    "library" where there is one and it may add as it likes."""
    if distributed and order == "any" and size >= LARGE:
        return "library"
    # sums behind engines read the parts as they lie, number by number where those are no whole vectors: 1.5
    # GB a rank on 2 H100 took 9.2 ms, by kernels, which pad the parts, 4.6 (2026-11-27)
    if engine.able() and size % 16 == 0 and by_engines_pays(size, world):
        return "engine"
    return "packets" if even and size <= TINY else "kernel"


def by_engines_pays(size: int, world: int) -> bool:
    """Whether engines are modelled to be faster than kernels."""
    if world == 1:
        return False
    cut = engine.sums(size, 1, 1, world)
    low, high = cut[-1]
    last = (world + 1) * (high - low)
    return engine.seconds(size, world, len(cut) * (world - 1), last) < flat.seconds(size, world)


@host.checked
def reduce_scatter(
    x: torch.Tensor,
    *,
    group: Group = None,
    order: str = "rank",
    out: torch.Tensor | None = None,
    how: str | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' x, added in float32 (float64 of float64) and rounded once.
    Collective.

    Args:
        x: (M, …) of bfloat16, float16, float32 or float64, alike on all ranks.
        group: who takes part, see `groups.team_of`; all ranks without.
        order: "rank": the parts are added in the order of ranks; "any": also as torch's library does, which
            may round on its way.
        out: (m, …), contiguous, takes the result; it may be this rank's rows of x, which costs a copy of
            them unless by engines, else it shares no memory with x.
        how: "packets" (of equal parts, and not of float64), "kernel", "engine" (copy engines, where peers'
            memory is addressed) or "library" where the choice by size is not wanted.
        blocks: multiprocessors that the kernel keeps at most; without it as the size asks for. Packets go by
            as many blocks as a part has twice a kilobyte, and are not chosen where this is given.

    Returns:
        (m, …): rows r·c to min((r + 1)·c, M) on rank r of n, c = ceil(M / n), as torch.chunk splits them.

    Raises:
        TileValueError, TileTypeError: what does not fit; a library without ``order="any"`` or a process
        group.
    """
    team = team_of(group)
    space, torch_group = workspace(team), library(group, team, x)
    blocks = flat.bound(blocks)
    given = signature(x), signature(out)
    key = ("reduce_scatter", *given, torch_group is not None, order, how, blocks)
    plan = space.plans.of(key, lambda: _plan(team, x, torch_group, order, out, how, blocks))
    c: torch.Tensor = plan.result(out, x)
    form, first = "out that is this rank's rows of x (in place)", team.rank * share(x.shape[0], team.size)
    own = flat.in_place("reduce_scatter", x, out, form, lambda o: (o, x.narrow(0, first, len(o))))
    plan.run(space, x, c, torch_group, own)
    return c


def _plan(
    team: Team, x: torch.Tensor, torch_group: Any, order: str, out: torch.Tensor | None, how: str | None,
    blocks: int | None,
) -> Plan:  # fmt: skip
    """What `reduce_scatter` does: of the team's memory, x, the result, torch's group, and whether the result
    is this rank's rows of x."""
    flat.summed(x, "reduce_scatter")
    if x.dim() == 0:
        raise TileValueError("reduce_scatter of a number", expected="a tensor of one axis at least")
    M = x.shape[0]
    shape = (rows_of(team.rank, M, team.size), *x.shape[1:])
    host.taking(out, shape, x.dtype)
    size = share(M, team.size) * math.prod(x.shape[1:]) * x.element_size()
    kept = flat.kept(team, "reduce_scatter", x, blocks, size=size, order=order)
    even = packable(x.numel(), x.dtype, x.device, M, team.size)
    choice = flat.allowed(kept, WAYS, torch_group)
    choice = choice or choose(size, order, torch_group is not None, team.size, even)
    if choice == "packets" and (kept["blocks"] is not None or not even):  # what was kept knows the size alone
        choice = "kernel"
    ways = (*["packets"][: int(even)], "kernel", *["engine"][: int(engine.able())])
    way = flat.way(how, choice, ways, order, torch_group)
    if x.numel() == 0:
        return Plan(shape, x.dtype, lambda space, x, c, torch_group, own: None)
    if way == "library":
        return Plan(
            shape, x.dtype, lambda space, x, c, torch_group, own: c.copy_(by_library(x, torch_group)())
        )
    inner = math.prod(x.shape[1:])
    add = scattering(M, inner, x.dtype, x.dtype, x.device, team, blocks=kept["blocks"], way=way)

    def run(space: Workspace, x: torch.Tensor, c: torch.Tensor, torch_group: Any, own: bool) -> None:
        landing = (
            torch.empty_like(c) if own and way != "engine" else c
        )  # kernels read x beside what they write
        add(space, x, landing, None)
        if landing is not c:
            c.copy_(landing)

    return Plan(shape, x.dtype, run)


def packable(count: int, dtype: torch.dtype, device: torch.device, M: int, world: int) -> bool:
    """Whether the parts of M rows, ``count`` numbers, can go in dense packets, of which there are none of
    float64: equal ones, by blocks that are resident together."""
    size = count // world * dtype.itemsize
    return M % world == 0 and dtype != torch.float64 and flat.resident(size, host.units(device))


def scattered(
    x: torch.Tensor,
    c: torch.Tensor,
    M: int,
    team: Team,
    bias: torch.Tensor | None = None,
    activation: str = "",
    way: str | None = None,
) -> None:
    """c = act(this rank's rows of the sum + bias), as `scattering` does it."""
    added, inner = 0 if bias is None else bias.numel(), math.prod(x.shape[1:])
    add = scattering(M, inner, x.dtype, c.dtype, x.device, team, added, activation, way=way)
    add(workspace(team), x, c, bias)


def scattering(
    M: int, inner: int, dtype: torch.dtype, out: torch.dtype, device: torch.device, team: Team, bias: int = 0,
    activation: str = "", blocks: int | None = None, way: str | None = None,
) -> Callable[[Workspace, torch.Tensor, torch.Tensor, torch.Tensor | None], None]:  # fmt: skip
    """What gives c = act(this rank's rows of the sum + bias): of the team's memory, x of M rows of ``inner``
    numbers, c, and a bias of so many numbers. ``way``: "packets", "kernel", or "engine", where c may be those
    rows of x; by the size without."""
    world, n, target = team.size, share(M, team.size) * inner, host.target_of(device)
    size = n * dtype.itemsize
    way = way or choose(size, "rank", False, world, packable(M * inner, dtype, device, M, world))
    kind, units = (world, dtype, out, bias, activation), flat.multiprocessors(device, blocks)
    told = Said("reduce_scatter of", M, "rows of", inner, host.dtype_of(dtype), "numbers,", way)
    if way == "engine":

        def by_copies(space: Workspace, x: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None) -> None:
            told(space)
            by_engines(flat.row(x.contiguous()), c, n, M * inner, space.team, bias, activation, units)

        return by_copies
    if way == "packets":
        each, boxes = flat.DENSE // dtype.itemsize, flat.boxes(size, flat.DENSE)
        what = flat.constants(flat.Cut(each, each, boxes, 128), *kind, n)
        del what["Q"]
        kernel = host.kernel(scatter_by_packets, target, **what)

        def by_packets(space: Workspace, x: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None) -> None:
            told(space)
            a, landing = flat.row(x.contiguous()), flat.landing(c)
            kernel(a.view(world, n), space.box(x, boxes * each, "parts"), biased(bias, c), landing)
            flat.landed(landing, c)

        return by_packets
    cut = flat.cut(size, dtype.itemsize, units, world)
    what = flat.constants(cut, *kind, n, M * inner) | {"givers": cut.givers}
    kernel, vectors = host.kernel(scatter_sum, target, **what), n // what["align"]
    padded = (world, flat.padded(n, dtype.itemsize))

    def run(space: Workspace, x: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None) -> None:
        told(space)
        a, landing = flat.row(x.contiguous()), flat.landing(c)
        (parts,) = space.tensors(x, (padded, dtype))
        arrived = space.counters(world, cut.givers or cut.blocks)
        kernel(a, parts, biased(bias, c), arrived, landing, vectors)
        flat.landed(landing, c)

    return run


def by_engines(
    a: torch.Tensor, c: torch.Tensor, n: int, t: int, team: Team, bias: torch.Tensor | None, activation: str,
    units: int, first: Callable[[], Iterable[Any]] | None = None,
) -> None:  # fmt: skip
    """c = act(sum of all ranks' a, t numbers, n a rank, + bias), this rank's. Each piece of c is added, in
    the order of ranks, when everyone's has come, beside the next one's copies. ``first``: what makes a, the
    next rank's numbers first, as `engine.cross` has it, on its lanes; then all of c is one piece."""
    world, rank = team.size, team.rank
    mine = a[min(t, rank * n) :][: c.numel()]
    own = None if first else flat.aligned(mine)  # a copy, perhaps
    inplace = own is not None and host.share_memory(own, c)
    landing = own if inplace else flat.landing(c)
    cut = flat.cut(n * a.element_size(), a.element_size(), units, world)
    (space,) = workspace(team).tensors(a, ((world * n,), a.dtype))
    plan = [(0, n)] if first else engine.sums(n, cut.P, a.element_size(), world)
    owners = [(rank + hop) % world for hop in range(1, world)]
    # of each owner its numbers, and where it has this rank's: behind as many of each rank in front
    given = {o: a[min(t, o * n) : min(t, o * n + n)] for o in owners}
    there = {o: comm.peer(space, o)[rank * len(x) :][: len(x)] for o, x in given.items()}
    steps = [[(there[o][low:high], given[o][low:high]) for o in owners] for low, high in plan]
    parts = space[: world * c.numel()].view(world, c.numel())
    added = 0 if bias is None else bias.numel()
    what = flat.constants(cut, world, a.dtype, c.dtype, added, activation, n, t) | {"inplace": inplace}
    del what["Q"]
    for low, high in (plan[k] for k in engine.cross(steps, team, space, first)):
        if own is None:  # what makes it has been launched
            engine.merged(a)
            own = flat.aligned(mine)
        if count := ceil_div(min(high, c.numel()) - low, cut.P) if low < c.numel() else 0:
            more = () if inplace else (landing,)
            host.launch(
                scatter_arrived, (own, parts, biased(bias, c), rank, low // cut.P, count, *more), **what
            )
    flat.landed(landing, c)


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
    """One of ``world`` tensors."""
    assert world
    return {"x": normal((rows, columns), dtype, generator(device, 1000 * seed + rank)), **more}


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    return by_rank(flat.reference_sum([a["x"] for a in everyone]), len(everyone))


def by_rank(whole: Expected, world: int) -> list[Expected]:
    """Each rank's rows of a result."""
    M = whole.value.shape[0]
    starts = [min(M, r * share(M, world)) for r in range(world + 1)]
    return [Expected(whole.value[a:b], whole.allowed[a:b]) for a, b in itertools.pairwise(starts)]


def by_library(x: torch.Tensor, group: Any, **_: Any) -> Callable[[], Any]:
    """torch.distributed's reduce-scatter, on equal parts."""
    world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    M, part = x.shape[0], share(x.shape[0], world)
    out = x.new_empty(part, *x.shape[1:])
    padded = x if part * world == M else x.new_zeros(part * world, *x.shape[1:])

    def call() -> Any:
        if padded is not x:
            padded[:M] = x
        scatter_into(out, padded, group)
        return out[: rows_of(rank, M, world)]

    return call


def _size(world: int, rows: int, columns: int, dtype: str = "bfloat16", **_: Any) -> int:
    return share(rows, world) * columns * getattr(torch, dtype).itemsize


def _even(world: int, rows: int, dtype: str = "bfloat16", **_: Any) -> bool:
    return rows % world == 0 and dtype != "float64"


def ways(world: int, units: int = 132, **shape: Any) -> dict[str, dict[str, Any]]:
    small = _size(world, **shape) <= TINY and _even(world, **shape)
    found: dict[str, dict[str, Any]] = {"packets": {"how": "packets"}} if small else {}
    found |= {"engine": {"how": "engine"}} if engine.able() else {}
    return found | {"kernel": {"how": "kernel"}, "library": {"how": "library", "order": "any"}}


def pick(
    world: int, order: str = "rank", units: int = 132, kept: Any = None, how: str | None = None, **shape: Any
) -> Pick:
    size, kept, even = _size(world, **shape), kept or {}, _even(world, **shape)
    way = how or kept.get("how") or choose(size, order, True, world, even)
    if way == "packets":
        return Pick(way, flat.boxes(size, flat.DENSE))
    return Pick(way, flat.cut(size, 1, kept.get("blocks") or units).blocks if way == "kernel" else None)


OP = RankOp(
    name="reduce_scatter",
    run=reduce_scatter,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=ways,
    base=lambda world, units=132, order="rank", **shape: {
        "how": choose(_size(world, **shape), order, True, world, _even(world, **shape)),
        "blocks": None,
    },
    knobs=lambda **_: (
        tuple({"how": way} for way in ("packets", "kernel", "engine") if way != "engine" or engine.able()),
        flat.BLOCKS,
    ),
    shape_of=lambda world, order="rank", **shape: {"size": _size(world, **shape), "order": order},
    cases=(
        *(
            Case({"rows": rows, "columns": columns, "dtype": dtype}, small=True)
            for rows, columns, dtype in (
                (24, 64, "bfloat16"),
                (5, 7, "float32"),
                (5, 7, "float64"),
                (1, 3, "float16"),
                (7, 1000, "bfloat16"),
                (700, 33, "bfloat16"),
                (1301, 401, "bfloat16"),
            )
        ),
        Case({"rows": 24, "columns": 64, "dtype": "bfloat16", "how": "kernel"}, small=True),
        *(
            Case({"rows": rows, "columns": columns, "dtype": dtype, "how": "engine"}, small=True)
            for rows, columns, dtype in (
                (24, 64, "bfloat16"),
                (5, 7, "float64"),
                (1301, 401, "bfloat16"),
                (1, 3, "float16"),
            )
        ),
        Case({"rows": 840, "columns": 37, "dtype": "float32", "how": "packets"}, small=True),
        *(Case({"rows": rows, "columns": 8192}) for rows in (5000, 3, 8192)),
        *(Case({"rows": rows, "columns": 8192}, bar=1.0) for rows in (64, 1024, 16384, 131072)),
    ),
    peers={"library": by_library},
    remote=lambda world, rows, columns, dtype="bfloat16", **_: float(
        (world - 1) * share(rows, world) * columns * getattr(torch, dtype).itemsize
    ),
)
