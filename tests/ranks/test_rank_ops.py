"""tilescale.ops of several ranks on processes: every small case on 1 to 8 ranks, torch's groups, memory that
is shared by calls of different shapes, ranks that call different things."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.nn.attention.bias imports it: both once here, not in each of the forked ranks
import torch.distributed as dist

import tilescale.ops
from tests.ranks.harness import RanksFailed, run_ranks
from tests.unit.ops.rank_cases import nothing_left, right, run
from tilescale import comm
from tilescale.errors import CommError, LaunchError, TileError
from tilescale.ops import RANK_MODULES, host, load_ranks
from tilescale.ops.case import Expected, as_tuple, worst
from tilescale.ops.ranks import flat, gemm_reduce, gemm_scatter, reduce
from tilescale.ops.ranks.workspace import release, size

pytestmark = pytest.mark.usefixtures("unoptimised")

CASES = {m: [c for c in load_ranks(m).cases if c.small] for m in RANK_MODULES}


def one_after_another(cases: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [run(module, dict(c.shape), seeds=1) for module, c in cases]


@pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", range(1, 9))
def test_meaning(world: int, other: bool):
    """Cases of all operations one after another, in the same workspace: each case on one number of ranks
    (on three the simulator has all of them, tests/unit/ops/test_rank_library.py), every second one here and
    the others under the marker slow. Those run the code that LLVM has optimised, which takes longer to make
    than all of the rest."""
    every = [(m, c) for m in RANK_MODULES for c in CASES[m]]
    cases = every[other::2][world - 1 :: 8]
    optimize = {"TILESCALE_CPU_OPTIMIZE": "1" if other else "0"}
    done = run_ranks(world, one_after_another, cases, timeout=120, env=optimize)
    for k, (module, case) in enumerate(cases):
        right([results[k] for results in done], case, alike=load_ranks(module).alike)


def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def with_torch(address: int, what: Any, *args: Any) -> Any:
    """On a rank that has joined torch's job, too."""
    comm.init()
    where = f"tcp://127.0.0.1:{address}"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank(), world_size=comm.world_size())
    try:
        return what(*args)
    finally:
        comm.barrier()
        dist.destroy_process_group()


def is_right(got: torch.Tensor, want: Expected) -> bool:
    return worst(got, want) <= 1


def are_close(theirs: torch.Tensor, got: torch.Tensor) -> bool:
    return torch.allclose(theirs.double(), got.double(), rtol=0.02, atol=0.02)


def groups(modules: tuple[str, ...]) -> list[bool]:
    """Every operation in a process group, a mesh and by the library."""
    pair = dist.new_group([0, 2])
    mesh = dist.init_device_mesh("cpu", (comm.world_size(),), mesh_dim_names=("tp",))
    right = []
    for module in modules:
        op, case = load_ranks(module), CASES[module][0]
        for group, members in ((None, [0, 1, 2]), (mesh["tp"], [0, 1, 2]), (pair, [0, 2])):
            if comm.rank() not in members:
                continue
            me, world = members.index(comm.rank()), len(members)
            everyone = [op.draw(**case.shape, rank=r, world=world) for r in range(world)]
            want = op.reference(everyone)[me]
            got = op.run(**everyone[me], group=group)
            right.append(all(map(is_right, as_tuple(got), as_tuple(want))))
            process_group = pair if group is pair else dist.group.WORLD
            measured = op.seen(op.call({**everyone[me], "group": group})())
            theirs = op.peers["library"](**everyone[me], group=process_group)()
            right.append(all(map(are_close, as_tuple(theirs), as_tuple(measured))))
    return right


def test_torch_groups_and_peers():
    """A process group and a mesh name the ranks; the peers of benchmarks compute the same."""
    done = run_ranks(3, with_torch, port(), groups, RANK_MODULES, timeout=120)
    assert all(all(r) for r in done) and [len(r) for r in done] == [
        6 * len(RANK_MODULES),
        4 * len(RANK_MODULES),
        6 * len(RANK_MODULES),
    ], done


def by_the_library() -> bool:
    x = torch.arange(8.0).reshape(-1, 2) + 100 * comm.rank()
    return bool(tilescale.ops.all_gather(x, how="library").equal(tilescale.ops.all_gather(x)))


def test_the_library_gathers_the_same():
    assert run_ranks(2, with_torch, port(), by_the_library) == [True, True]


