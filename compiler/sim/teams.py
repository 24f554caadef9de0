"""Ranks of a team in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tilescale.compiler.sim.expr import Expressions


def simulated_rank(cx: Expressions, call: Any) -> Callable[[Any], Any]:
    """``ts.scale_rank`` in the simulator."""
    from tilescale.compiler.sim.machine import Stranger

    index, count, rank = (cx.scalar(a) for a in call.args)

    def run(ex: Any) -> Any:
        named, ranks = index(ex), int(count(ex))
        strangers = [n for n in np.atleast_1d(named).ravel().tolist() if not 0 <= n < ranks]
        return Stranger.of(strangers[0], ranks) if strangers else rank(ex)

    return run
