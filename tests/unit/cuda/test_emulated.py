"""Every operation's lowering for GPUs on the emulated threads, against the simulator, over shapes that divide
nothing."""

from __future__ import annotations

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda import thread_kernels as tk
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import emulator
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.passes import pipeline
from tilescale.compiler.tvm_compat import tirx

SHAPES = [
    (1,),
    (7,),
    (128,),
    (1000,),
    (48, 80),
    (3, 5),
    (64, 64),
    (1, 33),
    (17, 1),
    (2, 3, 40),
    (5, 1, 7),
    (130, 3),
]
THREADS = [32, 64, 96, 128, 256]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 100, 128])
def test_copies(shape, threads):
    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float16")):
        with T.Kernel(1, threads=threads):
            f, s = T.alloc_fragment(shape, "float32"), T.alloc_shared(shape, "bfloat16")
            T.copy(A, f)
            T.copy(f, s)
            T.copy(s, B)

    agree(kernel, {"A": data(shape, "float32"), "B": empty(shape, "float16")}, exact=True)


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int32", "int64", "float64", "float8_e4m3fn", "float8_e5m2", "bool", "float16"]
)
def test_dtypes(dtype):
    @T.prim_func
    def kernel(A: T.Tensor((5, 40), dtype), B: T.Tensor((5, 40), dtype), C: T.Tensor((5, 40), "float32")):
        with T.Kernel(1, threads=64):
            f, s = T.alloc_fragment((5, 40), dtype), T.alloc_shared((5, 40), dtype)
            T.copy(A, s)
            T.copy(s, f)
            T.copy(f, B)
            T.copy(f, C)

    agree(
        kernel,
        {"A": data((5, 40), dtype), "B": empty((5, 40), dtype), "C": empty((5, 40), "float32")},
        exact=True,
    )


@pytest.mark.parametrize("m, n", [(50, 70), (64, 64), (1, 200)])
def test_tiles_over_the_edge(m, n):
    M = T.dynamic("m")

    @T.prim_func
    def kernel(
        A: T.Tensor((M, n), "float32"),
        B: T.Tensor((M, n), "float32"),
        S: T.StridedTensor((M, n), (n + 3, 1), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, 32), T.ceildiv(M, 24), threads=64) as (bx, by):
            s = T.alloc_shared((24, 32), "float32")
            T.copy(A[by * 24 - 1, bx * 32 - 2], s)
            for i, j in T.Parallel(24, 32):
                s[i, j] = s[i, j] + 1
            T.copy(s, B[by * 24, bx * 32])
            T.copy(s, S[by * 24, bx * 32])

    agree(
        kernel,
        {"A": data((m, n), "float32"), "B": empty((m, n), "float32"), "S": empty((m, n), "float32")},
        exact=True,
    )


def test_transposes_go_through_shared_memory():
    @T.prim_func
    def kernel(A: T.Tensor((24, 40), "float32"), B: T.Tensor((40, 24), "float32")):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_fragment((24, 40), "float32"), T.alloc_fragment((40, 24), "float32")
            T.copy(A, a)
            for i, j in T.Parallel(40, 24):
                b[i, j] = a[j, i] * 2
            T.copy(b, B)

    agree(kernel, {"A": data((24, 40), "float32"), "B": empty((40, 24), "float32")}, exact=True)


def test_fragments_indexed_at_run_time_and_from_scalars():
    @T.prim_func
    def kernel(
        A: T.Tensor((8, 64), "float32"),
        B: T.Tensor((64,), "float32"),
        C: T.Tensor((8,), "float32"),
        n: T.int32,
    ):
        with T.Kernel(1, threads=32):
            a, total, few = (
                T.alloc_fragment((8, 64), "float32"),
                T.alloc_fragment((64,), "float32"),
                T.alloc_local((8,), "float32"),
            )
            T.copy(A, a)
            T.clear(total)
            for k in T.serial(n):
                for j in T.Parallel(64):
                    total[j] += a[k, j]
                few[k] = a[k, 5] + few[0] if k > 0 else 1
            for i in T.serial(8):
                C[i] = few[i] + total[i * 3]
            T.copy(total, B)

    agree(
        kernel,
        {"A": data((8, 64), "float32"), "B": empty((64,), "float32"), "C": empty((8,), "float32"), "n": 8},
    )


