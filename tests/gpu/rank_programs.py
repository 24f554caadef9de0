"""Programs of several ranks on GPUs, by name: ``tilescale launch -n 2 -m tests.gpu.rank_programs graph
streams``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

import tilescale
import tilescale.comm as comm
import tilescale.cuda
import tilescale.errors
import tilescale.language as T
from tests.team_kernels import listed, nested, nodes, overlapping


@tilescale.jit
def shift(N, threads=64):
    @T.prim_func
    def ring(
        A: T.Tensor((N,), "float32"),
        inbox: T.SymmTensor((N,), "float32"),
        s: T.Signal((2, 3)),
        B: T.Tensor((N,), "float32"),
        awaited: T.int64,
        far: T.int32,
    ):
        with T.Kernel(1, threads=threads):
            with T.Scale("device") as (rank, n):
                T.copy(A, inbox, dst=(rank + far) % (n + far - 1), signal=s[1, 2])
                T.wait(s[1, 2], awaited)
                T.copy(inbox, B)

    return ring


class Ring:
    """A ring shift of N elements, launched and compared."""

    def __init__(self, N: int = 500, team: Any = None):
        self.N, self.team = N, team
        self.rank, self.size = (team.rank, team.size) if team else (comm.rank(), comm.world_size())
        self.inbox, self.s = comm.empty((N,), team=team), comm.signals((2, 3), team=team)
        self.a, self.b = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
        self.kernel = shift(N)

    def launch(self) -> None:
        self.kernel(self.a, self.inbox, self.s, self.b, 1, 1)

    def wrong(self, step: int) -> int:
        return int((self.b != (self.rank - 1) % self.size + 100 * step).sum())

    def fill(self, step: int) -> None:
        self.a.fill_(self.rank + 100 * step)


def last() -> bool:
    return comm.rank() + 1 == comm.world_size()


def lonely() -> int:
    """Waits for two signals, of which one comes."""
    ring = Ring()
    ring.kernel(ring.a, ring.inbox, ring.s, ring.b, 2, 1)
    torch.cuda.synchronize()
    return 0


def far() -> int:
    """Reaches for a rank that there is not."""
    ring = Ring()
    ring.kernel(ring.a, ring.inbox, ring.s, ring.b, 1, 7)
    torch.cuda.synchronize()
    return 0


def different() -> int:
    """Ranks that launch different constants."""
    ring = Ring(500)
    other = shift(500, threads=64 * (1 + comm.rank()))
    other(ring.a, ring.inbox, ring.s, ring.b, 1, 1)
    torch.cuda.synchronize()
    return 0


def late() -> int:
    """The last rank does not make the launch that the others make."""
    ring = Ring()
    if last():
        time.sleep(10)  # longer than the others wait
    else:
        ring.launch()
        torch.cuda.synchronize()
    return 0


def ends() -> int:
    """The last rank ends, as if all were done, while the others' launch waits for it."""
    ring = Ring()
    if last():
        sys.exit(0)
    ring.launch()
    torch.cuda.synchronize()
    return 0


def killed() -> int:
    """The last rank is killed while the others' launch waits for it."""
    ring = Ring()
    if last():
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    ring.launch()
    torch.cuda.synchronize()
    return 0


def killed_inside() -> int:
    """The last rank is killed while fused products of all ranks follow one another."""
    from tilescale.ops import all_gather_matmul, matmul_reduce_scatter

    x, w = (torch.randn(shape, device="cuda").bfloat16() for shape in ((256, 512), (512, 256)))
    y = torch.randn(256 * comm.world_size(), 512, device="cuda").bfloat16()
    for step in range(10**9):
        all_gather_matmul(x, w)
        matmul_reduce_scatter(y, w)
        if step % 20 == 0:
            torch.cuda.synchronize()
        if last() and step == 100:
            print(f"killed at {time.time()}", flush=True)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return 0


def asserts() -> int:
    """A kernel of the last rank's own fails, which its host learns from torch, while the others' launch waits
    for it."""

    @T.prim_func
    def checked(A: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=64):
            T.device_assert(A[5] > 0.0, "A is positive")

    ring, check = Ring(), tilescale.compile(checked)
    if last():
        check(torch.zeros(64, device="cuda"))
        torch.cuda.synchronize()
    return told_early(ring)


