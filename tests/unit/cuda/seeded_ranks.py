"""Faults seeded into scheduled programs of several ranks, one statement each: waits, the fences behind them,
barriers, puts and what hands tiles to those who put them. The emulator judges them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import tilescale.language as T
from tests.unit.cuda.emulated import data, empty, same
from tests.unit.cuda.row_kernels import of_tokens, of_told, spread, told
from tests.unit.ops.test_sums_into_peers import by_tma, tiles
from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

#: what orders statements, or awaits what runs beside them
WAITED = ("wait", "proxy_fence", "sync", "await_rows", "rows_group")
NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))
S = 64


@dataclass(frozen=True)
class Fault:
    """``name`` groups faults of one sort; ``at`` is the statement that is changed."""

    name: str
    at: str
    program: Any


@dataclass(frozen=True)
class Case:
    """A kernel, and the arguments of each rank."""

    name: str
    build: Callable[[], Any]
    args: Callable[[], list[dict[str, Any]]]

    @cached_property
    def program(self) -> Any:
        return pipeline.run(self.build().trace(), target("sm_90a"))[0]

    @cached_property
    def want(self) -> Any:
        args = self.args()
        return launch(self.build(), len(args), {n: [a[n] for a in args] for n in args[0]}).arrays


# ---- the kernels


def gathered(world: int) -> Any:
    """Each rank puts its rows to the others while it multiplies, and multiplies theirs behind their signals."""

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, S, S), "bfloat16"),
        W: T.Tensor((S, S), "bfloat16"),
        C: T.Tensor((world, S, S), "bfloat16"),
        here: T.Signal((world,)),
    ):
        with T.Kernel(1, threads=128):
            x, w = T.alloc_shared((S, S), "bfloat16"), T.alloc_shared((S, S), "bfloat16")
            acc = T.alloc_fragment((S, S), "float32")
            with T.Scale("device") as (rank, n):
                for step in T.serial(n):
                    owner = (rank + step) % n
                    if step == 0:
                        for hop in T.serial(1, n):
                            mine = X[rank, 0:S, 0:S]
                            T.copy(mine, mine, dst=(rank + hop) % n, signal=here[rank], blocking=False)
                    else:
                        T.wait(here[owner])
                    T.clear(acc)
                    for k in T.Pipelined(1, num_stages=2):
                        T.copy(X[owner, 0, k * S], x)
                        T.copy(W[k * S, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, 0])

    return kernel


def pulled(world: int) -> Any:
    """Each rank reads the others' rows while it multiplies, and multiplies them behind its own signals."""

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, S, S), "bfloat16"),
        W: T.Tensor((S, S), "bfloat16"),
        C: T.Tensor((world, S, S), "bfloat16"),
        here: T.Signal((world,)),
    ):
        with T.Kernel(1, threads=128):
            x, w = T.alloc_shared((S, S), "bfloat16"), T.alloc_shared((S, S), "bfloat16")
            acc = T.alloc_fragment((S, S), "float32")
            with T.Scale("device") as (rank, n):
                for hop in T.serial(1, n):
                    owner = (rank + hop) % n
                    theirs = X[owner, 0:S, 0:S]
                    T.copy(theirs, theirs, src=owner, signal=here[owner], blocking=False)
                for step in T.serial(n):
                    owner = (rank + step) % n
                    if step > 0:
                        T.wait(here[owner])
                    T.clear(acc)
                    for k in T.Pipelined(1, num_stages=2):
                        T.copy(X[owner, 0, k * S], x)
                        T.copy(W[k * S, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, 0])

    return kernel


def relayed(world: int) -> Any:
    """A ring: each rank forwards what it was put."""

    @T.prim_func
    def kernel(
        X: T.SymmTensor((world, S, S), "bfloat16"),
        W: T.Tensor((S, S), "bfloat16"),
        C: T.Tensor((world, S, S), "bfloat16"),
        here: T.Signal((world,)),
    ):
        with T.Kernel(1, threads=128):
            x, w = T.alloc_shared((S, S), "bfloat16"), T.alloc_shared((S, S), "bfloat16")
            acc = T.alloc_fragment((S, S), "float32")
            with T.Scale("device") as (rank, n):
                for step in T.serial(n):
                    owner = (rank + n - step) % n
                    if step > 0:
                        T.wait(here[owner])
                    if step < n - 1:
                        there = X[owner, 0:S, 0:S]
                        T.copy(there, there, dst=(rank + 1) % n, signal=here[owner], blocking=False)
                    T.clear(acc)
                    for k in T.Pipelined(1, num_stages=2):
                        T.copy(X[owner, 0, k * S], x)
                        T.copy(W[k * S, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, 0])

    return kernel


