"""T.Scale of every kind on one rank: executors, clusters, the grid; barriers, signals, remote copies and
collectives among them."""

from __future__ import annotations

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import LaunchError, TileError, TileTypeError, TileValueError


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def test_executors_run_once_each_and_nest():
    @T.prim_func
    def kernel(C: T.Tensor((6, 2, 256), "int32")):
        with T.Kernel(2, threads=256) as b:
            with T.Scale("block") as (i, n):
                C[0, b, 0] = i * 100 + n
            with T.Scale("warpgroup") as (g, ng):
                C[1, b, g] = ng
                with T.Scale("warp") as (w, nw):  # of this warpgroup
                    C[2, b, g * 4 + w] = nw
                    with T.Scale("thread") as (t, nt):
                        C[3, b, (g * 4 + w) * 32 + t] = nt
            with T.Scale("thread") as (t, nt):
                C[4, b, t] = nt + t
            with T.Scale("device") as (rank, world):
                with T.Scale("warp") as (w, nw):
                    C[5, b, w] = world * 10 + nw

    c = ints(6, 2, 256)
    run(kernel)(c)
    assert c[0, :, 0].tolist() == [2, 102]
    assert (c[1, :, :2] == 2).all() and (c[1, :, 2:] == -1).all()
    assert (c[2, :, :8] == 4).all() and (c[2, :, 8:] == -1).all()
    assert (c[3] == 32).all()
    assert c[4].equal((256 + torch.arange(256, dtype=torch.int32)).expand(2, -1))
    assert (c[5, :, :8] == 18).all() and (c[5, :, 8:] == -1).all()


def test_executors_have_fragments_of_their_own_and_share_shared_memory():
    @T.prim_func
    def kernel(
        A: T.Tensor((4, 16), "float32"), C: T.Tensor((4, 16), "float32"), D: T.Tensor((16,), "float32")
    ):
        with T.Kernel(1, threads=128):
            shared = T.alloc_shared((4, 16), "float32")
            total = T.alloc_fragment((16,), "float32")
            with T.Scale("warp") as (w, n):
                own = T.alloc_fragment((16,), "float32")
                T.copy(A[w, 0], own)
                for i in T.Parallel(16):
                    own[i] = own[i] * (w + 1)
                T.copy(own, shared[w, 0])
            T.barrier()
            T.copy(shared, C)
            T.reduce_sum(shared, total, dim=0)
            T.copy(total, D)

    a, c, d = torch.randn(4, 16), torch.zeros(4, 16), torch.zeros(16)
    run(kernel)(a, c, d)
    assert c.equal(a * torch.arange(1, 5)[:, None]) and torch.allclose(d, c.sum(0), atol=1e-5)


def test_executors_that_wait_have_views_of_fragments_of_their_own():
    @T.prim_func
    def kernel(A: T.Tensor((4, 16), "int32"), C: T.Tensor((4, 32), "int16")):
        with T.Kernel(1, threads=128):
            ready = T.alloc_signal((1,))
            with T.Scale("warp") as (w, n):
                own = T.alloc_fragment((16,), "int32")
                halves = T.view(own, (32,), "int16")
                T.copy(A[w, 0], own)
                T.signal(ready[0])
                T.wait(ready[0], n)
                for i in T.Parallel(32):
                    halves[i] = halves[i] + w
                T.copy(halves, C[w, 0])

    a, c = (
        torch.randint(-(1 << 30), 1 << 30, (4, 16), dtype=torch.int32),
        torch.zeros(4, 32, dtype=torch.int16),
    )
    run(kernel)(a, c)
    assert c.equal((a.view(torch.int16).int() + torch.arange(4)[:, None]).to(torch.int16))


