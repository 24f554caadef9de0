"""Blocks of a cluster on the emulated GPU: what they share, who meets whom, and whose shared memory a
statement reaches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import tilescale.language as T
from tests.leftovers import nothing_left
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.emulator import EmulationError, Emulator
from tilescale.compiler.emulator.async_units import AsyncUnits
from tilescale.compiler.emulator.memory import Block, Memory
from tilescale.compiler.tvm_compat import structural_map, tirx
from tilescale.errors import TileSyntaxError

M, N, K = 128, 128, 264


def product(body: Any, grid: tuple[int, ...], cluster: Any = 2) -> Any:
    """A GEMM whose tile and trip count ``body(block indices)`` says: (row, column, rounds, first round)."""

    @T.prim_func
    def kernel(
        A: T.Tensor((M, K), "bfloat16"),
        B: T.Tensor((K, N), "bfloat16"),
        C: T.Tensor((M, N), "float32"),
        n: T.int32,
    ):
        with T.Kernel(*grid, threads=128, cta_cluster=cluster) as blocks:
            a, b = T.alloc_shared((64, 32), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            with T.Scale("cta_cluster") as (rank, count):
                row, col, rounds = body(blocks, rank, count, n)
                T.clear(acc)
                for k in T.Pipelined(rounds, num_stages=3):
                    T.copy(A[row * 64, k * 32], a)
                    T.copy(B[k * 32, col * 64], b)
                    T.gemm(a, b, acc)
                T.copy(acc, C[row * 64, col * 64])

    return kernel


def copies(kernel: Any) -> tuple[int, int]:
    text = print_kernel(lowered(kernel)[0]).text
    return text.count("ts::tma_load("), text.count("ts::tma_load_multicast(")


ROUNDS = -(-K // 32)
#: who copies what: grid, cluster, the tile of a block, (plain copies, shared ones)
TILES: dict[str, Any] = {
    "the second index of a grid": ((2, 2), (1, 2), lambda b, r, n, k: (b[1], b[0], ROUNDS), (1, 1)),
    "the rank in the cluster": ((4,), 2, lambda b, r, n, k: (r, b // 2, ROUNDS), (1, 1)),
    "the number of blocks in the cluster": ((4,), 2, lambda b, r, n, k: (b % n, b // n, ROUNDS), (1, 1)),
    "an argument as trip count": ((4,), 2, lambda b, r, n, k: (r, b // 2, k), (1, 1)),
    "another trip count in each block": ((4,), 2, lambda b, r, n, k: (r, b // 2, k - r), (2, 0)),
    "tiles of different rows and columns": ((4,), (4,), lambda b, r, n, k: (b // 2, b % 2, ROUNDS), (2, 0)),
}


@pytest.mark.parametrize("case", TILES)
def test_only_what_is_proven_alike_is_shared(case: str):
    grid, cluster, body, count = TILES[case]
    kernel = product(body, grid, cluster)
    assert copies(kernel) == count
    args = {"A": data((M, K), "bfloat16", 1), "B": data((K, N), "bfloat16", 2), "C": empty((M, N), "float32")}
    for seed in (0, 1):
        agree(kernel, {**args, "n": ROUNDS}, seed=seed)


def test_tiles_of_clusters_that_stay():
    """Persistent clusters: the two blocks of each take two rows of one column."""
    clusters = 2

    @T.prim_func
    def kernel(
        A: T.Tensor((300, K), "float16"), B: T.Tensor((K, 200), "float16"), C: T.Tensor((300, 200), "float32")
    ):
        with T.Kernel(block=2 * clusters, threads=128, cta_cluster=2) as block:
            a, b = T.alloc_shared((64, 32), "float16"), T.alloc_shared((32, 64), "float16")
            acc = T.alloc_fragment((64, 64), "float32")
            for pair, col in T.Persistent((3, 4), clusters, block // 2):
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(K, 32), num_stages=3):
                    T.copy(A[(2 * pair + block % 2) * 64, k * 32], a)
                    T.copy(B[k * 32, col * 64], b)
                    with T.Scale("cta_cluster"):
                        T.gemm(a, b, acc)
                T.copy(acc, C[(2 * pair + block % 2) * 64, col * 64])

    args = {
        "A": data((300, K), "float16", 1),
        "B": data((K, 200), "float16", 2),
        "C": empty((300, 200), "float32"),
    }
    assert copies(kernel) == (1, 1)
    for seed in (0, 1):
        agree(kernel, args, seed=seed)


# ---- reaching each other


@T.prim_func
def neighbours(
    C: T.Tensor((8, 16), "float32"), D: T.Tensor((8, 2), "int32"), E: T.Tensor((8, 16), "float32")
):
    """Pulls, puts with their signals, meetings."""
    with T.Kernel(8, cta_cluster=4, threads=64) as b:
        own, got, put = (
            T.alloc_shared((16,), "float32"),
            T.alloc_shared((16,), "float32"),
            T.alloc_shared((4, 4), "float32"),
        )
        arrived = T.alloc_signal((1,))
        for i in T.Parallel(16):
            own[i] = b * 100 + i
        with T.Scale("cta_cluster") as (c, n):
            D[b, 0] = c
            D[b, 1] = n
            T.barrier()
            T.copy(own, got, src=(c + 1) % n)
            for k in T.serial(n):
                T.copy(own[k * 4 : k * 4 + 4], put[c, 0:4], dst=k, signal=arrived[0])
            T.wait(arrived[0], n)
            T.copy(got, C[b, 0])
            for i, j in T.Parallel(4, 4):
                E[b, i * 4 + j] = put[i, j]


@T.prim_func
def signals(C: T.Tensor((4, 4, 2), "int32")):
    """Clusters of two axes, other comparisons, counters that are set."""
    with T.Kernel(block=(4, 4), cta_cluster=(2, 2), threads=32) as (x, y):
        s, t = T.alloc_signal((4,)), T.alloc_signal((2,))
        with T.Scale("cta_cluster") as (c, n):
            for k in T.serial(n):
                T.signal(s[c], c + 1, dst=k)
            for k in T.serial(n):
                T.wait(s[k], k + 1, cmp="eq")
            T.signal(t[1], -5, op="set", dst=(c + 3) % n)
            T.wait(t[1], 0, cmp="lt")
            C[x, y, 0] = c
            C[x, y, 1] = n


@T.prim_func
def collectives(C: T.Tensor((4, 5, 16), "float32")):
    with T.Kernel(4, cta_cluster=4, threads=64) as b:
        own, out = T.alloc_shared((4,), "float32"), T.alloc_shared((4, 4), "float32")
        mine, part = T.alloc_shared((4, 4), "float32"), T.alloc_shared((4,), "float32")
        for i in T.Parallel(4):
            own[i] = b * 10 + i
        for i, j in T.Parallel(4, 4):
            mine[i, j] = b * 100 + i * 10 + j
        flat = T.reshape(out, (16,))
        with T.Scale("cta_cluster"):
            T.all_gather(own, out)
            T.copy(flat, C[b, 0, 0:16])
            T.all_to_all(mine, out)
            T.copy(flat, C[b, 1, 0:16])
            T.reduce_scatter(mine, part)
            T.copy(part, C[b, 2, 0:4])
            T.broadcast(own, part, 2)
            T.copy(part, C[b, 3, 0:4])
            T.all_reduce(own, op="max")
            T.copy(own, C[b, 4, 0:4])


@T.prim_func
def warps(A: T.Tensor((8, 64), "float32"), C: T.Tensor((8, 64), "float32")):
    """Executors of one block: the first warp fills two stages, the second reads them."""
    with T.Kernel(1, threads=64):
        stage = T.alloc_shared((2, 64), "float32")
        full, empty = T.alloc_signal((2,)), T.alloc_signal((2,))
        with T.Scale("warp") as (w, n):
            if w == 1:
                for k in T.serial(8):
                    T.wait(full[k % 2], k // 2 + 1)
                    for i in T.Parallel(64):
                        C[k, i] = stage[k % 2, i] * 2
                    T.signal(empty[k % 2])
            if w == 0:
                for k in T.serial(8):
                    T.wait(empty[k % 2], k // 2)
                    T.copy(A[k, 0:64], stage[k % 2, 0:64])
                    T.signal(full[k % 2])


@T.prim_func
def late(A: T.Tensor((8, 32), "int32"), C: T.Tensor((8, 32), "int32")):
    """Everybody reads the first block's tile, which has nothing more to do."""
    with T.Kernel(8, cta_cluster=4, threads=32) as b:
        own, got = T.alloc_shared((32,), "int32"), T.alloc_shared((32,), "int32")
        T.copy(A[b, 0:32], own)
        with T.Scale("cta_cluster") as (c, n):
            T.barrier()
            if c != 0:
                T.copy(own, got, src=0)
                T.copy(got, C[b, 0])


