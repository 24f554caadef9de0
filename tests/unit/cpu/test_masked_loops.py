"""Indices that are remainders beside a term that a loop around theirs changes: LLVM must not lose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale
import tilescale.language as T

P, ROUNDS = 128, 4

#: an index below P of the round's number, as the language has it and as NumPy does
PLACES: dict[str, Callable[[Any], Any]] = {
    "the next one": lambda i: (i + 1) % P,
    "the one before": lambda i: (i + P - 1) % P,
    "each third": lambda i: (i * 3) % P,
    "masked": lambda i: (i + 3) & (P - 1),
    "in parts": lambda i: i // 32 * 32 + (i + 1) % 32,
    "of 8 bits": lambda i: (i + 200).astype("uint8") // 2 if isinstance(i, np.ndarray) else T.cast(T.cast(i + 200, "uint8") // T.cast(2, "uint8"), "int32"),
}  # fmt: skip


def ring(place: Callable[[Any], Any], store: bool, by_threads: bool) -> Any:
    """Sums of rows that come in two halves of a tile in turn, read, or written, at ``place``."""

    @T.prim_func
    def kernel(X: T.Tensor((ROUNDS, P), "int32"), Y: T.Tensor((P,), "int32"), n: T.int32):
        with T.Kernel(1, threads=P):
            s, total = T.alloc_shared((2 * P,), "int32"), T.alloc_shared((P,), "int32")
            T.clear(total)
            T.clear(s)
            if by_threads:
                t = T.get_thread_binding()
                for k in T.serial(n):
                    s[(k % 2) * P + (place(t) if store else t)] = X[k, t]
                    T.sync_threads()
                    total[t] += s[(k % 2) * P + (t if store else place(t))]
            else:
                for k in T.serial(n):
                    for i in T.serial(P):
                        s[(k % 2) * P + (place(i) if store else i)] = X[k, i]
                    for i in T.serial(P):
                        total[i] += s[(k % 2) * P + (i if store else place(i))]
            T.copy(total, Y)

    return kernel


@pytest.mark.parametrize("by_threads", [False, True])
@pytest.mark.parametrize("name, store", [(n, False) for n in PLACES] + [("the next one", True)])
def test_remainders_are_not_lost(name: str, store: bool, by_threads: bool):
    x = np.random.default_rng(1).integers(-99, 99, (ROUNDS, P), dtype="int32")
    at, y = PLACES[name](np.arange(P, dtype="int32")), np.full(P, -1, "int32")
    tilescale.compile(ring(PLACES[name], store, by_threads), target="cpu")(x, y, ROUNDS)
    want = np.zeros((ROUNDS, P), "int32")
    if store:
        want[:, at] = x
    else:
        want = x[:, at]
    np.testing.assert_array_equal(y, want.sum(0))
