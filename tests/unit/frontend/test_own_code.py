"""T.get_thread_binding() at the scale of the block: what depends on it is the threads' own, on every target."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tests.unit.ops.test_argmax import TARGETS, run
from tilescale.compiler import driver
from tilescale.compiler.ops.loops import unroll_apart
from tilescale.errors import TileSyntaxError, TileValueError

RNG = np.random.default_rng(7)


def split_k(rows: int, depth: int, block: int, across: int, each: int) -> Any:
    """C = B A: ``across`` threads share a row, each with ``each`` elements a round, and add in shared memory."""

    @T.prim_func
    def kernel(
        A: T.Tensor((depth,), "float32"),
        B: T.Tensor((rows, depth), "float32"),
        C: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block), threads=(block, across)) as bn:
            tn, tk = T.get_thread_binding(0), T.get_thread_binding(1)
            a, b = T.alloc_local((each,), "float32"), T.alloc_local((each,), "float32")
            total, acc = T.alloc_shared((block,), "float32"), T.alloc_local((1,), "float32")
            if tk == 0:
                total[tn] = 0
            T.clear(acc)
            for k in T.serial(T.ceildiv(depth, across * each)):
                for v in T.vectorized(each):
                    a[v] = A[k * across * each + tk * each + v]
                    b[v] = B[bn * block + tn, k * across * each + tk * each + v]
                for v in T.serial(each):
                    acc[0] += a[v] * b[v]
            T.atomic_add(total[tn], acc[0])
            if tk == 0:
                C[bn * block + tn] = total[tn]

    return kernel


def tiled(rows: int, depth: int, block: int, step: int) -> Any:
    """The same with tiles that all threads copy between what is a thread's own."""

    @T.prim_func
    def kernel(
        A: T.Tensor((depth,), "float32"),
        B: T.Tensor((rows, depth), "float32"),
        C: T.Tensor((rows,), "float32"),
    ):
        with T.Kernel(T.ceildiv(rows, block), threads=block) as bn:
            tn = T.get_thread_binding()
            a, b = T.alloc_shared((step,), "float32"), T.alloc_shared((block, step), "float32")
            acc = T.alloc_var("float32")
            for k in T.serial(T.ceildiv(depth, step)):
                T.copy(A[k * step], a)
                T.copy(B[bn * block, k * step], b)
                for v in T.serial(step):
                    acc += a[v] * b[tn, v]
            C[bn * block + tn] = acc

    return kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "made", [(split_k, 40, 75, 8, 4, 8), (tiled, 40, 75, 32, 16)], ids=["split_k", "tiled"]
)
def test_products_by_threads(made: tuple[Any, ...], target: str):
    build, rows, depth, *how = made
    a, b = RNG.standard_normal(depth).astype("float32"), RNG.standard_normal((rows, depth)).astype("float32")
    out = run(build(rows, depth, *how), {"A": a, "B": b, "C": np.full(rows, np.nan, "float32")}, target)
    np.testing.assert_allclose(out["C"], b.astype(float) @ a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_what_one_thread_writes_another_one_reads_behind_it(target: str):
    @T.prim_func
    def turned(A: T.Tensor((4, 64), "int32"), B: T.Tensor((4, 64), "int32")):
        with T.Kernel(4, threads=64) as bx:
            t = T.get_thread_binding()
            s = T.alloc_shared((64,), "int32")
            for r in T.serial(3):
                s[t] = A[bx, (t + r) % 64]
                B[bx, t] = s[63 - t] + r

    a = RNG.integers(-9, 9, (4, 64), dtype="int32")
    out = run(turned, {"A": a, "B": np.full((4, 64), -1, "int32")}, target)
    assert (out["B"] == np.roll(a, -2, 1)[:, ::-1] + 2).all()


@pytest.mark.parametrize("promised", [True, False])
def test_a_broken_promise_of_rounds_apart_is_a_race(promised: bool):
    """Without the promise a barrier stands between rounds."""
    rounds = unroll_apart if promised else T.unroll

    @T.prim_func
    def kernel(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t, s = T.get_thread_binding(), T.alloc_shared((32,), "int32")
            for r in rounds(2):
                s[(t + r) % 32] = t
            B[t] = s[t]

    report = kernel.check(args={"B": np.zeros(32, "int32")}, seeds=2)
    assert any(f.kind == "race" for f in report.findings) == promised, report


def unpacked(step: int, width: int) -> Any:
    """Rounds that write a tile, of which all threads read behind them. ``step``: how far a round's elements lie
    behind those of the round before; ``width``: where they begin again."""

    @T.prim_func
    def kernel(A: T.Tensor((3, 256), "int32"), B: T.Tensor((3, 64), "int32")):
        with T.Kernel(1, threads=64):
            t, s = T.get_thread_binding(), T.alloc_shared((8, 32), "int32")
            for k in T.serial(3):
                for r in T.serial(4):
                    at = (r * step + t) % width
                    s[at // 32, at % 32] = 2 * A[k, r * 64 + t]
                B[k, t] = s[(63 - t) // 32, (63 - t) % 32]

    return kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("step, width", [(64, 256), (32, 256), (1, 64)])
def test_rounds_have_a_barrier_where_threads_share_elements(step: int, width: int, target: str):
    """Of a tile that each thread fills with elements of its own the barriers are in front of all rounds and
    behind them; where another thread writes the element in the next round, one is in each."""
    a, t = RNG.integers(-9, 9, (3, 256), dtype="int32"), np.arange(64)
    held = np.zeros((3, 256), "int32")
    for n in range(4):
        held[:, (n * step + t) % width] = 2 * a[:, n * 64 + t]
    out = run(unpacked(step, width), {"A": a, "B": np.full((3, 64), -1, "int32")}, target)
    assert (out["B"] == held[:, 63 - t]).all()
    text = driver.source_text(unpacked(step, width).trace(), "cuda", "cuda:sm_90a")
    rounds = re.search(r"for \(int r = 0.*?\n    }", text, re.S)
    assert rounds is not None and text.count("__syncthreads();") == 2
    assert rounds.group().count("__syncthreads();") == (step < 64), text


@pytest.mark.parametrize("target", TARGETS)
def test_rounds_move_an_address_by_constants(target: str):
    """In a swizzled tile too, whatever names the author has put between: the round stands in no quotient,
    remainder or swizzle, so that C++'s compiler unrolls the rounds and begins their loads together."""

    @T.prim_func
    def kernel(A: T.Tensor((1024,), "int32"), B: T.Tensor((1024,), "int32")):
        with T.Kernel(1, threads=64):
            t, s = T.get_thread_binding(), T.alloc_shared((32, 32), "int32")
            T.annotate_layout({s: tilescale.layout.make_swizzled_layout(s)})
            for r in T.serial(4):
                base = r * 256 + t * 4
                row, col = base // 32, base % 32
                for v in T.vectorized(4):
                    s[row, col + v] = A[base + v]
            for r in T.serial(4):
                far = r * 256 + (63 - t) * 4
                for v in T.vectorized(4):
                    B[far + v] = s[far // 32, far % 32 + v]

    a = RNG.integers(-9, 9, 1024, dtype="int32")
    assert (run(kernel, {"A": a, "B": np.zeros(1024, "int32")}, target)["B"] == a).all()
    text = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    places = re.findall(r"&s\[(.*?)\] ?(?:=|;)", text)
    assert len(places) == 2 and all(
        re.match(r"r(_1)? \* 256 \+ \(?[^r]*\^[^r]*$", p.replace("thread", "t")) for p in places
    ), text


def chosen(by_hand: bool) -> Any:
    """The places of positive numbers, at most 64 of a row, in any order."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 96), "int32"), B: T.Tensor((2, 64), "int32"), N: T.Tensor((2,), "int32")):
        T.annotate_pass_configs({tilescale.PassConfigKey.TL_DISABLE_THREAD_STORAGE_SYNC: by_hand})
        with T.Kernel(2, threads=32) as bx:
            t, at = T.get_thread_binding(), T.alloc_var("int32")
            count, places = T.alloc_shared((1,), "int32"), T.alloc_shared((64,), "int32")
            T.fill(count, 0)
            T.sync_threads()
            for r in T.serial(3):
                if A[bx, r * 32 + t] > 0:
                    at = T.atomic_add(count[0], 1, return_prev=True)
                    places[at] = r * 32 + t
            T.sync_threads()
            for r in T.serial(2):
                if r * 32 + t < count[0]:
                    B[bx, r * 32 + t] = places[r * 32 + t]
            if t == 0:
                N[bx] = count[0]

    return kernel


@pytest.mark.parametrize("target", TARGETS)
def test_threads_that_are_ordered_by_hand(target: str):
    """Their barriers are the author's two: else one stands in each round, since rounds write one tile."""
    a = np.where(RNG.random((2, 96)) < 0.4, 1, -1).astype("int32")
    out = run(chosen(True), {"A": a, "B": np.full((2, 64), -1, "int32"), "N": np.zeros(2, "int32")}, target)
    for row, places, count in zip(a, out["B"], out["N"], strict=True):
        assert sorted(places[:count]) == np.flatnonzero(row > 0).tolist() and (places[count:] == -1).all()


def test_barriers_of_threads_that_are_ordered_by_hand():
    texts = [driver.source_text(chosen(h).trace(), "cuda", "cuda:sm_90a") for h in (True, False)]
    found = [[text.count(f"__syncthreads();{s}") for s in ("", "  // T.barrier")] for text in texts]
    assert found == [[2, 2], [3, 2]], texts


def test_the_simulator_judges_the_order_by_hand():
    @T.prim_func
    def kernel(B: T.Tensor((32,), "int32")):
        T.annotate_pass_configs({"tl.disable_thread_storage_sync": True})
        with T.Kernel(1, threads=32):
            t, s = T.get_thread_binding(), T.alloc_shared((32,), "int32")
            s[t] = t
            B[t] = s[31 - t]

    report = kernel.check(args={"B": np.zeros(32, "int32")}, seeds=2)
    assert [f.kind for f in report.findings] == ["race"], report


@pytest.mark.parametrize("target", TARGETS)
def test_coordinates_of_a_thread(target: str):
    @T.prim_func
    def kernel(B: T.Tensor((4, 2, 8), "int32")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            i, j, k = T.index_to_coordinates(t, (4, 2, 8))
            B[i, j, k] = t

    assert (
        run(kernel, {"B": np.zeros((4, 2, 8), "int32")}, target)["B"] == np.arange(64).reshape(4, 2, 8)
    ).all()
    assert T.index_to_coordinates(13, (3, 5)) == [2, 3]


@pytest.mark.parametrize("target", TARGETS)
def test_loops_and_conditions_of_a_thread_s_own(target: str):
    @T.prim_func
    def kernel(B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding(0)
            n = T.alloc_var("int32")
            for i in T.serial(t):
                if i % 2 == 0:
                    n += i
            B[t] = n

    out = run(kernel, {"B": np.full(32, -1, "int32")}, target)
    assert out["B"].tolist() == [sum(range(0, t, 2)) for t in range(32)]


@T.prim_func
def by_warps(A: T.Tensor((128,), "int32"), B: T.Tensor((128,), "int32")):
    with T.Kernel(1, threads=128):
        t = T.get_thread_binding()
        warp, lane = t // 32, t % 32
        s = T.alloc_shared((4, 32), "int32")
        s[warp, lane] = A[t]
        T.sync_warp()
        B[t] = s[warp, 31 - lane]
        for _i in T.serial(2):
            T.sync_warp()
            s[warp, lane] = B[t] + 1
            T.sync_warp()
            B[t] = s[warp, lane ^ 1]
        for i in T.serial(lane, 64, 32):
            T.sync_warp()
            if i == 40:
                B[t] += 100


@pytest.mark.parametrize("target", TARGETS)
def test_warps_synchronize_at_the_scale_of_the_block(target: str):
    a = np.arange(128, dtype="int32")
    out = run(by_warps, {"A": a, "B": np.zeros(128, "int32")}, target)
    want = a.reshape(4, 32)[:, ::-1] + 2
    want[:, 8] += 100
    np.testing.assert_array_equal(out["B"].reshape(4, 32), want)


@T.prim_func
def histogram(A: T.Tensor((100, 3), "int32"), B: T.Tensor((8,), "int32"), C: T.Tensor((32,), "int32")):
    with T.Kernel(1, threads=32):
        t = T.get_thread_binding()
        counts = T.alloc_shared((8,), "int32")
        T.clear(counts)
        for i in T.serial(t, 100, 32):
            for j in T.unroll(3):  # rounds of a thread's own, which update what others do
                if A[i, j] >= 0:
                    T.atomic_add(counts[A[i, j]], 1)
        T.sync_threads()
        for k in T.serial(2):
            T.atomic_add(counts[t % 8], k)
        for i in T.serial(t, 8, 32):
            B[i] = counts[i]
        T.sync_threads()
        if t < 4:
            for k in T.serial(2):
                counts[t * 2 + k] = t
                C[t * 2 + k] = counts[t * 2 + k]


@pytest.mark.parametrize("target", TARGETS)
def test_shared_memory_in_rounds_of_a_thread_s_own(target: str):
    a = RNG.integers(-1, 8, (100, 3), dtype="int32")
    out = run(histogram, {"A": a, "B": np.zeros(8, "int32"), "C": np.full(32, -1, "int32")}, target)
    assert out["B"].tolist() == [(a == k).sum() + 4 for k in range(8)]
    assert out["C"].tolist() == [k // 2 if k < 8 else -1 for k in range(32)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "x, y, axis", [(16, 8, 0), (16, 8, 1), (64, 2, 0), (96, 1, 0), (24, 4, 0), (32, 3, 0), (4, 4, 0)], ids=str
)
@pytest.mark.parametrize("kind, op", [("int32", "max"), ("float16", "sum")])
def test_numbers_of_all_threads_along_an_axis(x: int, y: int, axis: int, kind: str, op: str, target: str):
    """By lanes of a warp, by several warps, and through shared memory alone."""
    identity = T.min_value("int32") if op == "max" else T.cast(0, kind)

    @T.prim_func
    def kernel(A: T.Tensor((y, x), kind), B: T.Tensor((y, x), kind)):
        with T.Kernel(1, threads=(x, y)):
            i, j = T.thread_binding(0, x, thread="threadIdx.x"), T.thread_binding(0, y, thread="threadIdx.y")
            r = T.alloc_local((1,), kind)
            both = (lambda p, q: T.max(p, q)) if op == "max" else (lambda p, q: p + q)
            with T.attr(T.comm_reducer(both, [identity]), "reduce_scope", 0):
                T.evaluate(T.tvm_thread_allreduce(T.uint32(1), A[j, i], True, r[0], i if axis == 0 else j))
            B[j, i] = r[0]

    a = RNG.integers(-99, 99, (y, x)).astype(kind)  # float16 has all sums of them
    out = run(kernel, {"A": a, "B": np.full((y, x), -100, kind)}, target)
    want = (a.max if op == "max" else a.sum)(1 - axis, keepdims=True)
    assert (out["B"] == want).all()


@pytest.mark.parametrize("target", TARGETS)
def test_shuffles_at_the_scale_of_the_block(target: str):
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), B: T.Tensor((32,), "int32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            total = T.alloc_local((1,), "int32")
            total[0] = A[t]
            for i in T.serial(3):
                other = t ^ (1 << i)
                total[0] = total[0] + T.tvm_warp_shuffle(0xFFFFFFFF, total[0], other % 32, 32, 32)
            B[t] = total[0]

    a = RNG.integers(-99, 99, 32, dtype="int32")
    out = run(kernel, {"A": a, "B": np.full(32, -1, "int32")}, target)
    assert (out["B"] == np.repeat(a.reshape(4, 8).sum(1), 8)).all()


def test_tiles_under_a_thread_s_condition_are_refused():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            f = T.alloc_fragment((64,), "float32")
            if T.get_thread_binding() < 32:
                T.copy(A, f)
            T.copy(f, A)

    with pytest.raises(TileSyntaxError, match="what all threads of the block do together"):
        kernel.trace()


def test_an_axis_that_there_is_not():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            A[T.get_thread_binding(3)] = 0

    with pytest.raises(TileValueError, match="axis 3 of the block"):
        kernel.trace()


def test_programs_without_it_are_as_they_were():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            with T.Scale("thread") as (t, n):
                A[t] = n

    assert "rows" not in kernel.trace().hints


@T.prim_func
def suffix_counts(A: T.Tensor((1000,), "int32"), B: T.Tensor((65,), "int32")):
    with T.Kernel(1, threads=256):
        tx = T.get_thread_binding()
        counts, sums = T.alloc_shared((65,), "int32"), T.alloc_var("int32")
        T.fill(counts, 0)
        for s in T.serial(4):
            if s * 256 + tx < 1000:
                T.atomic_add(counts[A[s * 256 + tx]], 1)
        T.sync_threads()
        if tx < 64:
            for i in T.serial(6):
                T.sync_threads(3, 64)
                if tx < 64 - (1 << i):
                    sums = counts[tx] + counts[tx + (1 << i)]
                T.sync_threads(3, 64)
                if tx < 64 - (1 << i):
                    counts[tx] = sums
        T.sync_threads()
        if tx < 65:
            B[tx] = counts[tx]


@pytest.mark.parametrize("target", TARGETS)
def test_some_threads_synchronize_by_number(target: str):
    a = RNG.integers(0, 64, 1000, dtype="int32")
    out = run(suffix_counts, {"A": a, "B": np.full(65, -1, "int32")}, target)
    want = [int((a >= k).sum()) for k in range(64)] + [0]
    assert out["B"].tolist() == want


def counting(threads: int) -> Any:
    @T.prim_func
    def kernel(A: T.Tensor((3, threads), "int32")):
        with T.Kernel(1, threads=threads):
            tx, n = T.get_thread_binding(), T.alloc_var("int32", 5)
            for k in T.serial(3):
                n += k  # in a loop that is the threads' own as a whole
                A[k, tx] = n

    return kernel


@pytest.mark.parametrize("target", TARGETS)
def test_a_counter_in_a_loop_of_the_threads_own(target: str):
    out = run(counting(32), {"A": np.zeros((3, 32), "int32")}, target)
    assert (out["A"] == np.array([[5], [6], [8]])).all()


def test_a_barrier_of_some_threads_where_all_come_is_refused():
    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32"), n: T.int32):
        with T.Kernel(1, threads=128):
            if n > 3:
                T.sync_threads(1, 64)

    with pytest.raises(TileValueError, match="of 64 threads where all 128 come"):
        kernel.trace()


@T.prim_func
def exchanged(A: T.Tensor((64, 16), "float32"), B: T.Tensor((64, 16), "float32")):
    """Threads turn over half of their numbers at a time."""
    with T.Kernel(1, threads=64):
        tx = T.get_thread_binding()
        x, s = T.alloc_local((16,), "float32"), T.alloc_shared((64, 8), "float32")
        for j in T.vectorized(16):
            x[j] = A[tx, j]
        for r in T.serial(2):
            for j in T.vectorized(8):
                s[tx, j] = x[r * 8 + j]
            for j in T.vectorized(8):
                x[r * 8 + j] = s[63 - tx, j]
        for j in T.vectorized(16):
            B[tx, j] = x[j]


@pytest.mark.parametrize("target", TARGETS)
def test_vectors_between_own_memory_and_shared(target: str):
    a = RNG.standard_normal((64, 16)).astype("float32")
    out = run(exchanged, {"A": a, "B": np.zeros((64, 16), "float32")}, target)
    assert (out["B"] == a[::-1]).all()


def test_vectors_between_own_memory_and_shared_are_accesses_of_16_bytes():
    """A step that is known only when the kernel runs leaves a thread's registers its own."""
    code = driver.source_text(exchanged.trace(), "cuda", "cuda:sm_90a")
    assert "x_shared" not in code, code
    assert len(re.findall(r"\*\(uint4\*\)&s\[", code)) == 1, code
    assert len(re.findall(r"= \*\(const uint4\*\)&s\[", code)) == 1, code


@pytest.mark.parametrize("target", TARGETS)
def test_some_threads_read_in_a_loop_what_all_have_in_local_memory(target: str):
    """Each thread has all of it, also where it is large and read by vectors."""

    @T.prim_func
    def kernel(
        A: T.Tensor((48,), "float32"), B: T.Tensor((48,), "float32"), C: T.Tensor((32, 48), "float32")
    ):
        with T.Kernel(1, threads=32):
            tx, x = T.get_thread_binding(), T.alloc_local((48,), "float32")
            for i in T.serial(48):
                x[i] = A[i] * 2
            for i in T.vectorized(48):
                C[tx, i] = x[i] + tx
            if tx == 3:
                for i in T.vectorized(48):
                    B[i] = x[47 - i]

    a = RNG.standard_normal(48).astype("float32")
    out = run(kernel, {"A": a, "B": np.zeros(48, "float32"), "C": np.zeros((32, 48), "float32")}, target)
    assert (out["B"] == 2 * a[::-1]).all()
    assert (out["C"] == 2 * a + np.arange(32, dtype="float32")[:, None]).all()


@pytest.mark.parametrize("target", TARGETS)
def test_rounds_of_a_vectorized_loop_that_add_up_go_in_order(target: str):
    @T.prim_func
    def kernel(A: T.Tensor((64, 4), "float32"), B: T.Tensor((3, 64), "float32")):
        with T.Kernel(2, threads=32) as bx:
            row = bx * 32 + T.get_thread_binding()
            acc, s = T.alloc_local((1,), "float32"), T.alloc_var("float32", 1)
            acc[0] = 0.0
            B[0, row] = 0.0
            for k in T.vectorized(4):
                acc[0] = acc[0] * 2 + A[row, k]
            for k in T.vectorized(4):
                x = s + A[row, k]
                s = x
            for k in T.vectorized(4):
                B[0, row] += A[row, k]
            B[1, row], B[2, row] = acc[0], s

    a = RNG.integers(-9, 9, (64, 4)).astype("float32")
    out = run(kernel, {"A": a, "B": np.zeros((3, 64), "float32")}, target)
    assert (out["B"] == [a.sum(1), a @ [8, 4, 2, 1], 1 + a.sum(1)]).all()
