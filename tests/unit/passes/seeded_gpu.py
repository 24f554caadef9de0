"""Faults seeded into what GPUs' schedules make of programs: those of tokens, stages, counters and copies
(seeded.py), and those of products and stores in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.unit.passes import seeded as rings
from tests.unit.passes.seeded import Case, Edits, Fault, with_args
from tilescale.compiler.ir.operations import find
from tilescale.compiler.tvm_compat import structural_map, structural_walk, tirx

HOPPER = {"arch": "sm_90a"}
TRUE, FALSE = tirx.const(True, "bool"), tirx.const(False, "bool")


# ---- kernels


def two_products() -> Any:
    """Both of a round are in flight together, into accumulators of their own."""

    @T.prim_func
    def main(
        A: T.Tensor((64, 320), "float16"),
        B: T.Tensor((320, 64), "float16"),
        C: T.Tensor((64, 128), "float32"),
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            x, y = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.clear(x)
            T.clear(y)
            for k in T.Pipelined(5, num_stages=4):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, x)
                T.gemm(a, b, y, transpose_A=True)
            T.copy(x, C[0:64, 0:64])
            T.copy(y, C[0:64, 64:128])

    return main


def awaited_at_once() -> Any:
    """Other work between the products of a round: each is awaited where it stands."""

    @T.prim_func
    def main(
        A: T.Tensor((64, 320), "float16"), B: T.Tensor((320, 64), "float16"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            x = T.alloc_fragment((64, 64), "float32")
            T.clear(x)
            for k in T.Pipelined(5, num_stages=2):
                T.copy(A[0, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, x)
                for i, j in T.Parallel(64, 64):
                    x[i, j] = x[i, j] * 0.5
            T.copy(x, C)

    return main


def attention() -> Any:
    """The products of a round in two of the schedule's: the last one runs under the next round's softmax;
    keys and values in rings of their own."""
    n = 64

    @T.prim_func
    def main(
        Q: T.Tensor((n, n), "float16"),
        K: T.Tensor((5 * n, n), "float16"),
        V: T.Tensor((5 * n, n), "float16"),
        O: T.Tensor((n, n), "float16"),
    ):
        with T.Kernel(1, threads=128):
            q, k, v = (
                T.alloc_shared((n, n), "float16"),
                T.alloc_shared((n, n), "float16"),
                T.alloc_shared((n, n), "float16"),
            )
            s, p, o = (
                T.alloc_fragment((n, n), "float32"),
                T.alloc_fragment((n, n), "float16"),
                T.alloc_fragment((n, n), "float32"),
            )
            top, before, total = (T.alloc_fragment((n,), "float32") for _ in range(3))
            T.copy(Q, q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            for t in T.Pipelined(5, num_stages=2):
                T.copy(K[t * n, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(top, before)
                T.reduce_max(s, top, dim=1, clear=False)
                for i, j in T.Parallel(n, n):
                    s[i, j] = T.exp(s[i, j] - top[i])
                for i in T.Parallel(n):
                    before[i] = T.exp(before[i] - top[i])
                    total[i] *= before[i]
                T.reduce_sum(s, total, dim=1, clear=False)
                for i, j in T.Parallel(n, n):
                    o[i, j] *= before[i]
                T.copy(s, p)
                T.copy(V[t * n, 0], v)
                T.gemm(p, v, o)
            for i, j in T.Parallel(n, n):
                o[i, j] /= total[i]
            T.copy(o, O)

    return main


CASES = (
    Case("gemm", lambda: gemm(128, 64, 448, BM=64, BN=64, threads=128, stages=4)),
    Case("stored in parts", lambda: gemm(128, 256, 384, out="float32", trans_b=True)),
    Case(
        "persistent",
        lambda: gemm(
            200,
            136,
            320,
            BM=64,
            BN=64,
            threads=128,
            stages=4,
            blocks=2,
            panel=2,
            dtype="float16",
            out="float32",
        ),
    ),
    Case("two products", two_products),
    Case("awaited at once", awaited_at_once),
    Case("attention", attention),
)


# ---- faults


def seeded(program: Any) -> Iterator[Fault]:
    """All faults of a scheduled program of a GPU; of rings, those of the first."""
    yield from rings.seeded(program)
    for edit in (_products, _awaits, _late, _stores):
        for name, at, made in edit(program):
            yield Fault(name, at, made)


def _name(s: Any) -> str:
    return s.value.op.name[len("ts.") :] if isinstance(s, tirx.Evaluate) and find(s.value) is not None else ""


def _sequences(program: Any, *names: str) -> list[Any]:
    found: list[Any] = []
    structural_walk(
        program.func.body,
        (tirx.SeqStmt, lambda s: found.append(s) if any(_name(x) in names for x in s.seq) else None),
    )
    return found


def _replaced(program: Any, old: Any, new: Any) -> Callable[[], Any]:
    return rings._again(
        program, structural_map(program.func.body, (tirx.Evaluate, lambda s: new if s.same_as(old) else s))
    )


def _statements(program: Any, name: str) -> list[Any]:
    found: list[Any] = []
    structural_walk(
        program.func.body, (tirx.Evaluate, lambda s: found.append(s) if _name(s) == name else None)
    )
    return found


def _products(program: Any) -> Edits:
    """Products that are awaited later than they should, or not at all; into, or out of, the wrong tile."""
    for k, s in enumerate(_statements(program, "wgmma")):
        pending, args = int(s.value.attrs["pending"]), list(s.value.args)
        if pending >= 0:
            yield (
                "a product awaited a group later",
                f"product {k}",
                _replaced(program, s, with_args(s, *args, pending=pending + 1)),
            )
            yield (
                "a product not awaited",
                f"product {k}",
                _replaced(program, s, with_args(s, *args, pending=-1)),
            )
        clears = tirx.const(not bool(args[3].value), "bool")
        yield (
            "a product that begins elsewhere",
            f"product {k}",
            _replaced(program, s, with_args(s, *args[:3], clears)),
        )
        yield (
            "a product left out",
            f"product {k}",
            _replaced(program, s, tirx.Evaluate(tirx.IntImm("int32", 0))),
        )


def _awaits(program: Any) -> Edits:
    """The wait for products left out, on the wrong side of its neighbours, or for fewer of them."""
    yield from _displaced(program, "await_products")
    for k, s in enumerate(_statements(program, "await_products")):
        fewer = with_args(s, *list(s.value.args), pending=int(s.value.attrs["pending"]) + 1)
        yield "await_products for a group fewer", f"wait {k}", _replaced(program, s, fewer)


def _displaced(program: Any, name: str) -> Edits:
    seqs = _sequences(program, name)
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if _name(s) != name or name == "await_stores" and not _may_wait(program, seq, k):
                continue
            at, without = rings._where(seqs, seq, k), items[:k] + items[k + 1 :]
            yield f"{name} left out", at, rings._with(program, seq, without)
            for down in range(1, len(items) - k):
                made = [*without[: k + down], s, *without[k + down :]]
                yield f"{name} {down} statements later", at, rings._with(program, seq, made)
            if k and rings._contains(items[k - 1], lambda x: _name(x) in ("gemm", "wgmma", "tma_store")):
                yield (
                    f"{name} a statement earlier",
                    at,
                    rings._with(program, seq, [*without[: k - 1], s, *without[k - 1 :]]),
                )


def _may_wait(program: Any, seq: Any, k: int) -> bool:
    """Whether stores may be in flight where a wait for them stands: in a loop, or behind one."""
    loops: list[Any] = []
    structural_walk(
        program.func.body,
        (
            tirx.For,
            lambda f: loops.append(f) if rings._contains(f, lambda s: s.same_as(seq.seq[k])) else None,
        ),
    )
    return bool(loops) or any(_name(s) == "tma_store" for s in list(seq.seq)[:k])


def _late(program: Any) -> Edits:
    """Late releases that come in the first round too, never, or for the round whose products are in
    flight."""
    for k, s in enumerate(_statements(program, "ring_release")):
        args = list(s.value.args)
        if len(args) < 2:
            continue
        known = isinstance(args[1], tirx.IntImm)
        if not known:
            yield (
                "a late release in the first round",
                f"release {k}",
                _replaced(program, s, with_args(s, args[0], TRUE)),
            )
        yield (
            "a late release that never comes",
            f"release {k}",
            _replaced(program, s, with_args(s, args[0], FALSE)),
        )
        yield "a release of the round in flight", f"release {k}", _replaced(program, s, with_args(s, args[0]))


def _stores(program: Any) -> Edits:
    """Stores out of tiles that are written too early or too late, to the wrong place, or not awaited."""
    yield from _displaced(program, "await_stores")
    seqs = _sequences(program, "tma_store")
    for seq in seqs:
        items = list(seq.seq)
        for k, s in enumerate(items):
            if _name(s) != "tma_store":
                continue
            at, without = rings._where(seqs, seq, k), items[:k] + items[k + 1 :]
            yield "a store left out", at, rings._with(program, seq, without)
            yield (
                "a store before its tile is written",
                at,
                rings._with(program, seq, [*without[: k - 1], s, *without[k - 1 :]]),
            )
            yield "a tile not written", at, rings._with(program, seq, items[: k - 1] + items[k:])
            for other in items:
                if other is not s and _name(other) == "tma_store":
                    made = with_args(s, s.value.args[0], *list(other.value.args)[1:])
                    yield "a store to another's place", at, _replaced(program, s, made)
                    break


LAST = "the last round's stage is filled no more: its release is for tiles to come"
#: faults that change nothing, and why, by case and name; how many of that name
HARMLESS: dict[tuple[str, str], tuple[int, str]] = {
    **{
        (case, name): (1, LAST)
        for case in ("gemm", "stored in parts", "two products")
        for name in ("release dropped", "a late release that never comes")
    },
    ("persistent", "await_stores 2 statements later"): (
        1,
        "right behind the store: it is awaited before the next tile all the same",
    ),
    ("attention", "release dropped"): (2, LAST),  # of values, and of the query, whose ring has one round
    ("attention", "counter not advanced"): (3, "the last round's: nothing is counted behind it"),
    ("attention", "counter advanced by two"): (3, "the last round's: nothing is counted behind it"),
    ("attention", "a read of a stage too many"): (
        1,
        "the first round, which stands alone: its stage is 0 either way",
    ),
    ("attention", "a read of a stage too few"): (
        1,
        "the first round, which stands alone: its stage is 0 either way",
    ),
}


def harmless(case: Case, fault: Fault, seen: int = 1) -> str | None:
    """Why a fault changes nothing; None where it must be found. ``seen``: so many faults of that name have
    survived in this case."""
    most, why = HARMLESS.get((case.name, fault.name), (0, ""))
    return why if seen <= most else None
