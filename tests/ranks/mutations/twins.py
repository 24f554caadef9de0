"""The repaired kernels of the corpus as subjects of mutation, and the mutants of them that are harmless."""

from __future__ import annotations

from typing import Any

from tests.ranks.faulty.kernels import CASES, Case
from tests.ranks.mutations.subjects import EXIT, Subject

FREE = "a rank is reached only when it has come to the launch, and the destination is written once: it is free from the beginning"
ONCE = "what it protects from being overwritten is written once in a launch"
BARRIER = "the barrier and the collective's meeting stand beside each other, and either of them is enough"
APART = "the two collectives share no memory, and each meets for itself"
IN_ORDER = "one executor puts the keys and then the values: whoever has heard of the values has the keys"
OWN = "the chain orders nothing: each block reads and writes elements of its own"
LATER = "it is sent later than it could be, and no wait in front of it depends on it"
FORWARD = "it moves over a statement that touches neither what it tells of nor what it waits for"

_REDUCED = "T.all_reduce(R[b, 0:S], B[b, 0:S])"
_KEYS = "signal of T.copy(K, keys, dst=right, signal=got[0])"
_VALUES = "signal of T.copy(V, values, dst=right, signal=got[1])"

HARMLESS: dict[str, dict[str, str]] = {
    "wave_front_one_tile_behind": {
        "signal T.signal(made[0]): deleted": "no block waits for the first counter"
    },
    "tiles_that_wait_for_later_ones": {"signal T.signal(ready[t]): moved up": FORWARD},
    "a_chain_longer_than_the_device": {
        "wait T.wait(done[b]): moved down": OWN,
        "wait T.wait(done[b]): one fewer": OWN,
        "signal T.signal(done[b + 1]): moved up": OWN,
    },
    "a_cluster_tile_overwritten": {"barrier T.barrier() (again 1): moved up": FORWARD},
    "a_block_outside_the_cluster": {
        f"barrier T.barrier() (again 1): {what}": "nobody writes the tile again, and it lives until its cluster has ended"
        for what in ("deleted", "moved up")
    },
    "reduced_before_it_is_filled": {
        "barrier T.barrier(): moved down": BARRIER,
        **{f"meeting 1 of {_REDUCED}: {what}": BARRIER for what in ("deleted", "moved up", "moved down")},
        f"meeting 2 of {_REDUCED}: deleted": ONCE,
        f"meeting 2 of {_REDUCED}: moved up": FORWARD,
    },
    "collectives_in_another_order": {
        "collective T.all_reduce(R): moved down": APART,
        "collective T.all_gather(A, G): moved up": APART,
        **{f"meeting 3 of T.all_reduce(R): {what}": APART for what in ("deleted", "moved up", "moved down")},
        **{
            f"meeting 1 of T.all_gather(A, G): {what}": FREE for what in ("deleted", "moved up", "moved down")
        },
        **{f"meeting 2 of T.all_gather(A, G): {what}": EXIT for what in ("deleted", "moved up")},
    },
    "another_root_on_rank_zero": {
        f"meeting 1 of T.broadcast(A, G, 1): {what}": FREE for what in ("deleted", "moved down")
    },
    "everyone_is_the_root": {
        f"meeting 1 of T.broadcast(A, G, rank if bug else world - 1): {what}": FREE
        for what in ("deleted", "moved down")
    },
    "a_team_in_two_orders": {
        f"meeting {k} of T.broadcast(A, G, root=0){again}: moved {way}": why
        for again in ("", " (again 1)")
        for k, way, why in ((1, "down", FREE), (2, "up", EXIT))
    },
    "teams_that_meet_in_a_circle": {
        "barrier T.barrier() (again 5): moved down": "the rank between has met both, so what is read was written before its second pair met"
    },
    "a_collective_under_a_branch": {
        "meeting 2 of T.all_reduce(R, B): deleted": ONCE,
        "meeting 2 of T.all_reduce(R, B): moved up": FORWARD,
    },
    "a_barrier_under_a_rank_branch": {
        f"barrier T.barrier() (again 1): {what}": ONCE for what in ("deleted", "moved up")
    },
    "a_barrier_against_a_wait": {"barrier T.barrier(): deleted": "the signal orders all that is read"},
    "one_of_two_waits": {
        f"{_KEYS}: moved up": IN_ORDER,
        "wait T.wait(got[0]): moved down": IN_ORDER,
        "wait T.wait(got[0]): one fewer": IN_ORDER,
        f"{_KEYS}: moved down": LATER,
        f"{_VALUES}: moved down": LATER,
        "wait T.wait(got[0]): moved up": "everyone has put its keys by then, so that the wait ends all the same",
        "wait T.wait(got[1]): moved up": "both waits stand in front of all that is read, in any order",
        "wait T.wait(got[1]): moved down": "it is moved over the read of the keys, which their own wait orders",
    },
}


def _subject(case: Case) -> Subject:
    def make(n: int) -> tuple[Any, dict[str, Any]]:
        return case.build(n, False), case.args(n)

    return Subject(case.name, make, HARMLESS.get(case.name, {}), (case.ranks,))


TWINS = tuple(_subject(case) for case in CASES if case.kind != "different-programs")