def test_operations_leave_multiprocessors_to_others(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    assert flat.multiprocessors(cpu, None) == 132
    monkeypatch.setenv("TILESCALE_SPARE", "16")
    assert (flat.multiprocessors(cpu, None), flat.multiprocessors(cpu, 4), host.units(cpu)) == (116, 4, 116)


def test_ranks_that_share_a_gpu_have_a_part_of_it_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comm, "sharing", lambda: 2)
    assert host.units(torch.device("cpu")) == 66
    monkeypatch.setenv("TILESCALE_SPARE", "16")
    assert host.units(torch.device("cpu")) == 50


def rounded_once() -> float:
    """Of a small product taken apart, how far it is off, as a share of what one rounding may be."""
    comm.init()
    parts = [gemm_scatter.draw(50, 72, 96, rank=r, world=2) for r in range(2)]
    got = tilescale.ops.matmul_reduce_scatter(**parts[comm.rank()])
    want = sum(a["x"].double() @ a["w"].double() for a in parts).chunk(2)[comm.rank()]
    return float(((got.double() - want).abs() / (want.abs() * 2.0**-8 + 1e-4)).max())


def test_small_parts_of_a_sum_are_not_rounded_on_their_way():
    assert max(run_ranks(2, rounded_once)) <= 1


def growing() -> list[bool]:
    """Calls that outgrow the workspace, go back to small ones and give it back; symmetric results."""
    comm.init()
    rank, world, right = comm.rank(), comm.world_size(), []
    for n in (10, 3_000_000, 20, 5_000_000, 7):
        got = tilescale.ops.all_gather(torch.full((n,), rank, dtype=torch.uint8))
        right.append(bool(got.equal(torch.arange(world).repeat_interleave(n).to(torch.uint8))))
        right.append(nothing_left())
    right.append(size() >= 3 * 5_000_000)
    release()
    right.append(size() == 0)
    out = comm.full((2 * world, 3), -1.0)
    x = torch.randn(2, 3) + rank
    got = tilescale.ops.all_gather(x, out=out)
    right.append(got is out and bool(got.equal(tilescale.ops.all_gather(x))))
    return right


def test_the_workspace_grows_and_is_given_back():
    assert all(all(r) for r in run_ranks(3, growing))


def anywhere() -> list[bool]:
    """Sums and broadcasts in place, into memory that begins anywhere, out of views, of nothing."""
    comm.init()
    rank, world, right = comm.rank(), comm.world_size(), []
    want = torch.arange(1000.0) * world + 100 * sum(range(world))
    for way in ("packets", "two_packets", "one_shot", "two_shot"):
        x = torch.arange(1000.0) + 100 * rank
        right.append(tilescale.ops.all_reduce(x, out=x, how=way) is x and bool(x.equal(want)))
        beside = torch.full((1003,), -1.0)
        y = beside[1:1001].copy_(torch.arange(1000.0) + 100 * rank)  # four bytes behind a multiple of 16
        right.append(bool(tilescale.ops.all_reduce(y, how=way).equal(want)))
        tilescale.ops.all_reduce(y, out=y, how=way)
        right.append(bool(y.equal(want)) and bool((beside[[0, 1001, 1002]] == -1).all()))
    for way in ("direct", "relayed"):
        x = torch.arange(7, dtype=torch.int16)[2:] + 10 * rank
        right.append(tilescale.ops.broadcast(x, world - 1, out=x, how=way) is x)
        right.append(bool(x.equal(torch.arange(7, dtype=torch.int16)[2:] + 10 * (world - 1))))
    x = (torch.arange(24.0).view(4, 6) + rank).T  # not contiguous
    part = tilescale.ops.reduce_scatter(x)
    right.append(bool(tilescale.ops.all_gather(part, rows=6).equal(tilescale.ops.all_reduce(x))))
    for nothing in (torch.empty(0, 5), torch.empty(4, 0)):
        for op in (tilescale.ops.all_reduce, tilescale.ops.reduce_scatter, tilescale.ops.broadcast):
            right.append(op(nothing).numel() == 0)
        right.append(tilescale.ops.all_gather(nothing).numel() == 0)
    right.append(tilescale.ops.matmul_all_reduce(torch.empty(0, 5), torch.ones(5, 3)).shape == (0, 3))
    return right


def test_in_place_and_anywhere_in_memory():
    done = run_ranks(3, anywhere)
    assert all(all(r) for r in done), done


