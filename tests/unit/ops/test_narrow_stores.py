"""Elements of tensors of 4-bit numbers, stored one by one: both halves of a byte by one iteration or executor,
what is refused, what the simulator finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tests.unit.cuda.test_hopper import lowered
from tests.unit.ops.test_narrow import GRID, codes_of
from tilescale.compiler.checks.run import check
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.static import check as prove
from tilescale.errors import TileTypeError

DTYPES = ["int4", "uint4", "float4_e2m1fn"]


@T.macro
def of_a_tensor(A, X, f, bx):
    for i, j in T.Parallel(16, 64):
        A[bx * 16 + i, j] = X[bx * 16 + i, j]


@T.macro
def of_a_fragment(A, X, f, bx):
    """Whose threads hold neighbours, or not."""
    for i, j in T.Parallel(16, 64):
        A[bx * 16 + i, j] = f[i, j]


@T.macro
def across(A, X, f, bx):
    """A row is the inner loop, its column by a name, in steps backwards."""
    for j, i in T.Parallel(64, 16):
        column = 63 - j
        A[bx * 16 + i, column] = X[bx * 16 + i, column]


@T.macro
def some(A, X, f, bx):
    """Under conditions, from an odd column to an even one."""
    for i, j in T.Parallel(16, 61):
        if i != 3:
            x = X[bx * 16 + i, j + 1]
            if x > 0.0:
                A[bx * 16 + i, j + 1] = x


@T.macro
def rows(A, X, f, bx):
    for i in T.Parallel(16):
        for j in T.serial(1, 64, 2):
            A[bx * 16 + i, j] = X[bx * 16 + i, j]


@T.macro
def two_a_step(A, X, f, bx):
    for i, j in T.Parallel(16, 32):
        A[bx * 16 + i, 2 * j] = X[bx * 16 + i, 2 * j]
        A[bx * 16 + i, 2 * j + 1] = X[bx * 16 + i, 2 * j]


@T.macro
def runs(A, X, f, bx):
    for i, g in T.Parallel(16, 8):
        x = T.alloc_local((8,), "float32")
        for k in T.vectorized(8):
            x[k] = X[bx * 16 + i, g * 8 + k] + 1.0
        for k in T.vectorized(8):
            A[bx * 16 + i, g * 8 + k] = x[k]


@T.macro
def added(A, X, f, bx):
    """What is stored is read, the numbers of a byte in turn."""
    for i, j in T.Parallel(16, 64):
        x = T.alloc_local((1,), "float32")
        x[0] = A[bx * 16 + i, j]
        A[bx * 16 + i, j] = T.clamp(x[0] + X[bx * 16 + i, j], 0.0, 6.0)


@T.macro
def serial(A, X, f, bx):
    for i in T.serial(4):
        for j in T.serial(5, 9):
            A[bx * 16 + i, j] = X[bx * 16 + i, j]
    A[bx * 16, 0] = 1
    A[bx * 16, 1] = X[0, 0]


@T.macro
def threads(A, X, f, bx):
    with T.Scale("thread") as (t, n):
        if t < 16:
            for j in T.serial(3, 64):
                A[bx * 16 + t, j] = X[bx * 16 + t, j]


@T.macro
def bound_threads(A, X, f, bx):
    t = T.get_thread_binding()
    for i in T.serial(16):
        if t < 32:
            for h in T.serial(2):
                A[bx * 16 + i, 2 * t + h] = X[bx * 16 + i, 2 * t + h]


@T.macro
def vectors(A, X, f, bx):
    for i in T.serial(16):
        for j in T.vectorized(2, 34):
            A[bx * 16 + i, j] = X[bx * 16 + i, j]


WAYS = [of_a_tensor, of_a_fragment, across, some, rows, two_a_step, runs, added, serial, threads, bound_threads, vectors]  # fmt: skip


def stored(way: Any, dtype: str) -> Any:
    @T.prim_func
    def kernel(X: T.Tensor((32, 64), "float32"), A: T.Tensor((32, 64), dtype)):
        with T.Kernel(2, threads=64) as bx:
            f = T.alloc_fragment((16, 64), "float32")
            if way is of_a_fragment:
                T.copy(X[bx * 16, 0], f)
            way(A, X, f, bx)

    return kernel


def expected(way: Any, x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """What each number becomes; NaN: it stays."""
    made = np.full(x.shape, np.nan)
    of = {
        "of_a_tensor": (slice(None), slice(0, 64), x),
        "rows": (slice(None), slice(1, 64, 2), x),
        "vectors": (slice(None), slice(2, 34), x),
        "threads": (slice(None), slice(3, 64), x),
        "runs": (slice(None), slice(0, 64), x + 1),
        "added": (slice(None), slice(0, 64), np.clip(a + x, 0, 6)),
        "two_a_step": (slice(None), slice(0, 64), np.repeat(x[:, ::2], 2, 1)),
    }
    if way is some:
        part = np.where(x[:, 1:62] > 0, x[:, 1:62], np.nan)
        part[[3, 19]] = np.nan
        made[:, 1:62] = part
    elif way is serial:
        for top in (0, 16):
            made[top : top + 4, 5:9] = x[top : top + 4, 5:9]
            made[top, :2] = 1, x[0, 0]
    else:
        r, c, values = of.get(way.__name__, of["of_a_tensor"])
        made[r, c] = values[r, c]
    return made


def numbers(codes: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float4_e2m1fn":
        return GRID[codes & 7] * np.where(codes & 8, -1, 1)
    return (codes ^ 8) - 8 if dtype == "int4" else codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_same_on_every_target(way: Any, dtype: str):
    rng = np.random.default_rng(len(way.__name__))
    low = 0 if dtype == "uint4" else -4
    x = rng.integers(low, 5, (32, 64)).astype(np.float32)
    old = rng.integers(0, 5, (32, 64))
    a = (old[:, ::2] | old[:, 1::2] << 4).astype(np.uint8).view("int8" if dtype == "int4" else "uint8")
    want = expected(way, x, numbers(old, dtype))
    codes = codes_of(want) if dtype == "float4_e2m1fn" else np.nan_to_num(want).astype(int) & 15
    codes = np.where(np.isnan(want), old, codes)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(a.dtype)
    kernel = stored(way, dtype)
    for arch in ("sm_90a", "sm_80"):
        got = agree(kernel, {"X": x, "A": a.copy()}, arch=arch, exact=True)
        np.testing.assert_array_equal(got["A"], packed)
    made = a.copy()
    run(kernel)(x, made)
    np.testing.assert_array_equal(made, packed)


def test_whole_bytes_are_not_read():
    """Both halves in one iteration: vectors of bytes, of which none is read."""
    text = print_kernel(lowered(stored(of_a_tensor, "int4"))[0]).text
    assert "*(uint2*)&A[" in text and "uint8_t(A[" not in text


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("n", [2, 10, 64])
def test_extents_of_a_call(n: int, target: str):
    """Of an odd number of iterations, too."""

    @tilescale.jit(target=target)
    def shifted(x):
        M, N = T.const("M"), T.dynamic("n")
        x: T.Tensor((M, N), "int32")
        y = T.empty((M, N), T.int4)
        with T.Kernel(M, threads=32) as b:
            y[b, N - 1] = 7
            for j in T.Parallel(N - 1):
                y[b, j] = x[b, j + 1]
        return y

    x = torch.arange(3 * n, dtype=torch.int32).reshape(3, n) % 16 - 8
    got = shifted(x)
    wide = torch.stack([got << 4 >> 4, got >> 4], -1).reshape(3, n)
    assert torch.equal(wide[:, :-1].int(), x[:, 1:]) and (wide[:, -1] == 7).all()


def test_rows_that_memory_names():
    @T.prim_func
    def kernel(at: T.Tensor((8,), "int32"), X: T.Tensor((8, 64), "int32"), A: T.Tensor((16, 64), "uint4")):
        with T.Kernel(2, threads=32) as bx:
            for i, j in T.Parallel(8, 32):
                row = at[i]
                A[row, bx * 32 + j] = X[i, bx * 32 + j]

    rng = np.random.default_rng(3)
    at, x = rng.permutation(16)[:8].astype(np.int32), rng.integers(0, 16, (8, 64)).astype(np.int32)
    want = np.full((16, 32), 0x5A, np.uint8)
    given = {"at": at, "X": x, "A": want.copy()}
    want[at] = x[:, ::2] | x[:, 1::2] << 4
    np.testing.assert_array_equal(agree(kernel, given, exact=True)["A"], want)
    assert (report := check(kernel, 1, given, seeds=2)), report
    made = given["A"].copy()
    run(kernel)(at, x, made)
    np.testing.assert_array_equal(made, want)


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_between_launches(target: str):
    @T.prim_func
    def kernel(X: T.Tensor((16,), "int32"), Y: T.Tensor((16,), "int32")):
        kept = T.alloc_global((16,), "int4")
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                kept[i] = X[i]
        with T.Kernel(2, threads=32) as bx:
            for i in T.Parallel(8):
                Y[bx * 8 + i] = kept[bx * 8 + i] * 3

    x, y = torch.arange(16, dtype=torch.int32) - 8, torch.zeros(16, dtype=torch.int32)
    tilescale.compile(kernel, target=target)(x, y)
    assert torch.equal(y, x * 3)


def found(act: Any) -> Any:
    """What the simulator says of two who write the halves of one byte, as memory tells them."""

    @T.prim_func
    def kernel(at: T.Tensor((2,), "int32"), A: T.Tensor((4, 64), "int4")):
        with T.Kernel(2, threads=32) as bx:
            act(A, at, bx)

    return check(kernel, 1, {"at": np.array([4, 5], np.int32), "A": np.zeros((4, 32), np.int8)}, seeds=2)


@T.macro
def two_blocks(A, at, bx):
    A[0, at[bx]] = 1


@T.macro
def two_threads(A, at, bx):
    with T.Scale("thread") as (t, n):
        if t < 2:
            A[bx, at[t]] = 1


@T.macro
def one_row(A, at, bx):
    """Rows that memory names are as different as the author says, in one byte as in two."""
    for i, j in T.Parallel(2, 4):
        if j % 2 == i:
            A[at[i] // 4 + bx, j] = 1


@T.macro
def in_turn(A, at, bx):
    if bx == 0:
        for i in T.serial(2):
            A[0, at[i]] = 1


@pytest.mark.parametrize("act", [two_blocks, two_threads, one_row], ids=lambda a: a.__name__)
def test_halves_of_one_byte_are_a_race(act: Any):
    report = found(act)
    assert not report and "counted in bytes of two int4 numbers" in str(report), report


def test_halves_in_turn_are_none():
    assert (report := found(in_turn)), report


def test_a_kept_half_need_not_be_written():
    """What is read of a fresh tensor all the same is found."""

    @tilescale.jit(target="sim")
    def kept(x, ahead: int):
        x: T.Tensor((8,), "int32")
        y = T.empty((8,), T.int4)
        with T.Kernel(1, threads=32):
            for j in T.serial(8 - ahead):
                y[j] = x[j] + (y[j + ahead] if ahead else 0)
        return y

    x = torch.arange(8, dtype=torch.int32) - 4
    got = kept(x, 0)
    assert torch.equal(torch.stack([got << 4 >> 4, got >> 4], -1).reshape(8).int(), x)
    with pytest.raises(tilescale.errors.FindingError, match="uninitialised"):
        kept(x, 4)


@T.macro
def odd_base(A, bx, n):
    for i, j in T.Parallel(4, 16):
        A[i, j + n] = 1


@T.macro
def one_of_two_rows(A, bx, n):
    for i, j in T.Parallel(2, 16):
        if i == 0:
            A[0, j] = 1


@T.macro
def two_beside(A, bx, n):
    for i, j in T.Parallel(4, 16):
        A[i, 2 * j] = 1
        A[i, 2 * j + 3] = 1


@T.macro
def rows_of_three(A, bx, n):
    for i, j in T.Parallel(8, 3):
        A[0, i * 3 + j] = 1


@T.macro
def long_runs(A, bx, n):
    for i in T.Parallel(8):
        for k in T.serial(6):
            A[0, i * 4 + k] = 1


@T.macro
def halves(A, bx, n):
    for i in T.Parallel(64):
        A[i // 16, i % 16] = 1


@T.macro
def two_to_a_row(A, bx, n):
    for i, j in T.Parallel(8, 16):
        if i % 2 == 0:
            A[i // 2, 2 * j] = 1
        else:
            A[i // 2, 2 * j + 1] = 2


@T.macro
def by_many_names(A, bx, n):
    """A column whose parts are named so often that nobody spells it out."""
    for i, j in T.Parallel(8, 16):
        a = j + i
        b = a + 2
        c = b + 2
        d = c + 2
        e = d + 2
        f = e + 2
        g = f + 2
        h = g + 2
        k = h + 2
        p = k + 2
        A[0, p] = 1


@T.macro
def of_a_block(A, bx, n):
    A[0, bx] = 1


@T.macro
def of_a_thread(A, bx, n):
    t = T.get_thread_binding()
    A[bx, t] = 1


@T.macro
def of_a_scale(A, bx, n):
    with T.Scale("thread") as (t, m):
        A[bx, 63 - t] = 1


@T.macro
def of_a_wave(A, bx, n):
    for tile in T.Persistent((64,), 2, bx):
        A[0, tile] = 1


@T.macro
def of_its_steps(A, bx, n):
    for j in T.serial(bx, 64, 4):
        A[0, j] = 1


@T.macro
def laid_out(A, bx, n):
    for i, j in T.Parallel(4, 16, loop_layout=T.Fragment((4, 16), forward_fn=lambda i, j: (i * 8 + j % 8, j // 8))):  # fmt: skip
        A[i, j] = 1


@pytest.mark.parametrize(
    ("act", "message", "expected"),
    [
        (odd_base, "share bytes of A: A[i, j + n]", "an even number plus that loop's index"),
        (one_of_two_rows, "share bytes of A: A[0, j]", "neighbouring iterations of one of its loops"),
        (two_beside, "share bytes of A", "neighbouring iterations"),
        (rows_of_three, "share bytes of A: A[0, i * 3 + j]", "neighbouring iterations"),
        (long_runs, "share bytes of A", "neighbouring iterations"),
        (halves, "share bytes of A", "neighbouring iterations"),
        (two_to_a_row, "share bytes of A", "neighbouring iterations"),
        (by_many_names, "share bytes of A", "neighbouring iterations"),
        (of_a_block, "depends on bx", "both int4 numbers of a byte by one of them"),
        (of_a_thread, "depends on thread", "both int4 numbers of a byte by one of them"),
        (of_a_scale, "depends on t", "both int4 numbers of a byte by one of them"),
        (of_a_wave, "depends on bx", "both int4 numbers of a byte by one of them"),
        (of_its_steps, "depends on bx", "both int4 numbers of a byte by one of them"),
        (laid_out, "loop_layout= of a T.Parallel", "no loop_layout="),
    ],
    ids=lambda a: getattr(a, "__name__", None),
)
def test_refused(act: Any, message: str, expected: str):
    @T.prim_func
    def kernel(A: T.Tensor((32, 64), "int4"), n: T.int32):
        with T.Kernel(2, threads=32) as bx:
            act(A, bx, n)

    with refused(TileTypeError, message, expected=expected):
        kernel.trace()


def test_whole_numbers_of_a_promise():
    """A column that is even by what the call promises, and blocks that are one."""
    n = T.dynamic("n", multiple_of=2)

    @T.prim_func
    def kernel(X: T.Tensor((n,), "int32"), A: T.Tensor((1, 64), "int4")):
        with T.Kernel(1, threads=32) as bx:
            for j in T.Parallel(8):
                A[bx, n + j] = X[j]
            A[0, bx] = 1

    a = np.zeros((1, 32), np.int8)
    run(kernel)(np.arange(8, dtype=np.int32), a)
    np.testing.assert_array_equal(a[0, 4:8], [0x10, 0x32, 0x54, 0x76])
    assert a[0, 0] == 1


def test_bytes_are_proven_inside():
    """The extents of a packed tensor are those of its bytes."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 64), "int4"), B: T.Tensor((4, 2), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(4):
                A[i, 40] = 1
                B[i, 1] = A[i, 63]

    assert "proven inside: 4 of 4" in str(prove(kernel))


