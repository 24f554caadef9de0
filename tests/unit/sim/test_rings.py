"""Rings and roles on the simulator: what is said where an order is missing, by ring, stage and both
statements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.passes.seeded import Case, Judge, gemm, seeded
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.passes import prefetch, roles
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.passes.schedule import schedule

BOTH = ("producer", "consumer")
S = 16


def fault(name: str, **plan: Any) -> list[Any]:
    """What is found of the first fault of that name in a GEMM, in turn."""
    program = schedule(tile_level(gemm()), 2, **(plan or {"roles": BOTH}))
    made = next(f for f in seeded(program) if f.name == name).program()
    return launch(made, 1, limit=20_000).report.findings


def one(findings: list[Any], kind: str, *words: str) -> str:
    """The text of the finding of that kind that has these words."""
    texts = [str(f) for f in findings if f.kind == kind and all(w in str(f) for w in words)]
    assert texts, "\n\n".join(map(str, findings))
    return texts[0]


def test_reuse_of_a_stage_before_its_reader_is_done():
    text = one(fault("acquire dropped"), "race", "reuse of stage", "of ring 0 before its reader is done")
    assert "rank 0, block 0, producer" in text and "block 0, consumer" in text
    assert "T.copy" in text and "T.gemm" in text  # both statements
    assert "acquire in front of the copy into it" in text
    one(fault("release before the last reader"), "race", "reuse of stage", "before its reader is done")


def test_a_stage_that_is_read_before_it_is_full():
    for name in ("wait dropped", "wait one round early", "commit before the last copy"):
        text = one(fault(name), "race", "of ring 0 is read before it is full", "T.copy", "T.gemm")
        assert "wait in front of its first reader" in text
    # One role: its own copy is in flight.
    text = one(fault("wait dropped", ahead=True), "race", "is read before it is full")
    assert "rank 0, block 0" in text


def test_a_ring_that_nobody_empties_is_a_deadlock():
    text = one(
        fault("release dropped"),
        "deadlock",
        "stage 0 of ring 0 to be empty: round 2 fills it behind the release of round 0",
    )
    assert "producer" in text
    one(fault("release dropped", ahead=True), "deadlock", "of ring 0 to be empty")
    text = one(
        fault("commit dropped"), "deadlock", "stage 0 of ring 0 to be full: round 0 has not been committed"
    )
    assert "consumer" in text


def test_a_round_that_nobody_reads():
    findings = fault("a loop with a round more")
    assert "round 7 is filled, and nobody waits for it before the block ends" in one(
        findings, "schedule", "ring 0"
    )


def test_a_stage_is_touched_between_the_tokens_of_its_round():
    one(
        fault("a read of the next stage"),
        "schedule",
        "ring 0: a[1, 0:32, 0:16] is read in round 0, whose stage is 0",
    )
    one(fault("release before all readers"), "schedule", "is read outside wait and release")
    one(
        fault("acquire behind the first copy", ahead=True),
        "schedule",
        "is written outside acquire and commit",
    )


def in_place() -> Any:
    @T.prim_func
    def main(A: T.Tensor((8, S), "int32")):
        with T.Kernel(1):
            a, b = T.alloc_shared((S,), "int32"), T.alloc_fragment((S,), "int32")
            for k in T.Pipelined(6, num_stages=3):
                T.copy(A[k, 0], a)
                for i in T.Parallel(S):
                    b[i] = a[i] + 1
                T.copy(b, A[k + 2, 0])

    return main


@pytest.mark.parametrize(
    "plan", [{"roles": BOTH}, {"roles": ("all",), "ahead": True}], ids=["two roles", "copies ahead"]
)
def test_the_source_of_a_copy_in_flight_is_not_to_change(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """A pass that forgets to look for it lets copies run ahead of what the loop itself writes."""
    monkeypatch.setattr(prefetch, "unfit", lambda *_: None)
    monkeypatch.setattr(roles._Cutter, "_check", lambda self, s: None)
    monkeypatch.setattr(roles._Cutter, "_check_part", lambda self, s, made, allocated: None)
    given = {"A": np.zeros((8, S), np.int32)}
    program = schedule(tile_level(in_place()), 3, **plan)
    findings = check(program, 1, given, seeds=2).findings
    text = one(findings, "race", "a copy into ring 0 reads it, which is in flight until its round is awaited")
    assert "A[" in text and "T.copy" in text


def test_copies_move_when_their_round_is_awaited_and_not_before():
    program = schedule(tile_level(gemm()), 2, BOTH)
    dropped = next(f for f in seeded(program) if f.name == "wait dropped").program()
    arrays = launch(tile_level(gemm())).arrays[0]
    given = {name: arrays[name] for name in "AB"}
    assert (launch(program, 1, given, order="adversary").arrays[0]["C"] == arrays["C"]).all()
    assert (
        launch(dropped, 1, given, order="adversary", limit=20_000).arrays[0]["C"] == 0
    ).all()  # nothing ever came


def test_clocks_of_blocks_with_roles_are_apart():
    """Blocks whose roles run at once keep their findings apart: no race among blocks that share nothing."""
    judge = Judge(Case("gemm", gemm))
    assert judge.judge(judge.scheduled({"depth": 3, "roles": BOTH})).finding is None
