"""Boxes of packets without marks: what is put comes bit for bit, launch after launch, and places are empty
behind each; what goes wrong with one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import Made, lowered
from tilescale.compiler import driver, emulator, static
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.emulator import EmulationError
from tilescale.compiler.passes.pipeline import tile_level
from tilescale.compiler.sim import numerics
from tilescale.compiler.tvm_compat import ir, structural_map, structural_walk, tirx
from tilescale.errors import TileTypeError, TileValueError
from tilescale.language.dtypes import BITS
from tilescale.packets import HEAD, SHIFT, length

FLOATS = ("bfloat16", "float16", "float32")


def to_everyone(n: int, rows: int, row: int, dtype: str, blocks: int = 1, threads: int = 64) -> Any:
    """Every rank gets a tile of each, its own too."""

    @T.prim_func
    def main(
        X: T.Tensor((n, blocks, rows, row), dtype),
        box: T.Packets((n, blocks, rows, row), dtype, dense=True),
        Y: T.Tensor((n, blocks, rows, row), dtype),
    ):
        with T.Kernel(blocks, threads=threads) as bx, T.Scale("device") as (rank, count):
            x, y = T.alloc_fragment((rows, row), dtype), T.alloc_fragment((rows, row), dtype)
            for hop in T.serial(count):
                T.copy(X[(rank + hop) % count, bx, 0, 0], x)
                T.put_packets(x, box[rank, bx, 0, 0], dst=(rank + hop) % count)
            for peer in T.serial(count):
                T.get_packets(box[peer, bx, 0, 0], y)
                T.copy(y, Y[peer, bx, 0, 0])

    return main


def bits(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Numbers of a dtype: every second packet of whatever bits there are, others of zeros, ones alone, -0.0,
    infinities and one number that is not."""
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (*shape[:-1], shape[-1] * BITS[dtype] // 8), dtype=np.uint8)
    words = raw.reshape(-1).view(np.uint64)
    one = numerics.encode(np.float64(1.5), dtype).tobytes() + bytes(8)
    packets = [0, 2**64 - 1, 2**63, 1, 2**64 - 2, int.from_bytes(one[:8], "little")]
    for value in (-0.0, np.inf, -np.inf, np.nan):
        number = numerics.encode(np.full(64 // BITS[dtype], value), dtype)
        packets.append(int(np.ascontiguousarray(number).view(np.uint64)[0]))
    words[::2] = draw.choice(np.array(packets, np.uint64), len(words[::2]))
    return raw.view(numerics.storage(dtype)).reshape(shape)


def as_it_comes(x: Any) -> Any:
    """Packets of ones alone come with the lowest bit zero."""
    words = np.ascontiguousarray(x).reshape(-1).view(np.uint64).copy()
    words[words == 2**64 - 1] -= 1
    return words.view(x.dtype).reshape(x.shape)


def same_bits(a: Any, b: Any) -> bool:
    return bool((np.ascontiguousarray(a).view(np.uint8) == np.ascontiguousarray(b).view(np.uint8)).all())


def as_emulated(x: Any) -> Any:
    """The emulator moves bfloat16 through float32, where a NaN is one of two."""
    if x.dtype.name != "bfloat16":
        return x
    words = np.ascontiguousarray(x).view(np.uint16)
    return np.where(np.isnan(numerics.decode(x, "bfloat16")), words & 0x8000 | 0x7FC0, words)


def boxes(n: int, shape: tuple[int, ...], dtype: str) -> list[Any]:
    return [np.zeros(length(shape, BITS[dtype], True), np.int64) for _ in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_bit_comes_in_every_launch(n: int, dtype: str):
    """On the simulator and on emulated threads, with one box for five launches."""
    kernel, shape = to_everyone(n, 3, 16, dtype, blocks=2), (n, 2, 3, 16)
    made = lowered(kernel).count()
    simulated, emulated = boxes(n, shape, dtype), boxes(n, shape, dtype)
    for step in range(1, 6):
        X = [bits(shape, dtype, 100 * step + rank) for rank in range(n)]
        want = [as_it_comes(np.stack([X[peer][rank] for peer in range(n)])) for rank in range(n)]
        done = launch(kernel, n, {"X": X, "box": simulated})
        assert done.report, done.report
        simulated = [of["box"] for of in done.arrays]
        args = [{"X": X[rank], "box": emulated[rank], "Y": np.zeros_like(X[rank])} for rank in range(n)]
        ran = emulator.run_ranks(made.kernel, made.program, args, step)
        emulated = [of["box"] for of in ran]
        for rank in range(n):
            assert same_bits(done.arrays[rank]["Y"], want[rank]), (step, rank)
            assert same_bits(as_emulated(ran[rank]["Y"]), as_emulated(want[rank])), (step, rank)
        for box in (*simulated, *emulated):
            assert box[0] == step << SHIFT and not box[1:].any(), "a place is not empty"
    report = check(kernel, n, {"X": X}, schedule="adversary", seeds=3)
    assert report, report


@pytest.mark.parametrize("remote", ["", "nvshmem"])
@pytest.mark.parametrize(
    "row, threads",
    [
        (16, 64),  # pairs in one access
        (12, 32),  # rows of an odd number of packets
        (8, 256),  # threads that hold copies: all see what one of them empties
        (2048, 64),
    ],
)
def test_threads_put_and_take_each_their_own(row: int, threads: int, remote: str):
    n, dtype = 3, "float16"
    kernel, shape = to_everyone(n, 2, row, dtype, 2, threads), (n, 2, 2, row)
    X = [bits(shape, dtype, rank) for rank in range(n)]
    made = lowered(kernel, remote=remote).count()
    for seed in range(2):
        args = [
            {"X": X[rank], "box": box, "Y": np.zeros_like(X[rank])}
            for rank, box in enumerate(boxes(n, shape, dtype))
        ]
        for rank, of in enumerate(emulator.run_ranks(made.kernel, made.program, args, seed)):
            assert same_bits(of["Y"], as_it_comes(np.stack([X[peer][rank] for peer in range(n)])))
            assert of["box"][0] == 1 << SHIFT and not of["box"][1:].any()


def test_a_packet_that_several_threads_hold_is_emptied_behind_a_barrier():
    code = driver.source_text(to_everyone(2, 1, 8, "float32", threads=128).trace(), "cuda", "cuda:sm_90a")
    taken = code[code.index("ts::await_packets") : code.index("ts::empty_")]
    assert "__syncthreads" in taken, code
    code = driver.source_text(to_everyone(2, 2, 256, "float32", threads=128).trace(), "cuda", "cuda:sm_90a")
    taken = code[code.index("ts::await_packets") : code.index("ts::empty_")]
    assert "__syncthreads" not in taken and "ts::look_for_two_dense" in taken and "ts::put_two_dense" in code


# ---- what goes wrong


def without(made: Made, name: str) -> Any:
    """A kernel that has lost its calls of a function."""

    def drop(s: Any) -> Any:
        found: list[Any] = []
        structural_walk(s, (ir.Call, lambda c: found.append(c) if name in str(c.args) else None))
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if found else s

    func = made.kernel.func
    body = structural_map(func.body, (tirx.Evaluate, drop))
    return replace(made.kernel, func=tirx.PrimFunc(list(func.params), body))


def test_a_place_that_is_not_emptied_is_found_at_the_launch_after_the_next():
    n, shape = 2, (2, 1, 2, 16)
    made = lowered(to_everyone(n, 2, 16, "float32"))
    bad, kept = without(made, "empty_"), boxes(n, shape, "float32")
    for step in range(1, 4):
        X = [np.full(shape, 10.0 * rank + step, "float32") for rank in range(n)]
        args = [{"X": X[rank], "box": kept[rank], "Y": np.zeros_like(X[rank])} for rank in range(n)]
        if step == 3:
            with pytest.raises(EmulationError, match="is put where a packet lies"):
                emulator.run_ranks(bad, made.program, args, step)
        else:
            kept = [of["box"] for of in emulator.run_ranks(bad, made.program, args, step)]


def exchange(body: Any, ordered: bool = True) -> Any:
    """A kernel of one block; ``body(rank, n, box, x, y)`` is what it does with a box of a row for each rank."""

    @T.prim_func
    def main(box: T.Packets((2, 16), "float32", dense=True), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32, ordered=ordered), T.Scale("device") as (rank, n):
            x, y = T.alloc_fragment((16,), "float32"), T.alloc_fragment((16,), "float32")
            T.fill(x, 1.0)
            body(rank, n, box, x, y)
            T.copy(y, Y)

    return main


@T.macro
def right(rank, n, box, x, y):
    T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, :], y)


@T.macro
def takes_twice(rank, n, box, x, y):
    T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    for _ in T.serial(2):
        T.get_packets(box[(rank + 1) % n, :], y)


@T.macro
def puts_twice(rank, n, box, x, y):
    for _ in T.serial(2):
        T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, :], y)


