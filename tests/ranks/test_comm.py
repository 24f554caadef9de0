"""tilescale.comm on hosts: symmetric memory, agreement, collection, teams, barriers, and every way of
ending."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilescale.comm as comm
from tests.ranks.harness import RanksFailed, run_ranks
from tilescale import ops
from tilescale.errors import CommError, TileError, TileTypeError, TileValueError

ROOT = Path(__file__).resolve().parents[2]
SHORT = {"TILESCALE_WAIT_TIMEOUT": "0.4"}


def my_segment() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob("ts-*")}


# ---- memory


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_peers_see_one_another(n: int) -> None:
    def work() -> list[float]:
        comm.init()
        comm.init()
        me, size = comm.rank(), comm.world_size()
        x = comm.full((3, 5), me, torch.float32)
        z = comm.zeros(7, "int32")
        comm.barrier()
        seen = [comm.peer(x, r).sum().item() for r in range(size)]
        comm.peer(z, (me + 1) % size)[2] = me + 10
        comm.barrier()
        assert z.tolist() == [0, 0, (me - 1) % size + 10, 0, 0, 0, 0]
        assert comm.peer(x, me).data_ptr() == x.data_ptr()
        comm.finalize()
        comm.finalize()
        return seen

    assert run_ranks(n, work) == [[15.0 * r for r in range(n)]] * n


def test_no_names_are_left_while_ranks_run() -> None:
    def work() -> list[str]:
        comm.init()
        comm.barrier()
        return [n for n in my_segment() if os.environ["TILESCALE_JOB"] in n]

    assert run_ranks(3, work) == [[], [], []]


def test_a_segment_that_is_not_this_users_alone_is_refused() -> None:
    """Another user could put it there, under the job's name, before the rank does."""
    job = f"test{os.getpid()}shared"
    twin = Path(f"/dev/shm/ts-{job}-1")
    twin.write_bytes(b"TSHEAP1\0")
    twin.chmod(0o666)
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "TILESCALE_JOB": job,
        "PYTHONPATH": str(ROOT),
    }
    try:
        code = "import tilescale.comm as comm; comm.init()"
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=60
        )
    finally:
        twin.unlink()
    assert done.returncode == 1 and f"{twin} is not this user's alone" in done.stderr, done.stderr


def test_alone_it_is_one_rank() -> None:
    code = """
    import tilescale.comm as comm
    assert (comm.rank(), comm.world_size(), comm.local_rank()) == (0, 1, 0) and not comm.is_initialized()
    comm.init()
    x = comm.zeros((2, 2), "float16", like="numpy")
    comm.peer(x, 0)[1, 1] = 3
    comm.barrier()
    assert x.tolist() == [[0, 0], [0, 3]] and comm.team([0]).size == 1
    import sys
    assert "torch" not in sys.modules and "tvm_ffi" not in sys.modules
    print("fine")
    """
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "TILESCALE_JOB"))
    }
    before = my_segment()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "fine\n", done.stderr
    assert my_segment() <= before


@pytest.mark.parametrize("like", ["torch", "numpy"])
def test_dtypes_and_shapes(like: str) -> None:
    def work() -> None:
        comm.init()
        for dtype in (
            "bool",
            "int8",
            "uint8",
            "int16",
            "int32",
            "int64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "float8_e5m2",
        ):
            for shape in [(), 5, (3, 4), (0, 4), (2, 3, 4)]:
                x = comm.zeros(shape, dtype, like=like)
                assert tuple(x.shape) == ((shape,) if isinstance(shape, int) else shape)
                assert str(x.dtype).removeprefix("torch.") == dtype
                if 0 not in x.shape:
                    address = x.data_ptr() if like == "torch" else x.ctypes.data
                    assert address % 4096 == 0
                    p = comm.peer(x, 1 - comm.rank())
                    assert p.shape == x.shape and p.dtype == x.dtype
        assert comm.empty((2, 2), torch.bfloat16).dtype == torch.bfloat16
        assert comm.empty((2, 2), np.float16, like="numpy").dtype == np.float16
        assert comm.signals((2, 3)).dtype == torch.int64 and comm.signals(3).sum() == 0

    run_ranks(2, work)


