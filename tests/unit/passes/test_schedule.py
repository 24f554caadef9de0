"""Which loops get roles or copies ahead, which stay in turn, and for what stated reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.passes.seeded import ag_gemm, gemm
from tilescale.compiler.checks.run import check
from tilescale.compiler.ir import spec
from tilescale.compiler.ir.tokens import token
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.roles import calls
from tilescale.compiler.passes.schedule import schedule
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import InternalError

BOTH = ("producer", "consumer")
S = 16


def forms(kernel: Any, **plan: Any) -> tuple[list[str], list[str]]:
    """The forms of a kernel's rings and the reasons for what stayed in turn; the program is well formed."""
    made = schedule(tile_level(kernel), 3, **plan)
    spec.verify(made.func, spec.SCHEDULED, "schedule")
    assert all(k.loc is not None and k.loc.file == __file__ for k in made.schedule.kept), made.schedule.kept
    return [r.form for r in made.schedule.rings], [k.reason for k in made.schedule.kept]


def roles_of(program: Any) -> list[str]:
    found: list[str] = []
    structural_walk(
        program.func.body,
        (tirx.AttrStmt, lambda s: found.append(str(s.node.value)) if s.attr_key == "ts.role" else None),
    )
    return found


def refused(
    kernel: Any, reason: str, args: dict[str, Any] | None = None, ranks: int = 1, **plan: Any
) -> None:
    """The kernel's one ring stays in turn for that reason (below the block there is none), and runs without a
    finding."""
    rings, reasons = forms(kernel, **plan)
    assert rings == ([] if kernel is each_warp else ["in_order"]) and any(reason in r for r in reasons), (
        rings,
        reasons,
    )
    report = check(kernel, ranks, args, level="both", depth=3, seeds=2, **{"roles": ("all",), **plan})
    assert report, report


@T.prim_func
def follows(A: T.Tensor((8, S), "int32"), C: T.Tensor((8, S), "int32")):
    """Which row comes next is in the last one."""
    with T.Kernel(1):
        a, at = T.alloc_shared((S,), "int32"), T.alloc_var("int32")
        for k in T.Pipelined(8, num_stages=3):
            T.copy(A[at, 0], a)
            T.copy(a, C[k, 0])
            at = a[0]


@T.prim_func
def in_place(A: T.Tensor((8, S), "int32")):
    """Each row is the one before it, plus one."""
    with T.Kernel(1):
        a, b = T.alloc_shared((S,), "int32"), T.alloc_fragment((S,), "int32")
        for k in T.Pipelined(7, num_stages=3):
            T.copy(A[k, 0], a)
            for i in T.Parallel(S):
                b[i] = a[i] + 1
            T.copy(b, A[k + 1, 0])


