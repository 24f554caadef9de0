"""Faults seeded into scheduled programs: what a wrong scheduling pass might leave behind, one at a time.

A fault is an edit of one sequence of statements (that of a ring's tokens, copies and readers) or of the plan
beside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tilescale.language as T
from tilescale.compiler.checks.levels import compare
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.operations import find
from tilescale.compiler.passes.pipeline import gpu_scheduled, tile_level
from tilescale.compiler.passes.roles import is_guard
from tilescale.compiler.passes.schedule import schedule
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx

ONE = tirx.IntImm("int32", 1)


@dataclass(frozen=True)
class Fault:
    """``name`` groups faults of one sort, ``at`` says which of them this is; ``program()`` has it."""

    name: str
    at: str
    program: Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kernel on ``ranks`` ranks with its arguments."""

    name: str
    build: Callable[[], Any]
    ranks: int = 1
    args: Callable[[], dict[str, Any]] = dict


# ---- kernels


def gemm() -> Any:
    @T.prim_func
    def main(
        A: T.Tensor((32, 112), "float32"), B: T.Tensor((112, 32), "float32"), C: T.Tensor((32, 32), "float32")
    ):
        with T.Kernel(2) as bx:
            a, b = T.alloc_shared((32, 16), "float32"), T.alloc_shared((16, 16), "float32")
            acc = T.alloc_fragment((32, 16), "float32")
            T.clear(acc)
            for k in T.Pipelined(7, num_stages=4):
                T.copy(A[0, k * 16], a)
                T.copy(B[k * 16, bx * 16], b)
                T.gemm(a, b, acc)
            T.copy(acc, C[0, bx * 16])

    return main


def persistent_gemm() -> Any:
    @T.prim_func
    def main(
        A: T.Tensor((64, 80), "float32"), B: T.Tensor((80, 48), "float32"), C: T.Tensor((64, 48), "float32")
    ):
        with T.Kernel(2) as block:
            a, b = T.alloc_shared((32, 16), "float32"), T.alloc_shared((16, 16), "float32")
            acc = T.alloc_fragment((32, 16), "float32")
            for i, j in T.Persistent((2, 3), 2, block):
                T.clear(acc)
                for k in T.Pipelined(5, num_stages=4):
                    T.copy(A[i * 32, k * 16], a)
                    T.copy(B[k * 16, j * 16], b)
                    T.gemm(a, b, acc)
                T.copy(acc, C[i * 32, j * 16])

    return main


