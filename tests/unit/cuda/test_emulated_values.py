"""One number as a value for each thread, which the emulator asks for at most instructions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tilescale.compiler.emulator.async_units import one
from tilescale.compiler.emulator.copies import EmulationError
from tilescale.compiler.emulator.memory import spread

THREADS = np.arange(96) < 50
NUMBERS = [5, True, 2.5, np.int32(-3), np.uint64(1 << 63), np.float16(0.5), np.array(7, np.int8)]


@pytest.mark.parametrize("number", [*NUMBERS, ml_dtypes.bfloat16(1.5)], ids=repr)
def test_a_number_for_each_thread(number: Any, monkeypatch: pytest.MonkeyPatch):
    want = np.broadcast_to(number, THREADS.shape)
    if want.dtype.kind in "biuf":  # np.broadcast_to would take six times as long
        monkeypatch.setattr(np, "broadcast_to", None)
    made = spread(number, THREADS)
    assert made.dtype == want.dtype and made.shape == want.shape and (made == want).all()
    assert made.strides == (0,) and not made.flags.writeable
    assert one(THREADS, number) == number


def test_values_that_are_there_stay():
    values = np.arange(96)
    assert spread(values, THREADS) is values
    assert spread(np.arange(1), THREADS).tolist() == [0] * 96
    with pytest.raises(EmulationError, match=r"threads of one instruction disagree: \[0 1 2 3\]"):
        one(THREADS, values)
    assert one(THREADS, np.where(THREADS, 4, values)) == 4