def scattered(world: int) -> Any:
    """Each rank multiplies its share of the inner extent; the parts of a rank's rows go there, and are added
    in the order of ranks."""

    @T.prim_func
    def kernel(
        A: T.Tensor((world, S, S), "bfloat16"),
        W: T.Tensor((S, S), "bfloat16"),
        own: T.Tensor((world, S, S), "float32"),
        parts: T.SymmTensor((world, S, S), "float32"),
        C: T.Tensor((S, S), "float32"),
        arrived: T.Signal((1,)),
    ):
        with T.Kernel(1, threads=128):
            x, w = T.alloc_shared((S, S), "bfloat16"), T.alloc_shared((S, S), "bfloat16")
            acc, total = T.alloc_fragment((S, S), "float32"), T.alloc_fragment((S, S), "float32")
            part = T.alloc_fragment((S, S), "float32")
            with T.Scale("device") as (rank, n):
                for step in T.serial(n):
                    owner = (rank + 1 + step) % n
                    T.clear(acc)
                    for k in T.Pipelined(1, num_stages=2):
                        T.copy(A[owner, 0, k * S], x)
                        T.copy(W[k * S, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, own[owner, 0, 0])
                    T.copy(
                        own[owner, 0:S, 0:S],
                        parts[rank, 0:S, 0:S],
                        dst=owner,
                        signal=arrived[0],
                        blocking=False,
                    )
                T.wait(arrived[0], n)
                T.clear(total)
                for r in T.serial(n):
                    T.copy(parts[r, 0, 0], part)
                    for i, j in T.Parallel(S, S):
                        total[i, j] += part[i, j]
                T.copy(total, C)

    return kernel


def gathers(world: int) -> list[dict[str, Any]]:
    made = []
    for r in range(world):
        x = np.full((world, S, S), np.nan).astype(data((1,), "bfloat16", 0).dtype)
        x[r] = data((S, S), "bfloat16", r)
        made.append(
            {
                "X": x,
                "W": data((S, S), "bfloat16", 9),
                "C": empty((world, S, S), "bfloat16"),
                "here": np.zeros(world, np.int64),
            }
        )
    return made


def _scatters(world: int) -> list[dict[str, Any]]:
    return [
        {
            "A": data((world, S, S), "bfloat16", r),
            "W": data((S, S), "bfloat16", 20 + r),
            "own": empty((world, S, S), "float32"),
            "parts": empty((world, S, S), "float32"),
            "C": empty((S, S), "float32"),
            "arrived": np.zeros(1, np.int64),
        }
        for r in range(world)
    ]


def _spreads(world: int) -> list[dict[str, Any]]:
    return [{**a, "rows": empty((world * 13, 64), "float32")} for a in of_tokens(world, 13)]


CASES = (
    Case("gathered", lambda: gathered(3), lambda: gathers(3)),
    Case("pulled", lambda: pulled(3), lambda: gathers(3)),
    Case("relayed", lambda: relayed(3), lambda: gathers(3)),
    Case("scattered", lambda: scattered(3), lambda: _scatters(3)),
    Case("added", lambda: by_tma("float32", "float16", place=8), lambda: tiles("float32", "float16")),
    Case("spread", lambda: spread(3, 3, tokens=13), lambda: _spreads(3)),
    Case("told", lambda: told(3), lambda: of_told(3)),
)


# ---- the faults


def seeded(case: Case) -> Iterator[Fault]:
    """All faults of a case's program, in the order of its statements."""
    for role, body in _roles(case.program.func.body):
        found: list[Any] = []
        structural_walk(body, (tirx.Evaluate, found.append))
        for k, s in enumerate(found):
            for what, other in _edits(s, role):
                program = case.program.with_body(_with(case.program.func.body, s, other))
                yield Fault(f"{role}: {_called(s)} {what}", f"statement {k}", program)


def _called(s: Any) -> str:
    pulls = name_of(s) == "remote_put" and str(s.value.attrs["side"]) == "src"
    return "pull" if pulls else name_of(s)


def without(name: str, role: str, gone: list[Any]) -> Callable[[Any], Any]:
    """Takes an operation out of a role's part: for `structural_map` over `tirx.AttrStmt`."""

    def region(s: Any) -> Any:
        if s.attr_key != "ts.role" or str(s.node.value) != role:
            return s

        def leaf(e: Any) -> Any:
            if name_of(e) != name:
                return e
            gone.append(e)
            return NOTHING

        return tirx.AttrStmt(
            s.node, s.attr_key, s.value, structural_map(s.body, (tirx.Evaluate, leaf)), s.span
        )

    return region


def _roles(body: Any) -> list[tuple[str, Any]]:
    regions: list[Any] = []
    structural_walk(body, (tirx.AttrStmt, lambda s: regions.append(s) if s.attr_key == "ts.role" else None))
    return [(str(s.node.value), s.body) for s in regions]


def _with(body: Any, old: Any, new: Any) -> Any:
    return structural_map(body, (tirx.Evaluate, lambda s: new if s.same_as(old) else s))


def _edits(s: Any, role: str) -> Iterator[tuple[str, Any]]:
    name = name_of(s)
    if name in (*WAITED, "signal", "barrier", "remote_put", "peer_rows"):
        yield "gone", NOTHING
    if name == "await_rows" and int(s.value.attrs["pending"]):
        yield "for one less", _again(s, {}, pending=2)
    if name == "peer_rows":
        tile, to, rank = s.value.args
        yield "of another rank", _again(s, {2: (rank + 1) % 3})
        down = ir.Range.from_min_extent(to.region[0].min + 1, to.region[0].extent)
        yield "to elsewhere", _again(s, {1: tirx.BufferRegion(to.source, [down, *to.region[1:]])})
        short = {}
        for k, r in ((0, tile), (1, to)):
            *first, last = r.region
            if first and int(first[0].extent) > 1:
                first[0] = ir.Range.from_min_extent(first[0].min, first[0].extent - 1)
            else:  # 16 bytes
                last = ir.Range.from_min_extent(last.min, last.extent - 4)
            short[k] = tirx.BufferRegion(r.source, [*first, last])
        yield "without its end", _again(s, short)
    if name == "wait":
        yield "for one less", _again(s, {1: s.value.args[1] - 1})
        yield "for one more", _again(s, {1: s.value.args[1] + 1})
    if name == "signal":
        yield "of two", _again(s, {1: tirx.IntImm("int64", 2)})
    if name == "remote_put":
        yield "of two", _again(s, {4: tirx.IntImm("int64", 2)})
        yield "of another rank", _again(s, {2: (s.value.args[2] + 1) % 3})
        for side, what in ((0, "from elsewhere"), (1, "to elsewhere")):
            r = s.value.args[side]
            first = ir.Range.from_min_extent((r.region[0].min + 1) % 3, r.region[0].extent)
            yield what, _again(s, {side: tirx.BufferRegion(r.source, [first, *r.region[1:]])})
        short = {}
        for side in (0, 1):
            r = s.value.args[side]
            rows = ir.Range.from_min_extent(r.region[1].min, r.region[1].extent - 1)
            short[side] = tirx.BufferRegion(r.source, [r.region[0], rows, *r.region[2:]])
        yield "without its last row", _again(s, short)


def _again(s: Any, other: dict[int, Any], **words: Any) -> Any:
    c = s.value
    args = [other.get(k, a) for k, a in enumerate(c.args)]
    return tirx.Evaluate(
        ir.Call(c.op, args, attrs={**dict(c.attrs), **words}, ret_ty=c.ty, span=c.span), s.span
    )


#: faults that change nothing, and why
HARMLESS = {
    ("gathered", "communicator: wait"): "no put stands behind it in any round",
    ("gathered", "communicator: sync"): "it stands behind that wait",
    (
        "scattered",
        "communicator: sync",
    ): "looks at entries have a barrier of their own; the third put needs none",
    ("told", "all: await_rows gone", "statement 7"): "in front of the signal all have been awaited",
    ("scattered", "consumer: sync gone", "statement 13"): "nothing was stored before that tile was written",
}


def harmless(case: Case, fault: Fault) -> str:
    """Why a fault changes nothing; "" where it should be found."""
    for (name, what, *at), why in HARMLESS.items():
        if name == case.name and fault.name.startswith(what) and at in ([], [fault.at]):
            return why if "more" not in fault.name else ""
    return ""


# ---- who judges


def found(case: Case, program: Any, seeds: int = 12) -> str:
    """How a fault shows: what the emulator says, or "other results"; "" where it does not."""
    made = Lowering(program).run()
    for seed in range(seeds):
        try:
            left = emulator.run_ranks(made, program, case.args(), seed)
        except EmulationError as error:
            return str(error)
        for rank, arrays in enumerate(left):
            for name, array in arrays.items():
                try:
                    same(array, case.want[rank][name], name, False)
                except AssertionError:
                    return "other results"
    return ""