def attention() -> Any:
    """The running softmax, its scores and products; keys and values in one ring."""

    @T.prim_func
    def main(
        Q: T.Tensor((32, 16), "float32"),
        K: T.Tensor((80, 16), "float32"),
        V: T.Tensor((80, 16), "float32"),
        O: T.Tensor((32, 16), "float32"),
    ):
        with T.Kernel(2) as bx:
            q, k, v = (
                T.alloc_shared((16, 16), "float32"),
                T.alloc_shared((16, 16), "float32"),
                T.alloc_shared((16, 16), "float32"),
            )
            s, o = T.alloc_fragment((16, 16), "float32"), T.alloc_fragment((16, 16), "float32")
            top, before, total = (T.alloc_fragment((16,), "float32") for _ in range(3))
            T.copy(Q[bx * 16, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for t in T.Pipelined(5, num_stages=4):
                T.copy(K[t * 16, 0], k)
                T.copy(V[t * 16, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(16, 16):
                    s[i, j] = T.exp(s[i, j] - top[i])
                for i in T.Parallel(16):
                    before[i] = T.exp(before[i] - top[i])
                    total[i] *= before[i]
                T.reduce_sum(s, total, dim=1, clear=False)
                for i, j in T.Parallel(16, 16):
                    o[i, j] *= before[i]
                T.gemm(s, v, o)
            for i, j in T.Parallel(16, 16):
                o[i, j] /= total[i]
            T.copy(o, O[bx * 16, 0])

    return main


def ag_gemm() -> Any:
    """All-gather and GEMM in one: each rank puts its rows to the others a chunk at a time; the copies of a
    chunk wait for it."""
    n, chunks = 2, 5

    @T.prim_func
    def main(
        X: T.SymmTensor((n, 16, chunks * 16), "float32"),
        W: T.Tensor((chunks * 16, 16), "float32"),
        here: T.Signal((n, chunks)),
        C: T.Tensor((n, 16, 16), "float32"),
    ):
        with T.Kernel(1):
            x, w = T.alloc_shared((16, 16), "float32"), T.alloc_shared((16, 16), "float32")
            acc = T.alloc_fragment((16, 16), "float32")
            with T.Scale("device") as rank, world:
                for c in T.serial(chunks):
                    mine = X[rank, 0:16, c * 16 : (c + 1) * 16]
                    for hop in T.serial(1, world):
                        T.copy(mine, mine, dst=(rank + hop) % world, signal=here[rank, c])
                for step in T.serial(world):
                    owner = (rank + step) % world
                    T.clear(acc)
                    for k in T.Pipelined(chunks, num_stages=4):
                        if step > 0:
                            T.wait(here[owner, k])
                        T.copy(X[owner, 0, k * 16], x)
                        T.copy(W[k * 16, 0], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, 0])

    return main


def ag_gemm_rows() -> Any:
    """All-gather and GEMM in one, as in example 08: a tile of other ranks' rows waits once, in front of its
    loop."""
    n = 2

    @T.prim_func
    def main(
        X: T.SymmTensor((n, 16, 80), "float32"), W: T.Tensor((80, 32), "float32"), here: T.Signal((n,)),
        C: T.Tensor((n, 16, 32), "float32"),
    ):  # fmt: skip
        with T.Kernel(1) as b:
            x, w = T.alloc_shared((16, 16), "float32"), T.alloc_shared((16, 16), "float32")
            acc = T.alloc_fragment((16, 16), "float32")
            with T.Scale("device") as rank, world:
                for step, j in T.Persistent((n, 2), 1, b):
                    owner = (rank + step) % world
                    if step == 0:
                        mine = X[rank, 0:16, 0:80]
                        for hop in T.serial(j + 1, world, step=2):
                            T.copy(mine, mine, dst=(rank + hop) % world, signal=here[rank])
                    else:
                        T.wait(here[owner])
                    T.clear(acc)
                    for k in T.Pipelined(5, num_stages=4):
                        T.copy(X[owner, 0, k * 16], x)
                        T.copy(W[k * 16, j * 16], w)
                        T.gemm(x, w, acc)
                    T.copy(acc, C[owner, 0, j * 16])

    return main


def _rows(rank: int) -> Any:
    made = np.ma.masked_all((2, 16, 80), np.float32)
    made[rank] = np.random.default_rng(rank).standard_normal((16, 80)).astype(np.float32)
    return made


CASES = (
    Case("gemm", gemm),
    Case("persistent_gemm", persistent_gemm),
    Case("attention", attention),
    Case("ag_gemm", ag_gemm, 2, lambda: {"X": _rows}),
    Case("ag_gemm_rows", ag_gemm_rows, 2, lambda: {"X": _rows}),
)
BOTH = ("producer", "consumer")
PLANS = {
    "2 stages, two roles": {"depth": 2, "roles": BOTH},
    "3 stages, two roles": {"depth": 3, "roles": BOTH},
    "2 stages, copies ahead": {"depth": 2, "ahead": True},
    "3 stages, copies ahead": {"depth": 3, "ahead": True},
}


# ---- faults


def seeded(program: Any) -> Iterator[Fault]:
    """All faults of a scheduled program with one ring."""
    for edit in (_tokens, _stages, _moves, _counters, _copies, _guards, _plan, _across):
        for name, at, made in edit(program):
            yield Fault(name, at, made)


Edits = Iterator[tuple[str, str, Callable[[], Any]]]


def _sequences(program: Any) -> list[Any]:
    """The sequences in which tokens of the ring stand."""
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.SeqStmt, lambda s: found.append(s) if any(_kind(x) for x in s.seq) else None)
    )
    return found


def _with(program: Any, old: Any, items: list[Any]) -> Callable[[], Any]:
    """The program with another sequence in the place of ``old``; the plan stays."""
    new = tirx.SeqStmt(items) if len(items) > 1 else items[0]

    def make() -> Any:
        body = structural_map(program.func.body, (tirx.SeqStmt, lambda s: new if s.same_as(old) else s))
        assert not body.same_as(program.func.body)
        return _again(program, body)()

    return make


def _kind(s: Any) -> str:
    """Which token a statement is; empty for any other statement."""
    name = s.value.op.name if isinstance(s, tirx.Evaluate) and find(s.value) is not None else ""
    return name[len("ts.ring_") :] if name.startswith("ts.ring_") else ""


def with_args(s: Any, *args: Any, **attrs: Any) -> Any:
    """The call that a statement is, with other arguments, and with these attributes too."""
    call = s.value
    kept = {**{key: call.attrs[key] for key in call.attrs.keys()}, **attrs}
    return tirx.Evaluate(ir.Call(call.op, list(args), attrs=kept, ret_ty=call.ty, span=call.span), s.span)


def _fills(s: Any) -> bool:
    return isinstance(s, tirx.Evaluate) and (op := find(s.value)) is not None and op.fills


def _reads(program: Any, s: Any) -> bool:
    """Whether a statement reads the ring's buffers."""
    found: list[Any] = []
    names = program.schedule.rings[0].buffers
    structural_walk(
        s, ((ir.TensorRegion, ir.TensorLoad), lambda n: found.append(n) if n.source.name in names else None)
    )
    return bool(found) and not _contains(s, _fills)


def _contains(s: Any, what: Callable[[Any], bool]) -> bool:
    found: list[Any] = []
    structural_walk(s, (tirx.Evaluate, lambda e: found.append(e) if what(e) else None))
    return bool(found)


def _advances(s: Any) -> bool:
    return (
        isinstance(s, tirx.BufferStore)
        and s.buffer.name.startswith("ring")
        and not isinstance(s.value, tirx.IntImm)
    )


def _where(seqs: list[Any], seq: Any, k: int) -> str:
    return f"sequence {next(i for i, s in enumerate(seqs) if s.same_as(seq))}, statement {k}"


def _tokens(program: Any) -> Edits:
    """Tokens dropped, doubled, of another round."""
    depth, seqs = program.schedule.rings[0].depth, _sequences(program)
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if not (kind := _kind(s)):
                continue
            at = _where(seqs, seq, k)
            yield f"{kind} dropped", at, _with(program, seq, items[:k] + items[k + 1 :])
            yield f"{kind} twice", at, _with(program, seq, [*items[: k + 1], *items[k:]])
            for name, by in (
                ("one round late", 1),
                ("one round early", -1),
                ("a phase late", depth),
                ("a phase early", -depth),
            ):
                counter = s.value.args[0] + tirx.IntImm("int32", by)
                other = with_args(s, counter, *list(s.value.args)[1:])
                yield f"{kind} {name}", at, _with(program, seq, [*items[:k], other, *items[k + 1 :]])


def _stages(program: Any) -> Edits:
    """Copies into, and reads of, another stage than that of the round."""
    depth, seqs = program.schedule.rings[0].depth, _sequences(program)
    names = program.schedule.rings[0].buffers
    changes: dict[str, Callable[[Any], Any]] = {
        "the next stage": lambda n: tirx.floormod(n + ONE, tirx.IntImm("int32", depth)),
        "the stage before": lambda n: tirx.floormod(
            n + tirx.IntImm("int32", depth - 1), tirx.IntImm("int32", depth)
        ),
        "a stage too many": lambda n: tirx.floormod(n, tirx.IntImm("int32", depth + 1)),
        "a stage too few": lambda n: (
            tirx.floormod(n, tirx.IntImm("int32", depth - 1)) if depth > 2 else tirx.IntImm("int32", 0)
        ),
    }
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if not _fills(s) and not _reads(program, s):
                continue
            for buffer in names:
                for how, change in changes.items():

                    def region(r: Any, buffer: str = buffer, change: Any = change) -> Any:
                        if r.source.name != buffer:
                            return r
                        return tirx.BufferRegion(
                            r.source,
                            [ir.Range.from_min_extent(change(r.region[0].min.a), 1), *list(r.region)[1:]],
                        )

                    other = structural_map(s, (ir.TensorRegion, region))
                    if not other.same_as(s):
                        what = "a copy into" if _fills(s) else "a read of"
                        yield (
                            f"{what} {how}",
                            f"{_where(seqs, seq, k)}, {buffer}",
                            _with(program, seq, [*items[:k], other, *items[k + 1 :]]),
                        )


def _moves(program: Any) -> Edits:
    """Tokens on the wrong side of the accesses that they guard."""
    seqs = _sequences(program)
    for seq in seqs:
        items = list(seq.seq)
        kinds = [_kind(s) for s in items]
        fills = [k for k, s in enumerate(items) if _fills(s)]
        readers = [k for k, s in enumerate(items) if _reads(program, s)]

        def moved(kind: str, target: int, items: list[Any] = items, kinds: list[str] = kinds) -> list[Any]:
            k = kinds.index(kind)
            out = [s for j, s in enumerate(items) if j != k]
            out.insert(target, items[k])
            return out

        at = _where(seqs, seq, 0)
        if "commit" in kinds:
            yield "commit before the last copy", at, _with(program, seq, moved("commit", fills[-1]))
            yield "commit before all copies", at, _with(program, seq, moved("commit", fills[0]))
        if "acquire" in kinds:
            yield "acquire behind the first copy", at, _with(program, seq, moved("acquire", fills[0]))
            yield "acquire behind all copies", at, _with(program, seq, moved("acquire", fills[-1]))
        if "wait" in kinds:
            yield "wait behind the first reader", at, _with(program, seq, moved("wait", readers[0]))
        if "release" in kinds:
            yield "release before the last reader", at, _with(program, seq, moved("release", readers[-1]))
            yield "release before all readers", at, _with(program, seq, moved("release", readers[0]))


def _counters(program: Any) -> Edits:
    """Counters that stand still, run, begin elsewhere, or begin anew with every entry of the loop."""
    seqs = _sequences(program)
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if _advances(s):
                at = _where(seqs, seq, k)
                yield "counter not advanced", at, _with(program, seq, items[:k] + items[k + 1 :])
                yield (
                    "counter advanced by two",
                    at,
                    _with(program, seq, [*items[: k + 1], s, *items[k + 1 :]]),
                )
                first = min(j for j, x in enumerate(items) if _kind(x))
                yield (
                    "counter advanced too early",
                    at,
                    _with(program, seq, [*items[: first + 1], s, *items[first + 1 : k], *items[k + 1 :]]),
                )
    starts: list[Any] = []
    structural_walk(
        program.func.body,
        (
            tirx.BufferStore,
            lambda s: (
                starts.append(s)
                if s.buffer.name.startswith("ring") and isinstance(s.value, tirx.IntImm)
                else None
            ),
        ),
    )
    for s in starts:
        other = tirx.BufferStore(s.buffer, ONE, list(s.indices), s.span)
        body = structural_map(
            program.func.body, (tirx.BufferStore, lambda x, s=s, other=other: other if x.same_as(s) else x)
        )
        yield "counter begins at one", s.buffer.name, _again(program, body)
        for loop in _tile_loops(program, s.buffer):
            anew = tirx.SeqStmt([s, loop.body])
            new = tirx.For(
                loop.loop_var,
                loop.min,
                loop.extent,
                loop.kind,
                anew,
                annotations=dict(loop.annotations),
                span=loop.span,
            )
            body = structural_map(
                program.func.body, (tirx.For, lambda x, loop=loop, new=new: new if x.same_as(loop) else x)
            )
            yield "counter reset between tiles", s.buffer.name, _again(program, body)


def _again(program: Any, body: Any) -> Callable[[], Any]:
    def make() -> Any:
        done = program.with_body(body)
        done.schedule = program.schedule
        return done

    return make


def _tile_loops(program: Any, counter: Any) -> list[Any]:
    """Loops around the pipelined loop in which a counter is advanced."""
    found: list[Any] = []

    def look(loop: Any) -> None:
        inner: list[Any] = []
        structural_walk(
            loop.body, (tirx.BufferStore, lambda s: inner.append(s) if s.buffer.same_as(counter) else None)
        )
        if (
            inner
            and str((loop.annotations or {}).get("ts.kind", "")) in ("persistent", "serial")
            and _nests(loop)
        ):
            found.append(loop)

    structural_walk(program.func.body, (tirx.For, look))
    return found


def _nests(loop: Any) -> bool:
    inner: list[Any] = []
    structural_walk(loop.body, (tirx.For, inner.append))
    return any(str((x.annotations or {}).get("ts.kind", "")) == "pipelined" for x in inner)


def _copies(program: Any) -> Edits:
    """Copies that are missing, doubled, of another round; loops of one role that make a round more or
    less."""
    seqs = _sequences(program)
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if _fills(s):
                at = _where(seqs, seq, k)
                yield "a copy dropped", at, _with(program, seq, items[:k] + items[k + 1 :])
                late = [s for j, s in enumerate(items) if j != k]
                late.insert(next(j for j, x in enumerate(late) if _advances(x)) + 1, s)
                yield "a copy behind the counter", at, _with(program, seq, late)
            elif is_guard(s):
                at = _where(seqs, seq, k)
                yield "guard dropped", at, _with(program, seq, items[:k] + items[k + 1 :])
                late = [x for j, x in enumerate(items) if j != k]
                late.insert(next(j for j, x in enumerate(late) if _fills(x)) + 1, s)
                yield "guard behind its copy", at, _with(program, seq, late)
    loops: list[Any] = []
    structural_walk(
        program.func.body,
        (tirx.For, lambda s: loops.append(s) if _contains(s, lambda e: bool(_kind(e))) else None),
    )
    for loop in loops:
        for name, by in (("a round more", 1), ("a round less", -1)):
            extent = loop.extent + tirx.IntImm("int32", by)
            new = tirx.For(
                loop.loop_var,
                loop.min,
                extent,
                loop.kind,
                loop.body,
                annotations=dict(loop.annotations),
                span=loop.span,
            )
            body = structural_map(
                program.func.body, (tirx.For, lambda x, loop=loop, new=new: new if x.same_as(loop) else x)
            )
            yield f"a loop with {name}", loop.loop_var.name, _again(program, body)


def _guards(program: Any) -> Edits:
    """Waits away from the copies that they guard, made by one role instead of both."""
    for k, region in enumerate(_regions(program)):
        choices: list[Any] = []
        structural_walk(region.body, (tirx.IfThenElse, choices.append))
        for s in choices:
            branches = [s.then_case] if s.else_case is None else [s.then_case, s.else_case]
            if any(map(is_guard, branches)) and not is_guard(s):
                nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
                parts = [nothing if is_guard(b) else b for b in branches]
                new = tirx.IfThenElse(s.condition, parts[0], parts[1] if len(parts) > 1 else None, s.span)
                body = structural_map(
                    program.func.body, (tirx.IfThenElse, lambda x, s=s, new=new: new if x.same_as(s) else x)
                )
                yield (
                    "guard left to the other role",
                    ("producer", "consumer")[k] + " without",
                    _again(program, body),
                )


def _regions(program: Any) -> list[Any]:
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.AttrStmt, lambda s: found.append(s) if s.attr_key == "ts.role" else None)
    )
    return found if len(found) > 1 else []


