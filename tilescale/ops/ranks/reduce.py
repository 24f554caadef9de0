"""``all_reduce(x)``: the sum of all ranks' x on every rank, the same bits on each.

The smallest go in packets, which are their own signal: every rank puts its x to all others and adds all of
them. Small ones go the same way in one shot of puts. Large ones in two: rank r
adds the r-th part of everyone's x and hands its sum out, 2 (n − 1) / n of x instead of n − 1 times. Both add
in the order of ranks. NCCL adds in an order of its own, so it takes a call only where the caller lets it
(``order="any"``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilescale.comm.backend import Team
from tilescale.ops import host
from tilescale.ops.case import generator, normal
from tilescale.ops.ranks import flat
from tilescale.ops.ranks.case import Case, Expected, Pick, RankOp
from tilescale.ops.ranks.flat_kernels import by_packets, one_shot, two_shot
from tilescale.ops.ranks.gemms import biased
from tilescale.ops.ranks.groups import Group, library, share, team_of
from tilescale.ops.ranks.workspace import workspace

#: bytes up to which packets are taken, and the same times the other ranks; up to which one shot is faster
#: than two, and from which NCCL may be. On 2 H100, 2026-11-24 (tests/bench/results/ranks_2.json), packets
#: took 6.3 µs at 512 KB, one shot 14.2, NCCL 12.8. By hand on 4 H200 two shots were faster from 256 KB on
TINY, MANY, SMALL, LARGE = 512 << 10, 3 << 19, 256 << 10, 256 << 20
#: bytes from which two ranks take two shots: 250 µs against 261 at 64 MB, 30 against 29 at 4 MB
TWO = 16 << 20
#: bytes up to which packets are measured
PACKETS = 1 << 20


def choose(size: int, world: int, order: str, distributed: bool, units: int = 132) -> str:
    """How ``size`` bytes are added: "packets", "one_shot", "two_shot", or "library" where there is one and it
    may add as it likes."""
    if distributed and order == "any" and size >= LARGE:
        return "library"
    if size <= TINY and size * (world - 1) <= MANY and flat.resident(size, units):
        return "packets"
    if world == 2:
        return "one_shot" if size < TWO else "two_shot"
    return "one_shot" if size <= SMALL else "two_shot"


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
        how: "packets" (not of float64), "one_shot", "two_shot" or "library" where the choice by size is not
            wanted.
        blocks: multiprocessors that the kernel keeps at most; without it as the size asks for. Packets go by
            as many blocks as the tensor has kilobytes.

    Raises:
        TileValueError, TileTypeError: what does not fit; a library without ``order="any"`` or a process
        group.
    """
    team = team_of(group)
    flat.summed(x, "all_reduce")
    c = host.result(out, tuple(x.shape), x.dtype, x)
    flat.in_place("all_reduce", x, out, "out that is x (in place, on all ranks)", lambda o: (x, o))
    torch_group = library(group, team, x)
    size = x.numel() * x.element_size()
    kept, units = (
        flat.kept(team, "all_reduce", x, blocks, size=size, order=order),
        host.units(x.device),
    )
    choice = flat.allowed(kept, torch_group) or choose(size, team.size, order, torch_group is not None, units)
    ways: tuple[str, ...] = ("packets", "one_shot", "two_shot")
    # a packet's word has four bytes of data
    if x.dtype == torch.float64 or not flat.resident(size, units):
        ways, choice = ways[1:], "one_shot" if choice == "packets" else choice
    way = flat.way(how, choice, ways, order, torch_group)
    if x.numel() == 0:
        return c
    if way == "library":
        if c.data_ptr() != x.data_ptr():
            c.copy_(x)
        torch.distributed.all_reduce(c, group=torch_group)
    else:
        reduced(x, c, team, way, blocks=kept["blocks"])
    return c


def reduced(
    x: torch.Tensor,
    c: torch.Tensor,
    team: Team,
    way: str,
    bias: torch.Tensor | None = None,
    activation: str = "",
    blocks: int | None = None,
) -> None:
    """c = act(the sum + bias)."""
    a, landing = flat.row(x.contiguous()), flat.landing(c)
    inplace = c.data_ptr() == x.data_ptr()
    if inplace and a.data_ptr() != landing.data_ptr():  # they do not begin at 16 bytes
        landing = a
    t, world, space = x.numel(), team.size, workspace(team)
    size, units = x.element_size(), flat.multiprocessors(x.device, blocks)
    add = biased(bias, c)
    if way == "packets":
        each, boxes = flat.EACH // size, flat.boxes(t * size)
        what = flat.constants(flat.Cut(each, each, boxes, 128), world, x, c, bias, activation, t)
        del what["Q"]
        args = (a, space.box(x, boxes * each), add, *(() if inplace else (landing,)))
        host.launch(by_packets, args, **what, inplace=inplace)
    elif way == "one_shot":
        cut = flat.cut(t * size, size, units, world)
        (parts,) = space.tensors(x, ((world, flat.padded(t, x.element_size())), x.dtype))
        args = (a, parts, add, space.counters(cut.blocks), *(() if inplace else (landing,)))
        what = flat.constants(cut, world, x, c, bias, activation, t)
        host.launch(one_shot, args, **what, inplace=inplace)
    else:
        cut = flat.cut(share(t, world) * size, size, units, world)
        n = -(-share(t, world) // cut.Q) * cut.Q
        parts, sums = space.tensors(x, ((world, n), x.dtype), ((world, n), c.dtype))
        given, done = space.counters(2, cut.blocks)
        args = (a, parts, sums, add, given, done, *(() if inplace else (landing,)))
        what = flat.constants(cut, world, x, c, bias, activation, t)
        host.launch(two_shot, args, **what, inplace=inplace)
    flat.landed(landing, c)


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
    total, kept = size * getattr(torch, dtype).itemsize, kept or {}
    way, units = (
        how or kept.get("how") or choose(total, world, order, True, units),
        kept.get("blocks") or units,
    )
    if way == "packets":
        return Pick(way, flat.boxes(total))
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
        **({"packets": {"how": "packets"}} if size * getattr(torch, dtype).itemsize <= PACKETS else {}),
        "one_shot": {"how": "one_shot"},
        "two_shot": {"how": "two_shot"},
        "library": {"how": "library", "order": "any"},
    },
    base=lambda world, size, dtype="bfloat16", order="rank", units=132, **_: {
        "how": choose(size * getattr(torch, dtype).itemsize, world, order, True),
        "blocks": None,
    },
    knobs=lambda **_: (({"how": "packets"}, {"how": "one_shot"}, {"how": "two_shot"}), flat.BLOCKS),
    shape_of=lambda world, size, dtype="bfloat16", order="rank", **_: {
        "size": size * getattr(torch, dtype).itemsize,
        "order": order,
    },
    alike=True,
    cases=(
        *(
            Case({"size": size, "dtype": dtype, "how": way}, small=True)
            for way in ("packets", "one_shot", "two_shot")
            for size, dtype in (
                (4096, "bfloat16"),
                (5, "float32"),
                *([(6, "float64")] if way != "packets" else []),
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