@T.prim_func
def around(A: T.Tensor((4, 8, 64), "float32"), C: T.Tensor((4, 8, 64), "float32")):
    """Tiles go round, one block further in each round; the next one is made of what came."""
    with T.Kernel(4, cta_cluster=4, threads=64) as b:
        own, came = T.alloc_shared((8, 64), "float32"), T.alloc_shared((8, 64), "float32")
        T.copy(A[b, 0:8, 0:64], own)
        with T.Scale("cta_cluster") as (c, n):
            for k in T.serial(3):
                T.copy(own, came, dst=(c + 1) % n)
                T.barrier()
                for i, j in T.Parallel(8, 64):
                    own[i, j] = came[i, j] + k
                T.barrier()
        T.copy(own, C[b, 0:8, 0:64])


@T.prim_func
def exchange(A: T.Tensor((4, 4, 2, 256), "float16"), C: T.Tensor((4, 4, 2, 256), "float16")):
    """Each block sends a part to each, whose place is the sender's; and what nobody waits for but the
    kernel's end."""
    with T.Kernel(4, cta_cluster=4, threads=64) as b:
        own, came = T.alloc_shared((4, 2, 256), "float16"), T.alloc_shared((4, 2, 256), "float16")
        last = T.alloc_shared((8, 256), "float16")
        for p in T.serial(4):
            T.copy(A[b, p, 0:2, 0:256], own[p, 0:2, 0:256])
        with T.Scale("cta_cluster") as (c, n):
            T.barrier()
            for k in T.serial(n):
                T.copy(own[k, 0:2, 0:256], came[c, 0:2, 0:256], dst=k)
            T.barrier()
            for p in T.serial(4):
                T.copy(came[p, 0:2, 0:256], C[b, p, 0:2, 0:256])
            T.copy(own[0, 0:2, 0:256], last[2 * c : 2 * c + 2, 0:256], dst=(c + 1) % n)