def test_peers_of_views() -> None:
    def work() -> None:
        comm.init()
        x = comm.zeros((4, 6), "int64")
        x.copy_(torch.arange(24).view(4, 6) + 100 * comm.rank())
        a = comm.zeros((4, 6), "int64", like="numpy")
        a[...] = x.numpy()
        comm.barrier()
        other = torch.arange(24).view(4, 6) + 100 * (1 - comm.rank())
        assert torch.equal(comm.peer(x[1:3, ::2], 1 - comm.rank()), other[1:3, ::2])
        assert torch.equal(comm.peer(x.T, 1 - comm.rank()), other.T)
        assert (comm.peer(a[1:, 2:], 1 - comm.rank()) == other.numpy()[1:, 2:]).all()
        with pytest.raises(TileValueError, match="peer.. of rank 2"):
            comm.peer(x, 2)
        for ordinary in (torch.zeros(3), np.zeros(3), comm.peer(x, 1 - comm.rank())):
            with pytest.raises(TileTypeError, match="not in this rank's symmetric memory"):
                comm.peer(ordinary, 0)
        comm.barrier()

    run_ranks(2, work)


def test_arguments_that_make_no_sense() -> None:
    def work() -> None:
        with pytest.raises(CommError, match="not initialised"):
            comm.empty(3)
        comm.init()
        with pytest.raises(TileValueError, match="negative"):
            comm.empty((3, -1))
        with pytest.raises(TileTypeError, match="shape 2.5"):
            comm.empty(2.5)  # type: ignore[arg-type]
        with pytest.raises(TileTypeError, match="complex64"):
            comm.empty(3, torch.complex64)
        with pytest.raises(TileValueError, match="like='jax'"):
            comm.empty(3, like="jax")
        with pytest.raises(TileValueError, match="different ranks out of 0 … 0"):
            comm.team([0, 0])
        with pytest.raises(TileTypeError, match="ranks, a ProcessGroup"):
            comm.team(3)

    run_ranks(1, work)


# ---- agreement


def test_ranks_that_ask_for_different_things_are_told() -> None:
    def shapes() -> None:
        comm.init()
        comm.empty((4, 4 + comm.rank()), "float32")

    def calls() -> None:
        comm.init()
        comm.barrier() if comm.rank() == 1 else comm.zeros(3)

    for work, texts in [
        (shapes, ("rank 0: empty((4, 4), float32)", "rank 1: empty((4, 5), float32)")),
        (calls, ("rank 1: barrier()",)),
    ]:
        with pytest.raises(RanksFailed) as e:
            run_ranks(2, work)
        assert {f.kind for f in e.value.failures} == {"CommError"} and len(e.value.failures) == 2
        assert all(text in f.text for f in e.value.failures for text in texts)
        assert e.value.seconds < 5


def test_a_rank_that_does_not_come_is_named() -> None:
    def work() -> None:
        comm.init()
        if comm.rank() != 2:
            comm.barrier()
        else:
            time.sleep(2)

    with pytest.raises(RanksFailed) as e:
        run_ranks(3, work, env=SHORT)
    texts = {f.rank: f.text for f in e.value.failures}
    assert set(texts) == {0, 1}
    assert any("waited 0.4 s in barrier() for rank 2" in t for t in texts.values()), texts


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    def work() -> None:
        comm.init()
        if comm.rank() == 0:
            comm.barrier()

    with pytest.raises(RanksFailed, match=r"rank 0: in barrier\(\): rank 1 has ended") as e:
        run_ranks(2, work)
    assert e.value.seconds < 3


def test_a_rank_that_is_killed_is_named_at_once() -> None:
    def work() -> None:
        comm.init()
        comm.barrier()
        if comm.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(RanksFailed) as e:
        run_ranks(3, work)
    texts = {f.rank: f.text for f in e.value.failures}
    assert texts[1] == "killed by SIGKILL"
    assert any("rank 1 (process" in t and "has died" in t for t in texts.values()), texts
    assert e.value.seconds < 3


def test_an_exception_ends_the_others_with_its_reason() -> None:
    def work() -> None:
        comm.init()
        if comm.rank() == 1:
            raise KeyError("the reason")
        comm.barrier()

    with pytest.raises(RanksFailed) as e:
        run_ranks(3, work)
    texts = {f.rank: f.text for f in e.value.failures}
    assert all("rank 1 stopped the job: KeyError: 'the reason'" in texts[r] for r in (0, 2)), texts
    assert e.value.seconds < 3