def one_sum_by_every_way() -> list[bool]:
    """In a random order of ways, sizes and dtypes, with numbers that are none among them."""
    comm.init()
    rank, world, right = comm.rank(), comm.world_size(), []
    draw, ways = random.Random(3), ["packets", "two_packets", "one_shot", "two_shot"]
    for step in range(12):
        n, dtype = (
            draw.choice((1, 9, 1000, 5000, 70_001)),
            draw.choice((torch.bfloat16, torch.float16, torch.float32)),
        )
        x = torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
        odd = (0.0, -0.0, float("inf"), -float("inf"), float("nan"))
        for k in range(n // 8):
            x[draw.randrange(n)] = odd[(k + step) % 5]
        if rank == step % world and n > 8:
            x.view(torch.uint8)[: 8 * (n // 8)] = 255  # packets of ones alone
        draw.shuffle(ways)
        sums = [tilescale.ops.all_reduce(x, how=way) for way in ways]
        whole = tilescale.ops.all_gather(sums[0].view(1, -1))
        for other in (*sums[1:], *whole):
            same = (other == sums[0]) & (other.signbit() == sums[0].signbit())
            right.append(bool((same | (other.isnan() & sums[0].isnan())).all()))
    return right


@pytest.mark.parametrize(
    "world, optimize",
    [(1, 0), (2, 0), (3, 0), (4, 1), *(pytest.param(n, 1, marks=pytest.mark.slow) for n in (1, 2, 3))],
)
def test_all_ways_to_add_give_the_same_bits(world: int, optimize: int):
    """On four ranks by the code that LLVM has optimised: its vectors might add in another order."""
    env = {"TILESCALE_CPU_OPTIMIZE": str(optimize)}
    done = run_ranks(world, one_sum_by_every_way, timeout=180, env=env)
    assert all(all(r) for r in done), done


@pytest.mark.parametrize("world, kilobytes", [(2, 1024), (3, 960), (4, 426), (8, 121)])
def test_sums_go_in_one_trip_of_packets_then_in_two_then_by_signals(world: int, kilobytes: int):
    """As docs/OPS.md says up to which sizes."""
    one, two = kilobytes << 10, 16 << 20
    ways = [reduce.choose(n, world, "rank", False) for n in (one, one + 1024, two, two + 1024)]
    assert ways == ["packets", "two_packets", "two_packets", "two_shot"]


def test_a_thread_has_no_room_for_packets_of_32_ranks():
    assert reduce.choose(4 << 20, 32, "rank", False) == "two_shot"


def sums_by_the_library() -> list[bool]:
    x, w = torch.arange(60.0).view(20, 3) + comm.rank(), torch.ones(3, 2)
    ours, theirs = tilescale.ops.all_reduce(x), tilescale.ops.all_reduce(x, order="any", how="library")
    part = tilescale.ops.reduce_scatter(x, order="any", how="library")
    whole = tilescale.ops.matmul_all_reduce(x, w)
    return [
        bool(ours.equal(theirs)),
        bool(part.equal(tilescale.ops.reduce_scatter(x))),
        bool(tilescale.ops.broadcast(x, 1, how="library").equal(torch.arange(60.0).view(20, 3) + 1)),
        bool(whole.equal(ours @ w)),
    ]


def test_the_library_adds_where_it_may():
    done = run_ranks(2, with_torch, port(), sums_by_the_library)
    assert all(all(r) for r in done), done


def different() -> None:
    comm.init()
    tilescale.ops.all_gather(torch.ones(4))
    tilescale.ops.all_gather(torch.ones(4 + comm.rank()))


def test_ranks_that_bring_different_shapes_are_told():
    with pytest.raises(RanksFailed, match="different|launch 2"):
        run_ranks(2, different)


def calls(what: str) -> None:
    """Small collectives of which a rank calls another one than the others; the kernels would all be alike."""
    comm.init()
    rank, ops = comm.rank(), tilescale.ops
    x, more = torch.ones(64, 8), torch.ones(64 + 8 * (rank == 1), 8)
    for _ in range(2):
        ops.all_reduce(x), ops.broadcast(x, 1), ops.all_gather(x), ops.reduce_scatter(x[:60])
    if what == "rows":
        ops.all_reduce(more)
    elif what == "dtype":
        ops.all_gather(x.to(torch.int32 if rank else torch.float32))
    elif what == "root":
        ops.broadcast(x, rank)
    elif what == "collective":
        (ops.reduce_scatter if rank else ops.all_reduce)(x)
    elif what == "way":  # of 2 MB packets, of more none
        ops.all_reduce(torch.ones(1 << (22 + 2 * (rank == 1)), dtype=torch.bfloat16))
    else:
        ops.matmul_all_reduce(more, torch.ones(8, 8))


@pytest.mark.parametrize("what", ["rows", "dtype", "root", "collective", "way", "product"])
def test_ranks_that_call_different_small_collectives_are_told(what: str):
    """What goes in packets is compared by the hosts: else sums of these would be wrong in silence."""
    with pytest.raises(RanksFailed, match="ranks [01] and [01] call different things: rank") as told:
        run_ranks(2, calls, what)
    assert "rows= of an operation or a layer" in str(told.value)


def test_simulated_ranks_that_call_different_small_collectives_are_told(ranks: Any):
    for what in ("rows", "root"):
        with pytest.raises(LaunchError, match="ranks [01] and [01] call different things: rank"):
            ranks(2, target="sim").call(calls, what)


def test_without_init():
    def work() -> None:
        tilescale.ops.all_gather(torch.ones(4))

    with pytest.raises(RanksFailed, match=r"not initialised"):
        run_ranks(2, work)


def views() -> list[bool]:
    """Products of operands and a bias that are views: strided, or of numbers with their signs changed."""
    comm.init()
    rank, right = comm.rank(), []
    x, w = torch.arange(32.0).view(4, 8) + rank, torch.arange(48.0).view(8, 6)
    bias = torch.arange(12.0)[::2]
    for product in (
        tilescale.ops.all_gather_matmul,
        tilescale.ops.matmul_reduce_scatter,
        tilescale.ops.matmul_all_reduce,
    ):
        plain = product(x, w, bias.clone())
        right.append(bool(product(x, w, bias).equal(plain)))
        right.append(bool(product(torch._neg_view(x), torch._neg_view(w), bias).equal(plain)))
        right.append(bool(product(x, w, torch._neg_view(-bias)).equal(plain)))
    return right


def test_products_of_views():
    assert all(all(r) for r in run_ranks(2, views))


def ranks_with_little_of_k() -> bool:
    """Products in one kernel whose last rank has one number of k or none, in whatever order w lies there."""
    comm.init()
    rank, right = comm.rank(), True
    few = {"BM": 64, "BN": 64, "BK": 32, "stages": 2, "threads": 128, "blocks": 2}
    for K, N in ((5, 1), (2, 1), (5, 3), (2, 3)):
        mine = slice(rank * -(-K // 3), (rank + 1) * -(-K // 3))
        x, w = torch.arange(40.0 * K).view(40, K), torch.arange(float(K * N)).view(K, N)
        for part in (w[mine] * 1, w.T[:, mine].contiguous().T, w.T.contiguous().T[mine] * 1):
            got = tilescale.ops.matmul_all_reduce(
                x[:, mine], part, inner=K, config=gemm_scatter.Config(**few)
            )
            right &= bool(got.equal(x @ w))
    return right


def test_ranks_agree_how_w_lies_where_it_does_not_say():
    assert all(run_ranks(3, ranks_with_little_of_k))


def refusals() -> list[str]:
    """Arguments that are nothing that a call takes, and behind each a call that is right."""
    comm.init()
    said, x, w, ops = [], torch.ones(4, 8), torch.ones(8, 6), tilescale.ops
    small, q, chosen = (
        torch.ones(8).to(torch.float8_e4m3fn),
        x.half().view(1, 2, 2, 8),
        torch.ones(4, 1).long(),
    )
    sent = ops.moe_dispatch(x, chosen, num_experts=2)
    for call in (
        lambda: ops.all_reduce(x.to_sparse()),
        lambda: ops.all_gather(x, rows=8.0),
        lambda: ops.all_gather(x, rows=-8),
        lambda: ops.all_reduce(x, blocks="3"),
        lambda: ops.broadcast(x, 2),
        lambda: ops.matmul_all_reduce(x, w, inner=0),
        lambda: ops.all_gather_matmul(x, w, config=gemm_scatter.Config()),
        lambda: ops.matmul_all_reduce(x, w, config=gemm_scatter.Config(BM="64")),
        lambda: ops.matmul_all_reduce(small, w.to(small.dtype), scale_x=x[0, :1], scale_w=x[0, :1]),
        lambda: ops.matmul_all_reduce(
            x.to(small.dtype),
            w.to(small.dtype),
            scale_x=x[0, :1],
            scale_w=x[0, :1],
            config=gemm_reduce.Config(),
        ),
        lambda: ops.all_to_all(x, torch.tensor([2, 2]), rows=8.0),
        lambda: ops.moe_dispatch(x, chosen, num_experts=2.0),
        lambda: ops.moe_dispatch(x, chosen, num_experts=2, slot="1"),
        lambda: ops.moe_dispatch(x, chosen, num_experts=2, tokens=4.5),
        lambda: ops.moe_dispatch(x, chosen, num_experts=2, blocks=0),
        lambda: ops.moe_dispatch(x, like=x),
        lambda: ops.moe_dispatch(x, like=sent, group=comm.team([0, 1])),
        lambda: ops.moe_combine(x, chosen),
        lambda: ops.ring_attention(q, q, q, config=gemm_scatter.Config()),
        lambda: ops.ulysses_attention(q[0], q[0], q[0], starts=chosen[:2, 0].int(), longest="2"),
    ):
        with pytest.raises(TileError) as refused:
            call()
        said.append(str(refused.value).splitlines()[0])
        assert ops.all_reduce(x).equal(2 * x)
    return said


def test_arguments_that_are_no_such_thing_are_refused_by_name():
    done = run_ranks(2, refusals)
    assert (
        done[0]
        == done[1]
        == [
            "x of all_reduce is sparse_coo",
            "rows=8.0",
            "rows=-8",
            "blocks='3'",
            "root=2 of 2 ranks",
            "inner=0",
            "config is tilescale.ops.ranks.gemm_scatter.Config",
            "BM='64' of a Config",
            "x of matmul_all_reduce has 1 axes",
            "config= of matmul_all_reduce of float8_e4m3fn",
            "rows=8.0",
            "num_experts=2.0",
            "slot='1'",
            "tokens=4.5",
            "blocks=0",
            "like of moe_dispatch is Tensor",
            "moe_dispatch with like= and a choice of experts",
            "sent of moe_combine is Tensor",
            "config is tilescale.ops.ranks.gemm_scatter.Config",
            "longest='2'",
        ]
    )


def failure(what: str) -> str:
    """What a call says whose numbers only the device sees."""
    comm.init()
    x, ids = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises((LaunchError, CommError)) as failed:  # who comes late learns it from the others
        if what == "size":
            tilescale.ops.all_to_all(x, torch.tensor([-1, 3]), rows=8)
        elif what == "sizes":
            tilescale.ops.all_to_all(x, torch.tensor([3, 2]), rows=10, how="kernel")
        elif what == "wide size":
            tilescale.ops.all_to_all(x, torch.tensor([(1 << 32) + 1, 2]), rows=10)
        else:  # on three ranks expert 4 of 4 would be the first one of a rank that has none
            more = {"expert": 4, "wide expert": 1 << 32, "none": -2}[what]
            tilescale.ops.moe_dispatch(x, ids.long() + more, num_experts=4)
    return str(failed.value)


@pytest.mark.parametrize(
    ("what", "ranks", "said"),
    [
        ("size", 2, "a size is negative"),
        ("sizes", 2, "sizes are of more rows than there are"),
        ("wide size", 2, "or of more rows than there are"),
        ("expert", 3, "an expert's number is num_experts or larger"),
        ("wide expert", 3, "an expert's number is num_experts or larger"),
        ("none", 3, "or less than -1"),
    ],
)
def test_numbers_that_there_are_not_end_the_launch(what: str, ranks: int, said: str):
    assert any(said in text for text in run_ranks(ranks, failure, what))


def without_graphs() -> list[str]:
    """Operations whose results are part of a graph, of inputs that require gradients."""
    comm.init()
    n = comm.world_size()
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 16, requires_grad=True)
    weights, experts = torch.ones(4, 1, requires_grad=True), torch.zeros(4, 1, dtype=torch.int32)
    sent = tilescale.ops.moe_dispatch(x, experts, weights, num_experts=n)
    found = {
        "all_gather_matmul": tilescale.ops.all_gather_matmul(x, w),
        "matmul_reduce_scatter": tilescale.ops.matmul_reduce_scatter(x, w),
        "matmul_all_reduce": tilescale.ops.matmul_all_reduce(x, w, torch.ones(16, requires_grad=True)),
        "all_gather": tilescale.ops.all_gather(x),
        "reduce_scatter": tilescale.ops.reduce_scatter(x),
        "all_reduce": tilescale.ops.all_reduce(x),
        "moe_dispatch": sent.rows,
        "expanded": sent.expanded(),
        "moe_combine": tilescale.ops.moe_combine(sent.expanded(), sent),
        "matmul": tilescale.ops.matmul(x, w),
    }
    return [name for name, y in found.items() if y.requires_grad]


def test_no_result_is_part_of_a_graph():
    """Neither all of one nor a piece of one, as what torch does around a kernel would make (OPS.md)."""
    assert run_ranks(2, without_graphs, timeout=120) == [[], []]
