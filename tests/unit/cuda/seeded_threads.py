"""Faults seeded into thread IR for Hopper, one instruction each: what a wrong lowering of tokens, products,
stores and fences might leave behind. The emulator judges them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gpu.gemms import gemm
from tests.unit.cuda.emulated import data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import EXTERN_CALLS, ir, structural_map, structural_walk, tirx

NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))
TRUE = tirx.const(True, "bool")


@dataclass(frozen=True)
class Fault:
    """``name`` groups faults of one sort; ``at`` is the instruction that is changed."""

    name: str
    at: str
    kernel: ThreadKernel


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments."""

    name: str
    build: Callable[[], Any]
    args: Callable[[], dict[str, Any]]


def _gemm(name: str, M: int, N: int, K: int, **options: Any) -> Case:
    dtype = options.get("dtype", "bfloat16")

    def args() -> dict[str, Any]:
        a, b = ((K, M) if options.get("trans_a") else (M, K)), ((N, K) if options.get("trans_b") else (K, N))
        return {"A": data(a, dtype, 1), "B": data(b, dtype, 2), "C": empty((M, N), options.get("out", dtype))}

    return Case(name, lambda: gemm(M, N, K, **options), args)


CASES = (
    _gemm("gemm", 64, 64, 296, BM=64, BN=64, BK=32, threads=128, stages=2),
    _gemm("two warpgroups", 128, 64, 1000, BM=128, BN=64, BK=32, stages=4, out="float32", trans_b=True),
    _gemm("persistent", 128, 64, 168, BM=64, BN=64, BK=32, threads=128, stages=2, blocks=1, dtype="float16"),
)


# ---- the faults


def seeded(kernel: ThreadKernel) -> Iterator[Fault]:
    """All faults of a kernel, in the order of its instructions."""
    calls: list[Any] = []
    structural_walk(kernel.func.body, (tirx.Evaluate, lambda s: calls.append(s) if _name(s) else None))
    idle = _idle(kernel, calls)
    for k, s in enumerate(calls):
        if k in idle:
            continue
        for what, other in _edits(s, calls):
            yield Fault(f"{_plain(s)} {what}", f"instruction {k}", _with(kernel, s, other))


def _idle(kernel: ThreadKernel, calls: list[Any]) -> set[int]:
    """The waits for stores in front of which none stands, and the meetings behind them: they keep nobody
    waiting."""
    again: set[Any] = set()  # what loops that store run more than once

    def look(loop: Any) -> None:
        inside: list[Any] = []
        structural_walk(loop.body, (tirx.Evaluate, inside.append))
        if any(_plain(s) == "tma_store" for s in inside):
            again.update(inside)

    structural_walk(kernel.func.body, (tirx.For, look))
    first = next((k for k, s in enumerate(calls) if _plain(s) == "tma_store"), len(calls))
    waits = [k for k, s in enumerate(calls[:first]) if _plain(s) == "bulk_wait_read" and s not in again]
    return {*waits, *(k + 1 for k in waits if _plain(calls[k + 1]) == "barrier_sync")}


def _name(s: Any) -> str:
    call = s.value
    return str(call.args[0].value) if isinstance(call, ir.Call) and call.op.name in EXTERN_CALLS else ""


def _plain(s: Any) -> str:
    name = _name(s).removeprefix("ts::").partition("<")[0]
    return "product" if name.startswith("wgmma_m64") else name


def _with(kernel: ThreadKernel, old: Any, new: Any) -> ThreadKernel:
    body = structural_map(kernel.func.body, (tirx.Evaluate, lambda s: new if s.same_as(old) else s))
    assert not body.same_as(kernel.func.body)
    return dataclasses.replace(kernel, func=tirx.PrimFunc(list(kernel.func.params), body))


def _call(s: Any, *args: Any, name: str = "") -> Any:
    return tirx.Evaluate(tirx.call_extern("void", name or _name(s), *args), s.span)


#: instructions that do nothing on the emulator, nor for the order of anything
IDLE = (
    "fewer_registers", "more_registers", "wgmma_arrived", "wgmma_behind", "prefetch_map", "fail", "printf",
)  # fmt: skip


