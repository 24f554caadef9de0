"""The language across ranks: remote copies, signals, barriers, collectives, teams; and what ranks are told
when they go wrong."""

from __future__ import annotations

import re

import pytest
import torch

import tilescale.language as T
from tests.kernels import run
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import comm

N = 4


def test_puts_gets_and_signals_of_every_kind():
    """A ring of puts with signals, gets after a barrier, signal op set, keep=True counters over three
    launches."""

    @T.prim_func
    def kernel(
        A: T.Tensor((8, 16), "float32"),
        S: T.SymmTensor((3, 8, 16), "float32"),
        s: T.Signal((4,)),
        k: T.Signal((2,), keep=True),
        C: T.Tensor((4, 8, 16), "float32"),
        D: T.Tensor((4,), "int64"),
        launch: T.int32,
    ):
        with T.Kernel(2, threads=64) as b:
            with T.Scale("device") as rank, num:
                nxt, prev = (rank + 1) % num, (rank + num - 1) % num
                # A put with its signal.
                T.copy(A[b * 4 : b * 4 + 4, 0:16], S[0, b * 4, 0], dst=nxt, signal=s[b])
                T.wait(s[b])
                T.copy(S[0, b * 4, 0], C[0, b * 4 : b * 4 + 4, 0:16])
                mine = A[b * 4 : b * 4 + 4, 0:16]
                T.copy(mine, S[2, b * 4, 0], dst=prev, signal=s[3], blocking=False)
                T.wait(s[3], 2)
                T.copy(S[2, b * 4, 0], C[3, b * 4 : b * 4 + 4, 0:16])
                t = T.alloc_shared((4, 16), "float32")
                T.copy(A[b * 4, 0], t)
                T.copy(t, S[1, b * 4, 0])
                T.barrier()
                T.copy(S[1, b * 4, 0], t, src=prev)  # a get
                T.copy(t, C[1, b * 4, 0])
                T.copy(S[1, 0:4, 0:16], C[2, b * 4 : b * 4 + 4, 0:16], src=(rank + 2) % num)
                if b == 0:
                    T.signal(s[2], 7 + rank, op="set", dst=nxt)
                    T.wait(s[2], 7 + prev, cmp="eq")
                    T.signal(k[0], 2, dst=prev)
                    T.wait(k[0], 2 * launch, cmp="ge")
                    D[0] = launch
                    D[1] = num
                T.barrier()

    made = run(kernel)

    def work():
        comm.init()
        rank, world = comm.rank(), comm.world_size()
        s, k, big = comm.signals((4,)), comm.signals((2,)), comm.empty((3, 8, 16), "float32")
        for launch in range(1, 4):
            whole = torch.randn(world, 8, 16, generator=torch.Generator().manual_seed(launch))
            c, d = torch.zeros(4, 8, 16), torch.zeros(4, dtype=torch.int64)
            made(whole[rank].contiguous(), big, s, k, c, d, launch)
            assert c[0].equal(whole[rank - 1]), launch
            assert c[1].equal(whole[rank - 1]), launch
            assert c[2].equal(whole[(rank + 2) % world, :4].repeat(2, 1)), launch
            assert c[3].equal(whole[(rank + 1) % world]), launch
            assert d.tolist()[:2] == [launch, world]
            assert s.tolist() == [0] * 4, "counters are zero behind a launch"
        assert k.tolist()[0] == 6, "kept counters live on"

    run_ranks(3, work)