def _plan(program: Any) -> Edits:
    """Tokens that take the ring for deeper than its buffers are."""
    ring = program.schedule.rings[0]

    def of_depth(depth: int) -> Any:
        done = copy(program)
        done.schedule = replace(
            program.schedule, rings=[replace(ring, depth=depth), *program.schedule.rings[1:]]
        )
        return done

    yield "tokens of a deeper ring", "", lambda: of_depth(ring.depth + 1)
    if ring.depth > 2:
        yield "tokens of a shallower ring", "", lambda: of_depth(ring.depth - 1)


def _across(program: Any) -> Edits:
    """What belongs to one role in the other."""
    seqs = _sequences(program)
    fill = next((s for s in seqs if "acquire" in map(_kind, s.seq)), None)
    read = next((s for s in seqs if "wait" in map(_kind, s.seq)), None)
    if len(program.schedule.roles) < 2 or fill is None or read is None:
        return
    fills, reads = list(fill.seq), list(read.seq)
    names = _names(program)

    def both(new_fills: list[Any], new_reads: list[Any]) -> Any:
        return lambda: _with(_with(program, fill, new_fills)(), read, new_reads)()

    for k, s in enumerate(fills):
        theirs = structural_map(s, (ir.Var, lambda v: names.get(v, v)))
        without = fills[:k] + fills[k + 1 :]
        if _fills(s):
            first = reads.index(next(x for x in reads if _kind(x) == "wait"))
            yield (
                "a copy in the consumer",
                "in front of its wait",
                both(without, [*reads[:first], theirs, *reads[first:]]),
            )
            yield (
                "a copy in the consumer",
                "behind its wait",
                both(without, [*reads[: first + 1], theirs, *reads[first + 1 :]]),
            )
        elif _kind(s) in ("acquire", "commit"):
            yield f"{_kind(s)} in the consumer", "", both(without, [theirs, *reads])
        elif is_guard(s):
            yield "guard left in the consumer", "", both(without, [theirs, *reads])
    for k, s in enumerate(reads):
        if _kind(s) in ("wait", "release"):
            ours = structural_map(s, (ir.Var, lambda v: {b: a for a, b in names.items()}.get(v, v)))
            yield f"{_kind(s)} in the producer", "", both([*fills, ours], reads[:k] + reads[k + 1 :])