def test_the_hook_of_uncaught_exceptions_tells_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import tilescale.comm as comm\ncomm.init()\ncomm.barrier()\n"
        "if comm.rank() == 1: raise ValueError('my reason')\ncomm.barrier()\n"
    )
    ranks = []
    for r in range(3):
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TILESCALE_JOB": f"hook{os.getpid()}",
            "TILESCALE_HEAP_SIZE": "16M",
        }
        env.update(RANK=str(r), WORLD_SIZE="3", LOCAL_RANK=str(r), LOCAL_WORLD_SIZE="3")
        ranks.append(
            subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.PIPE, text=True)
        )
    errors = [p.communicate(timeout=30)[1] for p in ranks]
    assert all(p.returncode == 1 for p in ranks)
    assert all("rank 1 stopped the job: ValueError: my reason" in errors[r] for r in (0, 2)), errors
    assert not any(f"hook{os.getpid()}" in n for n in my_segment())


def test_a_rank_that_never_starts_is_named_in_init() -> None:
    def work() -> None:
        if comm.rank() == 1:
            time.sleep(2)
        else:
            comm.init()

    with pytest.raises(RanksFailed, match=r"waited 0.4 s in init\(\) for rank 1"):
        run_ranks(3, work, env=SHORT)


def test_different_heap_sizes_are_refused() -> None:
    def work() -> None:
        comm.init(heap_size=(32 + comm.rank()) << 20)

    with pytest.raises(RanksFailed, match="set TILESCALE_HEAP_SIZE alike on all ranks") as e:
        run_ranks(2, work)
    assert len(e.value.failures) == 2 and e.value.seconds < 3


