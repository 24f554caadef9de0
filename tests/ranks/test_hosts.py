"""Host code of simulated ranks and symmetric memory: what nothing orders is a race, what cannot be seen is
refused."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import comm, hosts, simulator
from tilescale.errors import CommError

S = 8


def ring(remote: bool = True, ordered: bool = True) -> Any:
    """Everyone's vector goes to its neighbour; or (not remote) into its own inbox."""

    @T.prim_func
    def main(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,))):
        with T.Kernel(1, ordered=ordered), T.Scale("device") as (rank, n):
            if remote:
                T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
                T.wait(got[0])
            else:
                T.copy(A, inbox)

    return tilescale.compile(main, target="sim")


def ran(program: Callable[[int, int], Any], n: int = 2) -> tuple[simulator.Checking, list[Any]]:
    checking = simulator.Checking(seeds=1)

    def work(rank: int) -> Any:
        comm.init()
        return program(rank, n)

    return checking, simulator.world(n, checking).run(work)


def findings(program: Callable[[int, int], Any], n: int = 2) -> list[Any]:
    checking, endings = ran(program, n)
    assert all(e.error is None for e in endings), endings
    return checking.report.findings


def lines(program: Callable[..., Any]) -> set[int]:
    """The lines of a program that are marked."""
    source, first = inspect.getsourcelines(program)
    return {first + k for k, line in enumerate(source) if line.rstrip().endswith("# here")}


# ---- torch: seen in both directions, by element


def test_what_a_peer_reads_before_a_barrier_is_a_race():
    def program(rank: int, n: int) -> None:
        x = comm.zeros(S)
        x[2:4] = rank  # here
        comm.peer(x, 1 - rank)[3].item()  # here

    found = findings(program)
    assert {f.kind for f in found} == {"race"} and all(
        f.lines == {(__file__, k) for k in lines(program)} for f in found
    )
    assert "bytes 12:16 of zeros((8,), float32)" in str(found[0]) and "comm.barrier() between the two" in str(
        found[0]
    )


@pytest.mark.parametrize(
    "look", [print, str, repr, "{}".format, copy.deepcopy, torch.Tensor.tolist, torch.clone]
)
def test_whatever_looks_at_a_tensor_reads_it(look: Callable[[Any], Any]):
    """Printing disables torch's modes of operations, and a deep copy uses none."""

    def program(rank: int, n: int) -> None:
        x = comm.zeros(S)
        comm.barrier()
        comm.peer(x, 1 - rank).fill_(7)  # here
        look(x)  # here
        comm.barrier()

    found = findings(program)
    assert {f.kind for f in found} == {"race"} and all(
        f.lines == {(__file__, k) for k in lines(program)} for f in found
    )


@pytest.mark.parametrize("sync", ["barrier", "launch", "allocation"])
def test_meetings_order_hosts(sync: str):
    def program(rank: int, n: int) -> float:
        x, a = comm.zeros(S), torch.full((S,), float(rank))
        inbox, got = comm.empty(S), comm.signals(1)
        x.copy_(a)
        if sync == "barrier":
            comm.barrier()
        elif sync == "launch":
            ring()(a, inbox, got)
        else:
            comm.zeros(1)
        return float(comm.peer(x, 1 - rank).sum())

    checking, endings = ran(program)
    assert not checking.report.findings and [e.value for e in endings] == [S, 0]


def test_peers_write_elements_of_their_own():
    def program(rank: int, n: int) -> list[float]:
        board = comm.zeros(n)
        for r in range(n):
            comm.peer(board, r)[rank] = rank + 1
        comm.barrier()
        return board.tolist()

    checking, endings = ran(program, 3)
    assert not checking.report.findings and [e.value for e in endings] == [[1, 2, 3]] * 3


def test_peers_that_write_one_element_race_and_so_does_who_reads_it():
    def program(rank: int, n: int) -> None:
        board = comm.zeros(n)
        comm.peer(board, 0)[0] = rank  # here
        if rank == 0:
            board.sum()  # here

    found = findings(program, 3)
    assert found and {line for f in found for _, line in f.lines} == lines(program)
    assert any("rank 0 reads bytes 0:4" in str(f) or "which rank 0 read" in str(f) for f in found)


def test_a_view_is_no_access_and_an_update_is_one_of_both():
    def program(rank: int, n: int) -> None:
        x = comm.zeros((4, 4))
        part = comm.peer(x, 1 - rank).T[1:3].view(2, 4)
        x[:, 0] += 1  # another column
        part.mul_(2)
        comm.barrier()
        x.add_(1)

    assert not findings(program)

    def both(rank: int, n: int) -> None:
        x = comm.zeros(4)
        if rank:
            comm.peer(x, 0).add_(1)
        else:
            x.copy_(x + 1)

    assert findings(both)


def test_host_code_in_front_of_a_launch_is_behind_nobodys_kernel_but_its_own():
    """Rank 1's kernel may write its inbox as soon as rank 1 launches; rank 0's put into it comes behind what
    rank 0 did."""

    def program(rank: int, n: int) -> None:
        inbox, got, a = comm.zeros(S), comm.signals(1), torch.ones(S)
        comm.barrier()
        comm.peer(inbox, 1 - rank).sum()
        kernel(a, inbox, got)
        comm.peer(inbox, 1 - rank).sum()

    kernel = ring()
    assert not findings(program)
    kernel = ring(remote=False)
    found = findings(program)
    assert found and "main" in str(found[0]) and {f.kind for f in found} == {"race"}