def steps(cmp: str) -> Any:
    """Blocks hand rows on through a counter that they await exactly, or at least."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "int32"), done: T.Signal((1,)), C: T.Tensor((4, S), "int32")):
        with T.Kernel(1), T.Scale("grid"):
            a = T.alloc_shared((S,), "int32")
            for k in T.Pipelined(4, num_stages=3):
                T.wait(done[0], k, cmp=cmp)
                T.copy(A[k, 0], a)
                T.copy(a, C[k, 0])
                T.signal(done[0])

    return main


def polling(kind: Any) -> Any:
    """What it copies from may be written by other ranks, or (a T.Tensor) by nobody."""

    @T.prim_func
    def main(A: kind((4, S), "int32"), flag: T.Tensor((1,), "int32"), C: T.Tensor((4, S), "int32")):
        with T.Kernel(1):
            a = T.alloc_shared((S,), "int32")
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[k, 0], a)
                if T.atomic_load(flag[0]) == 0:
                    T.copy(a, C[k, 0])

    return main


@T.prim_func
def each_warp(A: T.Tensor((4, S), "int32"), C: T.Tensor((2, 4, S), "int32")):
    with T.Kernel(1, threads=32):
        a = T.alloc_shared((S,), "int32")
        with T.Scale("warp") as w, warps:
            for k in T.Pipelined(4, num_stages=3):
                T.copy(A[k, 0], a)
                T.copy(a, C[w, k, 0:S])


@T.prim_func
def late_wait(A: T.Tensor((4, S), "int32"), ready: T.Signal((4,)), C: T.Tensor((4, S), "int32")):
    """A wait behind the computation guards the copies of the next round."""
    with T.Kernel(1), T.Scale("grid"):
        a = T.alloc_shared((S,), "int32")
        for k in T.serial(4):
            T.signal(ready[k])
        for k in T.Pipelined(4, num_stages=3):
            T.copy(A[k, 0], a)
            T.copy(a, C[k, 0])
            T.wait(ready[k])


@T.prim_func
def hands_over(A: T.Tensor((4, S), "int32"), ready: T.Signal((4,)), C: T.Tensor((4, S), "int32")):
    """A signal and a wait for what it sets off, both among the copies."""
    with T.Kernel(1), T.Scale("grid"):
        a, b = T.alloc_shared((S,), "int32"), T.alloc_shared((S,), "int32")
        for k in T.Pipelined(4, num_stages=3):
            T.copy(A[k, 0], a)
            T.signal(ready[k])
            T.wait(ready[k])
            T.copy(A[k, 0], b)
            for i in T.Parallel(S):
                a[i] + b[i]
            T.copy(a, C[k, 0])


@T.prim_func
def two_phases(A: T.Tensor((8, S), "int32"), B: T.Tensor((8, S), "int32"), C: T.Tensor((8, S), "int32")):
    """The second loop reads what the first has written; each runs in roles of its own."""
    with T.Kernel(1):
        a, b = T.alloc_shared((S,), "int32"), T.alloc_shared((S,), "int32")
        for k in T.Pipelined(8, num_stages=3):
            T.copy(A[k, 0], a)
            T.copy(a, B[k, 0])
        for k in T.Pipelined(8, num_stages=3):
            T.copy(B[7 - k, 0], b)
            T.copy(b, C[k, 0])


def test_two_roles_stay_one_where_copies_cannot_run_ahead():
    refused(follows, "depends on at, which the computation may still change", {"A": _rows()}, roles=BOTH)
    refused(in_place, "A is written here and copied into a ring", {"A": _rows()}, roles=BOTH)
    refused(steps("eq"), "may become false again", roles=BOTH)
    looked = {"A": _rows()[:4], "flag": np.zeros(1, np.int32)}
    refused(polling(T.SymmTensor), "an atomic operation that is looked at", looked, roles=BOTH)
    refused(each_warp, "once for each executor below the block", roles=BOTH)
    refused(hands_over, "a wait among the copies may be for what a signal among them sets off", roles=BOTH)


def _rows() -> Any:
    return ((3 * np.arange(8)[:, None] + 1) % 8 + np.zeros(S)).astype(np.int32)


def test_one_role_copies_in_turn_where_its_copies_cannot_run_ahead():
    ahead = {"ahead": True}
    refused(follows, "depends on", {"A": _rows()}, **ahead)
    refused(in_place, "A is written in the loop and copied in it", {"A": _rows()}, **ahead)
    refused(steps("ge"), "the copies wait for others, who may wait for a signal of this loop", **ahead)
    refused(
        polling(T.Tensor), "an atomic operation that is looked at", {"flag": np.zeros(1, np.int32)}, **ahead
    )
    assert forms(each_warp, **ahead) == (["ahead"], [])  # each warp has a ring of its own
    refused(late_wait, "a wait in the loop that does not stand directly in front of the copies", **ahead)
    refused(hands_over, "a wait among the copies", **ahead)
    made = schedule(tile_level(gemm()), 1, ahead=True)
    assert [k.reason for k in made.schedule.kept] == ["a ring of one stage has none to copy ahead into"]


def test_waits_that_stay_true_go_to_the_producer():
    for kernel in (steps("ge"), late_wait):
        assert forms(kernel, roles=BOTH) == (["roles"], [])
        report = check(kernel, level="both", depth=3, seeds=3)
        assert report, report


def test_a_wait_in_front_of_the_copies_goes_to_the_producer_alone():
    def waits(program: Any) -> dict[str, int]:
        found: dict[str, int] = {}

        def region(s: Any) -> None:
            if s.attr_key == "ts.role":
                calls: list[Any] = []
                structural_walk(
                    s.body,
                    (ir.Call, lambda c: calls.append(c) if getattr(c.op, "name", "") == "ts.wait" else None),
                )
                found[str(s.node.value)] = len(calls)

        structural_walk(program.func.body, (tirx.AttrStmt, region))
        return found

    assert waits(schedule(tile_level(ag_gemm()), 3, BOTH)) == {"producer": 1, "consumer": 0}
    # behind the copies it may be needed by either: both wait
    assert waits(schedule(tile_level(late_wait), 3, BOTH)) == {"producer": 1, "consumer": 1}


def test_regions_end_where_the_block_writes_what_it_copies():
    made = schedule(tile_level(two_phases), 3, BOTH)
    assert roles_of(made) == ["producer", "consumer"] * 2
    assert [r.form for r in made.schedule.rings] == ["roles", "roles"]
    assert [k.reason for k in made.schedule.kept] == [
        "B is written here and copied into a ring, which would run ahead of it"
    ]
    report = check(two_phases, level="both", depth=3, seeds=3)
    assert report, report


def test_what_nobody_writes_is_copied_ahead_of_polls():
    assert forms(polling(T.Tensor), roles=BOTH) == (["roles"], [])
    report = check(
        polling(T.Tensor), 1, {"flag": np.zeros(1, np.int32)}, level="both", depth=3, seeds=2, roles=BOTH
    )
    assert report, report


def test_one_loop_that_cannot_be_cut_does_not_keep_the_others():
    @T.prim_func
    def main(A: T.Tensor((8, S), "int32"), C: T.Tensor((8, S), "int32"), D: T.Tensor((8, S), "int32")):
        with T.Kernel(1):
            a, b, at = T.alloc_shared((S,), "int32"), T.alloc_shared((S,), "int32"), T.alloc_var("int32")
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[at, 0], a)
                T.copy(a, C[k, 0])
                at = a[0]
            for k in T.Pipelined(8, num_stages=3):
                T.copy(A[k, 0], b)
                T.copy(b, D[k, 0])

    rings, reasons = forms(main, roles=BOTH)
    assert rings == ["in_order", "roles"] and len(reasons) == 1
    report = check(main, 1, {"A": _rows()}, level="both", depth=3, seeds=3)
    assert report, report


def test_tile_variables_are_copied_to_the_producer():
    """A tile's row comes from a variable that a while loop changes, and from a tensor that the kernel only
    reads."""

    @T.prim_func
    def main(A: T.Tensor((8, S), "int32"), rows: T.Tensor((8,), "int32"), C: T.Tensor((8, S), "int32")):
        with T.Kernel(1):
            a, t = T.alloc_shared((S,), "int32"), T.alloc_var("int32")
            while t < 8:
                row = rows[t]
                if row >= 0:
                    for k in T.Pipelined(2, num_stages=3):
                        T.copy(A[(row + k) % 8, 0], a)
                        T.copy(a, C[t + k, 0])
                t = t + 2

    assert forms(main, roles=BOTH) == (["roles"], [])
    rows = _rows()[:, 0].copy()
    rows[2] = -1
    report = check(main, 1, {"A": _rows(), "rows": rows}, level="both", depth=3, seeds=3)
    assert report, report


@pytest.mark.parametrize(
    "plan", [{"roles": BOTH}, {"roles": ("all",), "ahead": True}], ids=["two roles", "copies ahead"]
)
def test_a_tile_that_is_allocated_in_its_loop(plan: dict[str, Any]):
    @T.prim_func
    def main(A: T.Tensor((8, S), "int32"), C: T.Tensor((8, S), "int32")):
        with T.Kernel(1):
            for k in T.Pipelined(8, num_stages=3):
                a = T.alloc_shared((S,), "int32")
                T.copy(A[k, 0], a)
                T.copy(a, C[k, 0])

    report = check(main, level="both", depth=3, seeds=2, **plan)
    assert report, report


@pytest.mark.parametrize("plan", [{}, {"ahead": True}, {"roles": BOTH}])
def test_a_view_has_no_stages(plan: dict[str, Any]):
    """It is the memory of another tile, which a later round still needs."""

    @T.prim_func
    def main(A: T.Tensor((4, S), "int32"), C: T.Tensor((4, S), "int32")):
        with T.Kernel(1):
            t = T.alloc_shared((4, 4), "int32")
            for k in T.Pipelined(4, num_stages=2):
                flat = T.view(t, (S,), "int32")
                T.copy(A[k, 0], flat)
                T.copy(flat, C[k, 0])

    assert forms(main, **plan)[0] == []
    a = np.arange(4 * S, dtype=np.int32).reshape(4, S)
    report = check(main, 1, {"A": a}, level="both", depth=3, seeds=2, **{"roles": ("all",), **plan})
    assert report, report


def test_plans_that_there_are_not():
    for plan in ({"roles": ("consumer",)}, {"roles": BOTH, "ahead": True}):
        with pytest.raises(ValueError, match="one role"):
            schedule(tile_level(follows), 2, **plan)


def _broken(change: Any, **plan: Any) -> str:
    made = schedule(tile_level(gemm()), 2, **plan)
    with pytest.raises(InternalError) as error:
        spec.verify(change(made.func), spec.SCHEDULED, "the test")
    return str(error.value)


def test_the_verifier_knows_roles_and_tokens():
    def replaced(kind: Any, change: Any) -> Any:
        return lambda func: func.with_body(structural_map(func.body, (kind, change)))

    def without(name: str) -> Any:
        nothing = tirx.Evaluate(tirx.IntImm("int32", 0))
        return replaced(
            tirx.Evaluate,
            lambda s: nothing if getattr(getattr(s.value, "op", None), "name", "") == name else s,
        )

    def role(old: str, new: str) -> Any:
        def change(s: Any) -> Any:
            if s.attr_key != "ts.role" or str(s.node.value) != old:
                return s
            return tirx.AttrStmt(ir.StringImm(new), s.attr_key, s.value, s.body)

        return replaced(tirx.AttrStmt, change)

    for kind in ("acquire", "commit", "wait", "release"):
        assert f"ring 0 has no ts.ring_{kind}" in _broken(without(f"ts.ring_{kind}"), roles=BOTH)
    assert "a role that there is not" in _broken(role("producer", "driver"), roles=BOTH)
    assert "a producer without its consumer" in _broken(role("producer", "all"), roles=BOTH)
    assert "a role region in another one" in _broken(
        replaced(
            tirx.For, lambda s: tirx.AttrStmt(ir.StringImm("all"), "ts.role", tirx.IntImm("int32", 0), s)
        ),
        roles=BOTH,
    )
    constant = token("wait", 0, tirx.IntImm("int32", 0), None).value
    assert "a ring token without a counter" in _broken(
        replaced(ir.Call, lambda c: constant if getattr(c.op, "name", "") == "ts.ring_wait" else c),
        roles=BOTH,
    )


@T.prim_func
def two_loops(A: T.Tensor((8, S), "int32"), B: T.Tensor((8, S), "int32"), C: T.Tensor((S,), "int32")):
    """Rows of two tensors, then some of one alone, all added."""
    with T.Kernel(1):
        a, b, c = (
            T.alloc_shared((S,), "int32"),
            T.alloc_shared((S,), "int32"),
            T.alloc_fragment((S,), "int32"),
        )
        T.clear(c)
        for k in T.Pipelined(5, num_stages=3):
            T.copy(A[k, 0], a)
            T.copy(B[k, 0], b)
            for i in T.Parallel(S):
                c[i] += a[i] * b[i]
        for k in T.Pipelined(3, num_stages=3):
            T.copy(B[k + 5, 0], b)
            for i in T.Parallel(S):
                c[i] += b[i]
        T.copy(c, C)


def test_loops_that_fill_the_same_tiles_share_their_ring():
    made = schedule(tile_level(two_loops), 3, roles=BOTH, by_reader=True)
    spec.verify(made.func, spec.SCHEDULED, "schedule")
    (ring,) = made.schedule.rings
    assert (ring.depth, ring.buffers, ring.form) == (3, ["a", "b"], "roles")
    acquired = [c for c in calls(made.func.body) if c.op.name == "ts.ring_acquire"]
    assert [int(c.attrs["tiles"]) if "tiles" in c.attrs else None for c in acquired] == [None, 2]
    report = check(two_loops, 1, None, level="both", arch="sm_90a", seeds=3)
    assert report, report


def test_loops_of_other_stages_share_no_ring():
    @T.prim_func
    def other(A: T.Tensor((8, S), "int32"), C: T.Tensor((S,), "int32")):
        with T.Kernel(1):
            a, c = T.alloc_shared((S,), "int32"), T.alloc_fragment((S,), "int32")
            T.clear(c)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(A[k, 0], a)
                for i in T.Parallel(S):
                    c[i] += a[i]
            for k in T.Pipelined(3, num_stages=2):
                T.copy(A[k + 5, 0], a)
                for i in T.Parallel(S):
                    c[i] -= a[i]
            T.copy(c, C)

    assert not schedule(tile_level(other), 3, roles=BOTH, by_reader=True).schedule.rings