@pytest.mark.parametrize(
    "shape, axis",
    [
        ((8, 100), 1),
        ((8, 100), 0),
        ((1000,), 0),
        ((3, 4, 50), 1),
        ((64, 1), 1),
        ((1, 130), 0),
        ((16, 16, 16), 0),
    ],
)
@pytest.mark.parametrize("threads", [32, 96, 100, 256])
def test_reductions(shape, axis, threads):
    left = shape[:axis] + shape[axis + 1 :] or (1,)

    @T.prim_func
    def kernel(
        A: T.Tensor(shape, "float32"),
        B: T.Tensor(left, "float32"),
        C: T.Tensor(left, "float32"),
        D: T.Tensor(left, "int32"),
    ):
        with T.Kernel(1, threads=threads):
            a, b, s = (
                T.alloc_fragment(shape, "float32"),
                T.alloc_fragment(left, "float32"),
                T.alloc_shared(shape, "int32"),
            )
            most, d = T.alloc_fragment(left, "float32"), T.alloc_shared(left, "int32")
            T.copy(A, a)
            T.fill(most, 0.5)
            T.reduce_sum(a, b, dim=axis)
            T.reduce_max(a, most, dim=axis, clear=False)
            T.copy(b, B)
            T.copy(most, C)
            T.copy(A, s)
            T.reduce_bitxor(s, d, dim=axis)
            T.copy(d, D)

    args = {
        "A": data(shape, "float32", scale=4),
        "B": empty(left, "float32"),
        "C": empty(left, "float32"),
        "D": empty(left, "int32"),
    }
    agree(kernel, args)