def raises() -> int:
    """The last rank fails on its host while the others' launch waits for it."""
    ring = Ring()
    if last():
        raise ValueError("no more")
    return told_early(ring)


def told_early(ring: Ring) -> int:
    """Launches, and prints what a launch says that others have stopped, and whether it waited for its limit
    before."""
    began = time.monotonic()
    ring.launch()
    try:
        tilescale.cuda.synchronize()
    except tilescale.errors.LaunchError as error:
        print(
            f"after {'less' if time.monotonic() - began < 60 else 'more'} than 60 s: {error.message}",
            flush=True,
        )
    return 0


def unordered() -> int:
    """Launches without flags at their ends: the kernel's own counters, which are kept, order them."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "int32"),
        inbox: T.SymmTensor((2, 64), "int32"),
        s: T.Signal((1,), keep=True),
        step: T.int32,
        B: T.Tensor((64,), "int32"),
    ):
        with T.Kernel(1, threads=64, ordered=False):
            with T.Scale("device") as (rank, n):
                T.copy(A, inbox[step % 2, 0:64], dst=(rank + 1) % n, signal=s[0])
                T.wait(s[0], step + 1)
                T.copy(inbox[step % 2, 0:64], B)

    run = tilescale.compile(kernel)
    rank, size, wrong = comm.rank(), comm.world_size(), 0
    inbox, s = comm.empty((2, 64), torch.int32), comm.signals(1)
    b = torch.empty(64, device="cuda", dtype=torch.int32)
    for step in range(30):
        run(torch.full_like(b, 100 * step + rank), inbox, s, step, b)
        wrong += int((b != 100 * step + (rank - 1) % size).sum())
        if step % 2:
            comm.barrier()  # two slots: nobody is two launches ahead of a reader
    return wrong


def graph() -> int:
    """A launch in a CUDA graph counts on the device: it may be replayed, with launches of its own between."""
    ring = Ring()
    ring.fill(0)
    ring.launch()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        ring.launch()
    wrong = 0
    for step in range(30):
        ring.fill(step)
        captured.replay() if step % 3 else ring.launch()
        wrong += ring.wrong(step)
    return wrong


@tilescale.jit
def sum_of_packets(N, world, rounds, dense, threads=128):
    @T.prim_func
    def exchange(
        A: T.Tensor((N,), "float32"),
        box: T.Packets((world, N), "float32", dense=dense),
        B: T.Tensor((N,), "float32"),
    ):
        with T.Kernel(N // 256, threads=threads) as bx, T.Scale("device") as (rank, n):
            x, total = T.alloc_fragment((256,), "float32"), T.alloc_fragment((256,), "float32")
            parts = T.alloc_fragment((world, 256), "float32")
            T.copy(A[bx * 256], x)
            for k in T.serial(rounds):
                T.put_packets(x, box[rank, bx * 256], dst=(rank + 1 + k) % n)
            T.clear(total)
            if rounds == world:
                T.get_packets(box[0:world, bx * 256 : bx * 256 + 256], parts)
                for i in T.Parallel(256):
                    for r in T.serial(world):
                        total[i] += parts[r, i]
            else:
                T.get_packets(box[(rank + n - 1) % n, bx * 256 : bx * 256 + 256], total)
            T.copy(total, B[bx * 256])

    return exchange


class Packets:
    """Sums of everyone's vectors (or copies of the neighbour's), launched and compared: without flags around
    a launch, or, where one rank hears of one other alone, with them; in packets with marks, or dense ones."""

    def __init__(self, everyone: bool, dense: bool = False, N: int = 1024):
        self.everyone, self.rank, self.size = everyone, comm.rank(), comm.world_size()
        self.box = comm.packets((self.size, N), dense=dense)
        self.a, self.b = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
        self.kernel = sum_of_packets(N, self.size, self.size if everyone else 1, dense)

    def launch(self) -> None:
        self.kernel(self.a, self.box, self.b)

    def wrong(self, step: int) -> int:
        ranks = range(self.size) if self.everyone else [(self.rank - 1) % self.size]
        return int((self.b != sum(rank + 100 * step for rank in ranks)).sum())

    def fill(self, step: int) -> None:
        self.a.fill_(self.rank + 100 * step)


def packets() -> int:
    """Launches that packets order: one after the other, replayed by graphs, two in one graph, with ranks out of
    step and other launches of the team between."""
    ring, wrong = Ring(), 0
    for everyone, dense in itertools.product((True, False), (False, True)):
        sums = Packets(everyone, dense)
        sums.fill(0)
        sums.launch()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            sums.launch()
            sums.b.zero_()
            sums.launch()
        for step in range(40):
            sums.fill(step)
            if step % 5 == comm.rank() and comm.rank():
                time.sleep(0.002)
            captured.replay() if step % 3 else sums.launch()
            if step % 7 == 0:
                ring.fill(step)
                ring.launch()
                wrong += ring.wrong(step)
            wrong += sums.wrong(step)
        for step in range(200):  # nobody looks in between: ranks run ahead as far as packets let them
            sums.fill(step)
            sums.launch()
        wrong += sums.wrong(199)
    return wrong


@tilescale.jit
def added(N, dtype, scale, blocks=4, threads=256):
    lanes = {"block": 1, "warpgroup": threads // 128, "warp": threads // 32}[scale]
    part = N // lanes

    @T.prim_func
    def sums_in_place(
        A: T.Tensor((blocks, N), dtype),
        total: T.SymmTensor((blocks, N), dtype),
        s: T.Signal((blocks,)),
        B: T.Tensor((blocks, N), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b:
            with T.Scale("device") as (rank, n):
                for k in T.serial(n):
                    with T.Scale(scale) as (e, _):
                        low = e % lanes * part  # blocks are counted over the grid
                        T.copy(
                            A[b, low : low + part],
                            total[b, low : low + part],
                            dst=(rank + 1 + k) % n,
                            signal=s[b],
                            op="add",
                        )
                T.wait(s[b], n * lanes)
                T.copy(total[b, 0:N], B[b, 0:N])

    return sums_in_place


@tilescale.jit
def added_in_turn(N, dtype, blocks=4, rows=32, threads=128):
    """Rounds in each of which every rank adds by TMA to one other rank's memory, and all blocks of it to the
    same rows."""

    @T.prim_func
    def sums_by_tma(
        A: T.Tensor((rows, N), dtype),
        total: T.SymmTensor((rows, N), dtype),
        B: T.Tensor((rows, N), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as b, T.Scale("device") as (rank, n):
            held = T.alloc_fragment((rows, N), dtype)
            T.copy(A, held)
            for k in T.serial(n):
                T.copy(held, total[0:rows, 0:N], dst=(rank + 1 + k) % n, op="add", prefer_instruction="tma")
                T.barrier()
            if b == 0:
                T.copy(total[0:rows, 0:N], B[0:rows, 0:N])

    return sums_by_tma


def sums_by_tma() -> int:
    """Sums by TMA, of blocks at once and of ranks in turn. Whole numbers: their sums are exact in any
    order."""
    wrong, rank, size = 0, comm.rank(), comm.world_size()
    for dtype in ("float32", "float16", "bfloat16", "int32", "float64"):
        for N in (32, 64):
            kind = getattr(torch, dtype)
            total = comm.empty((32, N), dtype)
            a, b = (torch.empty(32, N, device="cuda", dtype=kind) for _ in range(2))
            kernel = added_in_turn(N, dtype)
            for step in range(12):
                a.fill_(rank + step % 3)
                a[:, 1].add_(1)
                total.fill_(step)
                if step % 4 == rank:
                    time.sleep(0.002)
                kernel(a, total, b)
                want = torch.full_like(b, 4 * sum(r + step % 3 for r in range(size)) + step)
                want[:, 1] += 4 * size
                wrong += int((b != want).sum())
    return wrong


def sums() -> int:
    """Puts that add, by blocks, warpgroups and warps, each of which looks at entry flags of ranks that come
    late. Whole numbers: their sums are exact in any order. Then those by TMA."""
    wrong, rank, size = 0, comm.rank(), comm.world_size()
    for dtype in ("float32", "float16", "bfloat16", "int32"):
        for N, scale in ((1000, "block"), (1024, "warpgroup"), (1024, "warp"), (33, "block")):
            kind = getattr(torch, dtype)
            total, s = comm.empty((4, N), dtype), comm.signals((4,))
            a, b = (torch.empty(4, N, device="cuda", dtype=kind) for _ in range(2))
            kernel = added(N, dtype, scale)
            for step in range(12):
                a.fill_(rank + step)
                total.fill_(step)
                if step % 4 == rank:
                    time.sleep(0.002)
                kernel(a, total, s, b)
                off = b != sum(r + step for r in range(size)) + step
                if off.any():
                    print(
                        f"sums of {dtype}, {N}, {scale}, step {step}: {b[off][:4].tolist()} in {off.sum(1).tolist()}"
                    )
                wrong += int(off.sum())
    return wrong + sums_by_tma()


def tuned() -> int:
    """Ranks tune together, and keep the same configuration."""
    tuner = tilescale.autotune(configs=[{"threads": 128}, {"threads": 256}])(added)
    kernel = tuner(1024, "float32", "warpgroup")
    total, s = comm.empty((4, 1024), "float32"), comm.signals((4,))
    a, b = (torch.ones(4, 1024, device="cuda") for _ in range(2))
    total.fill_(0)
    kernel(a, total, s, b)
    return int((b != comm.world_size()).sum())


def unsent() -> int:
    """Rank 1 launches nothing, and rank 0 waits for its packets."""
    sums = Packets(everyone=True)
    sums.fill(0)
    if comm.rank() == 0:
        sums.launch()
        torch.cuda.synchronize()
    return 0


def streams() -> int:
    """Launches on streams in turn are one sequence."""
    ring, pair = Ring(), [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    ring.fill(3)
    torch.cuda.synchronize()
    for step in range(30):
        with torch.cuda.stream(pair[step % 2]):
            ring.b.fill_(-1)
            ring.launch()
            wrong += (ring.b != (ring.rank - 1) % ring.size + 300).sum()
    torch.cuda.synchronize()
    return int(wrong)


def overlap() -> int:
    """A graph on one stream and the same launch in another one, which nothing orders."""
    ring, pair, graphs = Ring(), [torch.cuda.Stream(), torch.cuda.Stream()], []
    ring.launch()
    torch.cuda.synchronize()
    for _ in pair:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            ring.launch()
    torch.cuda.synchronize()
    comm.barrier()
    if last():
        time.sleep(0.5)  # the others' launches wait for it, both of them
    for stream, graph in zip(pair, graphs, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    tilescale.cuda.synchronize()
    return 0


def teams() -> int:
    """A team of two ranks beside the world, and tensors that come and go."""
    world, wrong = Ring(), 0
    some = comm.team([comm.world_size() - 1, 0])
    for step in range(10):
        world.fill(step)
        world.launch()
        if some:
            pair = Ring(300 + step, team=some)
            pair.fill(step)
            pair.launch()
            wrong += pair.wrong(step)
        wrong += world.wrong(step)
    return wrong


def placed(kind: str, array: Any) -> Any:
    """An argument of a kernel, where it belongs; collective for what others reach."""
    if kind == "signal":
        return comm.signals(array.shape)
    return comm.zeros(array.shape, torch.int32) if kind == "symm" else torch.from_numpy(array.copy()).cuda()


def inside() -> int:
    """Teams inside kernels: the cases of tests/team_kernels.py for so many ranks, three launches each."""
    rank, n, wrong = comm.rank(), comm.world_size(), 0
    for name, (make, least) in {
        "nodes": (nodes, 1),
        "listed": (listed, 2),
        "nested": (nested, 3),
        "overlapping": (overlapping, 3),
    }.items():
        if n < least:
            continue
        prim, given, want = make(n)
        kinds = {p.name: p.spec.kind for p in prim.trace().params if hasattr(p.spec, "kind")}
        run = tilescale.compile(prim)
        for _ in range(3):
            values = {key: placed(kinds[key], array) for key, array in given[rank].items()}
            run(*values.values())
            for key, expected in want(rank).items():
                if not (values[key].cpu().numpy() == expected).all():
                    print(f"{name}: {key} of rank {rank} is wrong", flush=True)
                    wrong += 1
    return wrong


def barriers() -> int:
    """All blocks of all ranks meet, again and again."""

    @T.prim_func
    def kernel(A: T.SymmTensor((4, 64), "int32"), rounds: T.int32, B: T.Tensor((4, 64), "int32")):
        with T.Kernel(4, threads=64) as bx:
            with T.Scale("device") as (rank, n):
                for r in T.serial(rounds):
                    tile = T.alloc_fragment((64,), "int32")
                    T.fill(tile, 1000 * r + bx)
                    T.copy(tile, A[bx, 0:64], dst=(rank + 1) % n)
                    T.barrier()
                    T.copy(A[(bx + 1) % 4, 0:64], tile)
                    T.copy(tile, B[bx, 0:64])
                    T.barrier()

    run = tilescale.compile(kernel)
    a, b, wrong = comm.zeros((4, 64), torch.int32), torch.zeros(4, 64, dtype=torch.int32, device="cuda"), 0
    for step in range(10):
        run(a, step + 1, b)
        want = (1000 * step + (torch.arange(4, device="cuda") + 1) % 4)[:, None]
        wrong += int((b != want).sum())
    return wrong


def meets() -> int:
    """What torch does on streams of several ranks, ordered by launches that do nothing but meet."""

    @T.prim_func
    def meeting():
        with T.Kernel(1):
            with T.Scale("device"):
                T.barrier()

    meet, x = tilescale.compile(meeting), comm.zeros((1000,), torch.int64)
    rank, other = comm.rank(), (comm.rank() + 1) % comm.world_size()
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for step in range(30):
        x.fill_(100 * step + rank)
        meet()
        wrong += (comm.peer(x, other) != 100 * step + other).sum()
        meet()
    return int(wrong)


def room() -> int:
    """Blocks on every multiprocessor wait for a signal that comes behind a kernel which needs much shared
    memory, on another stream."""

    @T.prim_func
    def waiting(s: T.Signal((1,), keep=True), blocks: T.int32):
        with T.Kernel(blocks, threads=32):
            with T.Scale("device"):
                T.wait(s[0], 1)

    @T.prim_func
    def roomy(A: T.Tensor((50_000,), "float32"), B: T.Tensor((50_000,), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((50_000,), "float32")  # 200 kB
            T.copy(A, tile)
            T.copy(tile, B)

    wait, copy, s = tilescale.compile(waiting), tilescale.compile(roomy), comm.signals(1)
    a, b, other = torch.randn(50_000, device="cuda"), torch.zeros(50_000, device="cuda"), torch.cuda.Stream()
    copy(a, b)  # loaded here: loading may wait for all that runs
    s.fill_(1)
    wait(s, 1)
    wrong = 0
    for _ in range(5):
        s.fill_(0)
        b.fill_(0)
        torch.cuda.synchronize()
        wait(s, 2 * torch.cuda.get_device_properties(0).multi_processor_count)
        with torch.cuda.stream(other):
            copy(a, b)
            s.fill_(1)
        tilescale.cuda.synchronize()
        wrong += int((a != b).sum())
    return wrong


#: those that end well may run one after another in one job
PROGRAMS = (
    lonely,
    far,
    different,
    late,
    ends,
    killed,
    killed_inside,
    asserts,
    raises,
    unordered,
    graph,
    packets,
    sums,
    tuned,
    unsent,
    streams,
    overlap,
    teams,
    inside,
    barriers,
    meets,
    room,
)


def main() -> int:
    comm.init()
    named, bad = {f.__name__: f for f in PROGRAMS}, 0
    for name in sys.argv[1:]:
        wrong = named[name]()
        comm.barrier()
        if comm.rank() == 0 or wrong:
            print(f"{name}: {wrong} wrong", flush=True)
        bad |= wrong != 0
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
