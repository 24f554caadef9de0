"""Atomics, prints, assertions, views: what they do and what they refuse."""

from __future__ import annotations

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler.checks.run import launch
from tilescale.errors import LaunchError, TileSyntaxError, TileTypeError, TileValueError

ATOMIC = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


@pytest.mark.parametrize("name", ATOMIC)
def test_atomics_on_elements_and_tiles(name: str):
    @T.prim_func
    def kernel(C: T.Tensor((8,), name), D: T.Tensor((4, 6), name), E: T.Tensor((64,), name)):
        with T.Kernel(64) as b:
            T.atomic_add(C[0], 1)
            T.atomic_max(C[1], b - 10)
            T.atomic_min(C[2], b - 10)
            old = T.atomic_add(C[3], 1, return_prev=True)
            if T.cast(old, "int32") < 64:
                T.atomic_add(E[T.cast(old, "int32")], 1)
            t = T.alloc_shared((3, 4), name)
            T.fill(t, 1)
            T.atomic_add(D[2, 3], t)  # over the edge: what lies outside is dropped
            T.atomic_max(D[0:2, 0:4], t[0:2, :])
            T.atomic_store(C[4], 7)
            T.atomic_addx2(C[5], t[0, 0])
            if b == 0:
                T.atomic_add(C[7], T.atomic_load(D[0, 4]))

    c, d, e = (torch.zeros(s, dtype=getattr(torch, name)) for s in ((8,), (4, 6), (64,)))
    c[1], d[0, 4] = -100, 3
    run(kernel)(c, d, e)
    assert c.double().tolist() == [64, 53, -10, 64, 7, 64, 64, 3]
    want = torch.zeros(4, 6, dtype=torch.float64)
    want[2:, 3:], want[:2, :4], want[0, 4] = 64, 1, 3
    assert d.double().equal(want)
    assert e.double().equal(torch.ones(64, dtype=torch.float64))


def test_what_atomics_refuse():
    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((16,), "float32"), H: T.Tensor((16,), "int8")):
            with T.Kernel(1):
                f = T.alloc_fragment((16,), "float32")
                t = T.alloc_shared((8,), "float16")
                statement(A, H, f, t)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileTypeError,
        "T.atomic_add of int8",
        lambda A, H, f, t: T.atomic_add(H[0], 1),
        expected="one of float32",
    )
    refuse(
        TileTypeError,
        "f is private to its executor",
        lambda A, H, f, t: T.atomic_add(f[0], 1.0),
        write="f[…] += …",
    )
    refuse(
        TileTypeError,
        "T.atomic_add of float16 into float32",
        lambda A, H, f, t: T.atomic_add(A[0:8], t),
        at="T.atomic_add(A[0:8], t)",
    )
    refuse(
        TileValueError,
        "T.atomic_max: t has a tile of (8,) and A one of (16,)",
        lambda A, H, f, t: T.atomic_max(A, t),
    )
    refuse(
        TileTypeError,
        "of a whole tile returns nothing",
        lambda A, H, f, t: T.atomic_add(A, f, return_prev=True),
        write="T.Parallel",
    )