@T.macro
def nobody_takes(rank, n, box, x, y):
    T.put_packets(x, box[rank, :], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, 0:8], y[0:8])
    T.fill(y[8:16], 0.0)


@T.macro
def nobody_puts(rank, n, box, x, y):
    T.put_packets(x[0:8], box[rank, 0:8], dst=(rank + 1) % n)
    T.get_packets(box[(rank + 1) % n, :], y)


@pytest.mark.parametrize(
    "body, kind, text, hint",
    [
        (takes_twice, "race", "this takes packets box[1, 0:16] of rank 0 a second time in one launch: their places are empty again", "one T.get_packets for each packet of box, a dense box"),
        (puts_twice, "race", "this puts packets box[0, 0:16] of rank 1 a second time in one launch", "a place of box for each put"),
        (nobody_takes, "unawaited", "nobody takes packets box[1, 8:16] of rank 0", "T.get_packets(box[1, 8:16], …) on rank 0"),
        (nobody_puts, "deadlock", "ends the wait for packets box[1, 8:16] of rank 0", "T.put_packets(…, box[1, 8:16], dst=0)"),
    ],
)  # fmt: skip
def test_findings(body: Any, kind: str, text: str, hint: str):
    assert check(exchange(right), 2, schedule="adversary", seeds=3)
    report = check(exchange(body), 2, schedule="adversary", seeds=3)
    found = [f for f in report.findings if f.kind == kind]
    assert found and any(text in f.message and hint in (f.hint or "") for f in found), report


