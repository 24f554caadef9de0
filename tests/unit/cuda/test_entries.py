"""Who looks at other ranks' entry flags: an executor's threads together, until they have seen all, and a thread
alone for itself (include/ts/team.cuh, step 2)."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import Made, agree_on_ranks
from tests.unit.cuda.seeded_ranks import gathers, relayed
from tests.unit.cuda.test_communicator import arguments as products
from tests.unit.cuda.test_communicator import code_of, pushed
from tests.unit.cuda.test_emulated_ranks import arguments, f32, zeros
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.emulator import EmulationError, ranks
from tilescale.compiler.gpu.ranks import Ranks
from tilescale.compiler.passes import pipeline


def scattered(scale: str, lanes: int, ordered: bool = True) -> Any:
    """Every executor of a scale puts to every other rank."""

    @T.prim_func
    def kernel(
        A: T.Tensor((256,), "float32"),
        inbox: T.SymmTensor((4, 256), "float32"),
        B: T.Tensor((256,), "float32"),
    ):
        with T.Kernel(1, threads=256, ordered=ordered):
            with T.Scale("device") as (rank, n):
                with T.Scale(scale) as (e, count):
                    for k in T.serial(1, n):
                        part = inbox[rank, e * lanes : (e + 1) * lanes]
                        T.copy(A[e * lanes : (e + 1) * lanes], part, dst=(rank + k) % n)
                T.barrier()
                T.copy(inbox[(rank + 1) % n, 0:256], B)

    return kernel


CALLS = {
    "block": "entered = ts::enter(team, ts::floormod(rank + k, n), tid, 256, 0,",
    "warpgroup": "entered_warpgroup = ts::enter(team, ts::floormod(rank + k, n), tid & 127, 128, "
    "(tid >> 7) + 1,",
    "warp": "entered_warp = ts::enter(team, ts::floormod(rank + k, n), tid & 31, 32, -1,",
}


@pytest.mark.parametrize(("scale", "lanes"), [("block", 256), ("warpgroup", 128), ("warp", 32)])
def test_threads_look_together_at_their_own_barrier(scale: str, lanes: int):
    kernel = scattered(scale, lanes)
    code = code_of(kernel)
    assert code.count(CALLS[scale]) == 1 and code.count("ts::enter") == 1
    assert "ts::peer(" not in code, "behind a look an address is arithmetic"
    args = [{"A": f32((256,), r), "inbox": f32((4, 256), 9), "B": f32((256,), 9)} for r in range(3)]
    agree_on_ranks(kernel, args, seeds=6)


def test_a_thread_alone_looks_for_itself():
    code = code_of(scattered("thread", 1))
    assert "ts::peer(team, inbox," in code and "ts::enter" not in code and "entered" not in code


def test_where_nobody_enters_nobody_looks():
    code = code_of(scattered("block", 256, ordered=False))
    assert "ts::twin(team, inbox," in code
    assert "ts::peer(" not in code and "ts::enter" not in code and "entered" not in code


def test_meetings_await_everyone_once():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), G: T.SymmTensor((4, 128), "float32")):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            T.all_gather(A, G[0:n, 0:128])

    code = code_of(kernel)
    assert code.count("entered = ts::enter_all(team, tid, 128, 0, ") == 1, "and none in front of the puts"
    assert code.count("ts::enter") == 1
    assert len(re.findall(r"if \(tid < 32\) \{(?:\n *//.*)?\n    ts::team_sync\(team, tid, ", code)) == 2
    agree_on_ranks(kernel, [{"A": f32((128,), r), "G": f32((4, 128), 9)} for r in range(4)], seeds=6)


def test_the_communicator_has_a_look_of_its_own():
    code = code_of(pushed(64, 64, 128, 2))
    assert code.count("ts::enter(team, ") == 1 and code.count(", tid - 160, 64, 14, ") == 1
    agree_on_ranks(relayed(3), gathers(3), seeds=6)


def test_consumers_look_at_the_barrier_of_the_consumers():
    kernel = pushed(64, 64, 128, 2, warps=0)
    assert ", tid, 128, 15, " in code_of(kernel)
    agree_on_ranks(kernel, products(64, 64, 128, 2), seeds=4)


def several(how: str) -> Any:
    """Puts of which the second may need a look of its own, or not."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "float32"),
        inbox: T.SymmTensor((2, 64), "float32"),
        s: T.Signal((1,)),
        to: T.Tensor((2,), "int32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            peer = (rank + 1) % n
            if how == "behind a condition":
                if to[0] > 0:
                    T.copy(A, inbox[0, 0:64], dst=peer)
            elif how == "in the other branch":
                if to[0] > 0:
                    T.copy(A, inbox[0, 0:64], dst=peer)
                else:
                    T.copy(A, inbox[1, 0:64], dst=peer)
            elif how == "from memory":
                T.copy(A, inbox[0, 0:64], dst=to[0])
            elif how == "in a loop in front":
                for _ in T.serial(to[1]):
                    T.copy(A, inbox[0, 0:64], dst=peer)
            else:
                T.copy(A, inbox[0, 0:64], dst=peer)
            if how == "of the same":
                for _ in T.serial(to[1]):
                    T.copy(A, inbox[1, 0:64], dst=peer)
            elif how == "from memory":
                T.copy(A, inbox[1, 0:64], dst=to[0])
            elif how == "of another":
                T.copy(A, inbox[1, 0:64], dst=(rank + 2) % n)
            elif how != "in the other branch":
                T.copy(A, inbox[1, 0:64], dst=peer)

    return kernel


@pytest.mark.parametrize(
    ("how", "looks"),
    [
        ("of the same", 1),
        ("of another", 2),
        ("from memory", 2),
        ("behind a condition", 2),
        ("in the other branch", 2),
        ("in a loop in front", 2),
    ],
)
def test_what_a_look_has_seen_is_not_looked_at_again(how: str, looks: int):
    assert code_of(several(how)).count("ts::enter(") == looks


# ---- seeded faults


def fresh(kernel: Any) -> Made:
    """A kernel as the lowering of this test makes it: none that another test keeps."""
    program, _ = pipeline.run(kernel.trace(), target("sm_90a"))
    return Made(Lowering(program).run(), program)


def put() -> Any:
    @T.prim_func
    def kernel(
        A: T.Tensor((256,), "float32"),
        inbox: T.SymmTensor((256,), "float32"),
        s: T.Signal((2,)),
        B: T.Tensor((256,), "float32"),
    ):
        with T.Kernel(2, threads=64) as bx:
            with T.Scale("device") as (rank, n):
                T.copy(A[bx * 128], inbox[bx * 128 : bx * 128 + 128], dst=(rank + 1) % n, signal=s[bx])
                T.wait(s[bx], 1)
                T.copy(inbox[bx * 128 : bx * 128 + 128], B[bx * 128])

    return kernel


def test_a_look_cannot_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Ranks, "look", lambda self, rank, site: [])
    made = fresh(put())
    with pytest.raises(EmulationError, match=r"thread 0 .* touches rank \d, of whose entry .* does not know"):
        emulator.run_ranks(made.kernel, made.program, arguments(2))