@pytest.mark.parametrize("load", [True, False])
def test_an_atomic_whose_value_is_asked_for_has_an_element(load: bool):
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), k: T.int32, B: T.Tensor((1,), "int32")):
        with T.Kernel(1):
            if load:
                B[0] = T.atomic_load(A[k]) + 1
            else:
                B[0] = T.atomic_add(A[k], 1, return_prev=True) + 1

    at = "T.atomic_load(A[k])" if load else "T.atomic_add(A[k], 1, return_prev=True)"
    a, b = torch.arange(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    made = run(kernel)
    made(a, 7, b)
    assert b.item() == 8
    with refused(LaunchError, "an index of A lies outside (8,)", at=f"B[0] = {at} + 1"):
        made(a, 8, b)
    (found,) = launch(kernel, 1, {"A": a.numpy(), "k": 8, "B": b.numpy()}).report.findings
    assert (
        found.kind == "out-of-bounds"
        and "A[8] lies outside A, whose shape is (8,)" in found.message
        and at in str(found)
    )


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_constant_indices_outside_are_refused_with_their_place(target: str):
    def refuse(statement, **more):
        @T.prim_func
        def kernel(A: T.SymmTensor((8,), "int32"), B: T.Tensor((8,), "int32")):
            with T.Kernel(1), T.Scale("device"):
                statement(A, B)

        with refused(TileValueError, "index 9 lies outside axis 0 of A, whose extent is 8", **more):
            made = tilescale.compile(kernel, target=target)
            made.check(ranks=1) if target == "sim" else None

    refuse(lambda A, B: T.atomic_add(A[9], 1), at="T.atomic_add(A[9], 1)")
    refuse(lambda A, B: T.atomic_load(A[9]), at="T.atomic_load(A[9])")
    refuse(
        lambda A, B: T.atomic_add(A[9], 1, dst=0, return_prev=True),
        at="T.atomic_add(A[9], 1, dst=0, return_prev=True)",
    )
    refuse(lambda A, B: B.__setitem__(0, A[9] + 1), at="B.__setitem__(0, A[9] + 1)")
    refuse(lambda A, B: A.__setitem__(9, 1), at="A.__setitem__(9, 1)")


def test_prints_show_rank_block_place_and_value(capfd: pytest.CaptureFixture[str]):
    @T.prim_func
    def kernel(A: T.Tensor((2, 3), "float32"), n: T.int32):
        with T.Kernel(2) as b:
            if b == 1:
                t = T.alloc_shared((2, 3), "bfloat16")
                T.copy(A, t)
                T.print(t)
                T.print(t[1, 0:2], "part")
                T.print(n * 2)
                T.print(t[0, 1], msg="one")
                v = T.alloc_var("int32", 41)
                print(v)
                T.print("here")
                T.print(t[0, 0], "two\nlines | 100 %")

    run(kernel)(torch.tensor([[1.0, 2, 3], [4, 5.5, -6]]), 21)
    out, err = capfd.readouterr()
    text = out + err
    line = kernel.func.__code__.co_firstlineno
    for part in (
        f"test_atomic_print_view.py:{line + 6}: t = bfloat16(2, 3)",
        "[[1, 2, 3],\n [4, 5.5, -6]]",
        "part = bfloat16(2)",
        "[4, 5.5]",
        f":{line + 8}: n * 2 = 42",
        "one = 2",
        "v = 41",
        "here",
        "two\nlines | 100 % = 1",
        "block (1, 0, 0)",
    ):
        assert part in text, (part, text)
    assert "block (0, 0, 0)" not in text


def test_the_simulator_prints_like_the_cpu(capfd: pytest.CaptureFixture[str]):
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((2, 3), "float32"), B: T.Tensor((n, 12), "float32"), x: T.float32, flag: T.bool):
        with T.Kernel(2, 2) as (bx, by):
            if bx == 1 and by == 0:
                for dtype in ("float64", "float16", "bfloat16", "float8_e4m3fn", "int32"):
                    t = T.alloc_shared((2, 3), dtype)
                    T.copy(A, t)
                    T.print(t)
                m = T.alloc_shared((3,), "bool")
                for i in T.Parallel(3):
                    m[i] = A[0, i] > 0.2
                T.print(m, "mask")
                T.print(B)
                T.print(B[0:2, 4], "column")
                T.print(x / 3, "third")
                T.print(A[1, 2] > 1)
                T.print(flag, "flag")
                T.print(A[1, 1])
                T.print("here")

    a, b = torch.tensor([[0.1257302, -1.5, 3.0], [1e-9, float("inf"), 250.125]]), torch.randn(90, 12)
    run(kernel)(a, b, 0.7, True)
    want = capfd.readouterr().out
    shown = launch(kernel, 1, {"A": a.numpy(), "B": b.numpy(), "x": 0.7, "flag": True}).printed
    assert "\n".join(shown) + "\n" == want and "..., " in want and "[False, False, True]" in want