def _names(program: Any) -> dict[Any, Any]:
    """The producer's names → the consumer's of the same spelling."""
    found: list[dict[str, Any]] = []
    for s in _regions(program):
        variables: list[Any] = []
        structural_walk(s.body, (tirx.For, lambda x, out=variables: out.append(x.loop_var)))
        structural_walk(s.body, (tirx.Bind, lambda x, out=variables: out.append(x.var)))
        found.append({v.name: v for v in variables})
    return {v: found[1][n] for n, v in found[0].items() if n in found[1]}


# ---- judging

ORDERS = (("round_robin", 0), ("adversary", 0), ("random", 1), ("adversary", 1))


@dataclass
class Verdict:
    """What was found: by anything, and by races, deadlocks and results alone, without the rules of tokens
    (their order, and that stages are touched between them)."""

    finding: Any = None
    without_order: Any = None


class Judge:
    """Runs scheduled programs of one case and compares them with what its tile program leaves behind."""

    def __init__(self, case: Case):
        self.case = case
        self.program = tile_level(case.build())
        self.tile = {
            order: launch(self.program, case.ranks, case.args(), order=order[0], seed=order[1])
            for order in ORDERS
        }
        assert all(r.report for r in self.tile.values()), next(
            str(r.report) for r in self.tile.values() if not r.report
        )

    def scheduled(self, plan: dict[str, Any]) -> Any:
        return (
            gpu_scheduled(self.program, target(plan["arch"]))
            if "arch" in plan
            else schedule(self.program, **plan)
        )

    def judge(self, program: Any, *, thorough: bool = False) -> Verdict:
        """``thorough``: beyond the first finding, also what is found without the rules of tokens."""
        verdict = Verdict()
        for order in ORDERS:
            done = launch(
                program, self.case.ranks, self.case.args(), order=order[0], seed=order[1], limit=20_000
            )
            found = [*done.report.findings]
            if not found:
                found = list(compare(self.program, self.tile[order].arrays, done.arrays))
            verdict.finding = verdict.finding or next(iter(found), None)
            if verdict.finding and not thorough:
                break
            semantic = [f for f in found if not (f.kind == "schedule" and f.message.startswith("ring "))]
            if not semantic and found:
                semantic = list(compare(self.program, self.tile[order].arrays, done.arrays))
            verdict.without_order = verdict.without_order or next(iter(semantic), None)
            if verdict.finding and verdict.without_order:
                break
        return verdict


#: faults that change nothing, and why, by plan ("ahead" or "roles"), name and place
HARMLESS = {
    (
        "ahead",
        "a copy into a stage too many",
        "sequence 0",
    ): "the loop is entered once: its first rounds have the same stage either way",
    (
        "ahead",
        "a copy into a stage too few",
        "sequence 0",
    ): "the loop is entered once: its first rounds have the same stage either way",
    (
        "roles",
        "guard left to the other role",
        "consumer without",
    ): "what this consumer reads of others comes through the ring, whose rounds"
    " are committed behind the producer's wait",
    (
        "ahead",
        "a loop with a round more",
        "i0_n",
    ): "the tile loop of the whole block, not of the pass: a tile beyond all reads zero, writes nothing",
}


def harmless(plan: str, fault: Fault) -> str | None:
    """Why a fault changes nothing; None where it must be found."""
    form = "ahead" if plan.endswith("ahead") else "roles"
    return HARMLESS.get((form, fault.name, fault.at.split(",")[0]))
