"""``all_reduce(x)``: the sum of all ranks' x on every rank, the same bits on each.

The smallest go in packets, which are their own signal: every rank puts its x to all others and adds all of
them. Larger ones go in two trips: rank r adds the r-th part of everyone's x and hands its sum out,
2 (n − 1) / n of x instead of n − 1 times; in packets too, or, the largest, in puts with signals. Packets take
no float64: small sums of those go in one shot of such puts. All these add in the order of ranks.
NCCL adds in an order of its own, so it takes a call only where the caller lets it (``order="any"``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.case import generator, normal
from tilescale.ops.prepared import Plan, signature
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.case import Case, Expected, Pick, RankOp
from tilescale.ops.ranks.flat_kernels import by_packets, one_shot, two_shot, two_shot_by_packets
from tilescale.ops.ranks.gemms import biased
from tilescale.ops.ranks.groups import Group, library, share, team_of
from tilescale.ops.ranks.said import Said
from tilescale.ops.ranks.workspace import Workspace, workspace

#: of what does not go in packets: bytes up to which one shot is faster than two, of two ranks (250 µs against
#: 261 at 64 MB, 30 against 29 at 4 MB on 2 H100, 2026-11-24), and from which NCCL may be. By hand on 4 H200
#: two shots were faster from 256 KB on
SMALL, TWO, LARGE = 256 << 10, 16 << 20, 256 << 20
#: bytes that leave a rank while a second trip of packets takes its time (a model: some 2 µs at 330 GB/s);
#: bytes up to which two trips of packets are faster than puts with signals: on 4 H200 8 MB took 41 µs, and 58
#: (2026-11-26)
TRIP, STREAM = 640 << 10, 16 << 20
#: bytes up to which two trips of packets are there: boxes are four times as large, on four ranks
IN_TWO = 32 << 20
#: ranks whose packets a thread has room for in its registers
HELD = 16
#: ways but for the library's; bytes up to which packets are measured
WAYS = ("packets", "two_packets", "one_shot", "two_shot")
MOST = {"packets": 1 << 20, "two_packets": IN_TWO}


def choose(size: int, world: int, order: str, distributed: bool, units: int = 132) -> str:
    """How ``size`` bytes are added: "packets", "two_packets", "one_shot", "two_shot", or "library" where
    there is one and it may add as it likes."""
    if distributed and order == "any" and size >= LARGE:
        return "library"
    # in one trip everything goes to everyone, in two parts of it go twice
    if size * (world - 1) * max(0, world - 2) <= TRIP * world and flat.resident(size, units):
        return "packets"
    return "two_packets" if size <= STREAM and world <= HELD else signalled(size, world)


def signalled(size: int, world: int) -> str:
    """The same, of what does not go in packets."""
    return "one_shot" if size <= SMALL or (world <= 2 and size < TWO) else "two_shot"


def packed(size: int, dtype: torch.dtype, units: int) -> tuple[str, ...]:
    """The ways in packets that there are for ``size`` bytes of a dtype: none of float64."""
    if dtype == torch.float64:
        return ()
    one = ("packets",) if flat.resident(size, units) else ()
    return (*one, "two_packets") if size <= IN_TWO else one


def there(choice: str, size: int, world: int, dtype: torch.dtype, units: int) -> str:
    """A choice by the size, where there is such a way for a dtype; else the one without packets."""
    packets = choice in ("packets", "two_packets")
    return signalled(size, world) if packets and choice not in packed(size, dtype, units) else choice


@host.checked
def all_reduce(
    x: torch.Tensor,
    *,
    group: Group = None,
    order: str = "rank",
    out: torch.Tensor | None = None,
    how: str | None = None,
    blocks: int | None = None,
) -> torch.Tensor:
    """The sum of all ranks' x, added in float32 (float64 of float64) and rounded once, the same bits on all
    of them. Collective.

    Args:
        x: of any shape, bfloat16, float16, float32 or float64, alike on all ranks.
        group: who takes part, see `groups.team_of`; all ranks without.
        order: "rank": the parts are added in the order of ranks; "any": also as torch's library does, which
            may round on its way.
        out: of x's shape, contiguous, takes the result; x itself, on all ranks or on none, is added in
            place, else it shares no memory with x.
        how: "packets" and "two_packets" (not of float64, nor of what is too large for them), "one_shot",
            "two_shot" or "library" where the choice by size is not wanted.
        blocks: multiprocessors that the kernel keeps at most; without it as the size asks for. "packets" go
            by as many blocks as the tensor has twice a kilobyte.

    Raises:
        TileValueError, TileTypeError: what does not fit; a library without ``order="any"`` or a process
        group.
    """
    team = team_of(group)
    space, torch_group = workspace(team), library(group, team, x)
    blocks = flat.bound(blocks)
    form = "out that is x (in place, on all ranks)"
    own = flat.in_place("all_reduce", x, out, form, lambda o: (x, o))
    key = ("all_reduce", signature(x), signature(out), own, torch_group is not None, order, how, blocks)
    plan = space.plans.of(key, lambda: _plan(team, x, torch_group, order, out, own, how, blocks))
    c: torch.Tensor = plan.result(out, x)
    plan.run(space, x, c, torch_group)
    return c


def _plan(
    team: Team, x: torch.Tensor, torch_group: Any, order: str, out: torch.Tensor | None, own: bool,
    how: str | None, blocks: int | None,
) -> Plan:  # fmt: skip
    """What `all_reduce` does: of the team's memory, x, the result and torch's group."""
    flat.summed(x, "all_reduce")
    host.taking(out, tuple(x.shape), x.dtype)
    size, units = x.numel() * x.element_size(), host.units(x.device)
    kept = flat.kept(team, "all_reduce", x, blocks, size=size, order=order)
    choice = flat.allowed(kept, (*WAYS, "library"), torch_group)
    choice = choice or choose(size, team.size, order, torch_group is not None, units)
    choice = there(choice, size, team.size, x.dtype, units)
    ways = (*packed(size, x.dtype, units), "one_shot", "two_shot")
    way = flat.way(how, choice, ways, order, torch_group)
    shape = tuple(x.shape)
    if x.numel() == 0:
        return Plan(shape, x.dtype, lambda space, x, c, torch_group: None)
    if way == "library":
        return Plan(shape, x.dtype, _by_library)
    add = reducing(x.numel(), x.dtype, x.dtype, x.device, team, way, blocks=kept["blocks"], inplace=own)
    return Plan(shape, x.dtype, lambda space, x, c, torch_group: add(space, x, c, None))


def _by_library(space: Workspace, x: torch.Tensor, c: torch.Tensor, torch_group: Any) -> None:
    if c.data_ptr() != x.data_ptr():
        c.copy_(x)
    torch.distributed.all_reduce(c, group=torch_group)


def reduced(
    x: torch.Tensor, c: torch.Tensor, team: Team, way: str, bias: torch.Tensor | None, activation: str
) -> None:
    """c = act(the sum + bias), c not x."""
    added = 0 if bias is None else bias.numel()
    add = reducing(x.numel(), x.dtype, c.dtype, x.device, team, way, added, activation)
    add(workspace(team), x, c, bias)


def reducing(
    t: int, dtype: torch.dtype, out: torch.dtype, device: torch.device, team: Team, way: str, bias: int = 0,
    activation: str = "", blocks: int | None = None, inplace: bool = False,
) -> Callable[[Workspace, torch.Tensor, torch.Tensor, torch.Tensor | None], None]:  # fmt: skip
    """What gives c = act(the sum + bias): of the team's memory, x of ``t`` numbers, c, which is x where
    ``inplace``, and a bias of so many numbers."""
    world, size, target = team.size, dtype.itemsize, host.target_of(device)
    units = flat.multiprocessors(device, blocks)
    kind = (world, dtype, out, bias, activation)
    behind: tuple[int, ...] = ()  # the kernel's last arguments
    if way == "packets":
        each, boxes = flat.DENSE // size, flat.boxes(t * size, flat.DENSE)
        what = flat.constants(flat.Cut(each, each, boxes, 128), *kind, t)
        del what["Q"]
        kernel = host.kernel(by_packets, target, **what, inplace=inplace)

        def between(space: Workspace, x: torch.Tensor, c: torch.Tensor, add: Any) -> tuple[Any, ...]:
            """The kernel's arguments behind x."""
            return space.box(x, boxes * each, "parts"), add

    elif way == "two_packets":
        wide = max(size, out.itemsize)  # sums of all ranks lie in registers, too
        P = flat.DENSE // wide
        pieces, count, room = flat.in_pieces(share(t, world) * wide, units, world)
        what = flat.constants(flat.Cut(P, P, count, 128), *kind, t)
        del what["Q"], what["blocks"]
        what |= {"pieces": pieces, "room": room * P}
        kernel, behind = host.kernel(two_shot_by_packets, target, **what, inplace=inplace), (count,)

        def between(space: Workspace, x: torch.Tensor, c: torch.Tensor, add: Any) -> tuple[Any, ...]:
            return space.box(x, room * P, "parts"), space.box(c, room * P, "sums"), add

    elif way == "one_shot":
        cut = flat.cut(t * size, size, units, world)
        padded = (world, flat.padded(t, size))
        kernel = host.kernel(one_shot, target, **flat.constants(cut, *kind, t), inplace=inplace)

        def between(space: Workspace, x: torch.Tensor, c: torch.Tensor, add: Any) -> tuple[Any, ...]:
            (parts,) = space.tensors(x, (padded, dtype))
            return parts, add, space.counters(cut.blocks)

    else:
        cut = flat.cut(share(t, world) * size, size, units, world)
        n = -(-share(t, world) // cut.Q) * cut.Q
        kernel = host.kernel(two_shot, target, **flat.constants(cut, *kind, t), inplace=inplace)

        def between(space: Workspace, x: torch.Tensor, c: torch.Tensor, add: Any) -> tuple[Any, ...]:
            parts, sums = space.tensors(x, ((world, n), dtype), ((world, n), out))
            return parts, sums, add, *space.counters(2, cut.blocks).unbind()

    told = Said("all_reduce of", t, host.dtype_of(dtype), "numbers,", way)

    def run(space: Workspace, x: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None) -> None:
        told(space)
        a, landing = flat.row(x.contiguous()), flat.landing(c)
        if inplace and a.data_ptr() != landing.data_ptr():  # they do not begin at 16 bytes
            landing = a
        to = () if inplace else (landing,)
        kernel(a, *between(space, x, c, biased(bias, c)), *to, *behind)
        flat.landed(landing, c)

    return run


# ---- what is right, and what it is measured against


def draw(
    size: int,
    dtype: str = "bfloat16",
    rank: int = 0,
    world: int = 1,
    device: Any = "cpu",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """One of ``world`` tensors of ``size`` numbers."""
    assert world
    return {"x": normal((size,), dtype, generator(device, 1000 * seed + rank)), **more}


def reference(everyone: list[dict[str, Any]]) -> list[Expected]:
    return [flat.reference_sum([a["x"] for a in everyone])] * len(everyone)


def by_library(x: torch.Tensor, group: Any, **_: Any) -> Callable[[], Any]:
    """torch.distributed.all_reduce, which is in place: a copy keeps x."""
    out = torch.empty_like(x)

    def call() -> Any:
        out.copy_(x)
        torch.distributed.all_reduce(out, group=group)
        return out

    return call


def by_torch(x: torch.Tensor, group: Any, **_: Any) -> Callable[[], Any]:
    """PyTorch's two-shot sum in symmetric memory, in place, and the copies in and out."""
    if x.device.type != "cuda" or x.dtype != torch.bfloat16 or x.numel() % 8:
        raise NotImplementedError("PyTorch's symmetric all-reduce takes bfloat16 in whole vectors on GPUs")
    import torch.distributed._symmetric_memory as symm_mem

    name, out = group.group_name, torch.empty_like(x)
    space = symm_mem.empty(x.numel(), device=x.device, dtype=x.dtype)
    symm_mem.rendezvous(space, name)
    small = x.numel() * 2 <= SMALL

    def call() -> Any:
        space.copy_(x.view(-1))
        if small:
            return torch.ops.symm_mem.one_shot_all_reduce_out(space, "sum", name, out.view(-1))
        torch.ops.symm_mem.two_shot_all_reduce_(space, "sum", name)
        return out.view(-1).copy_(space)

    return call


def pick(
    world: int,
    size: int,
    dtype: str = "bfloat16",
    order: str = "rank",
    units: int = 132,
    kept: Any = None,
    how: str | None = None,
    **_: Any,
) -> Pick:
    kind, kept = getattr(torch, dtype), kept or {}
    total = size * kind.itemsize
    choice = kept.get("how") or choose(total, world, order, True, units)
    way, units = how or there(choice, total, world, kind, units), kept.get("blocks") or units
    if way == "packets":
        return Pick(way, flat.boxes(total, flat.DENSE))
    if way == "two_packets":
        return Pick(way, flat.in_pieces(share(total, world), units, world)[1])
    cut = flat.cut(total if way == "one_shot" else share(total, world), 1, units)
    return Pick(way, None if way == "library" else cut.blocks)


def _remote(world: int, size: int, dtype: str = "bfloat16", **_: Any) -> float:
    """2 (n − 1) / n of the tensor, what any way sends at least where each number crosses a link once in each
    direction."""
    return 2.0 * (world - 1) / world * size * getattr(torch, dtype).itemsize


OP = RankOp(
    name="all_reduce",
    run=all_reduce,
    draw=draw,
    reference=reference,
    pick=pick,
    ways=lambda size, dtype="bfloat16", **_: {
        way: {"how": way, **({"order": "any"} if way == "library" else {})}
        for way in (*WAYS, "library")
        if size * getattr(torch, dtype).itemsize <= MOST.get(way, size * 8)
    },
    base=lambda world, size, dtype="bfloat16", order="rank", units=132, **_: {
        "how": choose(size * getattr(torch, dtype).itemsize, world, order, True),
        "blocks": None,
    },
    knobs=lambda **_: (tuple({"how": way} for way in WAYS), flat.BLOCKS),
    shape_of=lambda world, size, dtype="bfloat16", order="rank", **_: {
        "size": size * getattr(torch, dtype).itemsize,
        "order": order,
    },
    alike=True,
    cases=(
        *(
            Case({"size": size, "dtype": dtype, "how": way}, small=True)
            for way in WAYS
            for size, dtype in (
                (4096, "bfloat16"),
                (5, "float32"),
                *([(6, "float64")] if "packets" not in way else []),
                (1001, "float16"),
                (10_000, "bfloat16"),
                (1, "bfloat16"),
                *([(600_003, "bfloat16")] if way != "packets" else []),
            )
        ),
        *(Case({"size": size}) for size in (4104, 100_001, 10_000_003)),
        *(Case({"size": size}, bar=1.0) for size in (4096, 32768, 262_144, 2_097_152, 33_554_432)),
    ),
    peers={"library": by_library, "torch": by_torch},
    remote=_remote,
)
