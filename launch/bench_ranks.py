"""What each rank of `tilescale bench` runs: ``python -m tilescale.launch.bench_ranks PLAN OUT``. PLAN is the
command's, as JSON; rank 0 leaves the figures in the file OUT.

Each case is first compared: ours with the library's result, element by element. Then ours, every way of ours
that was asked for, the peers and the computation alone are timed together (tilescale/ops/ranks/measure.py).
"""

from __future__ import annotations

import inspect
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tilescale import comm
from tilescale.errors import TileError, TileValueError
from tilescale.launch import held_out
from tilescale.ops import host, load_ranks
from tilescale.ops.case import as_tuple, copied
from tilescale.ops.ranks import measure, picks
from tilescale.ops.ranks.case import RankOp, device_of
from tilescale.ops.ranks.groups import team_of
from tilescale.ops.ranks.workspace import release

#: bytes that leave a rank of an H200 machine in a second at most, by its links
LINK = 370e9
#: of the greatest magnitude of the library's result: roundings of every rank's part, and other orders of sums
ALIKE = 3e-2
#: what the harness itself tells an operation that draws its arguments
DRAWN = ("rank", "world", "device", "seed")


def different(ours: Any, theirs: Any) -> float:
    """The greatest difference, relative to the peer's greatest magnitude; infinite where that is NaN. Of
    several results the first."""
    ours, theirs = as_tuple(ours)[0], as_tuple(theirs)[0]
    if ours.shape != theirs.shape:
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    scale = theirs.double().abs().max().clamp_min(1e-30)
    worst = float((ours.double() - theirs.double()).abs().max() / scale)
    return worst if worst == worst else float("inf")


def fits(op: RankOp, shape: dict[str, Any]) -> None:
    """Refuses a shape that lacks words or has unknown ones, a word that is of another kind than those of the
    operation's own cases, and extents of which there is nothing to measure.

    Raises:
        TileValueError: a text where they have numbers, say; K=0.
    """
    takes = {n: p for n, p in inspect.signature(op.draw).parameters.items() if n not in DRAWN}
    named = {n for n, p in takes.items() if p.kind is not p.VAR_KEYWORD}
    missing = [n for n in named if takes[n].default is inspect.Parameter.empty and n not in shape]
    unknown = [n for n in shape if n not in named] if named == set(takes) else []
    if missing or unknown:
        what = f"{unknown[0]}=" if unknown else f"no {sorted(missing)[0]}="
        words = ",".join(f"{n}=…" for n in takes if n in named)
        raise TileValueError(f"{what} in a shape of {op.name}", expected=f"--shape {words}")
    for name, value in shape.items():
        known = {type(c.shape[name]) for c in op.cases if c.shape.get(name) is not None}
        if known and type(value) not in known:
            kinds = " or ".join(sorted(k.__name__ for k in known))
            raise TileValueError(f"{name}={value} of {op.name} is no {kinds}")
        if type(value) is int:
            least = min([1, *(n for c in op.cases if type(n := c.shape.get(name)) is int)])  # a root may be 0
            if value < least:
                raise TileValueError(
                    f"{name}={value} of {op.name} is too small", expected=f"at least {least}"
                )


def variants(
    op: RankOp, shape: dict[str, Any], arguments: list[dict[str, Any]], group: Any, every_way: bool
) -> dict[str, list[measure.Call]]:
    """What is timed, by name: "ours", "ours, …", a peer's name, "alone"."""
    world, units = comm.world_size(), host.units(device_of(arguments[0]))
    outs = [copied(op.run(**a)) for a in arguments]
    pairs = list(zip(arguments, outs, strict=True))
    made = {"ours": [op.call(a, o) for a, o in pairs]}
    if every_way:
        for way, more in op.ways(world=world, units=units, **shape).items():
            try:
                op.call({**arguments[0], **more}, outs[0])()
            except TileError:  # a way that is not of such a shape; alike on all ranks
                continue
            made[f"ours, {way}"] = [op.call({**a, **more}, o) for a, o in pairs]
    for name, prepare in op.peers.items():
        try:
            made[name] = [prepare(**a, group=group) for a in arguments]
        except RuntimeError as error:  # a refusal, alike on all ranks as shapes are; NotImplementedError too
            if name == "library" or isinstance(error, torch.OutOfMemoryError):
                raise
    if op.alone is not None:
        made["alone"] = [op.alone(**a, world=world) for a in arguments]
    return made


