"""Turns of an emulated block's roles: who gets them, and that few of them change threads."""

from __future__ import annotations

import numpy as np
import pytest

from tilescale.compiler.emulator import interleaving
from tilescale.compiler.emulator.copies import EmulationError


def order(seed: int) -> interleaving.Interleaving:
    return interleaving.Interleaving(np.random.default_rng(seed), seed)


@pytest.mark.parametrize("seed, most", [(2, 120), (4, 120), (0, 320)])
def test_who_goes_on_stays_in_its_thread(seed: int, most: int, monkeypatch: pytest.MonkeyPatch):
    """Two roles of 200 steps each: with an order in haste (seeds 2 and 4) most steps go to who made the last
    one; else half of them do."""
    given: list[None] = []

    class Counted(interleaving.Turn):
        def __init__(self) -> None:
            super().__init__()
            release = self.release
            self.release = lambda: (given.append(None), release())  # type: ignore[assignment]

    monkeypatch.setattr(interleaving, "Turn", Counted)
    made, steps = order(seed), []

    def role(name: str) -> None:
        for _ in range(200):
            steps.append(name)
            made.yields()

    made.together([lambda: role("a"), lambda: role("b")])
    assert sorted(steps) == ["a"] * 200 + ["b"] * 200
    assert len(given) <= most, len(given)


def test_an_error_is_raised_where_the_block_runs_and_ends_all():
    made, went_on = order(0), []

    def fails() -> None:
        made.yields()
        raise EmulationError("on purpose")

    def waits() -> None:
        made.yields(lambda: False)
        went_on.append(True)

    with pytest.raises(EmulationError, match="on purpose"):
        made.together([fails, waits])
    assert not went_on and not made.threads
    with pytest.raises(EmulationError, match="no role of the block can go on"):
        made.together([waits, waits])
    made.together([lambda: made.yields()])  # it can be used again
