"""Launches on the GPU: shapes, dtypes, streams, graphs, allocation, refusals; tensor maps and launch
attributes as the GPU sees them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.kernels import refused
from tests.unit.cuda.thread_kernels import I32, kernel, pointer, store, threads
from tilescale import native
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.describe import description
from tilescale.compiler.cuda.ops.tma import TensorMap
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.description import parameter_words
from tilescale.compiler.gpu.kernel import Source, ThreadKernel
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.cuda import architecture
from tilescale.errors import LaunchError, TileTypeError, TileValueError

N, M = T.dynamic("n"), T.dynamic("m")
DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "bool",
)


@T.prim_func
def add(A: T.Tensor((N,), "float32"), B: T.Tensor((N,), "float32"), C: T.Tensor((N,), "float32")):
    with T.Kernel(T.ceildiv(N, 1024), threads=128) as bx:
        for i in T.Parallel(1024):
            C[bx * 1024 + i] = A[bx * 1024 + i] + B[bx * 1024 + i]


@pytest.fixture(scope="module")
def added() -> Any:
    return tilescale.compile(add, target="cuda")


def normal(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("n", [1, 31, 128, 1000, 1024, 1025, 1 << 20, (1 << 20) + 7])
def test_elementwise(added: Any, n: int):
    a, b, c = normal(n), normal(n), torch.full((n + 64,), 7.0, device="cuda")
    added(a, b, c[:n])
    assert torch.equal(c[:n], a + b) and bool((c[n:] == 7).all())


def test_an_empty_tensor(added: Any):
    empty = torch.empty(0, device="cuda")
    added(empty, empty, empty)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_of_every_dtype(dtype: str):
    @T.prim_func
    def copied(A: T.Tensor((N, 40), dtype), B: T.Tensor((N, 40), dtype)):
        with T.Kernel(T.ceildiv(N, 16), threads=64) as bx:
            tile = T.alloc_shared((16, 40), dtype)
            T.copy(A[bx * 16, 0], tile)
            T.copy(tile, B[bx * 16, 0])

    a = (
        torch.randint(0, 2, (37, 40), device="cuda").to(torch.bool)
        if dtype == "bool"
        else (torch.randn(37, 40, device="cuda") * 4).to(getattr(torch, dtype))
    )
    b = torch.zeros_like(a)
    tilescale.compile(copied, target="cuda")(a, b)
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_strided_tensors():
    @T.prim_func
    def transposed(
        A: T.StridedTensor((N, 33), (T.dynamic("s"), T.dynamic("t")), "float32"),
        B: T.Tensor((N, 33), "float32"),
    ):
        with T.Kernel(T.ceildiv(N, 16), threads=64) as bx:
            for i, j in T.Parallel(16, 33):
                B[bx * 16 + i, j] = A[bx * 16 + i, j]

    run = tilescale.compile(transposed, target="cuda")
    for a in (normal(33, 50).T, normal(50, 66)[:, ::2], normal(50, 33)):
        b = torch.zeros(50, 33, device="cuda")
        run(a, b)
        assert torch.equal(a, b)


def test_large_tensors_are_counted_in_64_bits():
    @T.prim_func
    def mark(A: T.Tensor((N, 1 << 16), "int8")):
        with T.Kernel(N, threads=64) as bx:
            for i in T.Parallel(64):
                A[bx, (1 << 16) - 64 + i] = 5

    a = torch.zeros((1 << 16) + 3, 1 << 16, dtype=torch.int8, device="cuda")  # 4 GiB
    tilescale.compile(mark, target="cuda")(a)
    assert bool((a[:, -64:] == 5).all()) and int(a[:, -65].sum()) == 0


def test_large_shared_memory():
    @T.prim_func
    def kernel(A: T.Tensor((192, 256), "float32"), B: T.Tensor((192, 256), "float32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc_shared((192, 256), "float32")  # 192 KiB
            T.copy(A, tile)
            for i, j in T.Parallel(192, 256):
                B[i, j] = tile[191 - i, 255 - j]

    a, b = normal(192, 256), torch.zeros(192, 256, device="cuda")
    tilescale.compile(kernel, target="cuda")(a, b)
    assert torch.equal(b, a.flip(0, 1))


def test_outputs_are_allocated_where_the_inputs_are(added: Any):
    made = tilescale.compile(add, -1, target="cuda")
    a, b = normal(100), normal(100)
    c = made(a, b)
    assert c.device == a.device and torch.equal(c, a + b)


@tilescale.jit
def twice(A, block: int = 128):
    n = T.dynamic("n")
    A: T.Tensor((n,), "float32")
    B = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
        for i in T.Parallel(block):
            B[bx * block + i] = A[bx * block + i] * 2
    return B


def test_eager_kernels_follow_their_tensors():
    for _ in range(3):
        for device in ("cpu", "cuda"):
            a = torch.randn(77, device=device)
            b = twice(a)
            assert b.device == a.device and torch.equal(b, a * 2)


# ---- streams and graphs


def test_the_current_stream(added: Any):
    a, b, c = normal(1 << 22), normal(1 << 22), torch.zeros(1 << 22, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what is launched elsewhere would overtake this
        a.mul_(3)
        added(a, b, c)
        ready = stream.record_event()
    torch.cuda.current_stream().wait_event(ready)
    torch.cuda.synchronize()
    assert torch.equal(c, a + b)
    assert stream.query()


def test_a_launch_waits_for_its_stream_alone(added: Any):
    a, b, c = normal(1000), normal(1000), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    busy = torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)
    added(a, b, c)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    assert not busy.query(), "the launch went to the stream that sleeps, or the sleep was too short"
    torch.cuda.synchronize()


@pytest.mark.parametrize("warm", [True, False])
def test_graphs(warm: bool):
    """Also where the code is loaded by the very launch that is captured."""
    run = tilescale.compile(add, target="cuda", name=f"captured {warm}")
    a, b, c = normal(5000), normal(5000), torch.zeros(5000, device="cuda")
    if warm:
        run(a, b, c)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(a, b, c)
    for _ in range(3):
        a.normal_()
        c.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c, a + b)


def test_graphs_outlive_their_kernels():
    import gc

    a, b, c = normal(5000), normal(5000), torch.zeros(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    run = tilescale.compile(add, target="cuda", name="forgotten")
    run(a, b, c)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run(a, b, c)
    del run
    gc.collect()
    c.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(c, a + b)


def test_results_are_the_same_from_run_to_run():
    @T.prim_func
    def total(A: T.Tensor((4096,), "float32"), B: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=128):
            x, s = T.alloc_fragment((4096,), "float32"), T.alloc_fragment((1,), "float32")
            T.copy(A, x)
            T.reduce_sum(x, s)
            T.copy(s, B)

    run = tilescale.compile(total, -1, target="cuda")
    a = normal(4096)
    seen = {run(a).cpu().numpy().tobytes() for _ in range(200)}
    assert len(seen) == 1


# ---- refusals


def test_refusals(added: Any):
    a = normal(100)
    with refused(
        TileTypeError,
        "A is on cpu, and the kernel is compiled for the cuda target",
        expected="a tensor on a GPU",
        write="A.cuda()",
    ):
        added(a.cpu(), a, a.clone())
    with refused(TileTypeError, "B is a tensor of float16", write="B.to(torch.float32)"):
        added(a, a.half(), a.clone())
    with refused(TileValueError, "axis 0 of C has extent 99"):
        added(a, a, a[1:].clone())
    with refused(TileValueError, "C and A share memory, and the kernel writes C"):
        added(a, normal(100), a)
    with refused(TileValueError, "B is not contiguous"):
        added(a, normal(200)[::2], a.clone())
    with refused(TileTypeError, "A is on cuda:0, and the kernel is compiled for the cpu target"):
        tilescale.compile(add, target="cpu")(a, a, a.clone())


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus(added: Any):
    here, there = normal(100), normal(100).to("cuda:1")
    with refused(TileValueError, "B is on the GPU 1, and the tensors before it are on the GPU 0"):
        added(here, there, here.clone())
    out = torch.zeros_like(there)
    added(there, there, out)  # while GPU 0 is the current one
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(out, there * 2) and torch.cuda.current_device() == 0


def test_code_for_another_architecture_says_so():
    other = "sm_80" if architecture() != "sm_80" else "sm_89"
    if int(architecture()[3:5]) == int(other[3:5]):
        pytest.skip("this GPU runs it")
    a = normal(100)
    with refused(LaunchError, f"the kernel is compiled for {other}"):
        tilescale.compile(add, target=f"cuda:{other}")(a, a, a.clone())


# ---- attributes and tensor maps, by kernels written by hand


def made(thread: ThreadKernel, program: Any) -> Any:
    printed = print_kernel(thread)
    table = description(thread, program, parameter_words(program))
    code = toolchain.compile_cubin(printed, architecture()).code
    return native.make_cuda_kernel(code, struct.pack(f"<{len(table)}q", *table), "", thread.name, thread.name)


@pytest.mark.parametrize(
    "more",
    [{"cluster": (2, 1, 1)}, {"cooperative": True}, {"dependent": True}, {"cluster": (16, 1, 1)}],
    ids=str,
)
def test_launch_attributes(more: dict[str, Any]):
    if "cluster" in more and native.cuda_capability() < (9, 0):  # type: ignore[operator]
        pytest.skip("clusters need Hopper")

    @T.prim_func
    def shape(A: T.Tensor((32,), "int32")):
        with T.Kernel(32, threads=32):
            A[0] = 0

    A, bx = pointer("A", I32), tirx.Var("bx", I32)
    thread = kernel(
        "blocks",
        [A],
        threads(store(A, bx, bx + 1), {"blockIdx.x": (bx, 32)}),
        block=32,
        grid=(32, 1, 1),
        written=(0,),
        **more,
    )
    a = torch.zeros(32, dtype=torch.int32, device="cuda")
    run = made(thread, shape.trace())
    for _ in range(3):
        run(a)
    assert a.tolist() == list(range(1, 33))


TMA = """
#include <ts/ts.cuh>
extern "C" __global__ void mapped(const __grid_constant__ ts::TensorMap map, float* out, int row, int column) {
  __shared__ alignas(128) float tile[64 * 32];
  __shared__ uint64_t full;
  const uint32_t bar = (uint32_t)__cvta_generic_to_shared(&full), to = (uint32_t)__cvta_generic_to_shared(tile);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 8192;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(bar) : "memory");
  }
  __syncthreads();
  uint32_t done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(bar) : "memory");
  for (int i = threadIdx.x; i < 64 * 32; i += 128) out[i] = tile[i];
}
"""


@T.prim_func
def box(A: T.Tensor((N, M), "float32"), out: T.Tensor((64, 32), "float32"), row: T.int32, column: T.int32):
    with T.Kernel(1, threads=128):
        for i, j in T.Parallel(64, 32):
            out[i, j] = A[row + i, column + j]


@pytest.fixture(scope="module")
def mapped() -> Any:
    """The kernel above; one for all cases, so that it has maps of other tensors already."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA needs Hopper")
    program = box.trace()
    variables = [
        tirx.Var("map", ir.PointerType(ir.PrimType("uint8"))),
        pointer("out", "float32"),
        tirx.Var("row", I32),
        tirx.Var("column", I32),
    ]
    sources = (Source("map", 0), Source("param", 1), Source("param", 2), Source("param", 3))
    thread = kernel(
        "mapped",
        variables,
        tirx.Evaluate(tirx.IntImm(I32, 0)),
        sources=sources,
        maps=(TensorMap(0, (64, 32)),),
    )
    table = description(thread, program, parameter_words(program))
    code = toolchain.compile_cubin(Printed(TMA, "mapped", (None,) * TMA.count("\n")), architecture()).code
    return native.make_cuda_kernel(code, struct.pack(f"<{len(table)}q", *table), "", "mapped", "mapped")


