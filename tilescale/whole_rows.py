"""A second kernel for rows of whole vectors.

Rows whose length a call says (``T.dynamic`` as a tensor's last extent) may begin anywhere, so a GPU copies
them number by number. Where a call's rows are multiples of 16 bytes, as most are, TMA and cp.async can take
them: such calls go to a second kernel, the same program with the promise that ``T.dynamic("n",
multiple_of=…)`` makes. It is compiled at the first of them. Nobody has to promise anything, and any rows
work.

A kernel of several ranks has none: ranks with other rows would launch another kernel.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from tilescale import advice
from tilescale.language.dtypes import BITS

#: bytes that TMA and cp.async ask of a row and of its address
VECTOR = 16
_lock = threading.Lock()


class Row(NamedTuple):
    """A call's argument whose axis ``axis`` is to be a multiple of ``of``."""

    argument: int
    axis: int
    of: int


def wanted(kernel: Any) -> dict[str, int]:
    """The symbols that rows end by, with the multiples that make them whole vectors; none where all are
    promised, on targets that copy no vectors, and of kernels in which ranks meet."""
    promised, found = kernel.multiples, dict[str, int]()
    if not kernel.device.gpu or kernel.collective or kernel.instrument:
        return found
    for p in kernel.params:
        if (symbol := _row(p)) is not None:
            given = promised.get(symbol, 1)
            of = given * (VECTOR // math.gcd(VECTOR, given * BITS[p["dtype"]] // 8))
            if of > given:
                found[symbol] = math.lcm(found.get(symbol, 1), of)
    return found


def _row(p: dict[str, Any]) -> str | None:
    """The symbol that a parameter's rows end by, where they lie one behind another."""
    shape: list[Any] = list(p.get("shape") or ())
    plain = len(shape) > 1 and p.get("strides") is None and not p.get("of") and BITS[p["dtype"]] >= 8
    return shape[-1] if plain and isinstance(shape[-1], str) else None


def chooser(
    kernel: Any,
    general: Callable[..., Any],
    make: Callable[[Any, dict[str, int]], Callable[..., Any]],
) -> Callable[..., Any]:
    """``general``, or what chooses between it and what ``make`` gives for these multiples of a kernel
    (`launching.Launchable`). Where no argument says a symbol's value there is no other one."""
    multiples = wanted(kernel)
    places = {
        e: Row(at, axis, multiples[e])
        for at, k in reversed(list(enumerate(kernel._inputs)))
        for axis, e in enumerate(kernel.params[k].get("shape") or ())
        if isinstance(e, str) and e in multiples
    }
    if not multiples or len(places) < len(multiples):
        return general
    begins = [at for at, k in enumerate(kernel._inputs) if _row(kernel.params[k]) in multiples]
    say = functools.partial(advice.give, kernel.entry.meta)
    return Chooser(general, list(places.values()), begins, lambda: make(kernel, multiples), say)


class Chooser:
    """The calls of a kernel that has a second one: ``general`` runs any rows, ``make`` gives the other;
    ``advice`` is said when rows that are no whole vectors first come."""

    def __init__(
        self, general: Callable[..., Any], rows: list[Row], begins: list[int],
        make: Callable[[], Callable[..., Any]], advice: Callable[[], None] | None = None,
    ):  # fmt: skip
        self.general, self.rows, self.begins, self.make = general, rows, begins, make
        self.special: Callable[..., Any] | None = None
        self.advice = advice

    def __call__(self, *args: Any) -> Any:
        if self.fits(args):
            return self.whole()(*args)
        if self.advice is not None:
            say, self.advice = self.advice, None
            say()
        return self.general(*args)

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether all rows of a call are whole vectors. What is no tensor of torch's goes the general way."""
        try:
            return all(args[r.argument].shape[r.axis] % r.of == 0 for r in self.rows) and not any(
                args[k].data_ptr() % VECTOR for k in self.begins
            )
        except (AttributeError, IndexError, TypeError):
            return False

    def whole(self) -> Callable[..., Any]:
        if self.special is None:
            with _lock:
                self.special = self.special or self.make()
        return self.special
