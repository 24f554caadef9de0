"""Of the loops that a nest's fragments suggest, those behind the first one that fits are not made."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.layout import loops
from tilescale.compiler.passes import pipeline


def test_the_first_loop_that_fits_ends_the_search(monkeypatch: pytest.MonkeyPatch):
    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((64, 64), "float32")
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (T.alloc_fragment((64, 64), "float32") for _ in range(3))
            T.copy(A, a)
            T.copy(B, b)
            for i, j in T.Parallel(64, 64):
                c[i, j] = a[i, j] + b[i, j]
            T.copy(c, C)

    made: list[int] = []
    make, choose = loops.from_fragment, loops.choose

    def counted(*args: Any, **more: Any) -> Any:
        made[-1] += 1
        return make(*args, **more)

    def chosen(nest: Any, layouts: Any, threads: int) -> Any:
        made.append(0)
        loop, bad = choose(nest, layouts, threads)
        assert bad or made[-1] <= 1, "another loop was made behind one that fits"
        return loop, bad

    monkeypatch.setattr(loops, "from_fragment", counted)
    monkeypatch.setattr(loops, "choose", chosen)
    pipeline.run(kernel.trace(), target("sm_90a"))
    assert 1 in made
