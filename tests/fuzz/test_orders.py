"""The simulator's schedules name what an oracle of its own finds in generated programs, and nothing else. A
sample of the seeds; a thousand of them: tests/bench/bench_orders.py."""

from __future__ import annotations

import pytest

from tests.fuzz.judge import judge
from tests.fuzz.oracle import truth
from tests.fuzz.orders import Op, Orders, draw_orders


@pytest.mark.parametrize("first", range(0, 60, 30))
def test_no_fault_is_missed_and_none_is_made_up(first: int):
    verdicts = [judge(seed) for seed in range(first, first + 30)]
    assert [v.failure for v in verdicts] == [""] * 30
    assert all(v.complete for v in verdicts)
    assert {fault for v in verdicts for fault in v.faults} == {"race", "deadlock"}


@pytest.mark.parametrize("first", range(100, 180, 40))
def test_the_adversary_alone_names_every_deadlock(first: int):
    verdicts = [judge(seed, ["adversary"]) for seed in range(first, first + 40)]
    stuck = [v for v in verdicts if v.truth.stuck]
    assert len(stuck) > 5 and all("deadlock" in v.named["adversary"] for v in stuck)


def test_a_seed_is_one_program():
    assert draw_orders(5) == draw_orders(5) != draw_orders(6)


# ---- the oracle itself, on programs that people can judge


def of(*ops: list[Op], blocks: int = 1) -> Orders:
    return Orders(0, len(ops) // blocks, blocks, tuple(map(tuple, ops)))


PUT, READ = Op("put and signal", part=0, counter=0, peer=1), Op("read", part=0)
WAIT = Op("wait", counter=0, how="ge")


def test_data_behind_its_signal_is_in_order():
    found = truth(of([PUT], [WAIT, READ]))
    assert found is not None and not found.races and not found.stuck


def test_data_that_nobody_awaits_is_a_race():
    found = truth(of([PUT], [READ, WAIT]))
    assert found is not None and found.races == {frozenset({(0, 0), (1, 0)})} and not found.stuck


def test_one_of_two_signals_says_nothing_of_the_other():
    found = truth(of([PUT], [WAIT, READ], [PUT]))
    assert found is not None and found.races == {
        frozenset({(0, 0), (1, 1)}),
        frozenset({(2, 0), (1, 1)}),
        frozenset({(0, 0), (2, 0)}),
    }


def test_a_counter_may_pass_a_value():
    tell = Op("signal", counter=0, peer=1)
    for how, stuck in (("eq", True), ("ge", False)):
        found = truth(of([tell, tell], [Op("wait", counter=0, value=1, how=how)]))
        assert found is not None and found.stuck is stuck and not found.races


def test_a_barrier_that_one_rank_leaves_out():
    found = truth(of([Op("barrier")], []))
    assert found is not None and found.stuck


def test_a_wait_of_the_grid_does_not_acquire_from_other_ranks():
    near = Op("wait", counter=0, how="ge", scale="grid")
    found = truth(of([PUT], [near, READ]))
    assert found is not None and found.races


def test_a_store_and_an_addition_collide():
    found = truth(of([Op("signal", peer=1, how="set")], [], [Op("signal", peer=1)]))
    assert found is not None and found.races == {frozenset({(0, 0), (2, 0)})}


def test_a_flag_that_is_polled_orders_and_one_that_is_looked_at_may():
    write = Op("write", part=0)
    polled = truth(of([write, Op("store")], [Op("poll"), READ], [], [], blocks=2))
    looked = truth(of([write, Op("store")], [Op("write if", part=0)], [], [], blocks=2))
    other = truth(of([Op("store"), write], [Op("write if", part=0)], [], [], blocks=2))
    assert polled is not None and not polled.races and looked is not None and not looked.races
    assert other is not None and other.races == {frozenset({(0, 1), (1, 0)})}
