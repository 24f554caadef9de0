"""The kernel object: what a call takes, what it allocates, and what it says of arguments that do not fit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tilescale.errors import LaunchError, TileError, TileTypeError, TileValueError

m = T.dynamic("m")


@T.prim_func
def add(A: T.Tensor((m, 8), "float32"), B: T.Tensor((m, 8), "float32"), C: T.Tensor((m, 8), "float32")):
    with T.Kernel(T.ceildiv(m, 4), threads=32) as bx:
        for i, j in T.Parallel(4, 8):
            C[bx * 4 + i, j] = A[bx * 4 + i, j] + B[bx * 4 + i, j]


def twice(dtype: str, n: int = 16):
    @T.prim_func
    def main(A: T.Tensor((n,), dtype), B: T.Tensor((n,), dtype)):
        with T.Kernel(1):
            for i in T.Parallel(n):
                B[i] = A[i] + A[i]

    return main


@T.prim_func
def scaled(A: T.Tensor((4,), "float32"), k: T.int8, f: T.float32, B: T.Tensor((4,), "float32")):
    with T.Kernel(1):
        for i in T.Parallel(4):
            B[i] = A[i] * f + k


@pytest.fixture(scope="module")
def add_kernel() -> tilescale.Kernel:
    return tilescale.compile(add)


def abc(rows: int = 10) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8), torch.full((rows, 8), float("nan"))


# ---- what works


def test_positions_and_names(add_kernel):
    a, b, c = abc()
    assert add_kernel(a, b, c) is None and c.equal(a + b)
    c.zero_()
    assert add_kernel(a, C=c, B=b) is None and c.equal(a + b)
    assert add_kernel.inputs == ["A", "B", "C"] and add_kernel.symbols == ["m"] and add_kernel.name == "add"
    assert [p["written"] for p in add_kernel.params] == [False, False, True]
    assert repr(add_kernel) == (
        '<kernel add(A: T.Tensor((m, 8), "float32"), B: T.Tensor((m, 8), "float32"), C: T.Tensor((m, 8), "float32"))>'
    )


def test_numpy_and_torch_may_mix(add_kernel):
    a, b, _ = abc()
    c = np.empty((10, 8), "float32")
    add_kernel(a.numpy(), b, c)
    np.testing.assert_array_equal(c, (a + b).numpy())


def test_dynamic_extents_change_from_call_to_call(add_kernel):
    for rows in (1, 5, 64, 3):
        a, b, c = abc(rows)
        add_kernel(a, b, c)
        assert c.equal(a + b)


def test_an_empty_tensor_starts_no_block(add_kernel):
    add_kernel(*(torch.empty(0, 8) for _ in range(3)))


@pytest.mark.parametrize("out_idx", [2, -1, [2], (-1,)])
def test_one_output_is_returned_as_it_is(out_idx):
    kernel = tilescale.compile(add, out_idx)
    a, b, _ = abc()
    c = kernel(a, b)
    assert type(c) is torch.Tensor and c.equal(a + b) and kernel.inputs == ["A", "B"]
    n = kernel(a.numpy(), b.numpy())
    assert type(n) is np.ndarray and n.dtype == np.float32 and (n == c.numpy()).all()


def test_several_outputs_are_a_tuple_in_the_order_asked_for():
    @T.prim_func
    def split(
        A: T.Tensor((m, 4), "float32"), B: T.Tensor((4, m), "float32"), C: T.Tensor((m * 2 + 1,), "int32")
    ):
        with T.Kernel(m) as bx:
            for j in T.Parallel(4):
                B[j, bx] = A[bx, j]
            C[2 * bx] = bx
            C[2 * bx + 1] = -bx
            C[2 * m] = 7

    a = torch.randn(5, 4)
    c, b = tilescale.compile(split, [-1, 1])(a)
    assert b.equal(a.T) and c.tolist() == [0, 0, 1, -1, 2, -2, 3, -3, 4, -4, 7] and c.dtype == torch.int32


def test_outputs_only():
    @T.prim_func
    def iota(C: T.Tensor((6,), "int64")):
        with T.Kernel(1):
            for i in T.Parallel(6):
                C[i] = i

    made = tilescale.compile(iota, 0)()
    assert isinstance(made, torch.Tensor) and made.tolist() == [0, 1, 2, 3, 4, 5]


def test_outputs_ignore_torchs_default_dtype_and_device(add_kernel):
    kernel = tilescale.compile(add, -1)
    a, b, _ = abc()
    with torch.device("meta"):
        c = kernel(a, b)
    assert c.device.type == "cpu" and c.equal(a + b)


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
    ],
)
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_every_dtype_of_both_libraries(dtype: str, kind: str):
    values = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 1, 2, 0.5 if "float" in dtype else 3, 0, 1]
    kernel = tilescale.compile(twice(dtype), out_idx=-1)
    if kind == "torch":
        a = torch.tensor(values, dtype=torch.float64).to(getattr(torch, dtype))
        b = kernel(a)
        assert type(b) is torch.Tensor and b.dtype == a.dtype
    else:
        a = np.array(values).astype(getattr(ml_dtypes, dtype, None) or dtype)
        b = kernel(a)
        assert type(b) is np.ndarray and b.dtype == a.dtype
    assert [float(x) for x in b] == [2 * v for v in values]


def test_ml_dtypes_in_place_and_by_name():
    a = np.arange(16).astype(ml_dtypes.bfloat16)
    b = np.zeros_like(a)
    tilescale.compile(twice("bfloat16"))(B=b, A=a)
    assert b.tolist() == [2 * i for i in range(16)]


def test_bools():
    @T.prim_func
    def invert(A: T.Tensor((4,), "bool"), B: T.Tensor((4,), "bool")):
        with T.Kernel(1):
            for i in T.Parallel(4):
                B[i] = not A[i]

    kernel = tilescale.compile(invert, -1)
    assert kernel(torch.tensor([True, False, False, True])).tolist() == [False, True, True, False]
    assert kernel(np.array([True, False, False, True])).tolist() == [False, True, True, False]


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_none_for_a_tensor_that_is_never_touched(target: str):
    rows, pitch = T.dynamic("rows"), T.dynamic("pitch", multiple_of=4)

    def made(keeps: bool):
        @T.prim_func
        def main(
            A: T.Tensor((rows,), "float32"),
            D: T.Tensor((rows * 2, 4), "float16"),
            E: T.StridedTensor((rows, 4), (pitch, 1), "float32"),
            B: T.Tensor((rows,), "float32"),
        ):
            with T.Kernel(T.ceildiv(rows, 32), threads=32) as bx:
                for i in T.Parallel(32):
                    B[bx * 32 + i] = A[bx * 32 + i] * 2
                    if keeps:
                        E[bx * 32 + i, 0] = A[bx * 32 + i]

        return tilescale.compile(main, out_idx=-1, target=target)

    a, kept = torch.arange(50.0), torch.zeros(50, 4)
    kernel = made(False)
    assert torch.equal(kernel(a, None, None), a * 2)
    np.testing.assert_array_equal(kernel(a.numpy(), None, E=None), a.numpy() * 2)
    assert torch.equal(kernel(a, torch.zeros(100, 4, dtype=torch.float16), kept), a * 2)
    with refused(TileValueError, "D"):  # one that is given has to fit
        kernel(a, torch.zeros(99, 4, dtype=torch.float16), None)
    with refused(TileTypeError, "A is"):
        kernel(None, None, None)
    kernel = made(True)
    assert torch.equal(kernel(a, None, kept), a * 2) and torch.equal(kept[:, 0], a)
    with refused(TileTypeError, "E is"):
        kernel(a, None, None)


def test_none_where_an_extent_decides_something():
    rows = T.dynamic("rows")

    @T.prim_func
    def main(A: T.Tensor((rows, 4), "float32"), B: T.Tensor((64,), "int32")):
        with T.Kernel(1):
            B[0] = rows

    with refused(TileTypeError, "A is"):
        tilescale.compile(main, target="cpu")(None, torch.zeros(64, dtype=torch.int32))


def test_scalars_of_any_kind():
    a, b = torch.ones(4), torch.zeros(4)
    kernel = tilescale.compile(scaled)
    for k, f in [(3, 0.5), (np.int64(3), np.float32(0.5)), (3, 1), (True, 2.5)]:
        kernel(a, k, f, b)
        assert b.tolist() == [float(f) + int(k)] * 4


def test_tensors_that_require_grad_and_parameters_are_read(add_kernel):
    a, b, c = abc()
    add_kernel(torch.nn.Parameter(a), b.requires_grad_(), c)
    assert c.equal((a + b).detach())


def test_a_read_only_array_may_be_read_but_not_written(add_kernel):
    a, b, c = (x.numpy() for x in abc())
    a.flags.writeable = False
    add_kernel(a, b, c)
    np.testing.assert_array_equal(c, a + b)
    assert not a.flags.writeable
    c.flags.writeable = False
    with refused(
        TileValueError,
        "C is read-only, and the kernel writes it",
        write="C.copy()",
        at='C: T.Tensor((m, 8), "float32")',
    ):
        add_kernel(a, b, c)


def test_a_transposed_view_of_a_strided_parameter():
    s, t = T.dynamic("s, t")

    @T.prim_func
    def total(A: T.StridedTensor((3, 5), (s, t), "float32"), C: T.Tensor((3, 5), "float32")):
        with T.Kernel(1):
            for i, j in T.Parallel(3, 5):
                C[i, j] = A[i, j]

    kernel = tilescale.compile(total, -1)
    a = torch.randn(5, 3)
    assert kernel(a.T).equal(a.T) and kernel(torch.randn(6, 10)[::2, ::2]).shape == (3, 5)


def test_a_given_stride_is_checked():
    @T.prim_func
    def column(A: T.StridedTensor((3,), (4,), "float32"), C: T.Tensor((3,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(3):
                C[i] = A[i]

    kernel = tilescale.compile(column, -1)
    a = torch.randn(3, 4)
    assert kernel(a[:, 1]).equal(a[:, 1])
    with refused(
        TileValueError, "axis 0 of A has stride 1", expected='4: T.StridedTensor((3,), (4,), "float32")'
    ):
        kernel(torch.randn(3))


# ---- what is refused


def test_shapes(add_kernel):
    a, b, c = abc()
    with refused(
        TileValueError,
        "add: axis 1 of A has extent 9 (its shape is (10, 9))",
        at='A: T.Tensor((m, 8), "float32")',
        expected='8: T.Tensor((m, 8), "float32")',
    ):
        add_kernel(torch.randn(10, 9), b, c)
    with refused(
        TileValueError,
        "axis 0 of C has extent 3",
        at='C: T.Tensor((m, 8), "float32")',
        expected="10 = m, by axis 0 of A",
    ):
        add_kernel(a, b, c[:3])
    with refused(TileValueError, "A has 1 axis (its shape is (8,))", expected="2: T.Tensor((m, 8)"):
        add_kernel(a[0], b, c)
    # A shape that is wrong is said before strides that are wrong because of it.
    with refused(TileValueError, "axis 1 of B has extent 10 (its shape is (8, 10))"):
        add_kernel(a, b.T, c)


def test_an_extent_that_is_an_expression_is_checked_at_each_call():
    @T.prim_func
    def pairs(A: T.Tensor((m,), "float32"), B: T.Tensor((T.ceildiv(m, 2),), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(2):
                B[i] = A[i]

    kernel = tilescale.compile(pairs)
    kernel(torch.randn(5), torch.zeros(3))
    with refused(
        TileValueError,
        "axis 0 of B has extent 2",
        expected="3 = ((m + 2) - 1) // 2, where m is 5 by axis 0 of A",
    ):
        kernel(torch.randn(5), torch.zeros(2))
    with refused(TileValueError, "B has 2 axes"):
        kernel(torch.randn(5), torch.zeros(3, 1))
    with refused(TileTypeError, "A is a list"):
        kernel([1.0], torch.zeros(2))


def test_dtypes(add_kernel):
    a, b, c = abc()
    with refused(
        TileTypeError,
        "A is a tensor of float16",
        at='A: T.Tensor((m, 8), "float32")',
        write="A.to(torch.float32)",
        expected="float32",
    ):
        add_kernel(a.half(), b, c)
    with refused(TileTypeError, "B is a tensor of float64", write="B.astype('float32')"):
        add_kernel(a, b.numpy().astype("float64"), c)
    with refused(TileTypeError, "B is a tensor of bfloat16"):
        add_kernel(a, b.numpy().astype(ml_dtypes.bfloat16), c)
    with refused(TileTypeError, "A is a tensor of complex64"):
        add_kernel(a.to(torch.complex64), b, c)
    with refused(TileTypeError, "A is a tensor of float32", write="A.astype(ml_dtypes.bfloat16)"):
        tilescale.compile(twice("bfloat16"))(np.zeros(16, "float32"), np.zeros(16, "float32"))


def test_devices(add_kernel):
    a, b, c = abc()
    with refused(
        TileTypeError,
        "A is on meta, and the kernel is compiled for the cpu target",
        at='A: T.Tensor((m, 8), "float32")',
    ):
        add_kernel(a.to("meta"), b, c)
    with refused(TileTypeError, "B has the layout torch.sparse_coo", write="B.to_dense()"):
        add_kernel(a, b.to_sparse(), c)


def test_tensors_without_memory(add_kernel):
    """Storages that are given back, as of sharded parameters, and tensors that never had one: reading there
    ended the process."""
    a, b, c = abc()
    with FakeTensorMode():
        fake = torch.zeros(10, 8)
    gone = torch.zeros(10, 8)
    gone.untyped_storage().resize_(0)
    for tensor in (fake, gone):
        with refused(TileValueError, "B has no memory (its shape is (10, 8))", expected="elements in memory"):
            add_kernel(a, tensor, c)
    with refused(TileValueError, "C has no memory"):
        add_kernel(a, b, gone)


def test_contiguity_and_alignment(add_kernel):
    a, b, c = abc()
    with refused(
        TileValueError,
        "B is not contiguous: axis 1 has stride 10 (its shape is (10, 8))",
        at='B: T.Tensor((m, 8), "float32")',
        expected="row-major, stride 1 there",
        write="B.contiguous(), or declare it T.StridedTensor",
    ):
        add_kernel(a, torch.randn(8, 10).T, c)
    with refused(TileValueError, "B is not contiguous", write="numpy.ascontiguousarray(B)"):
        add_kernel(a, np.empty((8, 10), "float32").T, c)
    off = np.zeros(10 * 8 * 4 + 1, "uint8")[1:].view("float32").reshape(10, 8)
    with refused(TileValueError, "B begins 1 bytes behind a multiple of 4", write="B.copy()"):
        add_kernel(a, off, c)


def test_overlap(add_kernel):
    a, b, c = abc()
    with refused(
        TileValueError,
        "C and A share memory, and the kernel writes C",
        at='C: T.Tensor((m, 8), "float32")',
        write="C.clone()",
    ):
        add_kernel(a, b, a)
    both = torch.randn(11, 8)
    with refused(TileValueError, "C and B share memory"):
        add_kernel(a, both[:10], both[1:])
    add_kernel(a, a, c)  # both are only read
    assert c.equal(a + a)


def test_kinds_of_arguments(add_kernel):
    a, b, c = abc()
    with refused(
        TileTypeError,
        "A is",
        at='A: T.Tensor((m, 8), "float32")',
        expected="a torch tensor, a NumPy array, or anything",
    ):
        add_kernel(None, b, c)
    with refused(TileTypeError, "B is an int"):
        add_kernel(a, 3, c)
    with refused(TileTypeError, "B is a list"):
        add_kernel(a, [1, 2], c)
    kernel = tilescale.compile(scaled)
    x, y = torch.ones(4), torch.zeros(4)
    with refused(TileTypeError, "k is a float", at="k: T.int8", expected="an int (T.int8)", write="int(k)"):
        kernel(x, 2.5, 1.0, y)
    with refused(
        TileTypeError, "f is a tensor", at="f: T.float32", expected="a float (T.float32)", write="f.item()"
    ):
        kernel(x, 2, torch.ones(()), y)
    with refused(TileTypeError, "f is a str"):
        kernel(x, 2, "1.0", y)
    with refused(TileValueError, "k is 128", expected="a value that fits int8"):
        kernel(x, 128, 1.0, y)


def test_counts_and_names(add_kernel):
    a, b, c = abc()
    with refused(TileTypeError, "add: 2 arguments for 3 parameters; C is missing", expected="add(A, B, C)"):
        add_kernel(a, b)
    with refused(TileTypeError, "4 arguments for 3 parameters"):
        add_kernel(a, b, c, c)
    with refused(TileTypeError, "3 arguments for 2 parameters", expected="add(A, B)"):
        tilescale.compile(add, -1)(a, b, c)
    with refused(TileTypeError, "there is no parameter 'D'"):
        add_kernel(a, b, D=c)
    with refused(TileTypeError, "A is given twice"):
        add_kernel(a, b, A=c)
    with refused(TileTypeError, "1 argument for 3 parameters; A, C are missing"):
        add_kernel(B=b)


def test_an_ordinary_tensor_for_symmetric_memory():
    @T.prim_func
    def shared(S: T.SymmTensor((m, 4), "float32"), f: T.Signal((2,)), C: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            for i in T.Parallel(4):
                C[i] = S[0, i]

    kernel = tilescale.compile(shared)
    with refused(
        TileTypeError,
        "shared: S is an ordinary tensor",
        at='S: T.SymmTensor((m, 4), "float32")',
        write='S = tilescale.comm.empty((m, 4), "float32")',
        expected="symmetric memory of this rank",
    ):
        kernel(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(4))


def test_outputs_that_no_call_can_allocate():
    @T.prim_func
    def unknown(A: T.Tensor((4,), "float32"), C: T.Tensor((m,), "float32"), S: T.SymmTensor((4,), "float32")):
        with T.Kernel(1):
            C[0] = A[0]
            S[0] = A[0]

    with refused(
        TileValueError, "the extent m of C is in no shape of an argument", write="leave C out of out_idx"
    ):
        tilescale.compile(unknown, 1)
    with refused(TileTypeError, 'out_idx names S, which is T.SymmTensor((4,), "float32")'):
        tilescale.compile(unknown, -1)
    with refused(TileValueError, "out_idx 3 of unknown, which has 3 parameters"):
        tilescale.compile(unknown, 3)
    with refused(TileValueError, "names a parameter twice"):
        tilescale.compile(unknown, [1, -2])


def test_a_symbol_that_no_argument_defines():
    @T.prim_func
    def half(A: T.Tensor((m * 2 + 1,), "float32")):
        with T.Kernel(m):
            A[0] = 0

    with refused(
        TileValueError,
        "T.dynamic('m') stands alone in no extent or stride",
        expected="with m itself as an extent",
    ):
        tilescale.compile(half)


def test_a_waiting_grid_that_cannot_be_resident():
    def waiting(blocks):
        @T.prim_func
        def main(A: T.Tensor((m,), "float32")):
            with T.Kernel(blocks, threads=1024):
                with T.Scale("grid"):
                    T.barrier()
                A[0] = 0

        return main

    text = "at most 264 blocks where blocks wait"
    with refused(
        TileValueError, "its grid has 265 blocks, and 264 are resident", expected=text, at="T.barrier()"
    ):
        tilescale.compile(waiting(265))
    kernel = tilescale.compile(waiting(m))
    kernel(torch.zeros(8))
    with refused(TileValueError, "the grid has 300 blocks, and 264", expected=text, write="T.Persistent"):
        kernel(torch.zeros(300))


def test_a_failed_launch_points_at_the_statement():
    @T.prim_func
    def careful(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            T.device_assert(A[0] > 0, "too small")

    kernel = tilescale.compile(careful)
    kernel(torch.ones(4))
    with pytest.raises(LaunchError, match="careful: .*too small") as e:
        kernel(torch.zeros(4))
    assert 'T.device_assert(A[0] > 0, "too small")' in str(e.value) and e.value.loc.file == __file__
    kernel(torch.ones(4))  # and it can be launched again


def test_errors_are_pythons_kinds_too(add_kernel):
    a, b, c = abc()
    with pytest.raises(TypeError):
        add_kernel(a.half(), b, c)
    with pytest.raises(ValueError):
        add_kernel(a, b, a)
    with pytest.raises(TileError):
        add_kernel(a)


# ---- for people


def test_sources_and_passes(add_kernel):
    assert (
        "ts_block" in add_kernel.get_kernel_source()
        and add_kernel.get_kernel_source() == add_kernel.get_kernel_source("thread")
    )
    assert "ts.kernel" in add_kernel.get_kernel_source("tile") and "ts.role" in add_kernel.get_kernel_source(
        "scheduled"
    )
    assert "define" in add_kernel.get_kernel_source("llvm") and "ts_grid" in add_kernel.get_kernel_source(
        "asm"
    )
    with refused(TileValueError, "get_kernel_source('cuda')", expected="tile, scheduled, thread, llvm, asm"):
        add_kernel.get_kernel_source("cuda")
    names = [name for name, _ in add_kernel.trace()]
    assert names[0] == "trace" and "schedule" in names and names[-1] == "lower:ts_grid"
    assert all(text for _, text in add_kernel.trace())