def test_device_assertions_name_the_line():
    @T.prim_func
    def kernel(A: T.Tensor((8,), "int32"), limit: T.int32):
        with T.Kernel(8) as b:
            T.device_assert(A[b] < limit, "a value reached the limit | of all")

    made = run(kernel)
    made(torch.arange(8, dtype=torch.int32), 8)
    with refused(
        LaunchError,
        "a value reached the limit",
        at='T.device_assert(A[b] < limit, "a value reached the limit | of all")',
    ):
        made(torch.arange(8, dtype=torch.int32), 7)


def test_views_are_the_same_memory():
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 8), "float32"),
        C: T.Tensor((2, 16), "float32"),
        D: T.Tensor((32,), "int32"),
        E: T.Tensor((8, 8), "int16"),
    ):
        with T.Kernel(1):
            t = T.alloc_shared((4, 8), "float32")
            T.copy(A, t)
            wide = T.reshape(t, (2, 16))
            flat = T.view(t, (32,))
            bits = T.view(t, (32,), dtype="int32")
            halves = T.view(t, (8, 8), dtype="int16")
            for i in T.Parallel(32):
                flat[i] += 1.0
            T.copy(wide, C)
            T.copy(bits, D)
            T.copy(halves, E)

    a = torch.randn(4, 8)
    c, d, e = torch.zeros(2, 16), torch.zeros(32, dtype=torch.int32), torch.zeros(8, 8, dtype=torch.int16)
    run(kernel)(a, c, d, e)
    flat = (a + 1).flatten()
    assert (
        c.flatten().equal(flat)
        and d.equal(flat.view(torch.int32))
        and e.flatten().equal(flat.view(torch.int16))
    )

    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((T.dynamic("n"),), "float32")):
            with T.Kernel(1):
                t = T.alloc_shared((4, 8), "float32")
                statement(A, t)

        with refused(kind, message, **more):
            kernel.trace()

    refuse(
        TileValueError,
        "has 128 bytes",
        lambda A, t: T.reshape(t, (4, 9)),
        expected="the same number of bytes",
    )
    refuse(
        TileValueError,
        "a view of A, whose extents are not constants: (n,) as (4,)",
        lambda A, t: T.view(A, (4,)),
        expected="extents of which it is clear",
    )
    refuse(TileTypeError, "are not constants, as int32", lambda A, t: T.view(A, None, "int32"))
    refuse(
        TileTypeError,
        "a view of t, whose extents are not constants",
        lambda A, t: T.view(t, (T.dynamic("n"),)),
        expected="a T.Tensor",
    )


def test_a_pipelined_copy_into_a_viewed_buffer_keeps_its_meaning():
    @T.prim_func
    def kernel(A: T.Tensor((6, 16), "int32"), C: T.Tensor((4, 4), "int32")):
        with T.Kernel(1):
            a = T.alloc_shared((16,), "int32")
            square = T.reshape(a, (4, 4))
            s = T.alloc_fragment((4, 4), "int32")
            T.clear(s)
            for k in T.Pipelined(6, num_stages=3):
                T.copy(A[k, 0], a)
                for i, j in T.Parallel(4, 4):
                    s[i, j] += square[j, i] * (k + 1)
            T.copy(s, C)

    a = torch.randint(-5, 6, (6, 16), dtype=torch.int32)
    want = sum((k + 1) * a[k].view(4, 4).t() for k in range(6))
    for depth in (1, 3):
        c = torch.zeros(4, 4, dtype=torch.int32)
        run(kernel, depth=depth)(a, c)
        assert c.equal(want), depth


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("dtype, shape", [("float16", (16, 128)), ("int32", (16, 64)), ("int64", (16, 32))])
def test_a_view_of_registers_on_gpus(arch: str, dtype: str, shape: tuple[int, int]):
    """What is written under one name is read under the other, also where nothing else reads it."""

    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float32"), B: T.Tensor(shape, dtype), C: T.Tensor((16, 64), "float32")):
        with T.Kernel(1, threads=64):
            a, c = T.alloc_fragment((16, 64), "float32"), T.alloc_fragment((16, 64), "float32")
            T.copy(A, a)
            T.copy(T.view(a, shape, dtype), B)
            bits = T.view(c, shape, dtype)
            T.copy(B, bits)
            T.copy(c, C)

    a = data((16, 64), "float32", 1)
    args = {"A": a, "B": empty(shape, dtype), "C": empty((16, 64), "float32")}
    got = agree(kernel, args, exact=True, arch=arch)
    assert (got["C"] == a).all() and (got["B"].view("float32") == a).all()