def test_what_a_killed_job_of_the_same_name_left_is_replaced(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def work() -> int:
        me = comm.rank()
        if me == 0:
            pid = os.fork()
            if pid == 0:
                comm.init()  # waits for rank 1 and is killed
            name = Path(f"/dev/shm/ts-{os.environ['TILESCALE_JOB']}-0")
            while not name.exists():
                time.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            assert name.exists()
            killed.touch()
            time.sleep(0.2)
        while not killed.exists():
            time.sleep(0.001)
        comm.init()  # rank 1 finds the dead one's file first
        x = comm.full(4, me)
        comm.barrier()
        return int(comm.peer(x, 1 - me)[0].item())

    assert run_ranks(2, work) == [1, 0]


# ---- memory that runs out, and comes back


def test_a_heap_that_is_full_says_so_on_every_rank() -> None:
    def work() -> None:
        comm.init()
        with pytest.raises(
            CommError, match=r"empty\(\(100000000,\), float32\): the symmetric heap of rank 0 has no"
        ) as e:
            comm.empty(100_000_000)
        assert "TILESCALE_HEAP_SIZE" in str(e.value)
        assert comm.zeros(10).sum() == 0  # and life goes on

    run_ranks(2, work)


def test_a_full_dev_shm_is_an_error_and_no_sigbus() -> None:
    stat = os.statvfs("/dev/shm")
    # More than it can ever hold, which the system refuses at once. What is only more than is free it would first
    # take page by page, and where /dev/shm may grow to all of the memory, end processes for it.
    room = stat.f_blocks * stat.f_frsize

    def work() -> None:
        comm.init()
        with pytest.raises(
            CommError, match="has no memory for .* bytes in /dev/shm: No space left on device"
        ):
            comm.empty(room + (64 << 20), "uint8")
        assert comm.zeros(10).sum() == 0

    run_ranks(2, work, env={"TILESCALE_HEAP_SIZE": str(room * 2)})


def test_memory_is_freed_when_all_ranks_have_dropped_it() -> None:
    def work() -> None:
        comm.init()
        x = comm.zeros(1 << 20)
        first = x.data_ptr()
        keep = x[3:5]
        del x
        comm.barrier()
        comm.barrier()
        assert comm.zeros(1 << 20).data_ptr() != first, "a view keeps it"
        if comm.rank() == 0:
            del keep  # rank 0 drops it, rank 1 does not yet
        for _ in range(3):
            comm.barrier()
        y = comm.zeros(1 << 20)
        assert y.data_ptr() != first
        del y
        if comm.rank() == 1:
            del keep
        comm.barrier()
        assert comm.zeros(1 << 20).data_ptr() == first, "all have dropped it"

    run_ranks(2, work)


def test_a_peer_view_keeps_the_memory() -> None:
    def work() -> None:
        comm.init()
        x = comm.full(1000, comm.rank() + 1)
        first, p = x.data_ptr(), comm.peer(x, 1 - comm.rank())
        del x
        comm.barrier()
        comm.barrier()
        assert comm.zeros(1000).data_ptr() != first
        assert (p == 2 - comm.rank()).all()
        del p
        gc.collect()

    run_ranks(2, work)


def test_a_loop_of_temporaries_does_not_grow() -> None:
    def work() -> int:
        comm.init()
        return len({comm.empty((1000, 100)).data_ptr() for _ in range(300)})

    assert all(places <= 3 for places in run_ranks(2, work, env={"TILESCALE_HEAP_SIZE": "8M"}))


def test_random_lifetimes_keep_offsets_equal() -> None:
    """Ranks drop tensors at different times, and are in overlapping teams; contents and addresses must
    hold."""

    def work() -> None:
        import random

        comm.init()
        me, common, own = comm.rank(), random.Random(1), random.Random(100 + comm.rank())
        everyone = comm.team([0, 1, 2])
        teams = [t for t in (everyone, comm.team([0, 1]), comm.team([1, 2]), comm.team([2, 0])) if t]
        by_members = {t.members: t for t in teams}
        held: list[tuple[torch.Tensor, float, tuple[int, ...]]] = []
        for step in range(150):
            members = common.choice([(0, 1, 2), (0, 1), (1, 2), (2, 0)])
            size = common.randint(1, 50_000)
            if members in by_members:
                team = by_members[members]
                x = comm.full(size, step * 10 + me, team=team)
                held.append((x, step * 10, members))
            if len(held) > 8 or own.random() < 0.5:
                for _ in range(own.randint(0, 3)):
                    if held:
                        held.pop(own.randrange(len(held)))
            for x, value, _ in held:
                assert (x == value + me).all(), step
        comm.barrier()
        for x, value, members in held:
            for r, m in enumerate(members):
                assert comm.peer(x, r).data_ptr() == x.data_ptr() + (m - me) * (64 << 20), value
        comm.barrier()

    run_ranks(3, work)


# ---- teams


def test_teams_of_ranks() -> None:
    def work() -> object:
        comm.init()
        half = comm.team([0, 1] if comm.rank() < 2 else [3, 2])
        assert half and comm.team(list(half.members)) is half
        assert bool(comm.team([1, 3])) == (comm.rank() in (1, 3))
        x = comm.full(4, comm.rank(), team=half)
        comm.barrier(half)
        other = comm.peer(x, 1 - half.rank)[0].item()
        comm.barrier()
        return half.members, half.rank, int(other)

    assert run_ranks(4, work) == [((0, 1), 0, 1), ((0, 1), 1, 0), ((3, 2), 1, 3), ((3, 2), 0, 2)]


def test_teams_of_process_groups_and_meshes(tmp_path: Path) -> None:
    def work() -> list[tuple[int, ...]]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=comm.rank(), world_size=4
        )
        comm.init()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(TileValueError, match="a DeviceMesh of 2 axes"):
            comm.team(mesh)
        groups = [comm.team(mesh["tp"]), comm.team(mesh["dp"]), comm.team(dist.group.WORLD)]
        pair = dist.new_group([0, 3])
        if comm.rank() in (1, 2):
            with pytest.raises(TileValueError, match="calls an operation of a group that it is not in"):
                ops.all_gather(torch.ones(2), group=pair)
        else:
            assert ops.all_gather(torch.ones(2), group=pair).shape == (4,)
            dist.destroy_process_group(pair)
            with pytest.raises(TileValueError, match="a ProcessGroup that was destroyed"):
                ops.all_gather(torch.ones(2), group=pair)
        comm.barrier()
        dist.destroy_process_group()
        return [g.members for g in groups if g]

    assert run_ranks(4, work) == [
        [(0, 1), (0, 2), (0, 1, 2, 3)],
        [(0, 1), (1, 3), (0, 1, 2, 3)],
        [(2, 3), (0, 2), (0, 1, 2, 3)],
        [(2, 3), (1, 3), (0, 1, 2, 3)],
    ]


# ---- processes