def _edits(s: Any, calls: list[Any]) -> Iterator[tuple[str, Any]]:
    plain, args = _plain(s), list(s.value.args)[1:]
    if plain in IDLE:
        return
    yield "left out", NOTHING
    if plain.startswith("mbarrier_"):
        yield from _of_barriers(s, plain, args, calls)
    elif plain == "wgmma_wait":
        pending = int(_name(s).partition("<")[2].rstrip(">").partition(",")[0])
        yield "for a group fewer", _call(s, name=f"ts::wgmma_wait<{pending + 1}>")
    elif plain == "product":
        yield "of the columns beside", _call(s, args[0], args[1], args[2] + tirx.IntImm("uint64", 2), args[3])
        yield (
            "that keeps what it should not, or forgets",
            _call(s, *args[:3], tirx.IntImm("int32", 1 - int(args[3].value))),
        )
    elif plain == "tma_load":
        yield "for the next stage's barrier", _call(s, args[0], args[1], _next(args[2]), *args[3:])
        yield "for the other barrier", _call(s, args[0], args[1], _partner(args[2], calls), *args[3:])
        yield "a box further", _call(s, *args[:-1], args[-1] + tirx.IntImm("int32", 8))
    elif plain == "tma_store":
        yield "a box further", _call(s, *args[:-1], args[-1] + tirx.IntImm("int32", 8))


def _of_barriers(s: Any, plain: str, args: list[Any], calls: list[Any]) -> Iterator[tuple[str, Any]]:
    if plain != "mbarrier_init":
        yield "of the next stage", _call(s, _next(args[0]), *args[1:])
    yield "of the other barrier", _call(s, _partner(args[0], calls), *args[1:])
    if plain == "mbarrier_wait":
        yield "for the other phase", _call(s, args[0], 1 - args[1])
    elif plain == "mbarrier_expect":
        yield "of too few bytes", _call(s, args[0], args[1] - 128)
        yield "of too many bytes", _call(s, args[0], args[1] + 128)
    elif plain == "mbarrier_init":
        yield "for an arrival more", _call(s, args[0], args[1] + 1)
        if int(args[1].value) > 1:
            yield "for an arrival fewer", _call(s, args[0], args[1] - 1)
    elif plain == "mbarrier_arrive_warp" and not isinstance(args[1], tirx.IntImm):
        yield "where it should not", _call(s, args[0], TRUE)


def _next(where: Any) -> Any:
    """The same barrier of the next stage; of a ring with one stage the word behind it."""
    load = where.args[0]
    stages, index = int(load.source.ty.shape[0]), load.indices[0]
    return tirx.address_of(
        tirx.BufferLoad(load.source, [tirx.floormod(index + 1, tirx.IntImm("int32", stages))])
    )


def _partner(where: Any, calls: list[Any]) -> Any:
    """full for empty, empty for full, of the same stage."""
    load = where.args[0]
    name = load.source.name
    wanted = name.replace("full", "empty") if "full" in name else name.replace("empty", "full")
    for s in calls:
        for a in list(s.value.args)[1:]:
            if isinstance(a, ir.Call) and a.op.name == "tirx.address_of" and a.args[0].source.name == wanted:
                return tirx.address_of(tirx.BufferLoad(a.args[0].source, list(load.indices)))
    raise AssertionError(f"{name} has no partner")


# ---- judging


@dataclass
class Verdict:
    """What the emulator says, or "" ; whether the results are wrong."""

    said: str = ""
    wrong: bool = False

    @property
    def found(self) -> bool:
        return bool(self.said) or self.wrong


class Judge:
    """Runs kernels of one case under schedules of the engines; even seeds deliver as late as they may."""

    def __init__(self, case: Case, arch: str = "sm_90a"):
        self.case, self.args = case, case.args()
        self.program, _ = pipeline.run(case.build().trace(), target(arch))
        self.kernel = Lowering(self.program).run()
        self.right = emulator.run(self.kernel, self.program, self.args)

    def judge(self, kernel: ThreadKernel, seeds: int = 12) -> Verdict:
        verdict = Verdict()
        for seed in range(seeds):
            try:
                got = emulator.run(kernel, self.program, self.args, seed)
            except emulator.EmulationError as error:
                return Verdict(str(error), verdict.wrong)
            verdict.wrong |= any(
                not np.array_equal(_bits(got[name]), _bits(self.right[name])) for name in got
            )
        return verdict


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


LAST = "the last round's stage is filled no more: its release is for tiles to come"
#: faults that change nothing, and why, by case and name; how many of that name
HARMLESS: dict[tuple[str, str], tuple[int, str]] = {
    (case, f"mbarrier_arrive_warp {how}"): (1, LAST)
    for case in ("gemm", "two warpgroups")
    for how in ("left out", "of the next stage", "of the other barrier")
}


def harmless(case: Case, fault: Fault, seen: int = 1) -> str | None:
    """Why a fault changes nothing; None where it must be found. ``seen``: so many faults of that name have
    survived in this case."""
    most, why = HARMLESS.get((case.name, fault.name), (0, ""))
    return why if seen <= most else None