def test_warps_hand_tiles_over_by_signals():
    """Producer and consumer warps through a ring of two stages; a block's barrier does not stand in their
    way."""
    rounds = 9

    @T.prim_func
    def kernel(A: T.Tensor((rounds, 32), "float32"), C: T.Tensor((3, 32), "float32")):
        with T.Kernel(3, threads=96) as b:
            ring = T.alloc_shared((2, 32), "float32")
            full, empty = T.alloc_signal((2,)), T.alloc_signal((2,))
            acc = T.alloc_shared((32,), "float32")
            T.clear(acc)
            with T.Scale("warp") as (w, n):
                if w == 0:
                    for k in T.serial(rounds):
                        if k >= 2:
                            T.wait(empty[k % 2], k // 2 * 2)
                        T.copy(A[k, 0], ring[k % 2, 0:32])
                        T.signal(full[k % 2])
                else:
                    part = T.alloc_fragment((16,), "float32")
                    for k in T.serial(rounds):
                        T.wait(full[k % 2], k // 2 + 1)
                        T.copy(ring[k % 2, (w - 1) * 16 : (w - 1) * 16 + 16], part)
                        for i in T.Parallel(16):
                            acc[(w - 1) * 16 + i] += part[i] * (k + b)
                        T.signal(empty[k % 2])
            T.copy(acc, C[b, 0])

    a, c = torch.randint(-4, 5, (rounds, 32)).float(), torch.zeros(3, 32)
    run(kernel)(a, c)
    for b in range(3):
        assert c[b].equal(sum(a[k] * (k + b) for k in range(rounds)))


@pytest.mark.parametrize(("cmp", "value"), [("ge", 3), ("eq", 3), ("gt", 2), ("ne", 0), ("le", 5), ("lt", 9)])
def test_every_comparison_of_a_wait(cmp: str, value: int):
    @T.prim_func
    def kernel(C: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=64):
            s = T.alloc_signal((1,))
            with T.Scale("warp") as (w, n):
                if w == 0:
                    T.wait(s[0], value, cmp=cmp)
                    C[0] = 1
                else:
                    T.signal(s[0], 3, op="set")
                    C[1] = 1

    c = ints(2)
    run(kernel)(c)
    assert c.tolist() == [1, 1]


def test_blocks_of_a_cluster_reach_each_others_shared_memory():
    @T.prim_func
    def kernel(
        C: T.Tensor((8, 16), "float32"), D: T.Tensor((8, 2), "int32"), E: T.Tensor((8, 16), "float32")
    ):
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
                T.copy(own, got, src=(c + 1) % n)  # reads a neighbour's tile
                for k in T.serial(n):  # puts a quarter into everyone's, with a signal
                    T.copy(own[k * 4 : k * 4 + 4], put[c, 0:4], dst=k, signal=arrived[0])
                T.wait(arrived[0], n)
                T.copy(got, C[b, 0])
                for i, j in T.Parallel(4, 4):
                    E[b, i * 4 + j] = put[i, j]
                T.barrier()

    c, d, e = torch.zeros(8, 16), ints(8, 2), torch.zeros(8, 16)
    run(kernel)(c, d, e)
    for b in range(8):
        rank, base = b % 4, b - b % 4
        assert d[b].tolist() == [rank, 4]
        assert c[b].tolist() == [(base + (rank + 1) % 4) * 100 + i for i in range(16)]
        assert e[b].tolist() == [(base + k) * 100 + rank * 4 + j for k in range(4) for j in range(4)]


def test_clusters_of_two_axes_and_remote_signals():
    @T.prim_func
    def kernel(C: T.Tensor((4, 4, 2), "int32")):
        with T.Kernel(block=(4, 4), cta_cluster=(2, 2), threads=32) as (x, y):
            s = T.alloc_signal((4,))
            with T.Scale("cta_cluster") as (c, n):
                for k in T.serial(n):
                    T.signal(s[c], c + 1, dst=k)
                for k in T.serial(n):
                    T.wait(s[k], k + 1, cmp="eq")
                C[x, y, 0] = c
                C[x, y, 1] = n

    c = ints(4, 4, 2)
    run(kernel)(c)
    assert (
        c[:, :, 0].tolist() == [[x % 2 + 2 * (y % 2) for y in range(4)] for x in range(4)]
        and (c[:, :, 1] == 4).all()
    )


def test_collectives_in_a_cluster_and_over_lanes():
    @T.prim_func
    def kernel(C: T.Tensor((4, 5, 16), "float32"), D: T.Tensor((2, 8), "float32")):
        with T.Kernel(4, cta_cluster=4, threads=64) as b:
            own, out = T.alloc_shared((4,), "float32"), T.alloc_shared((4, 4), "float32")
            mine = T.alloc_shared((4, 4), "float32")
            for i in T.Parallel(4):
                own[i] = b * 10 + i
            for i, j in T.Parallel(4, 4):
                mine[i, j] = b * 100 + i * 10 + j
            flat = T.reshape(out, (16,))
            with T.Scale("cta_cluster") as (c, n):
                T.all_gather(own, out)
                T.copy(flat, C[b, 0, 0:16])
                T.all_to_all(mine, out)
                T.copy(flat, C[b, 1, 0:16])
                part = T.alloc_shared((4,), "float32")
                T.reduce_scatter(mine, part)
                T.copy(part, C[b, 2, 0:4])
                T.broadcast(own, part, 2)
                T.copy(part, C[b, 3, 0:4])
                T.all_reduce(own, op="max")
                T.copy(own, C[b, 4, 0:4])
                T.barrier()
            with T.Scale("warp") as (w, nw):
                lanes, total = T.alloc_fragment((32, 8), "float32"), T.alloc_fragment((8,), "float32")
                for i, j in T.Parallel(32, 8):
                    lanes[i, j] = i * (j + 1) + w
                T.all_reduce(lanes, total)
                if b == 0:
                    T.copy(total, D[w, 0])

    c, d = torch.zeros(4, 5, 16), torch.zeros(2, 8)
    run(kernel)(c, d)
    r = range(4)
    for b in r:
        assert c[b, 0].tolist() == [k * 10 + i for k in r for i in r]
        assert c[b, 1].tolist() == [k * 100 + b * 10 + j for k in r for j in r]
        assert c[b, 2, :4].tolist() == [sum(k * 100 + b * 10 + j for k in r) for j in r]
        assert c[b, 3, :4].tolist() == [20 + i for i in r]
        assert c[b, 4, :4].tolist() == [30 + i for i in r]
    assert d.tolist() == [[496.0 * (j + 1) + 32 * w for j in range(8)] for w in range(2)]


def test_a_block_that_others_reach_into_ends_with_its_cluster():
    """Readers are late and many clusters follow: the memory of a block that has nothing left to do must not
    go to the next one."""

    @T.prim_func
    def kernel(C: T.Tensor((600, 256), "int32")):
        with T.Kernel(600, cta_cluster=4, threads=64) as b:
            own, got = T.alloc_shared((256,), "int32"), T.alloc_shared((256,), "int32")
            ready, spin = T.alloc_signal((1,)), T.alloc_var("int32")
            for i in T.Parallel(256):
                own[i] = b * 1000 + i
            with T.Scale("cta_cluster") as (c, n):
                for k in T.serial(n):
                    T.signal(ready[0], dst=k)
                if c != 0:
                    T.wait(ready[0], n)
                    while spin < 2000 * c:
                        spin += 1
                    T.copy(own, got, src=0)
                    T.copy(got, C[b, 0])

    c = ints(600, 256)
    run(kernel)(c)
    base = (torch.arange(600) // 4 * 4 * 1000)[:, None] + torch.arange(256)
    mine = torch.arange(600) % 4 != 0
    assert c[mine].equal(base[mine].int()) and (c[~mine] == -1).all()


def test_the_grid_meets_and_later_blocks_may_signal_earlier_ones():
    @T.prim_func
    def kernel(A: T.Tensor((32,), "int32"), C: T.Tensor((32,), "int32"), D: T.Tensor((2, 32), "int32")):
        with T.Kernel(32, threads=64):
            with T.Scale("grid") as (i, n):
                A[i] = i + 1
                T.barrier()
                C[i] = A[(i + 5) % n]  # what another block wrote
                T.barrier()
                A[i] = -i
                T.barrier()
                D[0, i] = A[n - 1 - i]
                D[1, i] = n
            T.sync_grid()

    a, c, d = torch.zeros(32, dtype=torch.int32), ints(32), ints(2, 32)
    run(kernel)(a, c, d)
    assert c.tolist() == [(i + 5) % 32 + 1 for i in range(32)] and d[0].tolist() == [
        -(31 - i) for i in range(32)
    ]


def test_executors_meet_too():
    """A barrier of the grid inside a warp scale meets every warp of every block."""

    @T.prim_func
    def kernel(A: T.Tensor((4, 2), "int32"), C: T.Tensor((4, 2), "int32")):
        with T.Kernel(4, threads=64) as b:
            with T.Scale("grid"):
                with T.Scale("warp") as (w, n):
                    x = b * 10 + w
                    A[b, w] = x
                    T.barrier()
                    C[b, w] = A[3 - b, 1 - w] + x

    a, c = ints(4, 2), ints(4, 2)
    run(kernel)(a, c)
    assert c.tolist() == [[(3 - b) * 10 + 1 - w + b * 10 + w for w in range(2)] for b in range(4)]


def test_a_fork_sees_all_the_names_around_it():
    @T.prim_func
    def kernel(
        A: T.Tensor((8,), "float32"), C: T.Tensor((4, 2), "float32"), f: T.float32, n: T.int64, flag: T.bool
    ):
        with T.Kernel(4, threads=64) as b:
            half = A[b] * 0.5
            wide = n + b
            on = half > 0.0
            v = T.alloc_var("float32", 2.0)
            v = v + b
            s = T.alloc_signal((1,))
            for k in T.serial(2):
                with T.Scale("warp") as (w, m):
                    T.signal(s[0])
                    T.wait(s[0], 2 * (k + 1))
                    if w == k:
                        C[b, w] = (
                            half * f + T.cast(wide, "float32") + (1.0 if on and flag else 0.0) + v * (k + 1)
                        )

    a, c = torch.randn(8), torch.zeros(4, 2)
    run(kernel)(a, c, 3.0, 2**20, True)
    for b in range(4):
        for k in range(2):
            want = a[b] * 1.5 + 2**20 + b + float(a[b] > 0) + (2 + b) * (k + 1)
            assert abs(float(c[b, k] - want)) < 0.5, (b, k)


def test_a_signal_that_never_comes_is_reported(monkeypatch: pytest.MonkeyPatch):
    from tilescale.native import configure

    @T.prim_func
    def kernel(C: T.Tensor((2,), "int32"), k: T.int32):
        with T.Kernel(2, threads=64) as b:
            s = T.alloc_signal((3,))
            with T.Scale("warp") as (w, n):
                if w == 0:
                    T.signal(s[2], 4)
                elif b == 1:
                    # a number of the caller's: a constant 7 would not compile, since nothing adds more than 4
                    T.wait(s[2], k)

    made = run(kernel)
    monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", "0.3")
    configure()
    try:
        with refused(LaunchError, "", at="T.wait(s[2], k)") as report:
            made(ints(2), 7)
    finally:
        monkeypatch.undo()
        configure()
    for part in ("rank 0", "block (1, 0, 0)", "s[2]", "7", "4"):
        assert part in report.text, report.text


def test_what_scales_signals_and_barriers_refuse():
    def refuse(kind, message, statement, **more):
        @T.prim_func
        def kernel(A: T.Tensor((16,), "int64"), S: T.SymmTensor((4, 8), "float32"), s: T.Signal((4,))):
            with T.Kernel(4, cta_cluster=2):
                t, local = T.alloc_shared((8,), "float32"), T.alloc_signal((2,))
                frag = T.alloc_fragment((8,), "float32")
                statement(A, S, s, t, local, frag)

        with refused(kind, message, **more):
            kernel.trace()

    @T.macro
    def at(scale, f):
        with T.Scale(scale):
            f()

    v, t = TileValueError, TileTypeError
    refuse(
        t,
        "s is signalled at the scale of the block",
        lambda A, S, s, t, l, f: T.signal(s[0]),
        write='inside T.Scale("device")',
    )
    refuse(
        t,
        "is signalled at the scale of the device",
        lambda A, S, s, t, l, f: at("device", lambda: T.wait(l[0])),
        write='T.Scale("cta_cluster")',
    )
    refuse(
        t,
        "A is a int64 tensor and no signal",
        lambda A, S, s, t, l, f: T.signal(A[0]),
        expected="A: T.Signal(shape)",
    )
    refuse(v, "T.signal is a tile of (2,)", lambda A, S, s, t, l, f: T.signal(l), expected="one element")
    refuse(v, "T.wait with cmp='=='", lambda A, S, s, t, l, f: T.wait(l[0], 1, cmp="=="), expected="ge, eq")
    refuse(
        v, "T.signal with op='sub'", lambda A, S, s, t, l, f: T.signal(l[0], 1, op="sub"), expected="add, set"
    )
    refuse(t, "T.signal is given 3", lambda A, S, s, t, l, f: T.signal(3), expected="a counter")
    refuse(
        v,
        "dst=5 is no block of the cluster",
        lambda A, S, s, t, l, f: at("cta_cluster", lambda: T.signal(l[0], dst=5)),
        expected="0 ≤ block < 2",
    )
    refuse(
        t,
        "S belongs to another block (src=) and is not in shared memory",
        lambda A, S, s, t, l, f: at("cta_cluster", lambda: T.copy(S[0, 0], t, src=1)),
        write="T.alloc_shared",
    )
    refuse(
        TileError,
        "T.all_gather has no one to meet",
        lambda A, S, s, t, l, f: T.all_gather(t, S),
        write='with T.Scale("device")',
    )
    refuse(v, "T.all_gather: S is (4, 8) and a part",
           lambda A, S, s, t, l, f: at("device", lambda: T.all_gather(f[0:4], S)))  # fmt: skip
    refuse(
        t,
        "the destination t cannot be reached",
        lambda A, S, s, t, l, f: at("device", lambda: T.broadcast(f, t)),
        write="T.SymmTensor",
    )
    refuse(
        v,
        "T.all_reduce with op='avg'",
        lambda A, S, s, t, l, f: at("device", lambda: T.all_reduce(S, op="avg")),
        expected="sum, max",
    )
    refuse(v, "root=-1 is no rank", lambda A, S, s, t, l, f: at("device", lambda: T.broadcast(S, S, -1)))


def test_blocks_of_a_thousand_threads_end_before_many_others_begin():
    """Stacks of all threads of all blocks at once are more than a process may have (vm.max_map_count)."""

    @T.prim_func
    def kernel(C: T.Tensor((40, 1024), "int32")):
        with T.Kernel(40, threads=1024) as b:
            row = T.alloc_shared((1024,), "int32")
            with T.Scale("thread") as (t, n):
                row[t] = t
                T.sync_threads()
                C[b, t] = row[1023 - t]

    c = ints(40, 1024)
    run(kernel)(c)
    assert c.equal(torch.arange(1023, -1, -1, dtype=torch.int32).expand(40, 1024))
