"""T.put_packets and T.get_packets: small messages that are their own signal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree_on_ranks, lowered
from tilescale.compiler import driver, emulator, static
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda.describe import BARE, COOPERATIVE, DEVICE, TEAM, UNORDERED, description
from tilescale.compiler.description import parameter_words
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.sim import numerics
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileError
from tilescale.language.dtypes import BITS
from tilescale.packets import SHIFT, length


def all_to_all(n: int, rows: int, row: int, dtype: str, blocks: int = 1, ordered: bool = True) -> Any:
    """Every rank gets a tile of each, its own too."""

    @T.prim_func
    def main(
        X: T.Tensor((n, blocks, rows, row), dtype),
        box: T.Packets((n, blocks, rows, row), dtype),
        Y: T.Tensor((n, blocks, rows, row), dtype),
    ):
        with T.Kernel(blocks, threads=64, ordered=ordered) as bx, T.Scale("device") as (rank, count):
            x, y = T.alloc_fragment((rows, row), dtype), T.alloc_fragment((rows, row), dtype)
            for peer in T.serial(count):
                T.copy(X[peer, bx, 0, 0], x)
                T.put_packets(x, box[rank, bx, 0, 0], dst=peer)
            for peer in T.serial(count):
                T.get_packets(box[peer, bx, 0, 0], y)
                T.copy(y, Y[peer, bx, 0, 0])

    return main


def given(n: int, shape: tuple[int, ...], dtype: str) -> list[Any]:
    draw = np.random.default_rng(5)
    return [numerics.encode(draw.integers(0, 100, (n, *shape)).astype(np.float64)
                            if dtype in numerics.FLOATS else draw.integers(0, 100, (n, *shape)), dtype)
            for _ in range(n)]  # fmt: skip


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "int32", "int64", "float8_e4m3fn"]
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rank_gets_what_each_has_put(n: int, dtype: str):
    kernel, X = all_to_all(n, 3, 16, dtype, blocks=2), given(n, (2, 3, 16), dtype)
    done = launch(kernel, n, {"X": X})
    assert done.report, done.report
    for rank in range(n):
        want = np.stack([X[peer][rank] for peer in range(n)])
        assert (done.arrays[rank]["Y"].view(np.uint8) == want.view(np.uint8)).all()
        assert done.arrays[rank]["box"][0] == 1 << SHIFT
        assert len(done.arrays[rank]["box"]) == length((n, 2, 3, 16), BITS[dtype])
    report = check(kernel, n, {"X": X}, schedule="adversary", seeds=3)
    assert report, report


@pytest.mark.parametrize("dtype, row", [("float32", 16), ("bfloat16", 40), ("int8", 8), ("int64", 3)])
def test_threads_put_and_get_each_their_own(dtype: str, row: int):
    n = 3
    kernel, X = all_to_all(n, 5, row, dtype, blocks=2), given(n, (2, 5, row), dtype)
    args = [
        {
            "X": X[rank],
            "box": np.zeros(length((n, 2, 5, row), BITS[dtype]), np.int64),
            "Y": np.zeros_like(X[rank]),
        }
        for rank in range(n)
    ]
    agree_on_ranks(kernel, args, seeds=3)


def one_shot(n: int, N: int, block: int, dtype: str, threads: int = 128) -> Any:
    """An all-reduce in one trip: everyone puts to everyone, and adds in rank order."""

    @T.prim_func
    def main(A: T.Tensor((N,), dtype), box: T.Packets((n, N), dtype), B: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, block), threads=threads) as bx, T.Scale("device") as (rank, count):
            x, parts = T.alloc_fragment((block,), dtype), T.alloc_fragment((n, block), dtype)
            total = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block], x)
            T.put_packets(x, box[rank, bx * block])
            T.get_packets(box[0:n, bx * block : bx * block + block], parts)
            T.clear(total)
            for i in T.Parallel(block):
                for r in T.serial(n):
                    total[i] += parts[r, i]
            T.copy(total, B[bx * block])

    return main


@pytest.mark.parametrize("n, dtype", [(2, "float32"), (3, "bfloat16"), (4, "float16")])
def test_an_all_reduce_in_one_shot(n: int, dtype: str):
    N, block = 512, 256
    draw = np.random.default_rng(3)
    A = [numerics.encode(draw.standard_normal(N), dtype) for _ in range(n)]
    want = np.zeros(N, "float32")
    for a in A:
        want = want + numerics.decode(a, dtype).astype("float32")
    kernel = one_shot(n, N, block, dtype)
    report = check(kernel, n, {"A": A}, schedule="adversary", seeds=4)
    assert report, report
    for of in launch(kernel, n, {"A": A}).arrays:
        assert (of["B"].view(np.uint8) == numerics.encode(want, dtype).view(np.uint8)).all()
    size = length((n, N), BITS[dtype])
    args = [{"A": a, "box": np.zeros(size, np.int64), "B": np.zeros_like(a)} for a in A]
    for made in (lowered(kernel), lowered(kernel, "sm_80")):
        for seed in range(3):
            for of in emulator.run_ranks(made.kernel, made.program, args, seed):
                assert (of["B"].view(np.uint8) == numerics.encode(want, dtype).view(np.uint8)).all()


# ---- what goes wrong, on the simulator


def exchange(body: Any, ordered: bool = True, extent: int = 2) -> Any:
    """A kernel of one block; ``body(rank, n, box, x, y)`` is what it does with a box of a row for each rank."""

    @T.prim_func
    def main(box: T.Packets((extent, 16), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32, ordered=ordered), T.Scale("device") as (rank, n):
            x, y = T.alloc_fragment((16,), "float32"), T.alloc_fragment((16,), "float32")
            T.fill(x, 1.0)
            body(rank, n, box, x, y)
            T.copy(y, Y)

    return main


@T.macro
def nobody_puts(rank, n, box, x, y):
    T.put_packets(x[0:8], box[rank, 0:8], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, :], y)


@T.macro
def puts_twice(rank, n, box, x, y):
    for _ in T.serial(2):
        T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, :], y)


@T.macro
def nobody_gets(rank, n, box, x, y):
    T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, 0:8], y[0:8])
    T.fill(y[8:16], 0.0)


@T.macro
def no_place(rank, n, box, x, y):
    T.put_packets(x, box[rank + 1, :], dst=(rank + 1) % n)
    T.get_packets(box[0, :], y)


@pytest.mark.parametrize(
    "body, kind, text, hint",
    [
        (nobody_puts, "deadlock", "ends the wait for packets box[1, 8:16] of rank 0", "T.put_packets(…, box[1, 8:16], dst=0)"),
        (puts_twice, "race", "this puts packets box[0, 0:16] of rank 1 a second time in one launch", "a place of box for each put"),
        (nobody_gets, "unawaited", "nobody takes packets box[1, 8:16] of rank 0", "T.get_packets(box[1, 8:16], …) on rank 0"),
        (no_place, "out-of-bounds", "box[2, 0:16] of rank 0 lies outside box, whose shape is (2, 16)", ""),
    ],
)  # fmt: skip
def test_findings(body: Any, kind: str, text: str, hint: str):
    report = check(exchange(body), 2, schedule="adversary", seeds=3)
    found = [f for f in report.findings if f.kind == kind]
    assert found and any(text in f.message and hint in (f.hint or "") for f in found), report


def test_packets_order_nothing_but_themselves():
    """What its sender wrote before a packet may be read behind a signal, not behind the packet."""

    def kernel(signals: bool) -> Any:
        @T.prim_func
        def main(
            box: T.Packets((2, 2), "float32"),
            inbox: T.SymmTensor((16,), "float32"),
            s: T.Signal((1,)),
            Y: T.Tensor((16,), "float32"),
        ):
            with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
                t = T.alloc_fragment((2,), "float32")
                x = T.alloc_fragment((16,), "float32")
                T.fill(x, 1.0)
                T.clear(t)
                T.copy(x, inbox, dst=1 - rank)
                T.signal(s[0], dst=1 - rank)
                T.put_packets(t, box[rank, :], dst=1 - rank)
                T.get_packets(box[1 - rank, :], t)
                if signals:
                    T.wait(s[0])
                T.copy(inbox, Y)

        return main

    assert check(kernel(True), 2, schedule="adversary", seeds=3)
    report = check(kernel(False), 2, schedule="adversary", seeds=3)
    assert any(f.kind == "race" for f in report.findings), report


def test_every_interleaving():
    report = check(one_shot(2, 8, 8, "float32", 32), 2, {"A": np.ones(8, "float32")}, schedule="exhaustive")
    assert report and report.complete, report


# ---- the launch without flags


def lines_of(kernel: Any) -> list[str]:
    return [note for note in tile_level(kernel).notes if "launches begin and end" in note]


@T.macro
def to_the_next(rank, n, box, x, y):
    T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + n - 1) % n, :], y)


@T.macro
def others(rank, n, box, x, y):
    for k in T.serial(1, n):
        T.put_packets(x, box[rank, :], dst=(rank + k) % n)
    for k in T.serial(1, n):
        T.get_packets(box[(rank + k) % n, :], y)


@T.macro
def all_but_own(rank, n, box, x, y):
    for k in T.serial(n):
        if k != rank:
            T.put_packets(x, box[rank, :], dst=k)
    T.put_packets(x, box[rank, :], dst=rank)
    for k in T.serial(n):
        if k != rank:
            T.get_packets(box[k, :], y)
    T.get_packets(box[rank, :], y)


@T.macro
def to_all(rank, n, box, x, y):
    T.put_packets(x, box[rank, :])
    for k in T.serial(1, T.get_world_size()):
        T.get_packets(box[(T.get_rank() + k) % n, :], y)


@T.macro
def by_sender(rank, n, box, x, y):
    for k in T.serial(n):
        T.put_packets(x, box[k, :], dst=k)
    for _ in T.serial(n):
        T.get_packets(box[rank, :], y)


@T.macro
def with_a_barrier(rank, n, box, x, y):
    others(rank, n, box, x, y)
    T.barrier()


@pytest.mark.parametrize(
    "body, extent, why",
    [
        (others, 4, ""),
        (all_but_own, 4, ""),
        (to_all, 4, ""),
        (to_the_next, 2, ""),
        (to_the_next, 3, "of 3 ranks, rank 0 is not known to get packets of rank 1"),
        (by_sender, 4, "no axis of box is the rank whose packets they are"),
        (with_a_barrier, 4, "T.barrier reaches other ranks too"),
        (others, 64, "box has places for 64 of ranks"),
    ],
)
def test_flags_are_left_out_where_each_rank_gets_packets_of_each_other(body: Any, extent: int, why: str):
    kernel = exchange(body, extent=extent)
    (line,) = lines_of(kernel)
    assert why in line and bool(why) == line.startswith("launches begin and end with flags")
    assert tile_level(kernel).launch.flagged == bool(why)
    assert lines_of(exchange(body, ordered=False)) == []


def test_the_table_of_a_launch_without_flags():
    kernel, bare = exchange(others), exchange(with_a_barrier)
    for prim, flags in (
        (kernel, DEVICE | UNORDERED | TEAM | BARE | COOPERATIVE),
        (bare, DEVICE | TEAM | COOPERATIVE),
    ):
        own = driver.lower(prim.trace(), "cuda:sm_90a").own
        assert description(own, prim.trace(), parameter_words(prim.trace()), 7)[5] == flags


# ---- refusals


@pytest.mark.parametrize(
    "what, body",
    [
        ("A is a float32 tensor and no box of packets", lambda b, A, f, r: T.put_packets(f, A, dst=0)),
        ("is of float16, the packets of box of float32", lambda b, A, f, r: T.put_packets(T.alloc_fragment((16,), "float16"), b[r, :], dst=0)),
        ("a packet has 2 of float32", lambda b, A, f, r: T.get_packets(b[r, 0:3], f[0:3])),
        ("box[r, 1:5] begins at 1 of a row", lambda b, A, f, r: T.get_packets(b[0, 1:5], f[0:4])),
        ("T.get_packets: f has a tile of (16,) and box one of (8,)", lambda b, A, f, r: T.get_packets(b[r, 0:8], f)),
        ("4 lies outside axis 0 of box, whose extent is 4", lambda b, A, f, r: T.get_packets(b[4, :], f)),
        ("box is a box of packets and is used as memory", lambda b, A, f, r: T.copy(b[r, 0:8], f[0:8])),
        ("T.get_packets of box", lambda b, A, f, r: T.get_packets(b[r, :], b[r, :])),
    ],
)  # fmt: skip
def test_refusals(what: str, body: Any):
    @T.prim_func
    def kernel(box: T.Packets((4, 16), "float32"), A: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32), T.Scale("device") as (r, n):
            f = T.alloc_fragment((16,), "float32")
            body(box, A, f, r)

    with pytest.raises(TileError) as error:
        tile_level(kernel)
    assert what in str(error.value) and "^^^" in str(error.value), error.value


def test_boxes_that_are_used_as_memory_or_cut_through_packets():
    @T.prim_func
    def reads(box: T.Packets((4, 16), "float32"), A: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            A[0] = box[0, 1]

    @T.prim_func
    def views(box: T.Packets((4, 16), "float32"), A: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            T.copy(T.view(box, (64,))[0:16], A)

    @T.prim_func
    def rows(box: T.Packets((4, 6), "float16")):
        with T.Kernel(1), T.Scale("device") as (r, n):
            T.barrier()

    @T.prim_func
    def symbols(box: T.Packets((4, T.dynamic("k")), "int8")):
        with T.Kernel(1), T.Scale("device") as (r, n):
            T.barrier()

    for kernel, text in (
        (reads, "box is a box of packets and is used as memory"),
        (views, "box is a box of packets and is used as memory"),
        (rows, "the rows of box are of 6 elements of float16, and a packet has 4"),
        (symbols, "T.dynamic('k', multiple_of=8)"),
    ):
        with pytest.raises(TileError) as error:
            tile_level(kernel)
        assert text in str(error.value), error.value


def test_boxes_of_extents_that_calls_say():
    m = T.dynamic("m", multiple_of=4)

    @T.prim_func
    def kernel(
        A: T.Tensor((m,), "bfloat16"), box: T.Packets((3, m), "bfloat16"), B: T.Tensor((3, m), "bfloat16")
    ):
        with T.Kernel(T.ceildiv(m, 32), threads=32) as bx, T.Scale("device") as (rank, n):
            for peer in T.serial(n):
                T.put_packets(A[bx * 32 : bx * 32 + 32], box[rank, bx * 32], dst=peer)
            for peer in T.serial(n):
                T.get_packets(box[peer, bx * 32 : bx * 32 + 32], B[peer, bx * 32 : bx * 32 + 32])

    (line,) = lines_of(kernel)
    assert line.startswith("launches begin and end without flags")
    args = []
    for rank in range(3):
        A = numerics.encode(np.arange(96) + 100.0 * rank, "bfloat16")
        args.append({"A": A, "box": np.zeros(length((3, 96), 16), np.int64), "B": np.zeros((3, 96), A.dtype)})
    agree_on_ranks(kernel, args)
    done = launch(kernel, 3, {name: [a[name] for a in args] for name in args[0]})
    assert all((of["B"] == np.stack([a["A"] for a in args])).all() for of in done.arrays)
    with pytest.raises(TileError, match=r'80 words[\s\S]*tilescale.comm.packets\(\(3, 96\), "bfloat16"\)'):
        launch(kernel, 3, {"A": args[0]["A"], "box": np.zeros(80, np.int64)})
    nothing = {"A": args[0]["A"][:0], "box": np.zeros(length((3, 0), 16), np.int64), "B": args[0]["B"][:, :0]}
    assert [of["box"][0] for of in launch(kernel, 3, nothing).arrays] == [0] * 3, "no launch to be counted"


def test_packets_to_everyone_in_a_team():
    """Two teams of two ranks exchange by themselves; their launches keep their flags."""

    @T.prim_func
    def kernel(
        A: T.Tensor((8,), "float32"), box: T.Packets((2, 8), "float32"), B: T.Tensor((2, 8), "float32")
    ):
        with T.Kernel(1, threads=32), T.Scale("device") as (rank, n):
            node = rank // 2
            with T.Scale("device", team=range(node * 2, node * 2 + 2)) as (me, m):
                T.put_packets(A, box[me, :])
                T.get_packets(box[0:2, :], B)

    (line,) = lines_of(kernel)
    assert line.endswith("no axis of box is the rank whose packets they are, in every T.put_packets")
    A = [np.full(8, rank, "float32") for rank in range(4)]
    done = launch(kernel, 4, {"A": A})
    assert done.report, done.report
    for rank, of in enumerate(done.arrays):
        assert (of["B"] == np.stack(A[rank // 2 * 2 : rank // 2 * 2 + 2])).all()
    args = [
        {"A": a, "box": np.zeros(length((2, 8), 32), np.int64), "B": np.zeros((2, 8), "float32")} for a in A
    ]
    agree_on_ranks(kernel, args)


def test_launches_on_emulated_threads_take_turns_in_the_box():
    """Three launches with one box: halves alternate, and nothing is cleared."""
    n, kernel = 2, one_shot(2, 64, 32, "float32", 32)
    made, size = lowered(kernel), length((2, 64), 32)
    boxes = [np.zeros(size, np.int64) for _ in range(n)]
    for step in range(1, 4):
        args = [
            {
                "A": np.full(64, 10.0 * rank + step, "float32"),
                "box": boxes[rank],
                "B": np.zeros(64, "float32"),
            }
            for rank in range(n)
        ]
        done = emulator.run_ranks(made.kernel, made.program, args, step)
        assert all((of["B"] == 10 + 2 * step).all() and of["box"][0] == step << SHIFT for of in done)
        boxes = [of["box"] for of in done]


def test_a_packet_that_two_threads_put_is_found():
    """Threads that hold copies of an element: one of them puts it."""
    kernel = exchange(others)
    made, args = (
        lowered(kernel),
        {"box": np.zeros(length((2, 16), 32), np.int64), "Y": np.zeros(16, "float32")},
    )
    emulator.run_ranks(made.kernel, made.program, [dict(args), dict(args)])

    def everyone(s: Any) -> Any:  # the test of who puts is taken away
        puts: list[Any] = []
        structural_walk(
            s.then_case,
            (ir.Call, lambda c: puts.append(c) if "put_packet" in str(c) else None),
        )
        return s.then_case if puts else s

    func = made.kernel.func
    body = structural_map(func.body, (tirx.IfThenElse, everyone))
    bad = replace(made.kernel, func=tirx.PrimFunc(list(func.params), body))
    with pytest.raises(EmulationError, match="is put twice in one launch"):
        emulator.run_ranks(bad, made.program, [dict(args), dict(args)])


def test_what_is_put_and_taken_is_known_to_be_written():
    """The static checks see through the views under which packets are made and taken."""
    found = static.check(one_shot(3, 64, 32, "bfloat16", 32).trace(), ranks=3)
    assert found.counts["coverage"]["proven"] >= 4 and not found.open_questions(), found.open_questions()


def two_shot(n: int, piece: int) -> Any:
    """Each rank sums a slice of everyone's vectors, and puts the sum to everyone: two trips, one launch."""

    @T.prim_func
    def main(
        A: T.Tensor((n, piece), "float32"),
        box: T.Packets((2, n, piece), "float32"),
        B: T.Tensor((n, piece), "float32"),
    ):
        with T.Kernel(1, threads=64), T.Scale("device") as (rank, count):
            parts, total = T.alloc_fragment((n, piece), "float32"), T.alloc_fragment((piece,), "float32")
            for k in T.serial(1, count + 1):
                T.put_packets(A[(rank + k) % count, :], box[0, rank, :], dst=(rank + k) % count)
            T.get_packets(box[0, 0:n, :], parts)
            T.clear(total)
            for i in T.Parallel(piece):
                for r in T.serial(n):
                    total[i] += parts[r, i]
            T.put_packets(total, box[1, rank, :])
            T.get_packets(box[1, 0:n, :], B)

    return main


@pytest.mark.parametrize("n", [2, 4])
def test_an_all_reduce_in_two_shots(n: int):
    kernel, A = (
        two_shot(n, 64),
        [np.random.default_rng(r).standard_normal((n, 64)).astype("float32") for r in range(n)],
    )
    assert not tile_level(kernel).launch.flagged
    want = np.zeros((n, 64), "float32")
    for a in A:
        want = want + a
    report = check(kernel, n, {"A": A}, seeds=4)
    assert report, report
    assert all((of["B"] == want).all() for of in launch(kernel, n, {"A": A}).arrays)
    args = [{"A": a, "box": np.zeros(length((2, n, 64), 32), np.int64), "B": np.zeros_like(a)} for a in A]
    agree_on_ranks(kernel, args)
