"""Launches that end without flags (``T.Kernel(awaited=True)``): what they promise is judged, what their owner
cannot await is refused, and GPUs are told."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import lowered
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda.describe import AWAITED, description
from tilescale.compiler.description import parameter_words
from tilescale.compiler.sim import awaited
from tilescale.errors import TileSyntaxError, TileValueError


def shift(told: int, waits: int, where: str = "s[0]", promise: bool = True) -> Any:
    """Each rank puts to the next one with ``told`` signals, of which ``waits`` are awaited."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.SymmTensor((8,), "float32"), s: T.Signal((2,))):
        with T.Kernel(1, threads=32, awaited=promise), T.Scale("device") as (rank, n):
            T.copy(A, B, dst=(rank + 1) % n)
            for _ in range(told):
                T.signal(s[0], dst=(rank + 1) % n)
            T.wait(s[0], waits)

    return kernel


def kinds(kernel: Any, ranks: int) -> list[str]:
    return [f.kind for f in check(kernel, ranks, schedule="adversary", seeds=3).findings]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_awaited_is_right(ranks: int):
    assert kinds(shift(2, 2), ranks) == []


def test_a_signal_too_many_is_found():
    found = check(shift(2, 1), 2, schedule="adversary", seeds=3).findings
    texts = [f.message for f in found if f.kind == "unawaited"]
    assert any("this signals s[0] of rank" in t and "does not await it before it ends" in t for t in texts)
    assert kinds(shift(2, 1, promise=False), 2) == []


def test_a_put_that_nothing_awaits_is_found():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.SymmTensor((2, 8), "float32"), s: T.Signal((1,))):
        with T.Kernel(1, threads=32, awaited=True), T.Scale("device") as (rank, n):
            T.copy(A, B[0, 0:8], dst=(rank + 1) % n, signal=s[0])
            T.copy(A[0:4], B[1, 2:6], dst=(rank + 1) % n)
            T.wait(s[0], 1)

    found = check(kernel, 2, schedule="adversary", seeds=3).findings
    assert {f.kind for f in found} == {"unawaited"}
    assert "this writes B[1, 2:6] of rank" in found[0].message, found[0].message
    assert found[0].loc is not None and found[0].loc.file == __file__


def test_one_block_that_ends_early_is_no_matter():
    """The rank's end is that of its last block."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), B: T.SymmTensor((8,), "float32"), s: T.Signal((1,))):
        with T.Kernel(2, threads=32, awaited=True) as b, T.Scale("device") as (rank, n):
            if b == 0:
                T.copy(A, B, dst=(rank + 1) % n, signal=s[0])
            else:
                T.wait(s[0], 1)

    assert kinds(kernel, 2) == []


def test_reads_and_sums_are_refused():
    def pulled(how: str) -> Any:
        @T.prim_func
        def kernel(B: T.SymmTensor((8,), "float32"), C: T.SymmTensor((8,), "float32"), s: T.Signal((1,))):
            with T.Kernel(1, threads=32, awaited=True), T.Scale("device") as (rank, n):
                x = T.alloc_fragment((8,), "float32")
                T.copy(C, x)
                if how == "read":
                    T.copy(B, x, src=(rank + 1) % n)
                else:
                    T.copy(x, B, dst=(rank + 1) % n, op="add")
                T.signal(s[0], dst=(rank + 1) % n)
                T.wait(s[0], 1)

        return kernel

    with pytest.raises(
        TileSyntaxError, match="T.copy reads another rank's memory in a T.Kernel with awaited"
    ):
        check(pulled("read"), 2)
    with pytest.raises(TileSyntaxError, match="adds to another rank's memory"):
        check(pulled("add"), 2)


def test_without_order_there_is_nothing_to_leave_out():
    with pytest.raises(TileValueError, match="ordered=False"):

        @T.prim_func
        def kernel(s: T.Signal((1,), keep=True)):
            with T.Kernel(1, threads=32, ordered=False, awaited=True), T.Scale("device") as (rank, n):
                T.signal(s[0], dst=(rank + 1) % n)

        kernel.trace()


def test_gpus_are_told():
    for promise in (True, False):
        kernel = shift(1, 1, promise=promise)
        program = kernel.trace()
        table = description(lowered(kernel).kernel, program, parameter_words(program))
        assert bool(table[5] & AWAITED) == promise


def mixed(everyone: bool) -> Any:
    """A box of packets in a launch with flags: each rank gets packets of the others, or of the next alone."""

    @T.prim_func
    def kernel(
        A: T.Tensor((4,), "int32"),
        box: T.Packets((2, 4), "int32"),
        B: T.SymmTensor((4,), "int32"),
        s: T.Signal((1,)),
    ):
        with T.Kernel(1, threads=32, awaited=True), T.Scale("device") as (rank, n):
            x = T.alloc_fragment((4,), "int32")
            if everyone:
                T.put_packets(A, box[rank, 0:4])
                for r in T.serial(2):
                    T.get_packets(box[r, 0:4], x)
            else:
                T.put_packets(A, box[rank, 0:4], dst=0)
                if rank == 0:
                    for r in T.serial(n):
                        T.get_packets(box[r, 0:4], x)
            T.copy(A, B, dst=(rank + 1) % n, signal=s[0])
            T.wait(s[0], 1)

    return kernel


def test_packets_without_an_exchange_keep_exits():
    """Else a launch could write over the packets of the last but one, which their rank has still to take."""
    assert lowered(mixed(True)).kernel.awaited and not lowered(mixed(False)).kernel.awaited
    assert kinds(mixed(True), 2) == kinds(mixed(False), 2) == []


def test_launches_that_do_not_promise_are_not_judged(monkeypatch: pytest.MonkeyPatch):
    """The judge itself: without it the tests above would pass as well."""
    monkeypatch.setattr(awaited, "judge", lambda machine: None)
    assert kinds(shift(2, 1), 2) == []
