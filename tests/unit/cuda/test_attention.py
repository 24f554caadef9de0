"""Flash attention on Hopper without a GPU: products from registers and from tiles outside rings, the overlap
of rounds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import _named, edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.ops.attention import Tile, attention, tile_of

#: (queries, keys), heads, keys' heads, head dimension, causal, tile, seed of the schedule
CASES = [
    ((130, 200), 1, 1, 64, False, Tile(128, 64, 256), 0),
    ((130, 130), 2, 1, 64, True, Tile(128, 128, 256), 1),
    ((100, 330), 1, 1, 128, False, Tile(64, 64, 128, 1), 2),
    ((200, 200), 1, 1, 64, True, Tile(192, 128, 384), 3),
    ((130, 130), 1, 1, 32, True, Tile(128, 32, 256), 4),
    ((64, 40), 1, 1, 256, False, Tile(128, 64, 256), 5),
    ((130, 130), 3, 1, 64, True, Tile(64, 64, 128, 2, 2), 1),
    ((200, 250), 2, 1, 32, True, Tile(64, 64, 128, 2, 3), 2),
    ((130, 130), 3, 1, 64, False, Tile(128, 64, 256, 2, 3), 0),
    ((130, 130), 3, 1, 64, True, Tile(128, 128, 256, 2, 2), 4),
]


def kernel(
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool,
    tile: Tile,
    packed: bool = False,
    dtype: str = "bfloat16",
) -> Any:
    return attention(heads, kv_heads, dim, packed, dtype, dim**-0.5, causal, tile)


def arguments(
    queries: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: str = "bfloat16", side: int = 1
) -> dict[str, Any]:
    q, other = (1, heads, queries, dim), (1, kv_heads, keys, dim)
    made = {
        "Q": data(q, dtype, 1),
        "K": data(other, dtype, 2),
        "V": data(other, dtype, 3),
        "O": empty(q, dtype),
        "Lse": empty(q[:3], "float32"),
    }
    return {**made, "side": side}


@pytest.mark.parametrize("lengths, heads, kv_heads, dim, causal, tile, seed", CASES, ids=str)
def test_results(
    lengths: tuple[int, int], heads: int, kv_heads: int, dim: int, causal: bool, tile: Tile, seed: int
):
    made = kernel(heads, kv_heads, dim, causal, tile)
    text = print_kernel(lowered(made)[0]).text
    assert "mma_m16n8" not in text.replace("wgmma", "") and re.search(r"wgmma_m64n\d+k16_bf16_r1", text), (
        "P lies in registers"
    )
    assert text.count("if (ts::any(shrink") >= 2, "whole warps leave out what they need not rescale"
    agree(made, arguments(*lengths, heads, kv_heads, dim, side=min(heads, 2)), seed=seed)


def test_packed_sequences():
    """Of 70, 1 and 129 queries with 130, 3 and no keys."""
    starts = [np.cumsum([0, *n]).astype("int32") for n in ((70, 1, 129), (130, 3, 0))]
    args = arguments(1, 1, 1, 1, 64)
    del args["side"]
    for name, count in (
        ("Q", starts[0][-1]),
        ("K", starts[1][-1]),
        ("V", starts[1][-1]),
        ("O", starts[0][-1]),
    ):
        args[name] = (
            data((int(count), 1, 64), "bfloat16", ord(name))
            if name != "O"
            else empty((int(count), 1, 64), "bfloat16")
        )
    args |= {"Lse": empty((1, 200), "float32"), "Starts": starts[0], "Begins": starts[1], "most": 129}
    agree(kernel(1, 1, 64, False, Tile(128, 64, 256), packed=True), args, seed=1)


def chained(rounds: Any, between: bool = False, fresh: bool = False) -> Any:
    """y += (a·bₙ - i as float16)·cₙ, a converted by threads. ``between``: y is touched in front of the first
    product; ``fresh``: the factor belongs to its round."""

    @T.prim_func
    def program(
        A: T.Tensor((64, 64), "float32"),
        B: T.Tensor((512, 64), "float16"),
        C: T.Tensor((512, 64), "float16"),
        Y: T.Tensor((64, 64), "float32"),
        n: T.int32,
    ):
        with T.Kernel(1, threads=128):
            a, b, c = (T.alloc_shared((64, 64), "float16") for _ in range(3))
            x, y = (T.alloc_fragment((64, 64), "float32") for _ in range(2))
            h = T.alloc_fragment((64, 64), "float16")
            T.copy(A, a)
            T.clear(y)
            for k in T.Pipelined(n if rounds is None else rounds, num_stages=2):
                T.copy(B[k * 64, 0], b)
                if between:
                    for i, j in T.Parallel(64, 64):
                        y[i, j] = y[i, j] * 0.5
                T.gemm(a, b, x, clear_accum=True)
                T.copy(C[k * 64, 0], c)
                for i, j in T.Parallel(64, 64):
                    x[i, j] = x[i, j] - i
                if fresh:
                    g = T.alloc_fragment((64, 64), "float16")
                    T.copy(x, g)
                    T.gemm(g, c, y)
                else:
                    T.copy(x, h)
                    T.gemm(h, c, y)
            T.copy(y, Y)

    return program


@pytest.mark.parametrize("n", [0, 1, 2, 5])
@pytest.mark.parametrize("between, fresh", [(False, False), (True, False), (False, True)])
def test_any_number_of_rounds(n: int, between: bool, fresh: bool):
    """Overlapped where nothing forbids it: a statement in front of the first product that needs the last
    one's result does, and a tile of the round's own."""
    draw = np.random.default_rng(n)  # small integers: any order of sums is exact
    args = {
        name: draw.integers(-2, 3, (512, 64) if name in "BC" else (64, 64)).astype(
            "float32" if name == "A" else "float16"
        )
        for name in "ABC"
    }
    args["Y"] = empty((64, 64), "float32")
    for rounds in (None, n):
        made = chained(rounds, between, fresh)
        assert ("ts::wgmma_wait<1>" in print_kernel(lowered(made)[0]).text) == (not between and not fresh), (
            rounds
        )
        agree(made, {**args, "n": n}, seed=n, exact=True)


def test_a_tile_that_threads_write_has_one_fence():
    """Behind the writes and in front of the loop, or of the first round."""
    for between in (False, True):
        text = print_kernel(lowered(chained(None, between))[0]).text
        meeting = re.compile(r"ts::fence_proxy_async\(\);\n *ts::barrier_sync\(15, 128\);  // T.gemm reads a")
        assert len(meeting.findall(text)) == text.count("reads a") == 1
        loops = [m.start() for m in re.finditer(r"for \(int k = 0;", text)]
        assert meeting.search(text).start() < loops[1], "the producer's loop comes first"


def test_queries_come_by_tma():
    """A tile that is filled once and that only products read is a ring of one stage: no thread touches it."""
    made, program = lowered(kernel(1, 1, 64, False, Tile(128, 64, 256)))
    assert [(r.depth, r.buffers) for r in program.schedule.rings] == [
        (2, ["k"]),
        (2, ["v"]),
        (1, ["q"]),
    ] and len(made.maps) == 4
    assert "reads q" not in print_kernel(made).text


FAULTS: dict[str, Any] = {
    "queries without a wait": lambda n, a: (
        None if n == "ts::mbarrier_wait" and _named(a[0]) == "full2" else ...
    ),
    "values without a wait": lambda n, a: (
        None if n == "ts::mbarrier_wait" and _named(a[0]) == "full1" else ...
    ),
    "keys without a wait": lambda n, a: None if n == "ts::mbarrier_wait" and _named(a[0]) == "full0" else ...,
    "values not released": lambda n, a: (
        None if n == "ts::mbarrier_arrive_warp" and _named(a[0]) == "empty1" else ...
    ),
    "scores without a wait": lambda n, a: None if n == "ts::wgmma_wait<1>" else ...,
    "outputs without a wait": lambda n, a: None if n == "ts::wgmma_wait<0>" else ...,
    "the scores' wait lets two run": lambda n, a: (
        ("ts::wgmma_wait<2>", a) if n == "ts::wgmma_wait<1>" else ...
    ),
    "no fence in front of products": lambda n, a: None if n == "ts::wgmma_fence" else ...,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str):
    made, program = lowered(kernel(1, 1, 32, False, Tile(128, 32, 256)))
    args = arguments(128, 130, 1, 1, 32)
    right = emulator.run(made, program, args)["O"]
    broken = edited(made, FAULTS[fault])
    for seed in range(12):
        try:
            got = emulator.run(broken, program, args, seed)["O"]
        except emulator.EmulationError:
            return
        if not (got == right).all():
            return
    pytest.fail("no schedule shows it")


def test_a_missing_proxy_fence_is_found():
    made, program = lowered(chained(2))
    args = {
        "A": data((64, 64), "float32", 1),
        "B": data((512, 64), "float16", 2),
        "C": data((512, 64), "float16", 3),
    }
    args |= {"Y": empty((64, 64), "float32"), "n": 2}
    emulator.run(made, program, args)
    with pytest.raises(emulator.EmulationError, match=r"fence\.proxy\.async"):
        emulator.run(edited(made, lambda n, a: None if n == "ts::fence_proxy_async" else ...), program, args)


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize(
    "dim, causal", [(64, False), (64, True), (128, False), (128, True), (256, False), (256, True)]
)
def test_products_stay_in_flight(dim: int, causal: bool):
    tile = tile_of(dim, causal, 32, 132)
    made = toolchain.compile_cubin(print_kernel(lowered(kernel(32, 8, dim, causal, tile))[0]), "sm_90a")
    assert made.resources.spill_stores == 0 and made.resources.stack == 0
    # Three warpgroups under a causal mask, of 160 registers a thread, have none left for products in flight;
    # they take turns all the same, and are faster than two of which each has its products in flight.
    assert made.serialised == (dim == 64 and causal), made.messages