@pytest.mark.parametrize("op", ["sum", "max", "min", "abssum", "absmax", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint8"])
def test_kinds_of_reductions(op, dtype):
    @T.prim_func
    def kernel(A: T.Tensor((6, 48), dtype), B: T.Tensor((6,), dtype)):
        with T.Kernel(1, threads=64):
            a, b = T.alloc_fragment((6, 48), dtype), T.alloc_fragment((6,), dtype)
            T.copy(A, a)
            T.reduce(a, b, op, dim=1)
            T.copy(b, B)

    agree(kernel, {"A": data((6, 48), dtype, scale=0.9), "B": empty((6,), dtype)})


@pytest.mark.parametrize("shape, axis", [((40,), 0), ((6, 30), 1), ((6, 30), 0), ((2, 3, 9), 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(shape, axis, reverse):
    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32"), C: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=64):
            a, s = T.alloc_fragment(shape, "float32"), T.alloc_shared(shape, "float32")
            T.copy(A, a)
            T.copy(A, s)
            T.cumsum(a, dim=axis, reverse=reverse)
            T.cummax(s, dim=axis, reverse=reverse)
            T.copy(a, B)
            T.copy(s, C)

    agree(kernel, {"A": data(shape, "float32"), "B": empty(shape, "float32"), "C": empty(shape, "float32")})


def product(
    dtypes,
    shape,
    threads,
    trans_a=False,
    trans_b=False,
    policy=T.GemmWarpPolicy.Square,
    clear=False,
    precision="",
):
    (da, db, dc), (m, n, k) = dtypes, shape
    a_shape, b_shape = (k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)

    @T.prim_func
    def kernel(A: T.Tensor(a_shape, da), B: T.Tensor(b_shape, db), C: T.Tensor((m, n), dc)):
        with T.Kernel(1, threads=threads):
            a, b, c = T.alloc_shared(a_shape, da), T.alloc_shared(b_shape, db), T.alloc_fragment((m, n), dc)
            T.copy(A, a)
            T.copy(B, b)
            T.copy(C, c)
            T.gemm(
                a,
                b,
                c,
                transpose_A=trans_a,
                transpose_B=trans_b,
                policy=policy,
                clear_accum=clear,
                precision=precision,
            )
            T.copy(c, C)

    return kernel, {"A": data(a_shape, da), "B": data(b_shape, db, 1), "C": data((m, n), dc, 2)}


@pytest.mark.parametrize(
    "shape",
    [(16, 8, 16), (64, 64, 32), (48, 80, 20), (1, 1, 1), (17, 24, 33), (64, 16, 48), (32, 32, 64)],
    ids=str,
)
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32",) * 3,
        ("float16", "float16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", "int8", "int32"),
        ("float64",) * 3,
        ("float8_e4m3fn", "float8_e5m2", "float32"),
    ],
    ids=str,
)
def test_products(shape, dtypes):
    wide = "16" in dtypes[0] or "8" in dtypes[0]  # mma has a path of its own for each way that operands lie
    for threads, trans_a, trans_b in (
        (128, False, False),
        (96, True, True),
        (32, False, True),
        (128, True, False),
    )[: 4 if wide else 2]:
        agree(*product(dtypes, shape, threads, trans_a, trans_b))


@pytest.mark.parametrize("shape", [(32, 32, 64), (17, 24, 33)], ids=str)
@pytest.mark.parametrize("left", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
@pytest.mark.parametrize("right", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_products_of_bytes(shape, left, right):
    if ("int" in left) == ("int" in right):
        agree(
            *product((left, right, "int32" if "int" in left else "float32"), shape, 64, trans_b=True),
            arch="sm_80",
        )


@pytest.mark.parametrize("shape", [(32, 32, 64), (17, 24, 33)], ids=str)
@pytest.mark.parametrize("trans", [(False, True), (True, False)], ids=str)
def test_products_that_may_be_cut_to_tf32(shape, trans):
    """They use the tensor cores, and differ from those that may not."""
    kernel, args = product(("float32",) * 3, shape, 64, *trans, precision="tf32")
    assert "ts::mma_m16n8k8_tf32" in lowered_text(kernel, "sm_80")
    cut = agree(kernel, args, arch="sm_80")
    whole = agree(*product(("float32",) * 3, shape, 64, *trans), arch="sm_80")
    assert not np.array_equal(cut["C"], whole["C"])


def lowered_text(kernel, arch):
    from tilescale.compiler.cuda.lower import Lowering
    from tilescale.compiler.cuda.printer import print_kernel
    from tilescale.compiler.passes import pipeline

    program, _ = pipeline.run(kernel.trace(), target(arch))
    return print_kernel(Lowering(program).run()).text


@pytest.mark.parametrize("policy", list(T.GemmWarpPolicy))
def test_policies(policy):
    agree(*product(("float16", "float16", "float32"), (64, 64, 32), 256, policy=policy, clear=True))


def test_products_on_older_architectures_have_no_mma():
    kernel, args = product(("float16", "float16", "float32"), (32, 32, 16), 64)
    agree(kernel, args, arch="sm_75")


def test_operands_and_accumulators_elsewhere():
    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float16"), C: T.Tensor((40, 40), "float32")):
        with T.Kernel(1, threads=64):
            a, f, c = (
                T.alloc_shared((2, 32, 32), "float16"),
                T.alloc_fragment((32, 32), "float16"),
                T.alloc_shared((40, 40), "float32"),
            )
            T.copy(A, a[1, :, :])
            T.copy(A, f)
            T.clear(c)
            T.gemm(f, a[1, :, :], c[3:35, 5:37])
            T.copy(c, C)

    agree(kernel, {"A": data((32, 32), "float16"), "C": empty((40, 40), "float32")})


def test_atomics_are_done_once():
    @T.prim_func
    def kernel(
        A: T.Tensor((50,), "float32"),
        H: T.Tensor((8,), "int32"),
        S: T.Tensor((50,), "float32"),
        last: T.Tensor((3,), "int32"),
    ):
        with T.Kernel(3, threads=64) as bx:
            f, h = T.alloc_fragment((50,), "float32"), T.alloc_shared((8,), "int32")
            T.clear(h)
            T.copy(A, f)
            T.atomic_add(S, f)
            for i in T.Parallel(50):
                T.atomic_add(h[i % 8], 1)
            T.atomic_add(H, h)
            prev = T.atomic_add(H[0], 0, return_prev=True)
            if prev >= 0:
                last[bx] = 1

    args = {
        "A": data((50,), "float32"),
        "H": empty((8,), "int32"),
        "S": empty((50,), "float32"),
        "last": empty((3,), "int32"),
    }
    got = agree(kernel, args)
    assert got["H"].sum() == 150 and (got["last"] == 1).all()


@pytest.mark.parametrize("n", [1, 40, 1000])
def test_loops_of_dynamic_extent(n):
    N = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32")):
        with T.Kernel(1, threads=96):
            scale = T.alloc_var("float32", 2.0)
            scale = scale + 1
            for i in T.Parallel(N):
                B[i] = A[i] * scale

    agree(kernel, {"A": data((n,), "float32"), "B": empty((n,), "float32")})


def test_scales_below_the_block():
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 32), "float32"), B: T.Tensor((4, 32), "float32"), C: T.Tensor((128,), "int32")
    ):
        with T.Kernel(1, threads=128):
            s = T.alloc_shared((4, 32), "float32")
            T.copy(A, s)
            with T.Scale("warp") as (w, n):
                f, top, own = (
                    T.alloc_fragment((32,), "float32"),
                    T.alloc_fragment((1,), "float32"),
                    T.alloc_shared((32,), "float32"),
                )
                T.copy(s[w, :], f)
                T.reduce_max(f, top)
                for i in T.Parallel(32):
                    own[31 - i] = f[i] - top[0]
                for i in T.Parallel(32):
                    s[w, i] = own[i] + n
            with T.Scale("thread") as (t, m):
                C[t] = t * m
            T.copy(s, B)

    args = {"A": data((4, 32), "float32"), "B": empty((4, 32), "float32"), "C": empty((128,), "int32")}
    agree(kernel, args, exact=True)


def test_the_same_bits_on_every_run():
    kernel, args = product(("float32",) * 3, (33, 20, 9), 64)
    first, second = (agree(kernel, args, seed=s) for s in (0, 1))
    assert np.array_equal(first["C"], second["C"])


@pytest.mark.parametrize("where", ["if", "chosen", "both"])
def test_a_shuffle_of_part_of_a_warp_is_found(where: str):
    """The partners are there in all three; the other lanes are not."""
    out, tid = tk.pointer("out", "int32"), tirx.Var("tid", "int32")
    low, other = tirx.LT(tid, 8), tirx.call_extern("int32", "ts::shuffle_xor", tid, tk.int32(1))
    body = {
        "if": lambda: tirx.IfThenElse(low, tk.store(out, tid, other), None),
        "chosen": lambda: tk.store(out, tid, tirx.if_then_else(low, other, tid)),
        "both": lambda: tk.store(out, tid, tirx.Cast("int32", tirx.And(low, tirx.LT(other, 4)))),
    }[where]()
    for part, ok in ((body, False), (tk.store(out, tid, other), True)):
        kernel = tk.kernel("k", [out], tk.threads(part, {"threadIdx.x": (tid, 64)}), block=64)
        array = np.zeros(64, "int32")
        if ok:
            emulator.Emulator(kernel, ["out"]).launch((1, 1, 1), {"out": array}, [])
            assert array.tolist() == [t ^ 1 for t in range(64)]
        else:
            with pytest.raises(emulator.EmulationError, match="a shuffle in part of a warp"):
                emulator.Emulator(kernel, ["out"]).launch((1, 1, 1), {"out": array}, [])


def test_nothing_follows_from_a_number_of_which_nothing_is_known():
    @T.prim_func
    def kernel(A: T.Tensor((500,), "float32"), n: T.int32, B: T.Tensor((256,), "float32")):
        with T.Kernel(1, threads=128):
            first = (n + 5) % n  # between -2³¹ and 2³¹, as far as bounds go
            tile = T.alloc_fragment((256,), "float32")
            T.copy(A[first * 250], tile)
            T.copy(tile, B)

    for n in (2, 3, 4):
        agree(kernel, {"A": data((500,), "float32"), "n": n, "B": empty((256,), "float32")}, exact=True)


def test_a_name_of_the_nest_in_the_index_of_a_vector():
    """The vectors are read in front of the statement that binds it."""

    @T.prim_func
    def kernel(A: T.Tensor((100, 64), "float16"), B: T.Tensor((100, 64), "float32")):
        with T.Kernel(4, threads=64) as bx:
            for i, j in T.Parallel(32, 64):
                at = bx * 32 + i
                B[at, j] = T.cast(A[at, j], "float32") * 2

    agree(kernel, {"A": data((100, 64), "float16"), "B": empty((100, 64), "float32")}, exact=True)


def test_numbers_that_all_threads_have_leave_a_loop_to_memory():
    """Reading one does not cut a loop by its fragment: neighbours go together."""

    @T.prim_func
    def kernel(A: T.Tensor((8192,), "float16"), B: T.Tensor((8192,), "float16")):
        with T.Kernel(1, threads=128):
            f, top = T.alloc_fragment((8192,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A, f)
            T.reduce_max(f, top)
            for i, j in T.Parallel(1, 8192):
                B[i * 8192 + j] = T.cast(A[j] - top[i], "float16")

    program = pipeline.run(kernel.trace(), target("sm_90a"))[0]
    text = print_kernel(Lowering(program).run()).text
    assert text.count("(uint4*)") >= 3, text
    agree(kernel, {"A": data((8192,), "float16"), "B": empty((8192,), "float16")})
