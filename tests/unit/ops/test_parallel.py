"""T.Parallel with any index expressions: gather, scatter, transposed, strided, modulo, guarded, dependent on
data."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree
from tilescale.errors import LaunchError, TileError, TileSyntaxError, TileValueError


def test_index_expressions():
    N = T.dynamic("n")

    @T.prim_func
    def kernel(
        A: T.Tensor((N, 24), "float32"), I: T.Tensor((N,), "int32"), C: T.Tensor((9, N, 24), "float32")
    ):
        with T.Kernel(T.ceildiv(N, 8)) as b:
            t, u = T.alloc_shared((8, 24), "float32"), T.alloc_fragment((24, 8), "float32")
            T.copy(A[b * 8, 0], t)
            for i, j in T.Parallel(8, 24):
                C[0, b * 8 + i, j] = t[i, 23 - j]  # reversed
                u[j, i] = t[i, j]  # transposed
            for i, j in T.Parallel(8, 24):
                C[1, b * 8 + i, j] = u[j, i] + 1
                C[2, b * 8 + i, j] = t[i, (j * 5) % 24]  # modulo
                C[3, b * 8 + i, j] = A[I[b * 8 + i], j]  # gather
                if b * 8 + i < N:  # (an index read outside would be zero)
                    C[4, I[b * 8 + i], j] = t[i, j]  # scatter
                C[5, b * 8 + i, j] = t[i, j // 2 * 2]  # pairs
            for i, j in T.Parallel(8, 12):
                C[6, b * 8 + i, 2 * j] = t[i, j]  # strided stores
                C[6, b * 8 + i, 2 * j + 1] = t[i, 12 + j]
            for i in T.Parallel(8):
                for j in T.serial(24):
                    C[7, b * 8 + i, j] = t[i, j] * i + j
            for i, j in T.Parallel(8, 24):
                r = b * 8 + i
                if r % 2 == 0 and j > 2:
                    C[8, r, j] = A[r - 1, j - 3]  # row -1 reads zero
                elif r + j == 9:
                    C[8, r, j] = -1.0
                else:
                    C[8, r, j] = A[r, 23] if j == 0 else T.if_then_else(j < 4, t[i, j], 0.5)

    made = run(kernel)
    for n in (16, 21, 3):
        a, index = torch.randn(n, 24), torch.randperm(n).int()
        c = torch.full((9, n, 24), float("nan"))
        made(a, index, c)
        assert c[0].equal(a.flip(1))
        assert c[1].equal(a + 1)
        assert c[2].equal(a[:, torch.arange(24) * 5 % 24])
        assert c[3].equal(a[index.long()])
        assert c[4][index.long()].equal(a)
        assert c[5].equal(a[:, torch.arange(24) // 2 * 2])
        assert c[6].equal(torch.stack([a[:, :12], a[:, 12:]], 2).reshape(n, 24))
        # row within the block times, in float32: a product and a sum, rounded twice or (contracted) once
        assert torch.allclose(c[7], a * (torch.arange(n) % 8)[:, None] + torch.arange(24), atol=1e-5)
        want = torch.full((n, 24), 0.5)
        for r in range(n):
            for j in range(24):
                if r % 2 == 0 and j > 2:
                    want[r, j] = a[r - 1, j - 3] if r else 0.0
                elif r + j == 9:
                    want[r, j] = -1
                elif j == 0:
                    want[r, j] = a[r, 23]
                elif j < 4:
                    want[r, j] = a[r, j]
        assert c[8].equal(want), n


def test_bools_with_names_and_masks():
    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "float32"),
        M: T.Tensor((64,), "bool"),
        C: T.Tensor((4, 64), "float32"),
        D: T.Tensor((2, 64), "bool"),
    ):
        with T.Kernel(1):
            mask = T.alloc_fragment((64,), "bool")
            for i in T.Parallel(64):
                positive = A[i] > 0
                both = positive and M[i]
                C[0, i] = A[i] if positive else -1.0
                C[1, i] = 1.0 if both else 0.0
                mask[i] = not both or i < 3
                D[0, i] = positive != M[i]
                D[1, i] = positive & M[i] | (i == 5)
            for i in T.Parallel(64):
                C[2, i] = T.exp(A[i]) if mask[i] else 0.0
                if mask[i]:
                    C[3, i] = 2.0
                else:
                    C[3, i] = 3.0

    a, m = torch.randn(64), torch.rand(64) > 0.5
    c, d = torch.zeros(4, 64), torch.zeros(2, 64, dtype=torch.bool)
    run(kernel)(a, m, c, d)
    both = (a > 0) & m
    mask = ~both | (torch.arange(64) < 3)
    assert c[0].equal(torch.where(a > 0, a, -1.0)) and c[1].equal(both.float())
    assert torch.allclose(c[2], torch.where(mask, a.exp(), 0.0)) and c[3].equal(torch.where(mask, 2.0, 3.0))
    assert d[0].equal((a > 0) != m) and d[1].equal(both | (torch.arange(64) == 5))


def test_local_memory_belongs_to_one_iteration():
    @T.prim_func
    def kernel(A: T.Tensor((16, 8), "int32"), C: T.Tensor((16, 8), "int32"), D: T.Tensor((16,), "int32")):
        with T.Kernel(2) as b:
            for i in T.Parallel(8):
                row = T.alloc_local((8,), "int32")
                best = T.alloc_var("int32", -100)
                for j in T.serial(8):
                    row[j] = A[b * 8 + i, 7 - j] * 2
                for j in T.serial(8):
                    C[b * 8 + i, j] = row[j]
                    if row[j] > best:
                        best = row[j]
                D[b * 8 + i] = best

    a, c, d = (
        torch.randint(-9, 9, (16, 8), dtype=torch.int32),
        torch.zeros(16, 8, dtype=torch.int32),
        torch.zeros(16, dtype=torch.int32),
    )
    run(kernel)(a, c, d)
    assert c.equal(a.flip(1) * 2) and d.equal((a * 2).max(1).values)


def test_extents_known_only_at_run_time_and_nested_parallel():
    @T.prim_func
    def kernel(
        A: T.Tensor((T.dynamic("n"), 8), "int32"), C: T.Tensor((T.dynamic("n"), 8), "int32"), k: T.int32
    ):
        with T.Kernel(1):
            for i, j in T.Parallel(A.shape[0], k):
                C[i, j] = A[i, j] + i
            for i in T.Parallel(2):
                for j in T.Parallel(3):
                    C[i, j] = -A[i, j]
            for i in T.serial(k):
                for j in T.Parallel(i + 1):
                    C[2, j] += 1

    a, c = torch.randint(-9, 9, (5, 8), dtype=torch.int32), torch.zeros(5, 8, dtype=torch.int32)
    run(kernel)(a, c, 6)
    want = torch.zeros(5, 8, dtype=torch.int32)
    want[:, :6] = a[:, :6] + torch.arange(5)[:, None]
    want[:2, :3] = -a[:2, :3]
    want[2, :6] += torch.arange(6, 0, -1)
    assert c.equal(want)


def test_dependences_on_the_same_element_are_kept():
    """Each iteration may read and write its own elements several times, with names that shadow nothing."""

    @T.prim_func
    def kernel(C: T.Tensor((3, 40), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(40):
                x = C[0, i]
                C[0, i] = C[1, i]
                C[1, i] = x
                C[2, i] += C[0, i]
                C[2, i] *= x

    c = torch.randn(3, 40)
    want = torch.stack([c[1], c[0], (c[2] + c[1]) * c[0]])
    run(kernel)(c)
    assert c.equal(want)


EIGHT_AND_MORE = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "int64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float64",
]


@pytest.mark.parametrize("name", EIGHT_AND_MORE)
def test_elementwise_in_every_dtype(name: str):
    torch_dtype = getattr(torch, name)

    @T.prim_func
    def kernel(A: T.Tensor((7, 50), name), B: T.Tensor((7, 50), name), C: T.Tensor((4, 7, 50), name)):
        with T.Kernel(7) as b:
            a = T.alloc_fragment((50,), name)
            T.copy(A[b, 0], a)
            for i in T.Parallel(50):
                C[0, b, i] = a[i] + B[b, i]
                C[1, b, i] = a[i] if a[i] < B[b, i] else B[b, i]
                C[2, b, i] = T.max(a[i], B[b, 49 - i])
                a[i] = a[i] * 2
            T.copy(a, C[3, b, 0])

    low = 0 if name in ("bool", "uint8") else -4
    a, b = (torch.randint(low, 2 if name == "bool" else 5, (7, 50)).to(torch_dtype) for _ in range(2))
    c = torch.zeros(4, 7, 50).to(torch_dtype)
    run(kernel)(a, b, c)
    x, y = a.double(), b.double()
    want = torch.stack([x + y, torch.minimum(x, y), torch.maximum(x, y.flip(1)), x * 2])
    want = (want != 0).double() if name == "bool" else want.to(torch_dtype).double()
    assert c.double().equal(want)


def test_writing_a_tile_outside_is_refused_where_it_is_known_and_fails_where_it_is_not():
    def make(statement):
        @T.prim_func
        def kernel(C: T.Tensor((8,), "int32"), n: T.int32):
            with T.Kernel(1):
                t = T.alloc_fragment((8,), "int32")
                T.clear(t)
                for i in T.Parallel(8):
                    statement(t, i, n)
                T.copy(t, C)

        return kernel

    @T.macro
    def always(t, i, n):
        t[i + 8] = 1

    @T.macro
    def sometimes(t, i, n):
        t[i + n] = 1

    @T.macro
    def guarded(t, i, n):
        if i + n < 8:
            t[i + n] = 1

    @T.macro
    def reads(t, i, n):
        t[i] = t[i + n] + 1  # outside reads give zero, as everywhere

    with refused(TileValueError, "outside axis 0 of t, whose extent is 8", at="t[i + 8] = 1"):
        run(make(always))
    made, c = run(make(sometimes)), torch.zeros(8, dtype=torch.int32)
    made(c, 0)
    assert c.tolist() == [1] * 8
    with refused(LaunchError, "an index of t lies outside (8,)", at="t[i + n] = 1"):
        made(c, 1)
    run(make(guarded))(c, 3)
    assert c.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    run(make(reads))(c, 6)
    assert c.tolist() == [1] * 8


def test_operations_that_meet_are_refused_in_a_parallel_loop():
    def refuse(message, statement, at):
        @T.prim_func
        def kernel(s: T.Signal((4,)), A: T.SymmTensor((4, 8), "float32")):
            with T.Kernel(1):
                with T.Scale("device") as (rank, n):
                    for i in T.Parallel(4):
                        statement(s, A, i)

        with refused(TileError, message, at=at):
            kernel.trace()

    refuse("T.barrier stands in T.Parallel", lambda s, A, i: T.barrier(), "T.barrier()")
    refuse("T.wait stands in T.Parallel", lambda s, A, i: T.wait(s[i]), "T.wait(s[i])")
    refuse("T.signal stands in T.Parallel", lambda s, A, i: T.signal(s[i]), "T.signal(s[i])")
    refuse("T.all_reduce stands in a T.Parallel loop", lambda s, A, i: T.all_reduce(A), "T.all_reduce(A)")

    @T.prim_func
    def not_looped(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            for i in list(T.Parallel(4)):
                A[i] = 0

    with refused(TileSyntaxError, "T.Parallel is used outside a `for`", at="list(T.Parallel(4))"):
        not_looped.trace()


@pytest.mark.parametrize("rows", [0, 3])
def test_an_empty_tensor_reads_zero(rows: int):
    """No extent that a call gives is known not to be zero."""
    n = T.dynamic("n")

    @T.prim_func
    def kernel(A: T.Tensor((n,), "float32"), C: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                C[i] = A[0] + A[T.min(i, n - 1)] + 1

    a, c = torch.ones(rows), torch.zeros(16)
    run(kernel)(a, c)
    assert (c == (3 if rows else 1)).all()
    agree(kernel, {"A": a.numpy(), "C": c.numpy()})