def test_a_look_at_another_rank_is_not_enough(monkeypatch: pytest.MonkeyPatch):
    own = Ranks.look
    monkeypatch.setattr(Ranks, "look", lambda self, rank, site: own(self, self.of_launch("rank"), site))
    made = fresh(put())
    with pytest.raises(EmulationError, match=r"touches rank \d, of whose entry"):
        for seed in range(12):
            emulator.run_ranks(made.kernel, made.program, arguments(3), seed)


@pytest.mark.parametrize("how", ["behind a condition", "in the other branch"])
def test_a_look_that_may_not_have_been_made_is_not_enough(monkeypatch: pytest.MonkeyPatch, how: str):
    @contextlib.contextmanager
    def leaking(self: Any) -> Any:
        yield

    monkeypatch.setattr(Ranks, "behind_looks", leaking)
    made = fresh(several(how))
    args = [
        {
            "A": f32((64,), r),
            "inbox": f32((2, 64), 9),
            "s": zeros(1),
            "to": zeros(2).astype("int32"),
        }
        for r in range(2)
    ]
    with pytest.raises(EmulationError, match=r"touches rank \d, of whose entry"):
        emulator.run_ranks(made.kernel, made.program, args)


def test_a_look_awaits_the_rank_that_is_touched_alone(monkeypatch: pytest.MonkeyPatch):
    """Rank 2 enters when ranks 0 and 1 have done what they do between them, not before."""

    @T.prim_func
    def kernel(inbox: T.SymmTensor((64,), "int32"), s: T.Signal((1,)), B: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, n):
            if rank < 2:
                x = T.alloc_fragment((64,), "int32")
                T.fill(x, rank + 5)
                T.copy(x, inbox, dst=1 - rank, signal=s[0])
                T.wait(s[0])
                T.copy(inbox, B)

    made = fresh(kernel)
    entered = ranks.World.__init__
    ready: list[Any] = []

    class Late(set):  # type: ignore[type-arg]
        def add(self, rank: int) -> None:
            if rank < 2:
                super().add(rank)

    def init(self: Any, *args: Any) -> None:
        entered(self, *args)
        self.entered = Late()
        ready.append(self)

    monkeypatch.setattr(ranks.World, "__init__", init)
    args = [
        {"inbox": zeros(64).astype("int32"), "s": zeros(1), "B": zeros(64).astype("int32")} for _ in range(3)
    ]
    out = emulator.run_ranks(made.kernel, made.program, args, 3)
    assert ready and ready[0].entered == {0, 1}
    assert (out[0]["B"] == 6).all() and (out[1]["B"] == 5).all()
