"""Packets between ranks that are processes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.ranks.harness import RanksFailed, run_ranks
from tests.unit.ops.test_dense_packets import as_it_comes, bits, same_bits, to_everyone
from tests.unit.ops.test_packets import all_to_all, given, one_shot
from tilescale import comm
from tilescale.compiler.sim import numerics
from tilescale.errors import LaunchError, TileTypeError, TileValueError


@pytest.mark.parametrize("n, dtype", [(2, "float32"), (3, "bfloat16"), (4, "int8")])
def test_every_rank_gets_what_each_has_put_in_every_launch(n: int, dtype: str):
    made = tilescale.compile(all_to_all(n, 3, 16, dtype, blocks=3), target="cpu")
    X = given(n, (3, 3, 16), dtype)

    def work():
        comm.init()
        rank = comm.rank()
        box = comm.packets((n, 3, 3, 16), dtype, like="numpy")
        for step in range(5):
            x, y = np.roll(X[rank], step, 0), np.zeros_like(X[rank])
            made(x, box, y)
            want = np.stack([np.roll(X[peer], step, 0)[rank] for peer in range(n)])
            assert (y.view(np.uint8) == want.view(np.uint8)).all(), step

    run_ranks(n, work)


def lonely(puts: bool) -> Any:
    """Rank 1 puts to rank 0, or does not; a kernel whose launches have flags, since nobody else exchanges."""

    @T.prim_func
    def main(
        A: T.Tensor((16,), "float32"), box: T.Packets((2, 2, 16), "float32"), B: T.Tensor((16,), "float32")
    ):
        with T.Kernel(2) as bx, T.Scale("device") as (rank, n):
            if rank == 1:
                if puts:
                    T.put_packets(A, box[1, bx, :], dst=0)
                else:
                    T.put_packets(A[0:8], box[1, bx, 0:8], dst=0)
            else:
                T.get_packets(box[1, bx, :], B)

    return main


@pytest.mark.parametrize("launches", [1, 3])
def test_packets_that_nobody_puts_are_missed_by_name(launches: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "1")
    whole, part = (tilescale.compile(lonely(puts), target="cpu") for puts in (True, False))

    def work():
        comm.init()
        box = comm.packets((2, 2, 16), "float32", like="numpy")
        a, b = np.ones(16, "float32"), np.zeros(16, "float32")
        for _ in range(launches - 1):
            whole(a, box, b)
        part(a, box, b)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, work)
    (first,) = [f for f in failed.value.failures if f.rank == 0]
    last = "none came before" if launches == 1 else "those of launch 1 came last"
    assert f"for packets of box in launch {launches} of those that use it: {last}" in first.text, first.text
    assert "T.get_packets(box[1, bx, :], B)" in first.text, first.text


def test_a_rank_alone_exchanges_with_itself():
    made = tilescale.compile(all_to_all(1, 2, 8, "float32"), target="cpu")
    (X,) = given(1, (1, 2, 8), "float32")

    def work():
        comm.init()
        box, y = comm.packets((1, 1, 2, 8), "float32", like="numpy"), np.zeros_like(X)
        for _ in range(3):
            made(X, box, y)
            assert (y == X).all()
        assert box[0] == 3 << 32

    run_ranks(1, work)


def test_what_is_no_box_is_refused():
    made = tilescale.compile(all_to_all(1, 2, 8, "float32"), target="cpu")

    def work():
        comm.init()
        x = np.zeros((1, 1, 2, 8), "float32")
        for wrong in (
            comm.zeros((1, 1, 2, 8), "float32"),
            comm.packets((1, 1, 2, 16)),
            np.zeros(48, np.int64),
        ):
            with pytest.raises((TileTypeError, TileValueError)) as error:
                made(x, wrong, x.copy())
            assert 'T.Packets((1, 1, 2, 8), "float32")' in str(error.value), error.value
        with pytest.raises(TileValueError, match="rows of a multiple of 8 bytes, not of 12"):
            comm.packets((4, 3))

    run_ranks(1, work)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_all_reduce_of_the_same_bits_on_every_rank_without_flags(n: int):
    """Launch after launch, with ranks out of step: nobody waits for a rank that is late by one launch."""
    N = 512
    made = tilescale.compile(one_shot(n, N, 256, "bfloat16"), target="cpu")
    draw = np.random.default_rng(7)
    A = [numerics.encode(draw.standard_normal(N), "bfloat16") for _ in range(n)]

    def work():
        comm.init()
        box = comm.packets((n, N), "bfloat16", like="numpy")
        for step in range(20):
            b = np.zeros_like(A[0])
            if step % n == comm.rank():
                time.sleep(0.003)
            made(np.roll(A[comm.rank()], step), box, b)
            want = np.zeros(N, "float32")
            for a in A:
                want = want + numerics.decode(np.roll(a, step), "bfloat16").astype("float32")
            assert (b.view(np.uint16) == numerics.encode(want, "bfloat16").view(np.uint16)).all(), step

    run_ranks(n, work)


def test_one_body_on_both_targets(ranks):
    X = given(3, (1, 2, 8), "float32")
    arrays = ranks(3).run(all_to_all(3, 2, 8, "float32"), {"X": lambda rank: X[rank]})
    for rank, of in enumerate(arrays):
        assert (of["Y"] == np.stack([X[peer][rank] for peer in range(3)])).all()


def test_a_launch_without_blocks_leaves_the_halves_in_step():
    """With flags it counts, also where other ranks have blocks; without flags it does not, on any rank."""
    m = T.dynamic("m", multiple_of=2)

    def exchange(hops: int) -> Any:
        @T.prim_func
        def main(
            A: T.Tensor((m,), "float32"), box: T.Packets((2, 8), "float32"), B: T.Tensor((m,), "float32")
        ):
            with T.Kernel(m // 8) as bx, T.Scale("device") as (rank, n):
                T.put_packets(A[0:8], box[rank, :], dst=(rank + hops) % n)
                T.get_packets(box[(rank + hops) % n, :], B[0:8])

        return tilescale.compile(main, target="cpu")

    alone, both = exchange(0), exchange(1)

    def work():
        comm.init()
        rank, boxes = comm.rank(), [comm.packets((2, 8), like="numpy") for _ in range(2)]
        for step in range(6):
            count = 8 if (step + rank) % 2 else 0
            for made, box, size in ((alone, boxes[0], count), (both, boxes[1], 8 * (step % 3 > 0))):
                a, b = np.full(size, 10.0 * rank + step, "float32"), np.zeros(size, "float32")
                made(a, box, b)
                assert (b == (a if made is alone else 10.0 * (1 - rank) + step)).all()
        return [int(box[0]) >> 32 for box in boxes]

    assert run_ranks(2, work) == [[6, 4]] * 2


# ---- dense boxes


@pytest.mark.parametrize("n, dtype", [(1, "float16"), (2, "float32"), (3, "bfloat16"), (4, "float16")])
def test_every_bit_comes_in_every_launch(n: int, dtype: str):
    made, shape = tilescale.compile(to_everyone(n, 3, 16, dtype, blocks=3), target="cpu"), (n, 3, 3, 16)

    def work():
        comm.init()
        rank, box = comm.rank(), comm.packets(shape, dtype, dense=True, like="numpy")
        for step in range(12):
            X = [bits(shape, dtype, 100 * step + peer) for peer in range(n)]
            y = np.zeros_like(X[rank])
            if step % 4 == rank:
                time.sleep(0.003)
            made(X[rank], box, y)
            assert same_bits(y, as_it_comes(np.stack([x[rank] for x in X]))), step
        comm.barrier()
        assert box[0] == 12 << 32 and not box[1:].any()

    run_ranks(n, work)


def hand_over(puts: int, gets: int, asserts: bool = False) -> Any:
    """Rank 1 puts so many numbers to rank 0, which takes so many."""

    @T.prim_func
    def main(
        A: T.Tensor((16,), "float32"),
        box: T.Packets((2, 16), "float32", dense=True),
        B: T.Tensor((16,), "float32"),
    ):
        with T.Kernel(1), T.Scale("device") as (rank, n):
            if rank == 1:
                T.put_packets(A[0:puts], box[1, 0:puts], dst=0)
            else:
                if asserts:
                    T.device_assert(A[0] < 0.0, "rank 0 fails")
                T.get_packets(box[1, 0:gets], B[0:gets])

    return tilescale.compile(main, target="cpu")


@pytest.mark.parametrize(
    "numbers, launches, text",
    [
        ((16, 8), 3, "a packet is put into box where one lies that has not been taken"),
        ((8, 16), 1, "for packets of box in launch 1 of those that use it: they have not come"),
    ],
)
def test_what_is_left_and_what_is_missed(
    numbers: tuple[int, int], launches: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    faulty = hand_over(*numbers)
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "1")

    def work():
        comm.init()
        box = comm.packets((2, 16), dense=True, like="numpy")
        a, b = np.ones(16, "float32"), np.zeros(16, "float32")
        for _ in range(launches):
            faulty(a, box, b)

    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, work)
    assert any(text in f.text for f in failed.value.failures), [f.text for f in failed.value.failures]


def test_a_launch_that_fails_leaves_no_packets_to_the_next(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 takes nothing in a launch, and would take that in the launch after the next. The job has been
    stopped, and no rank launches with a box again that this launch used."""
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "1")
    fails, right = hand_over(16, 16, asserts=True), hand_over(16, 16)

    def work():
        comm.init()
        box = comm.packets((2, 16), dense=True, like="numpy")
        a, b = np.ones(16, "float32"), np.zeros(16, "float32")
        with pytest.raises(LaunchError, match="rank 0 fails"):
            fails(a, box, b)
        for _ in range(2):
            with pytest.raises(TileValueError, match="a launch with the box box failed") as error:
                right(a, box, b)
            assert 'tilescale.comm.packets((2, 16), "float32", dense=True)' in str(error.value)
        return bool(b.any())

    assert run_ranks(2, work) == [False, False]


def test_a_box_is_not_taken_for_one_of_the_other_kind():
    """Of as many bytes: half as many packets with marks."""
    marked, dense = all_to_all(2, 1, 8, "float32"), to_everyone(2, 1, 16, "float32")

    def work() -> list[str]:
        comm.init()
        told = []
        for kernel, row, other in ((marked, 16, True), (dense, 8, False)):
            box = comm.packets((2, 1, 1, row), "float32", dense=other, like="numpy")
            x = np.zeros((2, 1, 1, 24 - row), np.float32)
            with pytest.raises(TileValueError, match="of box has extent") as error:
                tilescale.compile(kernel, target="cpu")(x, box, x.copy())
            told.append(str(error.value))
        return told

    for told, wanted in run_ranks(2, work):
        assert 'T.Packets((2, 1, 1, 8), "float32")' in told and "dense=True" in wanted