def drawn(rng: Any) -> tuple[Any, dict[tuple[int, int], set[tuple[int, int]]], dict[tuple[int, int], int]]:
    """A nest whose places are drawn; who stores each number, and what comes to lie there."""
    rows, columns, inner, second = (int(rng.integers(1, n)) for n in (6, 9, 4, 4))
    a, b, k = (int(x) for x in rng.choice([0, 1, -1, 2, 3, 4, 6, 8], 3))
    row, base = int(rng.integers(0, 2)), 64 + int(rng.integers(0, 4))

    @T.prim_func
    def kernel(A: T.Tensor((8, 256), "uint4")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(rows, columns):
                for q in T.serial(inner):
                    A[i * row, a * i + b * j + k * q + base] = (i * 5 + j * 3 + q) % 16
                A[i * row, a * i + b * j + base + second] = (i + j) % 16

    who: dict[tuple[int, int], set[tuple[int, int]]] = {}
    values: dict[tuple[int, int], int] = {}
    for i in range(rows):
        for j in range(columns):
            at = a * i + b * j + base
            stores = [(at + k * q, (i * 5 + j * 3 + q) % 16) for q in range(inner)]
            for place, value in [*stores, (at + second, (i + j) % 16)]:
                who.setdefault((i * row, place), set()).add((i, j))
                values[i * row, place] = value
    return kernel, who, values


def test_drawn_nests():
    """Where no two iterations store one number, those that are accepted share no byte either."""
    rng, taken, refusals = np.random.default_rng(7), 0, 0
    while taken < 25:
        kernel, who, values = drawn(rng)
        try:
            kernel.trace()
        except TileTypeError as error:
            assert "share bytes of A" in str(error)
            refusals += 1
            continue
        if any(len(iterations) > 1 for iterations in who.values()):
            continue
        taken += 1
        old = np.full((8, 128), 0xAB, np.uint8)
        assert (report := check(kernel, 1, {"A": old}, seeds=1)), report
        want = np.tile(np.array([0xB, 0xA]), (8, 128))
        for place, value in values.items():
            want[place] = value
        made = old.copy()
        run(kernel)(made)
        np.testing.assert_array_equal(made, want[:, ::2] | want[:, 1::2] << 4)
    assert refusals > 10


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
def test_nvcc_takes_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TILESCALE_CUDA_COMPILER", "nvcc")
    for way in (of_a_fragment, some, runs):
        toolchain.compile_cubin(print_kernel(lowered(stored(way, "float4_e2m1fn"))[0]), "sm_90a")