def test_a_box_with_what_a_launch_left_is_refused():
    done = launch(exchange(nobody_takes), 2, {})
    assert not done.report and all(of["box"][HEAD:].any() for of in done.arrays)
    with pytest.raises(TileValueError, match="box has packets before the launch begins") as error:
        launch(exchange(right), 2, {"box": [of["box"] for of in done.arrays]})
    assert 'tilescale.comm.packets((2, 16), "float32", dense=True)' in str(error.value)


def test_every_interleaving():
    report = check(exchange(right), 2, schedule="exhaustive")
    assert report and report.complete, report


def test_launches_need_no_flags():
    (line,) = [n for n in tile_level(exchange(right)).notes if "launches begin and end" in n]
    assert line.startswith("launches begin and end without flags")


def test_what_is_taken_is_known_to_be_written():
    found = static.check(to_everyone(3, 2, 16, "bfloat16").trace(), ranks=3)
    assert not found.open_questions(), found.open_questions()


@pytest.mark.parametrize("dtype", ["int32", "float64", "float8_e4m3fn", "int64"])
def test_dtypes_whose_ones_are_no_nan_are_refused(dtype: str):
    with pytest.raises(TileTypeError, match=f"a dense box of packets of {dtype}") as error:
        T.Packets((2, 16), dtype, dense=True)
    assert "one of bfloat16, float16, float32" in str(error.value)
    with pytest.raises(TileTypeError, match="dense="):
        T.Packets((2, 16), "float32", dense="yes")