@T.prim_func
def gathered(
    A: T.Tensor((4, 8, 32), "float32"),
    C: T.Tensor((4, 32, 32), "float32"),
    D: T.Tensor((4, 8, 32), "float32"),
):
    with T.Kernel(4, cta_cluster=(2, 1), threads=32) as b:
        own, all_ = T.alloc_shared((8, 32), "float32"), T.alloc_shared((2, 8, 32), "float32")
        one = T.alloc_shared((8, 32), "float32")
        T.copy(A[b, 0:8, 0:32], own)
        with T.Scale("cta_cluster"):
            T.all_gather(own, all_)
            for p in T.serial(2):
                T.copy(all_[p, 0:8, 0:32], C[b, p * 8 : p * 8 + 8, 0:32])
            T.broadcast(own, one, 1)
            T.copy(one, D[b, 0:8, 0:32])


@T.prim_func
def reached(C: T.Tensor((4, 512), "float32"), D: T.Tensor((4, 512), "float32")):
    """What a block does behind its last use of a tile does not touch what others still read."""
    with T.Kernel(4, cta_cluster=2, threads=64) as b:
        own, got, own_later = (
            T.alloc_shared((512,), "float32"),
            T.alloc_fragment((512,), "float32"),
            T.alloc_shared((512,), "float32"),
        )
        for i in T.Parallel(512):
            own[i] = b * 1000 + i
        with T.Scale("cta_cluster") as (c, n):
            T.barrier()
            T.copy(own, got, src=1 - c)
        for i in T.Parallel(512):
            own_later[i] = b
        T.copy(got, C[b, 0])
        for i in T.Parallel(512):
            D[b, i] = own_later[511 - i]


