"""Every fault of the corpus has a hint. Where the finding says it as an edit of the source, the edited kernel
has no finding any more; where it does not, the reason why it is no edit stands here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.faulty.kernels import CASES, Case
from tests.ranks.faulty.repair import repaired

_INDEX = "which memory each is to have follows from what the kernel is for, not from the two accesses"
_VALUE = "what is to lie there follows from what the kernel is for"
_COUNT = "the count grows with the rounds of a loop, as an expression that a run does not show"
_BOUND = "whether the region, the condition or the extent is wrong, nobody but the author knows"
_BRANCH = "a meeting in that branch would lack those who do not take it"
_LAUNCH = "it is the launch that is wrong, or the arguments, and no statement"
_AGREE = "ranks disagree, and either may be the one that is right"

#: by case the reason why its hint is no edit
NOT_CODE = {
    **dict.fromkeys(
        (
            "two_writers",
            "two_ranks_own_the_border",
            "offsets_of_an_all_to_all_overlap",
            "dispatched_tokens_collide",
            "tiles_wider_than_their_distance",
            "everyone_puts_the_same",
            "packets_at_the_own_place",
            "one_place_for_two_rounds",
        ),
        _INDEX,
    ),
    **dict.fromkeys(
        ("half_a_vector_sent", "the_own_part_is_left_out", "a_result_accumulated_in_place"), _VALUE
    ),
    **dict.fromkeys(
        (
            "stage_reused_too_early",
            "the_wrong_phase",
            "one_consumer_gives_the_stage_back",
            "wave_front_one_tile_behind",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "index_outside_a_tile",
            "the_last_tile_is_longer",
            "one_stage_too_few",
            "a_counter_that_is_not_there",
            "a_block_outside_the_cluster",
            "off_by_one_peer",
            "division_by_zero",
        ),
        _BOUND,
    ),
    **dict.fromkeys(
        (
            "a_plain_flag_between_blocks",
            "the_last_block_is_not_the_last",
            "a_barrier_in_a_loop_of_other_lengths",
            "a_barrier_against_a_wait",
        ),
        _BRANCH,
    ),
    **dict.fromkeys(
        ("grid_too_large_to_wait", "a_chain_longer_than_the_device", "an_expert_that_is_not_there"), _LAUNCH
    ),
    **dict.fromkeys(
        (
            "collectives_in_another_order",
            "another_root_on_rank_zero",
            "everyone_is_the_root",
            "another_tile_on_rank_one",
            "a_team_in_two_orders",
            "teams_that_meet_in_a_circle",
        ),
        _AGREE,
    ),
    "a_dense_packet_taken_twice": "which of the two is left out follows from what the kernel is for",
    "packets_left_behind": "who is to take them, or whether they are put, nobody but the author knows",
    "ranks_of_the_launch_in_a_team": _BOUND,
    "a_transpose_in_place": "one loop of two names becomes two loops, whose bounds are those of the triangle",
    "a_loop_that_never_ends": "what is to change in the loop is the loop's own meaning",
    "signal_nobody_awaits": "where the news is needed, or whether the signal is, nobody but the author knows",
    "tiles_that_wait_for_later_ones": "the order of the tiles is to change, and not that of two statements",
    "a_producer_whose_empty_signal_is_missing": "a signal that is not there has no counter that a run could show",
    "warps_share_a_tile": "a signal of their own wants an allocation and a place for each of its two statements",
}


def test_the_reasons_are_those_of_cases_that_there_are():
    assert set(NOT_CODE) <= {case.name for case in CASES}
    assert len(NOT_CODE) < len(CASES) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_hint_that_is_code_makes_the_program_clean(case: Case, tmp_path: Path):
    findings = case.check(True, "adversary", 3).findings
    assert all(f.hint for f in findings)
    edits = [f.fix for f in findings if f.fix is not None]
    assert bool(edits) is (case.name not in NOT_CODE), [str(f) for f in findings]
    report, made = None, case
    for again in range(2 if edits else 0):  # two places of one fault are two findings
        if edits:
            made = repaired(made, edits[0], tmp_path / str(again))
            report = made.check(True, "adversary", 3)
            edits = [f.fix for f in report.findings if f.fix is not None]
    assert report is None or report, report
