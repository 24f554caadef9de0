"""What reaches other ranks, as it is printed: peers' addresses, signals, waits, meetings, and where threads
meet around them."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.kernels import refused
from tilescale.compiler import driver
from tilescale.compiler.cuda.describe import DEVICE, TEAM, UNORDERED, description
from tilescale.compiler.description import parameter_words
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.errors import TileSyntaxError


def printed(prim: Any) -> str:
    """The body's code without the author's lines."""
    text = driver.source_text(prim.trace(), "cuda", "cuda:sm_90a")
    return "\n".join(line for line in text.splitlines() if not re.match(r"\s*// \w+\.py:", line))


def lowered(prim: Any) -> ThreadKernel:
    return driver.lower(prim.trace(), "cuda:sm_90a").own


@T.prim_func
def shift(
    A: T.Tensor((128,), "float32"),
    inbox: T.SymmTensor((128,), "float32"),
    arrived: T.Signal((1,)),
    B: T.Tensor((128,), "float32"),
):
    with T.Kernel(1, threads=128):
        with T.Scale("device") as (rank, n):
            T.copy(A, inbox, dst=(rank + 1) % n, signal=arrived[0], value=2)
            T.wait(arrived[0], 2)
            T.copy(inbox, B)


def test_a_put_with_its_signal_and_the_wait_for_it():
    assert (
        printed(shift)
        == """\
#include <ts/ts.cuh>
#include <ts/team.cuh>

extern "C" __global__ void __launch_bounds__(128) shift(
    const float* __restrict__ A,
    float* inbox,
    int64_t* arrived,
    float* B,
    int my_rank,
    int ranks,
    const __grid_constant__ ts::Team team) {
  const int tid = threadIdx.x;
  ts::begin_launch(team, tid);
  int entered = 0;
  const int rank = my_rank;
  const int n = ranks;
  if (entered == 0) {
    entered = ts::enter(team, ts::floormod(rank + 1, n), tid, 128, 0, 0);
  }
  float* const inbox_there = (float*)ts::twin(team, inbox, ts::floormod(rank + 1, n), 0);
  inbox_there[tid] = A[tid];
  __syncthreads();  // the signal tells of what all threads did
  if (tid == 0) {
    ts::signal_add<true>(ts::twin(team, &arrived[0], ts::floormod(rank + 1, n), 1), 2L);
  }
  if (tid == 0) {
    ts::wait<true>(team, arrived, 0L, 2L, 0, 2);
  }
  __syncthreads();  // behind the wait
  B[tid] = inbox[tid];
  ts::end_launch(team, tid);
}"""
    )


def test_what_the_launcher_must_know_of_it():
    kernel = lowered(shift)
    assert (kernel.cooperative, kernel.device, kernel.ordered, kernel.team) == (True, True, True, True)
    program = shift.trace()
    table = description(kernel, program, parameter_words(program), 1234)
    assert table[5] == 1 | DEVICE | TEAM and table[12] == 1234
    assert [s.kind for s in kernel.sources] == ["param"] * 4 + ["rank", "world", "team"]
    assert kernel.sites[1].startswith("signal|arrived|") and kernel.sites[2].startswith("wait|arrived|")


def test_an_unordered_launch_says_so():
    @T.prim_func
    def kernel(s: T.Signal((1,), keep=True)):
        with T.Kernel(1, threads=32, ordered=False), T.Scale("device") as (rank, n):
            T.signal(s[0], dst=(rank + 1) % n)

    made = lowered(kernel)
    table = description(made, kernel.trace(), parameter_words(kernel.trace()))
    assert table[5] == DEVICE | UNORDERED | TEAM  # and nobody waits, so blocks need not be resident together


def test_both_sides_of_a_put_may_lie_in_one_tensor():
    @T.prim_func
    def kernel(A: T.SymmTensor((256,), "float32")):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            T.copy(A[0:128], A[128:256], dst=(rank + 1) % n)
            T.copy(A[0:128], A[128:256], src=(rank + 1) % n)

    text = printed(kernel)
    assert "A_there[tid + 128] = A[tid];" in text, "the source is the caller's"
    assert "A[tid + 128] = A_there" in text, "the destination is the caller's"
    assert "__restrict__" not in text


def test_a_tile_in_registers_is_put_and_got():
    @T.prim_func
    def kernel(A: T.SymmTensor((64, 64), "float16"), B: T.Tensor((64, 64), "float16")):
        with T.Kernel(1, threads=128), T.Scale("device") as (rank, n):
            f, g = T.alloc_fragment((64, 64), "float32"), T.alloc_shared((64, 64), "float16")
            T.copy(A, f, src=(rank + 1) % n)
            T.copy(A, g, src=0)
            T.copy(g, B)
            T.copy(f, A, dst=0)

    text = printed(kernel)
    assert "(half*)ts::twin(team, (half*)A" in text or "ts::twin(team, A," in text
    assert text.count("ts::twin(team, A, 0,") == 2


@pytest.mark.parametrize(
    "scale, call", [("grid", "barrier<false>(team, 1, 0)"), ("device", "barrier<true>(team, 1, 0)")]
)
def test_blocks_meet_through_one_thread_each(scale: str, call: str):
    @T.prim_func
    def kernel(A: T.Tensor((256,), "int32"), B: T.Tensor((256,), "int32")):
        with T.Kernel(2, threads=128) as bx:
            with T.Scale(scale):
                for i in T.Parallel(128):
                    A[bx * 128 + i] = i
                T.barrier()
                for i in T.Parallel(128):
                    B[bx * 128 + i] = A[(1 - bx) * 128 + i]

    text, made = printed(kernel), lowered(kernel)
    at = text.index("ts::" + call)
    assert "tells of what all threads did" in text[:at] and "behind the barrier" in text[at:]
    assert made.cooperative and made.device == (scale == "device")


def test_warps_signal_and_wait_each_for_itself():
    @T.prim_func
    def kernel(s: T.Signal((4,)), A: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128), T.Scale("grid"):
            for i in T.Parallel(128):
                A[i] = i
            with T.Scale("warp") as (w, _):
                T.signal(s[w])
                T.wait(s[3 - w])
            for i in T.Parallel(128):
                A[i] = A[127 - i]

    text = printed(kernel)
    first, rest = text.split("ts::signal_add<false>")
    assert (
        first.index("A[tid] = tid")
        < first.index("__syncthreads();  // a warp tells")
        < first.index("__syncwarp();  // the signal tells")
    )
    assert (
        "__syncwarp();  // behind the wait" in rest
        and "__syncthreads();  // behind what a warp heard" in rest
    )
    assert "if ((tid & 31) == 0) {" in text


def test_a_collective_meets_the_same_block_of_every_rank():
    @T.prim_func
    def kernel(A: T.Tensor((128,), "float32"), G: T.SymmTensor((2, 128), "float32")):
        with T.Kernel(1, threads=128), T.Scale("device"):
            T.all_gather(A, G)

    text = printed(kernel)
    assert text.count("ts::team_sync(team, tid, 0)") == 2 and text.count("behind the team sync") == 2

    @T.prim_func
    def inside(A: T.Tensor((128,), "float32"), G: T.SymmTensor((2, 128), "float32")):
        with T.Kernel(1, threads=128), T.Scale("device"), T.Scale("warp"):
            T.all_gather(A, G)

    with refused(TileSyntaxError, "a collective of ranks inside T.Scale('warp')"):
        lowered(inside)