def test_a_forked_child_is_no_rank() -> None:
    def work() -> None:
        comm.init()
        x = comm.zeros(4)
        pid = os.fork()
        if pid == 0:
            try:
                comm.barrier()
                os._exit(1)
            except CommError as e:
                comm._leave()
                os._exit(0 if "forked" in str(e) else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        comm.barrier()
        assert x.sum() == 0

    run_ranks(2, work)


def test_barriers_order_memory() -> None:
    def work() -> None:
        comm.init()
        me, n = comm.rank(), comm.world_size()
        x = comm.zeros(n, "int64")
        for step in range(1, 300):
            for r in range(n):
                comm.peer(x, r)[me] = step
            comm.barrier()
            assert (x == step).all()
            comm.barrier()

    run_ranks(4, work)


def test_init_again_after_finalize() -> None:
    def work() -> None:
        for _ in range(3):
            comm.init()
            x = comm.full(1000, comm.rank())
            comm.barrier()
            assert comm.peer(x, 1 - comm.rank())[0] == 1 - comm.rank()
            comm.finalize()
            assert not comm.is_initialized()
            assert (x == comm.rank()).all()  # kept alive, kept mapped

    run_ranks(2, work)


def outside() -> None:
    """A team that a rank is not in does not stand for all ranks."""
    comm.init()
    team = comm.team([0, 1])
    for _ in range(3):
        if comm.rank() == 2:
            with pytest.raises(
                TileValueError, match="rank 2 calls an operation of a group that it is not in"
            ):
                ops.all_reduce(torch.ones(3), group=team)
            with pytest.raises(TileValueError, match=r"rank 2 is not in the team of ranks \[0, 1\]"):
                comm.barrier(team)
        else:
            assert ops.all_reduce(torch.ones(3), group=team).tolist() == [2.0] * 3
        assert ops.all_reduce(torch.ones(3)).tolist() == [3.0] * 3


def test_a_rank_outside_of_a_team_takes_no_part(ranks: Any) -> None:
    run_ranks(3, outside)
    ranks(3).call(outside)


def what_is_left_of_a_job() -> list[str]:
    """A team, and memory, of before a `finalize`: refused behind the next `init`."""
    comm.init()
    team, x = comm.team(range(comm.world_size())), comm.full(8, 1.0)
    sent = ops.moe_dispatch(torch.ones(2, 8), torch.tensor([[0], [1]], dtype=torch.int32), num_experts=2)
    assert comm.team(team) is team
    comm.finalize()
    comm.init()
    said = []
    for call in (
        lambda: ops.all_reduce(torch.ones(3), group=team),
        lambda: comm.empty(3, team=team),
        lambda: comm.barrier(team),
        lambda: ops.moe_combine(torch.ones(4, 8), sent),
        lambda: comm.barrier([0, 1]),
        lambda: comm.peer(x, 0),
    ):
        with pytest.raises(TileError) as refused:
            call()
        said.append(str(refused.value).splitlines()[0])
    again = comm.team(range(comm.world_size()))
    assert again is not team and ops.all_reduce(torch.ones(3), group=again).tolist() == [2.0] * 3
    return said


def test_teams_and_memory_end_with_their_job(ranks: Any) -> None:
    gone = "the team of ranks [0, 1] is none of this job: it was made before a finalize()"
    told = [gone] * 4 + ["team=[0, 1]", "peer() of a tensor that is not in this rank's symmetric memory"]
    assert run_ranks(2, what_is_left_of_a_job) == [told] * 2
    assert ranks(2).call(what_is_left_of_a_job) == [told] * 2


def test_without_torch_arrays_are_numpys() -> None:
    code = """
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        import numpy as np
        from tilescale import comm
        from tilescale.errors import TileValueError
        comm.init()
        for made, dtype in ((comm.empty((2, 3), "float32"), "float32"), (comm.zeros(4, "bfloat16"), "bfloat16"), (comm.signals(2), "int64")):
            assert isinstance(made, np.ndarray) and made.dtype == dtype, made
        try:
            comm.empty(8, like="torch")
        except TileValueError as error:
            assert "without torch" in str(error) and 'like="numpy"' in str(error)
        else:
            raise AssertionError("no torch, and no error")
        comm.finalize()
    """
    env = {k: v for k, v in os.environ.items() if k != "TILESCALE_TARGET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cuda = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = None\nfrom tilescale import comm; comm.init()",
        ],
        cwd=ROOT,
        env={**env, "TILESCALE_TARGET": "cuda"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        cuda.returncode
        and "CommError: symmetric memory on GPUs needs torch, which is not installed" in cuda.stderr
    ), cuda.stderr
