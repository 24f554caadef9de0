"""The kernels of tilescale.ops for several ranks on the emulated Hopper GPU, as they are printed for TMA,
mbarriers, wgmma and the peers' addresses, against the simulator."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest

import tilescale
from tests.unit.cuda.emulated import agree, agree_on_ranks, data, empty, lowered
from tilescale.compiler import driver, emulator
from tilescale.language.dtypes import BITS
from tilescale.ops.gemm_kernels import results
from tilescale.ops.ranks import flat, flat_kernels, gather_gemm, gemm_reduce, gemm_scatter
from tilescale.ops.ranks.gemms import packed_shape
from tilescale.packets import length

FLAT = {"Q": 64, "blocks": 2, "threads": 64}


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


@pytest.mark.parametrize("givers", [0, 1])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("world, n, m", [(2, 320, 320), (3, 44, 20), (3, 131, 77)])
def test_gather(world: int, n: int, m: int, direct: bool, givers: int):
    align, w = math.gcd(4, n, m), n if direct else flat.padded(n, 4)
    kernel = flat_kernels.gather(
        world=world, dtype="int32", align=align, direct=direct, givers=givers, **FLAT
    )
    args = []
    for r in range(world):
        given = {
            "A": data((n if r < world - 1 else m,), "int32", r),
            "G": empty((world, w), "int32"),
            "arrived": zeros(world, givers or 2),
        }
        args.append(given if direct else {**given, "C": empty((world, n), "int32")})
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize("world, n, m", [(2, 320, 320), (3, 44, 20)])
def test_gather_by_packets(world: int, n: int, m: int):
    P = 256
    kernel = flat_kernels.gather_by_packets(world=world, P=P, blocks=2, threads=128, dtype="int32", align=4)
    args = [
        {
            "A": data((n if r < world - 1 else m,), "int32", r),
            "box": np.zeros(length((world, 2 * (P + 4)), 32), np.int64),
            "C": empty((world, n), "int32"),
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args, seeds=1)
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert any("without" in n and "flag" in n for n in notes), notes


@pytest.mark.parametrize(
    "world, M, groups, wide, warps, bias, gate",
    [
        (2, 128, 1, 64, 2, False, ""),
        (2, 128, 3, 64, 2, False, "silu kept"),
        (3, 100, 2, 64, 1, True, ""),
        (3, 2, 1, 64, 2, False, ""),
        (3, 100, 1, 136, 3, False, "relu"),
    ],
    ids=["whole", "groups", "ragged", "few", "rows"],
)
@pytest.mark.parametrize("pull", [False, True])
def test_gather_gemm(
    world: int, M: int, groups: int, wide: int, warps: int, bias: bool, gate: str, pull: bool
):
    N, K = 80 if gate else 72, 136
    cut = {
        "BM": 64,
        "BN": 64,
        "BK": 64,
        "stages": 2,
        "threads": 128,
        "blocks": 2,
        "panel": 2,
        "high": 32,
        "wide": wide,
        "groups": groups,
        "warps": warps,
    }
    what = {
        "dtype": "bfloat16",
        "out": "bfloat16",
        "trans_b": False,
        "bias": bias,
        "activation": "relu" if bias else "",
        "gate": gate.split(" ")[0],
        "kept": "kept" in gate,
    }
    c_shape, y_shape = results(M, N, what["gate"], what["kept"])
    make = gather_gemm.pull_gemm if pull else gather_gemm.gather_gemm
    if not pull:
        cut["abreast"] = groups > 1
    kernel = make(M=M, N=N, K=K, world=world, **cut, **what)
    each = -(-M // world)
    args = [
        {
            "A": data((each, K), "bfloat16", r),
            "X": empty((M, K), "bfloat16"),
            "W": data((K, N), "bfloat16", 9 + r),
            "add": data((N if bias else 1,), "bfloat16", 20 + r),
            "here": zeros(math.ceil(M / 64), groups),
            "C": empty(c_shape, "bfloat16"),
            "Y": empty(y_shape, "bfloat16"),
        }
        for r in range(world)
    ]
    for r, a in enumerate(args if pull else ()):
        rows = a.pop("A")[: max(0, M - r * each)]
        a["X"][r * each : r * each + len(rows)] = rows
    agree_on_ranks(kernel, args)


def test_gather_gemm_is_fetched_by_tma_and_multiplied_by_wgmma_at_full_size():
    for M, N, K, world in ((8192, 2560, 8192, 4), (5000, 1000, 1000, 3), (512, 14336, 8192, 4)):
        how = vars(gather_gemm.choose(M, N, K, world, "bfloat16")) | {"M": M, "N": N, "K": K, "world": world}
        assert how.pop("fused") and how.pop("pull") == (M > 1024) and not how.pop("engine")
        what = {"dtype": "bfloat16", "out": "bfloat16", "trans_b": False, "bias": False, "activation": ""}
        abreast = how.pop("abreast")
        for make, more in ((gather_gemm.gather_gemm, {"abreast": abreast}), (gather_gemm.pull_gemm, {})):
            kernel = make(**how, **what, **more)
            made = driver.lower(kernel.trace(), "cuda:sm_90a")
            assert not [n for n in made.program.notes if "without" in n or "in turn" in n], made.program.notes
            code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
            producer = code[code.index("ts::fewer_registers") : code.index("ts::more_registers")]
            assert "ts::wait<true>" in producer and "ts::tma_load(&x[" in producer
            assert "ts::wgmma_m64n" in code and f"ts::put_{'run' if M > 1024 else 'rows'}<8, 64>" in code


@pytest.mark.parametrize("kept", [False, True])
def test_a_gate_finds_its_columns_in_its_own_registers_at_full_size(kept: bool):
    how = vars(gather_gemm.choose(8192, 14336, 8192, 4, "bfloat16"))
    how = {k: v for k, v in how.items() if k not in ("fused", "pull", "engine", "abreast")}
    what = {"dtype": "bfloat16", "out": "bfloat16", "trans_b": True, "bias": False, "activation": ""}
    shape = {"M": 8192, "N": 14336, "K": 8192, "world": 4}
    kernel = gather_gemm.pull_gemm(**shape, **how, **what, gate="silu", kept=kept)
    made = driver.lower(kernel.trace(), "cuda:sm_90a")
    assert not any("shared memory" in n or "without" in n for n in made.program.notes), made.program.notes
    code = driver.source_text(kernel.trace(), "cuda", "cuda:sm_90a")
    stores = code.count("ts::tma_store(Y_map"), code.count("ts::tma_store(C_map")
    assert stores == (2, 4 * kept) and "acc_shared" not in code and "y_shared" not in code, code


SUMS = {**FLAT, "P": 32, "dtype": "bfloat16", "out": "bfloat16", "align": 4}


@pytest.mark.parametrize("bias, activation, givers", [(0, "", 0), (20, "relu", 1)])
@pytest.mark.parametrize("world, n, last", [(2, 320, 320), (3, 100, 40), (2, 333, 333), (3, 102, 31)])
def test_scatter_sum(world: int, n: int, last: int, bias: int, activation: str, givers: int):
    align = math.gcd(SUMS["align"], n, last)
    what = {**SUMS, "align": align, "bias": bias, "activation": activation, "givers": givers}
    kernel = flat_kernels.scatter_sum(world=world, **what)
    args = [
        {
            "X": data(((world - 1) * n + last,), "bfloat16", r),
            "parts": empty((world, flat.padded(n, 2)), "bfloat16"),
            "add": data((max(1, bias),), "bfloat16", 9),
            "arrived": zeros(world, givers or 2),
            "C": empty((n if r < world - 1 else last,), "bfloat16"),
            "steps": n // align,
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("world, m, first, count", [(2, 320, 0, 10), (3, 100, 1, 2), (3, 101, 2, 2)])
@pytest.mark.parametrize("bias, activation", [(0, ""), (20, "relu")])
def test_scatter_arrived(
    world: int, m: int, first: int, count: int, bias: int, activation: str, inplace: bool
):
    """Some of the numbers: the others of the result stay as they are."""
    what = {k: v for k, v in SUMS.items() if k != "Q"} | {"align": math.gcd(4, m)}
    kernel = flat_kernels.scatter_arrived(
        world=world, bias=bias, activation=activation, inplace=inplace, **what
    )
    given = {
        "own": data((m,), "bfloat16", 1),
        "parts": data((world, m), "bfloat16", 2),
        "add": data((max(1, bias),), "bfloat16", 9),
        "rank": 1,
        "first": first,
        "count": count,
    }
    agree(kernel, given if inplace else {**given, "C": empty((m,), "bfloat16")})


@pytest.mark.parametrize("m", [2, 320, 1000])
def test_carry(m: int):
    kernel = flat_kernels.carry(P=128, blocks=2, threads=64, dtype="int64")
    agree(kernel, {"A": data((m,), "int64", 1), "C": empty((m,), "int64")})


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shots, t", [(1, 300), (1, 4), (1, 301), (2, 300), (2, 4), (2, 301)])
def test_all_reduce(shots: int, t: int, inplace: bool):
    world = 3
    make = flat_kernels.one_shot if shots == 1 else flat_kernels.two_shot
    what = {**SUMS, "align": math.gcd(SUMS["align"], t)}
    kernel = make(world=world, bias=0, activation="", inplace=inplace, **what)
    n = -(-t // world)
    n = flat.padded(t, 2) if shots == 1 else -(-n // FLAT["Q"]) * FLAT["Q"]
    args = []
    for r in range(world):
        given = {"A": data((t,), "bfloat16", r), "parts": empty((world, n), "bfloat16")}
        if shots == 2:
            given["sums"] = empty((world, n), "bfloat16")
        given["add"] = data((1,), "bfloat16", 9)
        given |= {"arrived": zeros(2)} if shots == 1 else {"given": zeros(2), "done": zeros(2)}
        args.append(given if inplace else {**given, "C": empty((t,), "bfloat16")})
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize("bias, activation", [(0, ""), (20, "relu")])
def test_scatter_by_packets(bias: int, activation: str):
    what = {"P": 512, "blocks": 2, "threads": 128, "dtype": "bfloat16", "align": 4, "out": "bfloat16"}
    kernel = flat_kernels.scatter_by_packets(world=2, bias=bias, activation=activation, **what)
    args = [
        {
            "X": data((2, 900), "bfloat16", r),
            "box": np.zeros(length((2, 1024), 16, True), np.int64),
            "add": data((max(1, bias),), "bfloat16", 9),
            "C": empty((900,), "bfloat16"),
        }
        for r in range(2)
    ]
    agree_on_ranks(kernel, args, seeds=1)
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert any("without" in n and "flag" in n for n in notes), notes


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "world, t, pieces, out, bias, activation",
    [
        (2, 1000, 1, "bfloat16", 0, ""),
        (3, 3700, 2, "bfloat16", 20, "relu"),
        (4, 2048, 1, "float32", 0, ""),
        (1, 5, 1, "bfloat16", 0, ""),
    ],
)
def test_two_shots_by_packets(
    world: int, t: int, pieces: int, out: str, bias: int, activation: str, inplace: bool
):
    """Launch after launch in the same boxes; slices that end beyond the tensor, or begin there."""
    P, threads = 256, 32
    if inplace and out != "bfloat16":
        pytest.skip("a sum in place has the dtype of its parts")
    blocks = -(-t // (world * P * pieces))
    room = 4 * P * pieces
    assert blocks * pieces * P <= room
    what = {"P": P, "pieces": pieces, "room": room, "threads": threads, "dtype": "bfloat16", "out": out}
    what |= {"align": math.gcd(8, t), "bias": bias, "activation": activation, "inplace": inplace}
    kernel = flat_kernels.two_shot_by_packets(world=world, **what)
    args = [
        {
            "A": data((t,), "bfloat16", r),
            "parts": np.zeros(length((world, room), 16, True), np.int64),
            "sums": np.zeros(length((world, room), BITS[out], True), np.int64),
            "add": data((max(1, bias),), out, 9),
            "blocks": blocks,
            **({} if inplace else {"C": empty((t,), out)}),
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args, seeds=2)
    made, sums = lowered(kernel), []
    for step in range(3):
        ran = emulator.run_ranks(made.kernel, made.program, args, step)
        sums = [of["A" if inplace else "C"] for of in ran]
        assert all((s.view(np.uint8) == sums[0].view(np.uint8)).all() for s in sums)
        args = [
            {**a, "parts": of["parts"], "sums": of["sums"], "A": np.roll(a["A"], step)}
            for a, of in zip(args, ran, strict=True)
        ]
        assert all(
            a[box][0] == step + 1 << 32 and not a[box][1:].any() for a in args for box in ("parts", "sums")
        )
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert any("without" in n and "flag" in n for n in notes), notes


@pytest.mark.parametrize("world, pieces", [(2, 1), (4, 1), (4, 4), (8, 2)])
def test_dense_packets_lie_in_registers(world: int, pieces: int):
    """At full size: no spills, as many blocks on a multiprocessor as `flat.in_pieces` counts on, two packets an
    access, all looks of a thread in front of what empties their places."""
    what = {"P": 1024, "room": 1 << 20, "threads": 128, "dtype": "bfloat16", "align": 8, "out": "bfloat16"}
    what |= {"bias": 0, "activation": "", "inplace": False}
    kernel = flat_kernels.two_shot_by_packets(world=world, pieces=pieces, **what)
    made = tilescale.compile(kernel, target="cuda:sm_90a")
    assert made.resources["spill_stores"] == 0 and made.resources["blocks"] >= flat.TOGETHER, made.resources
    code = made.get_kernel_source()
    first = code[code.index("ts::await_packets") :]
    first = first[: first.index("ts::empty_")]
    assert "ts::look_for_two_dense" in first and "__syncthreads" not in first
    assert "put_dense(" not in code and "look_for_dense(" not in code


@pytest.mark.parametrize("relayed", [False, True])
@pytest.mark.parametrize("world, root, t", [(2, 1, 1000), (4, 2, 1000), (2, 0, 1001)])
def test_spread(world: int, root: int, t: int, relayed: bool):
    kernel = flat_kernels.spread(world=world, dtype="int32", align=math.gcd(4, t), relayed=relayed, **FLAT)
    args = [
        {
            "A": data((t,), "int32", r),
            "G": empty((flat.padded(t, 4),), "int32"),
            "arrived": zeros(world, 2),
            "root": root,
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize("world, root, t", [(2, 1, 500), (3, 0, 129)])
def test_spread_by_packets(world: int, root: int, t: int):
    """The root hears of everyone in each launch, so that no flags keep it from being launches ahead."""
    kernel = flat_kernels.spread_by_packets(
        world=world, P=256, blocks=2, threads=128, dtype="int32", align=math.gcd(4, t)
    )
    args = [
        {
            "A": data((t,), "int32", r),
            "box": np.zeros(length((world, 2 * 256 + 4), 32), np.int64),
            "root": root,
        }
        for r in range(world)
    ]
    agree_on_ranks(kernel, args, seeds=1)
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert any("without" in n and "flag" in n for n in notes), notes


@pytest.mark.parametrize("reduce", [False, True], ids=["scatter", "reduce"])
@pytest.mark.parametrize(
    "world, M, K, bias, out, trans_b, BK",
    [
        (2, 128, [72, 72], False, "bfloat16", False, 64),
        (3, 100, [40, 40, 8], True, "bfloat16", False, 64),
        (4, 256, [32, 32, 32, 32], True, "float32", True, 32),
    ],
    ids=["whole", "ragged", "pieces"],
)
def test_gemm_and_sum(
    world: int, M: int, K: list[int], bias: bool, out: str, trans_b: bool, BK: int, reduce: bool
):
    N = 72
    cut = {"BM": 64, "BN": 64, "BK": BK, "stages": 2, "threads": 128, "blocks": 2}
    cut |= {"panel": 2, "run": 2, "lead": 2, "warps": 1 if trans_b else 2}
    what = {"dtype": "bfloat16", "out": out, "trans_b": trans_b, "bias": bias, "activation": ""}
    even = len(set(K)) == 1
    make = gemm_reduce.gemm_reduce if reduce else gemm_scatter.gemm_scatter
    kernel = make(M=M, N=N, K=K[0] if even else None, align=1 if even else 8, world=world, **cut, **what)
    each = -(-M // world)
    if reduce:
        count = -(-(-(-M // 64) * -(-N // 64)) // world)
    else:
        count = -(-each // 64) * -(-N // 64)
    shape = (world - 1, count, *packed_shape(64, 64, (64, BK) if trans_b else (BK, 64)))
    args = []
    for r in range(world):
        given = {
            "A": data((M, K[r]), "bfloat16", r),
            "W": data((N, K[r]) if trans_b else (K[r], N), "bfloat16", 9 + r),
            "add": data((N if bias else 1,), out, 20),
            "own": empty(shape, "bfloat16"),
            "parts": empty(shape, "bfloat16"),
        }
        if reduce:
            finished = packed_shape(64, 64, (1, 256))
            given |= {"mine": empty((1, count, *finished), out)}
            given |= {"sums": empty((world - 1, count, *finished), out)}
            given |= {"arrived": zeros(count), "done": zeros(world - 1, count), "C": empty((M, N), out)}
        else:
            mine = max(0, min(each, M - r * each))
            given |= {"arrived": zeros(count), "C": empty((mine, N), out)}
        args.append(given)
    agree_on_ranks(kernel, args)


@pytest.mark.parametrize("make", [gemm_scatter.gemm_scatter, gemm_reduce.gemm_reduce])
@pytest.mark.parametrize("trans_b", [False, True])
def test_parts_come_back_through_the_operands_ring(make: Any, trans_b: bool):
    """At full size: TMA brings them into the stages of w, behind the producer's own wait; threads add them from
    16 bytes of shared memory at once, and store their own parts by 16 bytes."""
    module = importlib.import_module(make.__module__)
    how = vars(module.choose(8192, 8192, 2048, 4, "bfloat16")) | {"M": 8192, "N": 8192, "K": 2048, "world": 4}
    assert how.pop("fused") and not how.pop("engine")
    what = {"dtype": "bfloat16", "out": "bfloat16", "trans_b": trans_b, "bias": False, "activation": ""}
    program = driver.lower(make(**how, **what, align=1).trace(), "cuda:sm_90a").program
    (ring,) = program.schedule.rings
    assert ring.depth == how["stages"] and not any("in turn" in n for n in program.notes), program.notes
    code = driver.source_text(make(**how, **what, align=1).trace(), "cuda", "cuda:sm_90a")
    producer = code[code.index("ts::fewer_registers") : code.index("else if (tid - 288")]
    assert "ts::wait<true>" in producer
    assert "parts_map" in producer[producer.index("ts::fence_proxy_async_global") :]
    consumer = code[code.index("ts::more_registers") :]
    assert "*(uint4*)&w_in[0] = " in consumer and "= *(const uint4*)&own_out[0];" in consumer
    # a stage that only wgmma reads is given back without a fence of the threads' reads
    loop = consumer[: consumer.index("ts::wgmma_wait<0>")]
    assert "ts::mbarrier_arrive_warp" in loop and "fence_proxy_async" not in loop


def test_a_sum_in_packets_needs_no_flags():
    """World 2, three threads' worth beyond the end; and the launch's table says that no flags are needed."""
    t, blocks, P = 300, 4, 128
    cut = {"P": P, "blocks": blocks, "threads": 32, "dtype": "bfloat16", "out": "bfloat16", "align": 4}
    kernel = flat_kernels.by_packets(world=2, bias=0, activation="", inplace=False, **cut)
    args = [
        {
            "A": data((t,), "bfloat16", r),
            "box": np.zeros(length((2, blocks * P), 16, True), np.int64),
            "add": data((1,), "bfloat16", 9),
            "C": empty((t,), "bfloat16"),
        }
        for r in range(2)
    ]
    agree_on_ranks(kernel, args, seeds=1)
    notes = driver.lower(kernel.trace(), "cuda:sm_90a").program.notes
    assert any("without" in n and "flag" in n for n in notes), notes


@pytest.mark.parametrize(
    "make",
    [gather_gemm.gather_gemm, gather_gemm.pull_gemm, gemm_scatter.gemm_scatter, gemm_reduce.gemm_reduce],
)
@pytest.mark.parametrize("M, world", [(8192, 4), (2500, 3)])
def test_warps_beside_the_producer_put_at_full_size(make: Any, M: int, world: int):
    module = importlib.import_module(make.__module__)
    how = vars(module.choose(M, 2560, 8192, world, "bfloat16")) | {
        "M": M,
        "N": 2560,
        "K": 8192,
        "world": world,
    }
    assert how.pop("fused")
    left_out = ("pull", "engine") if make is gather_gemm.gather_gemm else ("pull", "engine", "abreast")
    how = {k: v for k, v in how.items() if k not in left_out}
    what = {"dtype": "bfloat16", "out": "bfloat16", "trans_b": False, "bias": False, "activation": ""}
    more = {} if module is gather_gemm else {"align": 1}
    notes = driver.lower(make(**how, **what, **more).trace(), "cuda:sm_90a").program.notes
    assert any(f"by {how['warps']} warp" in n and "beside the producer" in n for n in notes), notes