def tune(
    op: RankOp, shape: dict[str, Any], arguments: list[dict[str, Any]], plan: dict[str, Any], group: Any
) -> None:
    """Sets one knob of an operation after another to the fastest of its alternatives, and keeps the whole.
    The slowest rank counts. Alternatives that are refused are passed over, alike on all ranks."""
    world, device = comm.world_size(), device_of(arguments[0])
    units, team = host.units(device), team_of(None)
    best, outs = op.base(world=world, units=units, **shape), [copied(op.run(**a)) for a in arguments]
    for knob in op.knobs(world=world, units=units, **shape):
        tried: dict[str, dict[str, Any]] = {}
        for words in [{}, *knob]:
            tried.setdefault(json.dumps({**best, **words}), {**best, **words})
        calls: dict[str, list[measure.Call]] = {}
        for name, words in tried.items():
            more = op.asked(words)
            try:
                op.run(**{**arguments[0], **more}, out=outs[0])
            except (TileError, TypeError):
                continue
            calls[name] = [op.call({**a, **more}, o) for a, o in zip(arguments, outs, strict=True)]
        if len(calls) > 1:
            times = measure.measure(calls, plan["device"], plan["replays"], group)
            best = tried[min(times, key=lambda name: statistics.median(times[name]))]
        release()
    found = picks.found(team, op.name, device, **op.shape_of(world=world, **shape))
    if found != best:
        picks.keep(team, op.name, best, **op.shape_of(world=world, **shape))


def one(op: RankOp, shape: dict[str, Any], plan: dict[str, Any], group: Any) -> dict[str, Any]:
    """A case's figures, alike on all ranks."""
    fits(op, shape)
    rank, world, device = comm.rank(), comm.world_size(), plan["device"]
    draw = {"rank": rank, "world": world, "device": device}
    first = op.draw(**shape, **draw, seed=0)
    arguments = [first, *(op.draw(**shape, **draw, seed=k) for k in range(1, measure.sets(first, device)))]
    if plan["tune"] and not {"how", "scales"} & set(shape) and "config" not in first:
        tune(op, shape, arguments, plan, group)
    calls = variants(op, shape, arguments, group, plan["every_way"])
    worst = torch.tensor([0.0], dtype=torch.float64, device=device)
    for k, drawn in enumerate(arguments):
        ours = op.seen(calls["ours"][k]()) if op.same else op.run(**drawn)
        worst = worst.maximum(torch.tensor(different(ours, calls["library"][k]())).to(worst))
    if not op.same:
        calls["ours"] = [op.call(a) for a in arguments]  # those before are behind other calls now
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX, group=group)
    times = measure.measure(calls, device, plan["replays"], group)
    us = {name: measure.spread(seconds) for name, seconds in times.items()}
    tuned = picks.found(team_of(None), op.name, device_of(first), **op.shape_of(world=world, **shape))
    units = host.units(device_of(first))
    return figures(op, shape, us, float(worst.item()), world, units, tuned)


def figures(
    op: RankOp,
    shape: dict[str, Any],
    us: dict[str, dict[str, float]],
    worst: float,
    world: int,
    units: int,
    tuned: dict[str, Any],
) -> dict[str, Any]:
    """A case's line, from its times in microseconds; ``tuned``: what was found by tuning."""
    ours, library = us["ours"]["median"], us["library"]["median"]
    remote, pick = op.remote(world=world, **shape), op.pick(world=world, units=units, kept=tuned, **shape)
    limit = remote / LINK * 1e6
    best = max(limit, us["alone"]["median"] if "alone" in us else 0.0)
    ways = {n.removeprefix("ours, "): t["median"] for n, t in us.items() if n.startswith("ours, ")}
    return {
        "op": op.name,
        "shape": shape,
        "us": us,
        "way": pick.way,
        "blocks": pick.blocks,
        "tuned": tuned or None,
        "link_us": limit,
        "best_us": best,
        "ratio_to_library": library / ours,
        "ratio_to_torch": us["torch"]["median"] / ours if "torch" in us else None,
        "share_of_best": best / ours,
        "gbytes_per_s": remote / ours / 1e3,
        "tflops": op.flops(world=world, **shape) / ours / 1e6,
        "difference": worst,
        "right": worst <= ALIKE,
        "slower": library < ours,
        "fastest_way": min(ways, key=lambda w: ways[w]) if ways else None,
    }


