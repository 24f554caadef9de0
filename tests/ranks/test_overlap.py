"""Launches with ``ordered=False`` as `tilescale check` runs them: overlapped. Right programs, and each with
one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import comm, simulator

S = 4


def checked(program: Callable[[int, int], Any], n: int, schedule: str = "adversary") -> Any:
    """What was found in a program of n ranks."""
    checking = simulator.Checking(schedule, seeds=2)

    def work(rank: int) -> Any:
        comm.init()
        return program(rank, n)

    endings = simulator.world(n, checking).run(work)
    assert all(e.error is None for e in endings), endings
    return checking.report


def slots(count: int) -> Callable[[int, int], None]:
    """Two ranks exchange vectors by rotated slots: a rank's launch k begins behind its launch k - 1, whose
    wait tells it that its peer has ended launch k - 2. So two slots are enough, and one is not."""

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((2, S), "float32"), got: T.Signal((1,), keep=True),
        B: T.Tensor((S,), "float32"), step: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(A, inbox[step % count, 0:S], dst=(rank + 1) % n, signal=got[0])
            T.wait(got[0], step)
            T.copy(inbox[step % count, 0:S], B)

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, got = comm.zeros((2, S)), comm.signals(1)
        a, b = torch.full((S,), float(rank)), torch.zeros(S)
        for step in range(1, 6):
            kernel(a, inbox, got, b, step)
            assert float(b[0]) == (rank - 1) % n

    return program


def acknowledged(waits: bool) -> Callable[[int, int], None]:
    """One slot around a ring: whoever has read it says so to its writer, who waits for that before it writes
    again."""

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,), keep=True),
        free: T.Signal((1,), keep=True), B: T.Tensor((S,), "float32"), step: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            if waits:
                T.wait(free[0], step - 1)
            T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
            T.wait(got[0], step)
            T.copy(inbox, B)
            T.signal(free[0], dst=(rank + n - 1) % n)

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, got, free = comm.zeros(S), comm.signals(1), comm.signals(1)
        a, b = torch.full((S,), float(rank)), torch.zeros(S)
        for step in range(1, 6):
            kernel(a, inbox, got, free, b, step)

    return program


def epochs(cmp: str, first: bool = False) -> Callable[[int, int], None]:
    """A flag that takes the step's number, and a slot for each step; first: the wait is for the first step's
    number in all of them."""

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((8, S), "float32"), flag: T.Signal((1,), keep=True),
        B: T.Tensor((S,), "float32"), step: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(A, inbox[step, 0:S], dst=(rank + 1) % n)
            T.signal(flag[0], step, op="set", dst=(rank + 1) % n)
            T.wait(flag[0], 1 if first else step, cmp=cmp)
            T.copy(inbox[step, 0:S], B)

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, flag = comm.zeros((8, S)), comm.signals(1)
        a, b = torch.full((S,), float(rank)), torch.zeros(S)
        for step in range(1, 6):
            kernel(a, inbox, flag, b, step)

    return program


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversary"])
@pytest.mark.parametrize(
    ("program", "n"),
    [(slots(2), 2), (acknowledged(True), 3), (epochs("ge"), 3)],
    ids=["slots", "acks", "epochs"],
)
def test_right_programs_have_no_finding(program, n, schedule):
    report = checked(program, n, schedule)
    assert report, report
    assert not report.unchecked


@pytest.mark.parametrize(
    ("program", "n", "kind", "launches"),
    [(slots(1), 2, "race", (2, 1)), (acknowledged(False), 3, "race", (2, 1)), (epochs("ge", first=True), 3, "race", None),
     (epochs("eq"), 3, "deadlock", None)],
    ids=["one slot", "no acknowledgement", "the first step's flag", "a flag that goes past"],
)  # fmt: skip
def test_the_fault_between_two_launches_is_found(program, n, kind, launches):
    report = checked(program, n)
    found = [f for f in report.findings if f.kind == kind]
    assert found, report
    if launches:  # no one launch shows it
        assert all("overlapped" in f.schedule for f in found)
        assert (found[0].where.launch, found[0].others[0].launch) == launches
        assert (
            f"launch {launches[1]} reads" in found[0].message and "only that launch reaches" in found[0].hint
        )
        assert found[0].to_dict()["where"]["launch"] == launches[0]


def test_a_longer_row_of_launches_is_seen_by_windows_that_slide():
    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"),
        inbox: T.SymmTensor((S,), "float32"),
        got: T.Signal((1,), keep=True),
        B: T.Tensor((S,), "float32"),
        step: T.int32,
        writes: T.int32,
    ):
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            if writes == 1:
                T.copy(A, inbox, dst=(rank + 1) % n)
            T.signal(got[0], dst=(rank + 1) % n)
            T.wait(got[0], step)
            T.copy(inbox, B)

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, got, a, b = comm.zeros(S), comm.signals(1), torch.ones(S), torch.zeros(S)
        for step in range(1, 15):
            kernel(a, inbox, got, b, step, int(step in (1, late)))

    late = 0
    assert checked(program, 2)
    late = 12
    (found,) = checked(program, 2).findings
    assert (found.where.launch, found.others[0].launch) == (12, 11)


def test_host_code_between_launches_is_ordered_on_its_own_rank_alone():
    @T.prim_func
    def pull(X: T.SymmTensor((S,), "float32"), B: T.Tensor((S,), "float32")):
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(X, B, src=(rank + 1) % n)

    kernel = tilescale.compile(pull, target="sim")

    def program(rank: int, n: int) -> None:
        x, b = comm.zeros(S), torch.zeros(S)
        kernel(x, b)
        if between:
            comm.barrier()
        x.fill_(rank)
        if between:
            comm.barrier()
        kernel(x, b)

    between = True
    assert checked(program, 2)
    between = False
    report = checked(program, 2)
    assert {f.kind for f in report.findings} == {"race"} and any(
        "host" in str(f) and "comm.barrier()" in f.hint for f in report.findings
    )


@pytest.mark.parametrize("early", [False, True])
def test_what_a_host_reads_is_overwritten_when_it_has_been_read(early):
    """The host reads what came behind each launch: whoever says within the launch that it has been read says
    so too early."""

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,), keep=True),
        free: T.Signal((1,), keep=True), step: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            if not early and step > 1:
                T.signal(free[0], dst=(rank + n - 1) % n)
            T.wait(free[0], step - 1)
            T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
            T.wait(got[0], step)
            if early:
                T.signal(free[0], dst=(rank + n - 1) % n)

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, got, free, a = comm.zeros(S), comm.signals(1), comm.signals(1), torch.ones(S)
        for step in range(1, 5):
            kernel(a, inbox, got, free, step)
            inbox.sum()

    report = checked(program, 3)
    assert bool(report) is not early, report
    assert {(f.kind, f.others[0].executor) for f in report.findings} == (
        {("race", (("host", None),))} if early else set()
    )


def test_what_ends_a_window_orders_its_launches():
    """One slot is enough where hosts meet, or an ordered launch stands between."""

    def between(rank: int, n: int, inner: str) -> None:
        inbox, got, free = comm.zeros(S), comm.signals(1), comm.signals(1)
        a, b = torch.ones(S), torch.zeros(S)
        for step in range(1, 4):
            kernel(a, inbox, got, free, b, step)
            if inner == "barrier":
                comm.barrier()
            else:
                meet(inbox)

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32"), got: T.Signal((1,), keep=True),
        free: T.Signal((1,), keep=True), B: T.Tensor((S,), "float32"), step: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(A, inbox, dst=(rank + 1) % n, signal=got[0])
            T.wait(got[0], step)
            T.copy(inbox, B)

    @T.prim_func
    def met(X: T.SymmTensor((S,), "float32")):
        with T.Kernel(1), T.Scale("device"):
            T.barrier()

    kernel, meet = (tilescale.compile(f, target="sim") for f in (push, met))
    for inner in ("barrier", "launch"):
        report = checked(lambda rank, n: between(rank, n, inner), 3)
        assert report, report


def test_memory_that_launches_see_by_parts_is_not_checked_between_them():
    @T.prim_func
    def early(A: T.Tensor((S,), "float32"), inbox: T.SymmTensor((S,), "float32")):
        with T.Kernel(1, ordered=False), T.Scale("device") as (rank, n):
            T.copy(A, inbox, dst=(rank + 1) % n)

    kernel = tilescale.compile(early, target="sim")

    def program(rank: int, n: int) -> None:
        inbox, a = comm.zeros(2 * S), torch.ones(S)
        kernel(a, inbox[0:S])
        kernel(a, inbox[shift : shift + S])

    shift = S
    assert not checked(program, 2).unchecked
    shift = S // 2
    assert "early has ordered=False" in "".join(checked(program, 2).unchecked)


def passed_on(ordered: bool, everyone: bool, dense: bool = False) -> Callable[[int, int], None]:
    """Packets around a ring, or to everyone: in a ring of three nobody hears of the rank to which it puts."""

    @T.prim_func
    def push(
        A: T.Tensor((S,), "float32"),
        box: T.Packets((4, S), "float32", dense=dense),
        B: T.Tensor((4, S), "float32"),
    ):
        with T.Kernel(1, ordered=ordered), T.Scale("device") as (rank, n):
            for k in T.serial(n if everyone else 1):
                T.put_packets(A, box[rank, :], dst=(rank + 1 + k) % n)
            for k in T.serial(n if everyone else 1):
                T.get_packets(box[(rank + n - 1 - k) % n, :], B[k, :])

    kernel = tilescale.compile(push, target="sim")

    def program(rank: int, n: int) -> None:
        box = comm.packets((4, S), dense=dense)
        for step in range(1, 6):
            a, b = torch.full((S,), float(10 * rank + step)), torch.zeros(4, S)
            kernel(a, box, b)
            assert float(b[0, 0]) == 10 * ((rank - 1) % n) + step

    return program


@pytest.mark.parametrize("dense", [False, True])
def test_packets_of_the_launch_before_the_last_are_taken_first(dense: bool):
    report = checked(passed_on(ordered=False, everyone=False, dense=dense), 3)
    lost = [f for f in report.findings if "before the last" in f.message]
    assert lost and lost[0].kind == "race" and lost[0].where.launch is not None, report
    for ordered, everyone, ranks in ((True, False, 3), (False, True, 3), (True, True, 3), (False, False, 2)):
        report = checked(passed_on(ordered, everyone, dense), ranks)
        assert report, report