def test_a_peer_that_a_chain_of_names_says():
    """The peer's address stands on more bindings than TVM's analyses bear, and goes by way of a slot as the
    others do."""

    @T.prim_func
    def kernel(x: T.SymmTensor((4,), "float32"), s: T.Signal((1,)), B: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, n):
                T.barrier()
                node = rank // 2
                first = node * 2
                T.copy(x, B, src=T.min(first + 1, n - 1))
                T.signal(s[0], dst=T.min(first + 1, n - 1))
                if rank == T.min(first + 1, n - 1):
                    T.wait(s[0], T.min(2, n - first))

    made = run(kernel)

    def work():
        comm.init()
        x, b = comm.full((4,), comm.rank(), "float32"), torch.zeros(4)
        made(x, comm.signals((1,)), b)
        assert b.tolist() == [min(comm.rank() // 2 * 2 + 1, comm.world_size() - 1)] * 4

    run_ranks(3, work)


def test_edges_conversions_and_run_time_ranks_of_remote_copies():
    @T.prim_func
    def kernel(
        S: T.SymmTensor((T.dynamic("m"), 10), "float16"),
        C: T.Tensor((T.dynamic("m"), 10), "float32"),
        peer: T.int32,
    ):
        with T.Kernel(T.ceildiv(S.shape[0], 4), 2) as (x, y):
            with T.Scale("device"):
                t = T.alloc_fragment((4, 8), "float32")
                for i, j in T.Parallel(4, 8):
                    t[i, j] = T.get_rank() * 100 + (x * 4 + i) * 10 + y * 8 + j
                T.copy(t, S[x * 4, y * 8], dst=peer)  # over both edges, converted on the way
                T.barrier()
                T.copy(S[x * 4, y * 8], t, src=peer)
                T.copy(t, C[x * 4, y * 8])

    made = run(kernel)

    def work():
        comm.init()
        rank, world = comm.rank(), comm.world_size()
        s, c = comm.zeros((7, 10), "float16"), torch.zeros(7, 10)
        made(s, c, (rank + 1) % world)
        base = torch.arange(70.0).view(7, 10)
        assert s.float().equal(base + (rank - 1) % world * 100)
        assert c.equal(base + rank * 100)

    run_ranks(3, work)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_collectives_agree_with_torch(dtype: str):
    """All five, on two blocks that each take a part, for 1, 2 and 4 ranks; the reductions give the same bits
    on all of them."""

    def make(world):
        @T.prim_func
        def kernel(
            A: T.Tensor((world, 2, 24), dtype),
            G: T.SymmTensor((3, world, 2, 24), dtype),
            Q: T.SymmTensor((4, 2, 24), dtype),
            C: T.Tensor((8, world, 2, 24), dtype),
        ):
            with T.Kernel(2) as b:
                with T.Scale("device") as (rank, num):
                    T.all_gather(A[0, b, 0:24], G[0, 0:world, b, 0:24])
                    T.copy(G[0, 0:world, b, 0:24], C[0, 0:world, b, 0:24])
                    T.all_to_all(A[0:world, b, 0:24], G[1, 0:world, b, 0:24])
                    T.copy(G[1, 0:world, b, 0:24], C[1, 0:world, b, 0:24])
                    T.copy(A[0:world, b, 0:24], G[2, 0:world, b, 0:24])
                    t = T.alloc_shared((24,), dtype)
                    for k, op in enumerate(("sum", "max", "min", "prod")):
                        T.reduce_scatter(G[2, 0:world, b, 0:24], t, op=op)
                        T.copy(t, C[2, k % world, b, 0:24]) if k < world else None
                        T.copy(A[0, b, 0:24], Q[k, b, 0:24])
                        T.all_reduce(Q[k, b, 0:24], op=op)
                        T.copy(Q[k, b, 0:24], C[3 + k, 0, b, 0:24])
                    T.copy(A[0, b, 0:24], Q[0, b, 0:24])
                    T.all_reduce(Q[0, b, 0:24], t)
                    T.copy(t, C[3, 1 % world, b, 0:24])
                    T.broadcast(A[0, b, 0:24], Q[1, b, 0:24], num - 1)
                    T.copy(Q[1, b, 0:24], C[7, 0, b, 0:24])

        return kernel

    def work(made):
        comm.init()
        rank, world = comm.rank(), comm.world_size()
        torch_dtype = getattr(torch, dtype)
        a = torch.randint(-3, 4, (world, world, 2, 24), generator=torch.Generator().manual_seed(1)).to(
            torch_dtype
        )
        g, q = comm.empty((3, world, 2, 24), dtype), comm.empty((4, 2, 24), dtype)
        c = torch.zeros(8, world, 2, 24, dtype=torch_dtype)
        for _ in range(2):
            made(a[rank].contiguous(), g, q, c)
        wide = a.double()
        reduced = [wide.sum(0), wide.amax(0), wide.amin(0), wide.prod(0)]
        assert c[0].equal(a[:, 0]) and c[1].equal(a[:, rank])
        for k in range(min(4, world)):
            assert c[2, k].double().equal(reduced[k][rank]), k
        for k in range(4):
            assert c[3 + k, 0].double().equal(reduced[k][0]), k
        assert c[3, 1 % world].double().equal(reduced[0][0]) and c[7, 0].equal(a[world - 1, 0])
        return c[3].double().tolist() if world > 1 else None

    for world in (1, 2, 4):
        results = run_ranks(world, work, run(make(world)))
        assert all(r == results[0] for r in results)


def test_one_collective_in_two_branches():
    """Ranks meet wherever the collective stands that they come to."""

    @T.prim_func
    def kernel(A: T.Tensor((8,), "float32"), Q: T.SymmTensor((8,), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, num):
                T.copy(A, Q)
                if rank == 0:
                    T.all_reduce(Q, C)
                else:
                    T.all_reduce(Q, C)

    made = run(kernel)

    def work():
        comm.init()
        c = torch.zeros(8)
        made(torch.full((8,), 1.0 + comm.rank()), comm.empty((8,), "float32"), c)
        assert c.equal(torch.full((8,), 6.0))

    run_ranks(3, work)


def test_sums_of_floats_have_the_same_bits_everywhere():
    @T.prim_func
    def kernel(
        A: T.Tensor((64,), "float32"), Q: T.SymmTensor((64,), "float32"), C: T.Tensor((64,), "float32")
    ):
        with T.Kernel(1):
            with T.Scale("device"):
                T.copy(A, Q)
                T.all_reduce(Q)
                T.copy(Q, C)

    made = run(kernel)

    def work():
        comm.init()
        rank = comm.rank()
        a = (
            torch.randn(comm.world_size(), 64, generator=torch.Generator().manual_seed(0))
            * 10 ** torch.arange(comm.world_size())[:, None]
        )
        c, q = torch.zeros(64), comm.empty((64,), "float32")
        made(a[rank].contiguous(), q, c)
        total = a[0].clone()
        for r in range(1, comm.world_size()):
            total += a[r]  # in rank order
        assert c.equal(total)

    run_ranks(3, work)


def test_teams_count_their_own_ranks():
    @T.prim_func
    def kernel(S: T.SymmTensor((2, 4), "int32"), s: T.Signal((1,)), C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, num):
                t = T.alloc_shared((4,), "int32")
                for i in T.Parallel(4):
                    t[i] = rank * 10 + num + i * 100
                T.copy(t, S[0, 0:4], dst=(rank + 1) % num, signal=s[0])
                T.wait(s[0])
                T.copy(S[0, 0:4], C)
                T.barrier()

    made = run(kernel)

    def work():
        comm.init()
        world = comm.rank()
        evens, odds = comm.team([0, 2]), comm.team([1, 3])
        mine = evens if world % 2 == 0 else odds
        s, c = comm.empty((2, 4), "int32", team=mine), torch.zeros(4, dtype=torch.int32)
        counter = comm.signals((1,), team=mine)
        for _ in range(3):
            made(s, counter, c)
        neighbour = 1 - world // 2
        assert c.tolist() == [neighbour * 10 + 2 + i * 100 for i in range(4)]

    run_ranks(4, work)


def failing(fn, n=2, **env) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(n, fn, env={"TILESCALE_WAIT_TIMEOUT": "1", **env}, timeout=30)
    assert caught.value.seconds < 20
    return caught.value


def caret(text: str) -> str:
    """What the caret of an error stands under."""
    lines = text.splitlines()
    at = next(k for k, line in enumerate(lines) if re.fullmatch(r"\s*\|\s*\^+", line))
    return lines[at - 1][lines[at].index("^") : lines[at].rindex("^") + 1]


def test_a_signal_that_never_comes_ends_all_ranks_with_a_report():
    @T.prim_func
    def kernel(S: T.SymmTensor((4,), "float32"), ready: T.Signal((3,))):
        with T.Kernel(2) as b:
            with T.Scale("device") as (rank, num):
                T.signal(ready[1], 2, dst=rank)
                if b == 1 and rank == 1:
                    T.wait(ready[1], 9)

    made = run(kernel)

    def work():
        comm.init()
        made(comm.empty((4,), "float32"), comm.signals((3,)))

    error = failing(work)
    text = error.failures[-1].text
    for part in ("rank 1, block (1, 0, 0)", "ready", ">= 9", "the value is 4", "test_language_ranks.py"):
        assert part in text, (part, text)
    assert caret(text) == "T.wait(ready[1], 9)"


def test_a_rank_out_of_range_at_run_time():
    @T.prim_func
    def kernel(S: T.SymmTensor((4,), "float32"), A: T.Tensor((4,), "float32"), peer: T.int32):
        with T.Kernel(1):
            with T.Scale("device") as (rank, num):
                T.copy(A, S, dst=peer)

    made = run(kernel)

    def work():
        comm.init()
        made(comm.empty((4,), "float32"), torch.zeros(4), 2 if comm.rank() == 0 else 1)

    text = str(failing(work))
    assert re.search(r"rank 2 .*(of|0|team|world).*2", text), text
    assert caret(text) == "T.copy(A, S, dst=peer)"


def make_put(value):
    @T.prim_func
    def put(S: T.SymmTensor((8,), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            with T.Scale("device") as (rank, num):
                t = T.alloc_shared((8,), "float32")
                T.fill(t, value)
                T.copy(t, S, dst=(rank + 1) % num)
                T.barrier()
                T.copy(S, C)

    return put


def make_other():
    @T.prim_func
    def other(S: T.SymmTensor((8,), "float32"), C: T.Tensor((8,), "float32")):
        with T.Kernel(1):
            with T.Scale("device"):
                T.barrier()
                T.copy(S, C, src=0)

    return other


@pytest.mark.parametrize("what", ["kernel", "constants", "offset"])
def test_ranks_that_launched_different_things_learn_it_when_they_meet(what: str):
    mine = run(make_put(1.0))
    its = run(make_other() if what == "kernel" else make_put(2.0) if what == "constants" else make_put(1.0))

    def work():
        comm.init()
        rank = comm.rank()
        one, two = comm.empty((8,), "float32"), comm.empty((8,), "float32")
        (its if rank == 1 else mine)(two if rank == 1 and what == "offset" else one, torch.zeros(8))

    text = str(failing(work))
    assert "launched" in text and "rank 0" in text and "rank 1" in text, text
    if what == "kernel":
        assert "put" in text and "other" in text
    if what == "offset":
        assert "S" in text


def test_an_ordinary_tensor_for_a_symmetric_one():
    made = run(make_put(1.0))

    def work():
        comm.init()
        made(torch.zeros(8), torch.zeros(8))

    for failure in failing(work).failures:
        assert failure.kind == "TileTypeError" and "S is an ordinary tensor" in failure.text, failure.text
        assert (
            "expected: T.SymmTensor((8,)" in failure.text
            and "write instead: S = tilescale.comm.empty(" in failure.text
        )
        assert caret(failure.text) == 'S: T.SymmTensor((8,), "float32")'


def test_one_failed_assertion_ends_all():
    @T.prim_func
    def kernel(S: T.SymmTensor((8,), "float32"), s: T.Signal((1,))):
        with T.Kernel(1):
            with T.Scale("device") as (rank, num):
                T.device_assert(rank != 1, "rank one is unhappy")
                T.signal(s[0], dst=0)
                if rank == 0:
                    T.wait(s[0], num)

    made = run(kernel)

    def work():
        comm.init()
        made(comm.empty((8,), "float32"), comm.signals((1,)))

    error = failing(work, TILESCALE_WAIT_TIMEOUT="15")
    assert "rank one is unhappy" in str(error) and error.seconds < 10