def cases(plan: dict[str, Any]) -> list[tuple[RankOp, dict[str, Any]]]:
    """Operations and shapes: those asked for, else on GPUs the measured ones, on processors the small ones
    that no configuration is named for; or random ones near those."""
    listed = named(plan)
    if not plan["held_out"]:
        return listed
    by_op = {op.name: (op, choices([s for o, s in listed if o is op])) for op, _ in listed}
    found = held_out.drawn(
        {name: shapes for name, (_, shapes) in by_op.items()}, plan["held_out"], plan["seed"]
    )
    return [(by_op[name][0], shape) for name, shape in found]


def choices(shapes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shapes of which none says how it is done: those that say nothing, else all of them without that."""
    plain = [s for s in shapes if "how" not in s]
    return plain or [{k: v for k, v in s.items() if k != "how"} for s in shapes]


def named(plan: dict[str, Any]) -> list[tuple[RankOp, dict[str, Any]]]:
    """Those of the operations' own lists, or by ``--shape``."""
    found = []
    for module in plan["modules"]:
        op = load_ranks(module)
        if plan["shapes"]:
            found += [(op, dict(s)) for s in plan["shapes"]]
            continue
        for case in op.cases:
            small = case.small and not {"BM", "config"} & set(case.shape)
            # torch multiplies 8-bit floats with scales of blocks on GPUs alone
            small = small and case.shape.get("scales") != "blocks"
            wanted = small if plan["device"] == "cpu" else case.bar is not None
            if wanted and (not plan["only"] or any(o in str(case) for o in plan["only"])):
                found.append((op, dict(case.shape)))
    return found


def over(begun: float, plan: dict[str, Any], group: Any) -> bool:
    """Whether the time for cases is over, by rank 0's clock; collective."""
    late = torch.tensor([time.perf_counter() - begun > plan["seconds"]], dtype=torch.int32)
    late = late.to(plan["device"])
    torch.distributed.broadcast(late, 0, group=group)
    return bool(late.item())


def main() -> int:
    plan, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    backend = "nccl" if plan["device"] == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=world)
    group, lines, failed = torch.distributed.group.WORLD, [], False
    from tqdm import tqdm

    every, begun = cases(plan), time.perf_counter()
    todo = tqdm(every, disable=rank != 0 or not plan["progress"], unit="case", leave=False)
    for op, shape in todo:
        if plan["seconds"] is not None and over(begun, plan, group):
            break
        todo.set_description(f"{op.name} {' '.join(f'{k}={v}' for k, v in shape.items())}")
        try:
            lines.append(one(op, shape, plan, group))
        except (TypeError, TileError) as error:
            if not plan["shapes"] and not plan["held_out"]:
                raise
            lines.append({"op": op.name, "shape": shape, "failed": str(error)})
            failed = True
            if rank == 0:
                traceback.print_exc(limit=-1)
        release()
    if rank == 0:
        machine = {}
        if plan["device"] == "cuda":
            found = torch.cuda.get_device_properties(0)
            machine = {"gpu": found.name, "multiprocessors": found.multi_processor_count}
        out.write_text(
            json.dumps({"backend": backend, "machine": machine, "cases": lines, "drawn": len(every)})
        )
    torch.cuda.synchronize() if plan["device"] == "cuda" else None
    comm.barrier()
    torch.distributed.destroy_process_group()
    return int(failed or not all(line.get("right", False) for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
