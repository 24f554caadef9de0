"""T.Persistent's orders of tiles, drawn by hypothesis: every tile falls to one block, once."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilescale.language as T
from tests.kernels import refused, run
from tests.unit.cuda.emulated import agree, data, empty
from tilescale.compiler import driver
from tilescale.compiler.checks.run import launch
from tilescale.errors import TileError

extents = st.integers(1, 9)
cases = st.fixed_dictionaries(
    {
        "domain": st.lists(extents, min_size=2, max_size=4).map(tuple),
        "blocks": st.integers(1, 40),
        "group": st.none() | st.tuples(st.integers(1, 11), st.integers(1, 11)),
        "rotate": st.none() | st.integers(0, 90),
    }
)


def tiles(block: int, domain: Any, blocks: int, **order: Any) -> list[tuple[int, ...]]:
    """The tiles of one block, in the order of its loop."""
    loop = T.Persistent(domain, blocks, block, **order)
    assert loop.wrap is not None
    return [loop.wrap([counted]) for counted in range(*loop.ranges[0])]


@given(cases)
@settings(max_examples=300)
def test_every_tile_comes_once(case: dict[str, Any]):
    domain, blocks = case["domain"], case["blocks"]
    seen = Counter(t for b in range(blocks) for t in tiles(b, **case))
    assert seen == Counter(product(*map(range, domain)))
    counts = {len(tiles(b, **case)) for b in range(blocks)}
    assert max(counts) - min(counts) <= 1, "no block has two tiles more than another"


@given(cases)
@settings(max_examples=60)
def test_a_wave_takes_neighbours_of_the_order(case: dict[str, Any]):
    """Turned or not, wave w has the same tiles, which are neighbours in the order."""
    domain, blocks = case["domain"], case["blocks"]
    order = tiles(0, domain, 1, group=case["group"])
    own = [tiles(b, **case) for b in range(blocks)]
    for w in range(prod(domain) // blocks + 1):
        took = {t for mine in own for t in mine[w : w + 1]}
        assert took == set(order[w * blocks : (w + 1) * blocks])


def test_groups_go_round_the_owners():
    order = tiles(0, (3, 4, 16), 1, group=(2, 8))
    assert [t[0] for t in order[::16]] == [0, 1, 2] * 4, "a group of each owner, then the next of each"
    assert {t[1:] for t in order[:16]} == set(product(range(2), range(8)))
    assert order[48] == (0, 0, 8) and order[96] == (0, 2, 0)


def test_a_turned_wave_brings_a_block_to_another_owner():
    domain, blocks = (4, 8, 16), 64
    plain = [[t[0] for t in tiles(b, domain, blocks, group=(2, 8))] for b in range(blocks)]
    turned = [[t[0] for t in tiles(b, domain, blocks, group=(2, 8), rotate=16)] for b in range(blocks)]
    assert all(len(set(owners)) == 1 for owners in plain)
    assert all(len(set(owners[:4])) == 4 for owners in turned)


def visited(rows: Any, cols: Any, blocks: int, **order: Any) -> Any:
    @T.prim_func
    def kernel(seen: T.Tensor((3, rows, cols), "int32"), when: T.Tensor((blocks,), "int32")):
        with T.Kernel(blocks, threads=32) as b:
            when[b] = 0
            for o, i, j in T.Persistent((3, rows, cols), blocks, b, **order):
                seen[o, i, j] = seen[o, i, j] + 1 + 100 * b + 10000 * when[b]
                when[b] = when[b] + 1

    return kernel


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "order",
    [{}, {"rotate": 3}, {"group": (2, 4)}, {"group": (2, 3), "rotate": 6}, {"group": (4, 4), "rotate": 5}],
)
def test_kernels_take_the_tiles_that_numbers_say(order: dict[str, Any], dynamic: bool):
    rows, cols, blocks = 4, 6, 7
    kernel = visited(*((T.dynamic("m"), T.dynamic("n")) if dynamic else (rows, cols)), blocks, **order)
    want = np.zeros((3, rows, cols), "int32")
    for b in range(blocks):
        for wave, at in enumerate(tiles(b, (3, rows, cols), blocks, **order)):
            want[at] = 1 + 100 * b + 10000 * wave
    args = {"seen": np.zeros((3, rows, cols), "int32"), "when": np.zeros(blocks, "int32")}
    assert (launch(kernel, 1, args).arrays[0]["seen"] == want).all()


def test_indices_of_groups_that_do_not_fit_are_short():
    """Written out, they took TVM a minute on the CPU."""
    kernel = visited(5, 7, 4, group=(2, 4), rotate=3)
    text = driver.source_text(kernel.trace(), "tile")
    assert max(map(len, text.splitlines())) < 240, text
    args = {"seen": np.zeros((3, 5, 7), "int32"), "when": np.zeros(4, "int32")}
    run(kernel)(**args)
    assert (args["seen"] % 100 == 1).all() and args["when"].sum() == 3 * 5 * 7


def test_where_groups_fit_nothing_is_asked_of_an_index():
    text = driver.source_text(visited(4, 16, 7, group=(2, 8), rotate=16).trace(), "cuda", "cuda:sm_90a")
    assert not re.findall(r"if \((?!tid == 0)", text), text


BODIES = {
    "group= of a domain with one axis": {"domain": 8, "group": (2, 2)},
    "group=(2,) of T.Persistent": {"group": (2,)},
    "group=4 of T.Persistent": {"group": 4},
    "group=(0, 2) of T.Persistent": {"group": (0, 2)},
    "rotate=-1 of T.Persistent": {"rotate": -1},
    "rotate=1.5 of T.Persistent": {"rotate": 1.5},
}


@pytest.mark.parametrize("what", BODIES)
def test_what_is_no_order_is_refused(what: str):
    given = {"domain": (4, 4), **BODIES[what]}

    @T.prim_func
    def main(A: T.Tensor((4,), "int32")):
        with T.Kernel(2, threads=32) as b:
            for _ in T.Persistent(wave_size=2, index=b, **given):
                A[b] = 1

    with refused(TileError, what):
        main.trace()


@pytest.mark.parametrize("order", [{"rotate": 3}, {"group": (2, 2)}, {"group": (2, 1), "rotate": 2}])
def test_producers_go_the_same_way(order: dict[str, Any]):
    """Products of tiles whose operands a producer brings, on the emulated GPU."""

    @T.prim_func
    def kernel(
        A: T.Tensor((2, 192, 128), "bfloat16"),
        B: T.Tensor((128, 192), "bfloat16"),
        C: T.Tensor((2, 192, 192), "float32"),
    ):
        with T.Kernel(4, threads=128) as b:
            x, w = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            for o, i, j in T.Persistent((2, 3, 3), 4, b, **order):
                T.clear(acc)
                for k in T.Pipelined(2, num_stages=2):
                    T.copy(A[o, i * 64, k * 64], x)
                    T.copy(B[k * 64, j * 64], w)
                    T.gemm(x, w, acc)
                T.copy(acc, C[o, i * 64, j * 64])

    assert "tma_load" in driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    args = {
        "A": data((2, 192, 128), "bfloat16", 1),
        "B": data((128, 192), "bfloat16", 2),
        "C": empty((2, 192, 192), "float32"),
    }
    agree(kernel, args)
