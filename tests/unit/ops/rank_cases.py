"""Cases of the operations of several ranks, run on one rank: what the tests of all targets share."""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch

from tilescale import comm
from tilescale.ops import load_ranks
from tilescale.ops.case import as_tuple, worst
from tilescale.ops.ranks.case import Case, device_of
from tilescale.ops.ranks.groups import team_of
from tilescale.ops.ranks.workspace import COUNTERS, workspace

BESIDE = 64


def poisoned(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An output that holds NaN (or its dtype's least number), in the middle of memory that must stay as it
    is."""
    room = torch.full(((like.numel() + 2 * BESIDE) * like.element_size(),), 0x55, dtype=torch.uint8)
    room = room.to(like.device).view(like.dtype)
    out = room[BESIDE : BESIDE + like.numel()].view(like.shape)
    out.fill_(float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).min)
    return out, room


def intact(room: torch.Tensor) -> bool:
    return bool((torch.cat([room[:BESIDE], room[-BESIDE:]]).view(torch.uint8) == 0x55).all())


def run(module: str, shape: dict[str, Any], device: str = "cpu", seeds: int = 2) -> dict[str, Any]:
    """A case on this rank, with new data each time: how far off the worst element is, as a multiple of what
    rounding explains, a fingerprint of the bits, and whether a second call into poisoned memory gives the
    same and touches nothing beside it."""
    comm.init()
    op, rank, world = load_ranks(module), comm.rank(), comm.world_size()
    off, same, beside, bits = 0.0, True, True, []
    for seed in range(seeds):
        everyone = [op.draw(**shape, rank=r, world=world, seed=seed, device=device) for r in range(world)]
        want = op.reference(everyone)[rank]
        results = op.run(**everyone[rank])
        got, wanted = as_tuple(results), as_tuple(want)
        assert [g.shape for g in got] == [w.value.shape for w in wanted]
        assert all(g.device == device_of(everyone[rank]) for g in got)
        off = max(off, *map(worst, got, wanted))
        outs, rooms = zip(*map(poisoned, got), strict=True)
        again = as_tuple(op.run(**everyone[rank], out=outs if isinstance(results, tuple) else outs[0]))
        as_bytes = [g.contiguous().view(torch.uint8) for g in got]
        same &= all(map(operator.is_, again, outs))
        same &= all(a.equal(o.view(torch.uint8)) for a, o in zip(as_bytes, outs, strict=True))
        beside &= all(map(intact, rooms))
        bits.append(hashlib.sha256(b"".join(a.cpu().numpy().tobytes() for a in as_bytes)).hexdigest())
    return {"off": off, "same": same, "beside": beside, "bits": bits}


def right(results: list[dict[str, Any]], case: Case, *, alike: bool) -> None:
    """What `run` gave on all ranks. ``alike``: all have the same bits."""
    for rank, r in enumerate(results):
        assert r["off"] <= 1, f"{case} on rank {rank}: {r['off']} times what rounding explains"
        assert r["same"], f"{case} on rank {rank}: other bits in the second run"
        assert r["beside"], f"{case} on rank {rank}: memory beside the result was written"
    if alike:
        assert len({tuple(r["bits"]) for r in results}) == 1, f"{case}: ranks have different bits"


def nothing_left(group: Any = None) -> bool:
    """Whether the team's counters are zero, as the next launch expects them."""
    counters = workspace(team_of(group))._memory.get(COUNTERS)
    return counters is None or not bool(counters.any())