PROGRAMS: dict[str, Any] = {
    "around": (around, {"A": data((4, 8, 64), "float32", 1), "C": empty((4, 8, 64), "float32")}),
    "exchange": (exchange, {"A": data((4, 4, 2, 256), "float16", 1), "C": empty((4, 4, 2, 256), "float16")}),
    "gathered": (
        gathered,
        {
            "A": data((4, 8, 32), "float32", 1),
            "C": empty((4, 32, 32), "float32"),
            "D": empty((4, 8, 32), "float32"),
        },
    ),
    "reached": (reached, {"C": empty((4, 512), "float32"), "D": empty((4, 512), "float32")}),
    "neighbours": (
        neighbours,
        {"C": empty((8, 16), "float32"), "D": empty((8, 2), "int32"), "E": empty((8, 16), "float32")},
    ),
    "signals": (signals, {"C": empty((4, 4, 2), "int32")}),
    "collectives": (collectives, {"C": empty((4, 5, 16), "float32")}),
    "late": (late, {"A": data((8, 32), "int32", 1), "C": empty((8, 32), "int32")}),
    "warps": (warps, {"A": data((8, 64), "float32", 1), "C": empty((8, 64), "float32")}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_blocks_and_executors_reach_each_other(name: str):
    kernel, args = PROGRAMS[name]
    for seed in range(4):
        agree(kernel, args, exact=True, seed=seed)


def _without(what: str, number: int | None = None) -> Any:
    """An edit that takes out the ``number``th call of a function, or all."""
    count = [0]

    def edit(name: str, args: Any) -> Any:
        if not name.startswith(what):
            return ...
        count[0] += 1
        return None if number is None or count[0] == number else ...

    return edit


def _unawaited(kernel: Any, number: int | None) -> Any:
    """The kernel without its ``number``th wait, or without all."""
    count = [0]

    def change(s: Any) -> Any:
        if not (isinstance(s.condition, tirx.Not) and "ts::shared_wait" in str(s.condition)):
            return s
        count[0] += 1
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if number is None or count[0] == number else s

    body = structural_map(kernel.func.body, (tirx.IfThenElse, change))
    assert count[0]
    return dataclasses.replace(kernel, func=tirx.PrimFunc(list(kernel.func.params), body))


FAULTS: dict[str, Any] = {
    "no meeting at the beginning": ("signals", "ts::cluster_sync", 1),
    "no meeting before the pull": ("neighbours", "ts::cluster_sync", 2),
    "no meeting at the end": ("late", "ts::cluster_sync", 3),
    "no meeting in front of a signal": ("neighbours", "__syncthreads", 1),
    "no wait for the puts": ("neighbours", "ts::shared_wait", None),
    "no meeting behind the wait": ("neighbours", "__syncthreads", 2),
    "no signal": ("signals", "ts::shared_signal_add", None),
    "a stage is reused too soon": ("warps", "ts::shared_wait", 2),
    "a stage is read too soon": ("warps", "ts::shared_wait", 1),
    "the counters' zeroes are not awaited": ("warps", "__syncthreads", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str):
    name, what, number = FAULTS[fault]
    kernel, args = PROGRAMS[name]
    made, program = lowered(kernel)
    right = emulator.run(made, program, args)
    broken = _unawaited(made, number) if what == "ts::shared_wait" else None
    for seed in range(12):
        try:
            got = emulator.run(broken or edited(made, _without(what, number)), program, args, seed)
        except EmulationError:
            return
        if any((got[k] != right[k]).any() for k in right):
            return
    pytest.fail("no schedule shows it")


def test_a_launch_is_gone_when_it_is_over():
    """With the memory of its blocks, whether or not it is right."""
    for name in PROGRAMS:
        kernel, args = PROGRAMS[name]
        made, program = lowered(kernel)
        with nothing_left(Memory, Block, AsyncUnits, Emulator):
            emulator.run(made, program, args)
    made, program = lowered(PROGRAMS["signals"][0])
    broken = edited(made, _without("ts::shared_signal_add", None))
    with nothing_left(Memory, Block, AsyncUnits, Emulator), pytest.raises(EmulationError):
        emulator.run(broken, program, PROGRAMS["signals"][1])


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_compiles(name: str):
    toolchain.compile_cubin(print_kernel(lowered(PROGRAMS[name][0])[0]), "sm_90a")


def test_older_architectures_have_no_clusters():
    args = {
        "A": data((M, K), "bfloat16", 1),
        "B": data((K, N), "bfloat16", 2),
        "C": empty((M, N), "float32"),
        "n": ROUNDS,
    }
    agree(product(lambda b, r, n, k: (r, b // 2, k), (4,)), args, arch="sm_80")  # it only asks who it is
    with pytest.raises(TileSyntaxError, match="clusters need sm_90"):
        agree(neighbours, PROGRAMS["neighbours"][1], arch="sm_80")


def put(body: Any) -> Any:
    """A kernel in which ``body(own, came, other, rank, count, b)`` sends tiles."""

    @T.prim_func
    def kernel(A: T.Tensor((2, 8, 64), "float32"), C: T.Tensor((2, 8, 64), "float32")):
        with T.Kernel(2, cta_cluster=2, threads=64) as b:
            own, came, other = (
                T.alloc_shared((8, 64), "float32"),
                T.alloc_shared((8, 64), "float32"),
                T.alloc_shared((8, 64), "float32"),
            )
            seen = T.alloc_signal((1,))
            T.copy(A[b, 0:8, 0:64], own)
            T.clear(came)
            with T.Scale("cta_cluster") as (c, n):
                T.barrier()
                body(own, came, other, seen, c, n)
                T.barrier()
            T.copy(came, C[b, 0:8, 0:64])

    return kernel


@T.macro
def overwritten(own, came, other, seen, c, n):
    T.copy(own, came, dst=(c + 1) % n)
    T.fill(own, 1)


@T.macro
def read_at_once(own, came, other, seen, c, n):
    T.copy(own, came, dst=c)
    T.copy(came, other)


@T.macro
def sent_twice(own, came, other, seen, c, n):
    T.copy(own, other)
    for _ in T.serial(2):
        T.copy(own, came, dst=(c + 1) % n)


@T.macro
def signalled(own, came, other, seen, c, n):
    T.copy(own, came, dst=(c + 1) % n, signal=seen[0])
    T.wait(seen[0], 1)


@T.macro
def short(own, came, other, seen, c, n):
    for k in T.serial(8):
        T.copy(own[k, 0:64], came[k, 0:64], dst=(c + 1) % n)


@T.macro
def aside(own, came, other, seen, c, n):
    T.copy(own[0:8, 0:60], came[0:8, 2:62], dst=(c + 1) % n)


@pytest.mark.parametrize(
    "body", [overwritten, read_at_once, sent_twice, signalled, short, aside], ids=lambda x: x.__name__
)
def test_what_the_sender_does_next(body: Any):
    """Behind a copy its source may be written and its target read by the sender, in its own order."""
    made, program = lowered(put(body))
    assert not program.notes
    agree(put(body), {"A": data((2, 8, 64), "float32", 1), "C": empty((2, 8, 64), "float32")}, exact=True)