# TMA reads from 16-byte addresses alone: columns are multiples of four floats
@pytest.mark.parametrize(
    "rows, columns, row, column",
    [
        (100, 64, 0, 0),
        (100, 64, 50, 40),
        (200, 128, 64, 36),
        (40, 20, 0, 0),
        (100, 64, -3, 0),
        (100, 64, -3, -8),
    ],
)
def test_tensor_maps(mapped: Any, rows: int, columns: int, row: int, column: int):
    """Rows and columns the right way round, zeros outside, another map for another tensor."""
    a, out = normal(rows, columns), torch.full((64, 32), 9.0, device="cuda")
    mapped(a, out, row, column)
    torch.cuda.synchronize()
    around = torch.nn.functional.pad(a, (64, 64, 64, 64))
    assert torch.equal(out, around[64 + row : 128 + row, 64 + column : 96 + column])


# ---- for people


def test_resources_and_machine_code(added: Any):
    assert 0 < added.resources["registers"] < 128 and 0 < added.resources["occupancy"] <= 1
    assert added.arch == architecture()


def test_the_profiler(added: Any):
    profiler = added.get_profiler(n=1 << 20)
    profiler.assert_allclose(lambda a, b: a + b)
    assert 0 < profiler.do_bench(rep=20) < 1000
    assert np.median(profiler.do_bench(rep=20, return_mode="all")) > 0


def test_rows_of_any_length_by_two_kernels():
    """Rows that are whole vectors go to a second kernel, by TMA; others, and ones that begin elsewhere, do
    not."""
    from tests.unit.test_whole_rows import product

    kernel = tilescale.compile(product(), target="cuda")
    for m, n, k in ((100, 128, 64), (130, 72, 200), (64, 77, 33), (1, 8, 8), (65, 64, 60)):
        a, b = normal(m, k, dtype=torch.float16), normal(k, n, dtype=torch.float16)
        for shift in (0, 1):
            room = torch.zeros(m * k + 8, dtype=torch.float16, device="cuda")
            a = room[shift : shift + m * k].view(m, k).copy_(a)
            c = torch.full((m, n), float("nan"), device="cuda")
            kernel(a, b, c)
            torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
            assert kernel._run.fits((a, b, c)) == (n % 8 == 0 and k % 8 == 0 and not shift)