def test_behind_an_unordered_launch_host_code_awaits_what_arrives():
    def waits(rank: int, n: int) -> None:
        inbox, got, a = comm.zeros(S), comm.signals(1), torch.ones(S)
        comm.barrier()
        kernel(a, inbox, got)
        inbox.sum()  # the kernel awaited what came

    kernel = ring(ordered=False)
    assert not findings(waits)

    @T.prim_func
    def early(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32")):
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(A, inbox, dst=(rank + 1) % n)

    def looks(rank: int, n: int) -> None:
        inbox, a = comm.zeros(S), torch.ones(S)
        comm.barrier()
        sender(a, inbox)
        if settled:
            comm.barrier()
        inbox.sum()

    sender, settled = tilescale.compile(early, target="sim"), True
    assert not findings(looks)
    settled = False
    assert {f.kind for f in findings(looks)} == {"race"}


# ---- launches that reach nobody


def test_a_launch_that_reaches_nobody_is_no_meeting():
    def alone(rank: int, n: int) -> None:
        inbox, got, a = comm.zeros(S), comm.signals(1), torch.ones(S)
        if rank == 0:
            kernel(a, inbox, got)
        comm.barrier()

    def between(rank: int, n: int) -> None:
        x, inbox, got, a = comm.zeros(S), comm.zeros(S), comm.signals(1), torch.ones(S)
        x.add_(1)
        kernel(a, inbox, got)
        comm.peer(x, 1 - rank).sum()

    kernel = ring(remote=False)
    assert not findings(alone)
    assert {f.kind for f in findings(between)} == {"race"}
    kernel = ring()
    assert not findings(between)


# ---- what cannot be seen


def refused(program: Callable[[int, int], Any]) -> str:
    _, endings = ran(program)
    told = [e.error for e in endings if isinstance(e.error, CommError)]
    assert told, endings
    return str(told[0])


def test_a_peers_memory_does_not_leave_torch():
    def program(rank: int, n: int) -> None:
        comm.peer(comm.zeros(S), 1 - rank).numpy()

    text = refused(program)
    assert "numpy() of a peer's memory" in text and ".clone().numpy()" in text and Path(__file__).name in text


def test_who_writes_where_the_owner_reads_unseen_is_refused():
    def later(rank: int, n: int) -> None:
        x = comm.zeros(S)
        np.asarray(x)
        comm.barrier()
        comm.peer(x, 1 - rank)[0] = 1

    def before(rank: int, n: int) -> None:
        x = comm.zeros(S)
        if rank == 0:
            comm.peer(x, 1)[0] = 1
        else:
            x.numpy()

    def arrays(rank: int, n: int) -> None:
        comm.peer(comm.zeros(S, like="numpy"), 1 - rank)[0] = 1

    for program in (later, before, arrays):
        assert "cannot be seen" in refused(program)

    def behind(rank: int, n: int) -> list[float]:
        x = comm.zeros(S)
        comm.peer(x, 1 - rank)[0] = 1
        comm.barrier()
        return x.numpy().tolist()

    assert not findings(behind)


def test_numpys_arrays_are_compared_and_peers_reads_seen():
    def right(rank: int, n: int) -> tuple[Any, ...]:
        x = comm.zeros((2, S), like="numpy")
        x[:] = rank + 1
        comm.barrier()
        theirs = comm.peer(x, 1 - rank)
        assert (
            theirs.shape == (2, S)
            and len(theirs) == 2
            and theirs[0].shape == (S,)
            and (theirs[1] == 2 - rank).all()
        )
        np.testing.assert_allclose(theirs, np.full((2, S), 2.0 - rank))
        assert (
            float(theirs[0, 3])
            == np.asarray(theirs).max()
            == theirs.sum() / 16
            == (theirs + 0)[1, 1]
            == 2 - rank
        )
        assert np.concatenate([theirs, x]).shape == (4, S) and theirs[theirs > 0].size == 16
        comm.barrier()
        x[:] = 7
        comm.barrier()
        return (float(theirs[1, 1]),)

    checking, endings = ran(right)
    assert not checking.report.findings and [e.value for e in endings] == [(7,), (7,)], endings

    def wrong(rank: int, n: int) -> None:
        x = comm.zeros(S, like="numpy")
        if rank == 0:
            x[1] = 5
        else:
            comm.peer(x, 0)[1]  # here

    (found,) = findings(wrong)
    assert found.kind == "race" and {line for _, line in found.lines} == lines(wrong)


def test_counters_of_an_unordered_launch_are_its_programs_own():
    """As on every target: nobody zeroes them, since others may be signalling already."""

    def program(rank: int, n: int) -> list[int]:
        inbox, got, a = comm.zeros(S), comm.signals(1), torch.ones(S)
        comm.barrier()
        kernel(a, inbox, got)
        return got.tolist()

    for ordered, left in ((True, [0]), (False, [1])):
        kernel = ring(ordered=ordered)
        assert [e.value for e in ran(program)[1]] == [left] * 2


def test_a_ranks_thread_leaves_nothing_on_torchs_stacks():
    """What is left there goes with the thread, beside the interpreter's own end, and ended one check of ten
    by std::terminate."""
    from torch.overrides import _len_torch_function_stack
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    seen = []

    def rank():
        for step in (hosts._watch_torch, hosts.Hosts.thread_ends):
            step()
            seen.append((_len_torch_function_stack(), _len_torch_dispatch_stack()))

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert seen == [(1, 1), (0, 0)]