def test_a_view_of_registers_that_would_move_elements():
    @T.prim_func
    def kernel(A: T.Tensor((16, 64), "float32"), B: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=64):
            a = T.alloc_fragment((16, 64), "float32")
            T.copy(A, a)
            T.copy(T.view(a, (32, 32)), B)

    agree(kernel, {"A": data((16, 64), "float32"), "B": empty((32, 32), "float32")}, exact=True)

    @T.prim_func
    def halves(A: T.Tensor((16, 64), "float32"), B: T.Tensor((32, 64), "float16")):
        with T.Kernel(1, threads=64):
            a = T.alloc_fragment((16, 64), "float32")
            T.copy(A, a)
            T.copy(T.view(a, (32, 64), "float16"), B)

    with refused(
        TileValueError,
        "a view of a of (16, 64) float32 as (32, 64)",
        at='T.view(a, (32, 64), "float16")',
        expected="last axis alone",
    ):
        agree(halves, {"A": data((16, 64), "float32"), "B": empty((32, 64), "float16")})


def test_reinterpret_and_bits():
    @T.prim_func
    def kernel(
        A: T.Tensor((16,), "float32"),
        H: T.Tensor((16,), "float16"),
        C: T.Tensor((3, 16), "int32"),
        D: T.Tensor((16,), "float32"),
    ):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[0, i] = T.reinterpret(A[i], "int32")
                C[1, i] = T.popcount(T.reinterpret(A[i], "int32"))
                C[2, i] = T.cast(T.reinterpret(H[i], "int16"), "int32") & 0x7FFF
                D[i] = T.reinterpret(
                    T.bitwise_xor(T.reinterpret(A[i], "int32"), T.shift_left(1, 31)), "float32"
                )

    a, h = torch.randn(16), torch.randn(16).half()
    c, d = torch.zeros(3, 16, dtype=torch.int32), torch.zeros(16)
    run(kernel)(a, h, c, d)
    bits = a.view(torch.int32)
    assert c[0].equal(bits) and c[1].tolist() == [bin(v & 0xFFFFFFFF).count("1") for v in bits.tolist()]
    assert c[2].equal(h.view(torch.int16).int() & 0x7FFF) and d.equal(-a)
    with refused(TileSyntaxError, "called outside a kernel"):
        T.print(3)


def test_a_view_of_a_view_of_shared_memory():
    """By warps that have a tile, and under another dtype and back."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 256), "float32"), B: T.Tensor((4, 256), "float32")):
        with T.Kernel(1, threads=128), T.Scale("warp") as (w, _):
            x, y = T.alloc_shared((256,), "float32"), T.alloc_shared((256,), "float32")
            if w > 1:
                halves = T.view(T.view(x, (16, 16)), (64, 8), "float16")
                again = T.view(halves, (64, 4), "float32")
                for i, j in T.Parallel(64, 4):
                    again[i, j] = A[w, i * 4 + j]
                T.copy(x, B[w, 0:256])
            else:
                T.copy(A[w, 0:256], y)
                T.copy(y, B[w, 0:256])

    got = agree(kernel, {"A": data((4, 256), "float32"), "B": empty((4, 256), "float32")}, exact=True)
    assert (got["B"] == data((4, 256), "float32")).all()
