"""The C runtime on one rank: arguments, blocks, waits, barriers, forks, clusters, prints, the log; kernels
are written in C."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.unit.native_kernels import (
    BF16,
    BOOL,
    CLUSTER,
    E4M3,
    E5M2,
    EVENTS,
    F32,
    F64,
    FLOAT,
    I32,
    I64,
    INT,
    SIGNAL,
    SYMM,
    TENSOR,
    U8,
    WAITS,
    P,
    kernel,
)  # fmt: skip
from tilescale import native

ADD = """
BLOCK {
  const float *A = (void*)a[0], *B = (void*)a[1]; float* C = (void*)a[2];
  for (int64_t i = bx * 64; i < bx * 64 + 64 && i < a[5]; i++) C[i] = A[i] + B[i];
  return 0;
}
GRID((a[5] + 63) / 64, 1, 1)
"""
# Block i waits for the flag of block i + 1: later blocks signal earlier ones.
CHAIN = """
BLOCK { int64_t* f = (int64_t*)a[0]; ts_wait(ctx, f + bx + 1, 1, 0, 0); ts_signal(ctx, f + bx, 1, 0); return 0; }
GRID(a[3] - 1, 1, 1)
"""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """``limits(threads=…, timeout=…)`` for one test."""

    def set_limits(threads: int | None = None, timeout: float | None = None) -> None:
        if threads is not None:
            monkeypatch.setenv("TILESCALE_NUM_THREADS", str(threads))
        if timeout is not None:
            monkeypatch.setenv("TILESCALE_WAIT_TIMEOUT", str(timeout))
        native.configure()

    yield set_limits
    monkeypatch.undo()
    native.configure()


def add() -> Callable[..., None]:
    one = P(TENSOR, F32, [("sym", 0)])
    return kernel(
        ADD, [P(TENSOR, F32, [("def", 0)]), one, P(TENSOR, F32, [("sym", 0)], True)], nsyms=1, name="add"
    )


def chain() -> Callable[..., None]:
    site = "wait|s|model.py|12|T.wait(s[i + 1])"
    return kernel(
        CHAIN, [P(TENSOR, I64, [("def", 0)], True, "s")], nsyms=1, flags=WAITS, sites=[site], name="chain"
    )


def nop(*params: P, nsyms: int = 4, **more: object) -> Callable[..., None]:
    return kernel("BLOCK { return 0; } GRID(1, 1, 1)", params, nsyms=nsyms, **more)


# ---- arguments


@pytest.mark.parametrize("n", [0, 1, 64, 65, 1000, 100_000])
def test_add(n: int, limits: Callable[..., None]) -> None:
    limits(threads=3)
    a, b, c = torch.randn(n), torch.randn(n), torch.full((n,), 7.0)
    add()(a, b, c)
    assert torch.equal(c, a + b)


def test_numpy_arrays_are_arguments() -> None:
    a, b, c = np.arange(100, dtype="f"), np.ones(100, "f"), np.zeros(100, "f")
    add()(a, b, c)
    assert (c == a + 1).all()


def test_refused_arguments() -> None:
    f, x, y, z = add(), torch.zeros(8), torch.zeros(8), torch.zeros(8)
    for error, text, args in [
        (TypeError, "TS:nargs:-1:-1:3:2", (x, y)),
        (TypeError, "TS:dtype:2:-1:float32:float64", (x, y, z.double())),
        (TypeError, "TS:dtype:1:-1:float32:bfloat16", (x, y.bfloat16(), z)),
        (TypeError, "TS:kind:0:-1:tensor:int", (3, y, z)),
        (TypeError, "TS:kind:0:-1:tensor:None", (None, y, z)),
        (ValueError, "TS:ndim:0:-1:1:2", (x.view(2, 4), y, z)),
        (ValueError, "TS:shape:1:0:8:7", (x, y[:7], z)),
        (ValueError, "TS:contig:1:0:1:2", (x, torch.zeros(16)[::2], z)),
        (ValueError, "TS:overlap:2:0:disjoint memory:the same memory", (x, y, x)),
    ]:
        with pytest.raises(error) as e:
            f(*args)
        assert str(e.value) == text


def test_fixed_extents_and_strides() -> None:
    f = nop(
        P(TENSOR, F32, [4, None], strides=[("def", 0), 1]),
        P(TENSOR, F32, [None, None], strides=[("sym", 0), None]),
    )
    x = torch.zeros(4, 100)
    f(x[:, :10], torch.zeros(3, 100))
    with pytest.raises(ValueError, match="^TS:shape:0:0:4:5$"):
        f(torch.zeros(5, 3), x)
    with pytest.raises(ValueError, match="^TS:stride:0:1:1:2$"):
        f(x[:, ::2], x)
    with pytest.raises(ValueError, match="^TS:stride:1:0:100:50$"):
        f(x, torch.zeros(3, 50))


def test_axes_of_one_element_have_any_stride() -> None:
    nop(P(TENSOR, F32, [None, None, None]))(torch.zeros(5, 4, 3)[:, :1, :][:1])
    with pytest.raises(ValueError, match="^TS:contig:0:0:3:12$"):
        nop(P(TENSOR, F32, [None, None, None]))(torch.zeros(5, 4, 3)[:, :1, :])


@pytest.mark.parametrize(
    ("torch_dtype", "code"),
    [
        (torch.bool, BOOL),
        (torch.bfloat16, BF16),
        (torch.float8_e4m3fn, E4M3),
        (torch.float8_e5m2, E5M2),
        (torch.uint8, U8),
    ],
)
def test_dtypes_by_their_dlpack_codes(torch_dtype: torch.dtype, code: tuple[int, int]) -> None:
    nop(P(TENSOR, code, [None]))(torch.zeros(3, dtype=torch_dtype))
    with pytest.raises(TypeError, match="TS:dtype:0"):
        nop(P(TENSOR, code, [None]))(torch.zeros(3, dtype=torch.int8))


def test_retype_gives_numpy_a_bfloat16() -> None:
    x = np.zeros(3, np.uint16)
    nop(P(TENSOR, BF16, [3]))(native.retype(x, *BF16))
    with pytest.raises(TypeError, match="TS:dtype:0:-1:bfloat16:uint16"):
        nop(P(TENSOR, BF16, [3]))(x)
    with pytest.raises(ValueError, match="16 bits as 8"):
        native.retype(x, *E4M3)


def test_misaligned_tensors_are_refused() -> None:
    raw = np.zeros(33, np.uint8)
    shift = 1 + (-raw.ctypes.data) % 4  # one beyond a multiple of four
    x = torch.from_numpy(raw)[shift : shift + 8]
    nop(P(TENSOR, U8, [8]))(x)
    with pytest.raises(ValueError, match="^TS:align:0:-1:4:1$"):
        nop(P(TENSOR, F32, [2]))(torch.frombuffer(raw, dtype=torch.float32, count=2, offset=shift))


def test_scalars() -> None:
    code = "BLOCK { return !(a[0] == -3 && *(double*)&a[1] == 2.5 && a[2] == 1); } GRID(1, 1, 1)"
    f = kernel(code, [P(INT, (0, 8)), P(FLOAT, F32), P(INT, BOOL)])
    f(-3, 2.5, True)
    f(np.int64(-3), np.float32(2.5), 1)
    for error, text, args in [
        (ValueError, "TS:range:0:-1:int8:200", (200, 2.5, 1)),
        (ValueError, "TS:range:2:-1:bool:2", (-3, 2.5, 2)),
        (TypeError, "TS:kind:0:-1:int:float", (-3.5, 2.5, 1)),
        (TypeError, "TS:kind:1:-1:float:str", (-3, "x", 1)),
    ]:
        with pytest.raises(error) as e:
            f(*args)
        assert str(e.value) == text


def test_hidden_slots_are_rank_and_world_then_symbols() -> None:
    f = kernel(
        "BLOCK { int64_t* o = (void*)a[0]; for (int i = 0; i < 4; i++) o[i] = a[1 + i]; return 0; } GRID(1, 1, 1)",
        [P(TENSOR, I64, [("def", 1), ("def", 0)], True)],
        nsyms=2,
    )
    out = torch.zeros(2, 3, dtype=torch.int64)
    f(out)
    assert out.flatten()[:4].tolist() == [0, 1, 3, 2]


# ---- overlap


@pytest.mark.parametrize(("written", "refused"), [(True, True), (False, False)])
def test_overlap_matters_only_where_something_is_written(written: bool, refused: bool) -> None:
    f, x = nop(P(TENSOR, F32, [None]), P(TENSOR, F32, [None], written)), torch.zeros(10)
    f(x[:5], x[5:])
    if refused:
        with pytest.raises(ValueError, match="TS:overlap:1:0"):
            f(x[:6], x[5:])
    else:
        f(x[:6], x[5:])


def test_overlap_of_slices_is_decided_exactly() -> None:
    any2 = [None, None]
    f = nop(P(TENSOR, F32, any2, strides=any2), P(TENSOR, F32, any2, True, strides=any2))
    x = torch.zeros(16, 24)
    f(x[:, :12], x[:, 12:])  # side by side: the ranges of addresses overlap, the tensors do not
    f(x[::2], x[1::2])
    f(x[:, ::2], x[:, 1::2])
    f(x[:4, :4].T, x[4:8, :4])
    for a, b in [(x[:, :13], x[:, 12:]), (x[::2], x[::3]), (x[3:5], x[:, 5:6]), (x.T, x[15:, 23:])]:
        with pytest.raises(ValueError, match="TS:overlap:1:0"):
            f(a, b)


def test_overlap_agrees_with_marking_the_elements() -> None:
    import random

    rng, hits = random.Random(5), 0
    any2 = [None, None]
    f = nop(P(TENSOR, F32, any2, strides=any2), P(TENSOR, F32, any2, True, strides=any2))
    base = torch.zeros(400)
    for _ in range(2000):
        views = []
        for _ in range(2):
            rows, cols, s0, s1 = (
                rng.randint(1, 5),
                rng.randint(1, 5),
                rng.choice([1, 2, 3, 5, 12, 20]),
                rng.choice([1, 2, 3, 7]),
            )
            views.append(base.as_strided((rows, cols), (s0, s1), rng.randint(0, 60)))
        marks = [torch.zeros(400).as_strided(v.shape, v.stride(), v.storage_offset()) for v in views]
        for m in marks:
            m.fill_(1)
        roots = [m._base if m._base is not None else m for m in marks]
        expected = bool((roots[0].flatten() * roots[1].flatten()).any())
        hits += expected
        try:
            f(*views)
            got = False
        except ValueError:
            got = True
        assert got == expected, [(v.shape, v.stride(), v.storage_offset()) for v in views]
    assert 200 < hits < 1800  # both outcomes were drawn


# ---- descriptions


def test_make_kernel_refuses_what_does_not_fit() -> None:
    from tests.unit.native_kernels import build

    with pytest.raises(RuntimeError, match="version"):
        native.make_kernel(build("BLOCK { return 0; } GRID(1, 1, 1)"), b"\0" * 104, "", "k")
    with pytest.raises(RuntimeError, match="before the parameter that defines it"):
        nop(P(TENSOR, F32, [("sym", 0)]))
    with pytest.raises(RuntimeError, match="more than 8 axes"):
        nop(P(TENSOR, F32, [1] * 9))
    with pytest.raises(RuntimeError, match="ts_region"):
        nop(nregions=1)
    with pytest.raises(RuntimeError, match="No such file"):
        native.make_kernel("/nowhere.so", __import__("struct").pack("<13q", 1, *[0] * 12), "", "k")


def test_grids_that_cannot_be() -> None:
    f = kernel("BLOCK { return 0; } GRID(a[0], 1, 1)", [P(INT, I64)], cluster=(2, 1, 1))
    f(4)
    with pytest.raises(ValueError, match="^TS:cluster:-1:0:2:5$"):
        f(5)
    with pytest.raises(ValueError, match="^TS:grid:-1:0:2147483647:-2$"):
        f(-2)


# ---- blocks


@pytest.mark.parametrize("flags", [0, WAITS])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_block_runs_once_in_an_aligned_arena(
    flags: int, threads: int, limits: Callable[..., None]
) -> None:
    limits(threads=threads)
    f = kernel(
        """BLOCK { int32_t* o = (void*)a[0]; if ((uintptr_t)arena % 64) return 1;
        for (int i = 0; i < 1000; i++) arena[i] = (uint8_t)bx;
        for (int i = 0; i < 1000; i++) if (arena[i] != (uint8_t)bx) return 2;
        __atomic_fetch_add(o + bx + 5 * (by + 7 * bz), 1, __ATOMIC_RELAXED); return 0; } GRID(5, 7, 3)""",
        [P(TENSOR, I32, [3, 7, 5], True)],
        arena=1000,
        flags=flags,
    )
    for _ in range(20):
        out = torch.zeros(3, 7, 5, dtype=torch.int32)
        f(out)
        assert (out == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 64, 1000, 4224])
def test_blocks_that_wait_for_later_blocks(n: int, threads: int, limits: Callable[..., None]) -> None:
    limits(threads=threads)
    f = chain()
    for _ in range(3):
        flags = torch.zeros(n + 1, dtype=torch.int64)
        flags[n] = 1
        f(flags)
        assert (flags == 1).all()


def test_all_comparisons() -> None:
    f = kernel(
        """BLOCK { int64_t* s = (void*)a[0]; static const int64_t set[6] = {7, 5, 6, 4, 5, 4};
        if (bx == 0) ts_wait(ctx, s, 5, (int32_t)a[1], 0); else ts_signal(ctx, s, set[a[1]], 1); return 0; } GRID(2, 1, 1)""",
        [P(TENSOR, I64, [1], True), P(INT, I32)],
        flags=WAITS,
    )
    for cmp, start in enumerate([4, 4, 5, 5, 6, 5]):
        f(torch.tensor([start]), cmp)


def test_a_wait_that_never_ends_names_block_signal_values_and_line(limits: Callable[..., None]) -> None:
    limits(threads=1, timeout=0.2)
    with pytest.raises(RuntimeError) as e:
        chain()(torch.zeros(9, dtype=torch.int64))
    assert str(e.value) == (
        "TS:run:0:rank 0, block (7, 0, 0): waited 0.2 s for s[8]: expected >= 1, the value is 0 (model.py:12)"
    )
    flags = torch.zeros(9, dtype=torch.int64)  # and the next launch is unharmed
    flags[8] = 1
    chain()(flags)
    assert (flags == 1).all()


def test_the_index_of_a_signal_has_all_its_axes(limits: Callable[..., None]) -> None:
    limits(timeout=0.1)
    f = kernel(
        "BLOCK { ts_wait(ctx, (int64_t*)a[0] + 7, 3, 1, 0); return 0; } GRID(1, 1, 1)",
        [P(TENSOR, I64, [2, 5], True)],
        flags=WAITS,
        sites=["wait|ready|m.py|3|T.wait(ready[1, 2], 3)"],
    )
    with pytest.raises(
        RuntimeError, match=r"waited 0.1 s for ready\[1, 2\]: expected == 3, the value is 0 \(m.py:3\)"
    ):
        f(torch.zeros(2, 5, dtype=torch.int64))


def test_a_signal_that_is_missing_is_blamed_before_those_who_wait_at_the_barrier(
    limits: Callable[..., None],
) -> None:
    limits(threads=1, timeout=0.2)
    f = kernel(
        """BLOCK { if (bx == 3) ts_wait(ctx, (int64_t*)a[0], 1, 0, 0); ts_barrier(ctx, 5, 1, 1); return 0; } GRID(6, 1, 1)""",
        [P(TENSOR, I64, [1], True)],
        flags=WAITS,
        sites=["wait|s|m.py|3|T.wait(s[0])", "barrier||m.py|4|T.barrier()"],
    )
    with pytest.raises(RuntimeError, match=r"TS:run:0:rank 0, block \(3, 0, 0\): waited 0.2 s for s\[0\]"):
        f(torch.zeros(1, dtype=torch.int64))


def test_a_barrier_that_one_block_misses(limits: Callable[..., None]) -> None:
    limits(timeout=0.1)
    f = kernel(
        "BLOCK { if (bx) ts_barrier(ctx, 5, 1, 0); return 0; } GRID(4, 1, 1)",
        [],
        flags=WAITS,
        sites=["barrier||m.py|4|"],
    )
    with pytest.raises(
        RuntimeError,
        match=r"TS:run:0:rank 0, block \(\d, 0, 0\): waited 0.1 s at a barrier: 3 of 4 have arrived",
    ):
        f()


def test_ctrl_c_ends_a_wait() -> None:
    import signal

    # a shell that runs this in the background has it ignore Ctrl-C
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        f = chain()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            f(torch.zeros(9, dtype=torch.int64))
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_waiting_blocks_must_be_resident_together() -> None:
    sites = ["wait|s|m.py|1|"]
    for more, limit in [
        ({}, 4224),
        ({"threads": 256}, 1056),
        ({"shared": 100 << 10}, 264),
        ({"max_blocks": 16}, 16),
    ]:
        f = kernel(CHAIN, [P(TENSOR, I64, [("def", 0)], True)], nsyms=1, flags=WAITS, sites=sites, **more)
        fits = torch.ones(limit + 1, dtype=torch.int64)
        f(fits)
        with pytest.raises(ValueError, match=f"^TS:resident:-1:-1:{limit}:{limit + 1}$"):
            f(torch.ones(limit + 2, dtype=torch.int64))


def test_blocks_that_do_not_wait_need_not_be_resident() -> None:
    kernel("BLOCK { return 0; } GRID(100000, 1, 1)", [], max_blocks=16)()


def test_failed_assertions_and_return_codes() -> None:
    for flags in (0, WAITS):
        f = kernel(
            "BLOCK { if (bx == 2) ts_fail(ctx, 1); return 0; } GRID(3, 1, 1)",
            [],
            flags=flags,
            sites=["wait|s|m.py|1|", "assert||m.py|9|i < n, 'too many'"],
        )
        with pytest.raises(
            RuntimeError,
            match=r"TS:run:1:rank 0, block \(2, 0, 0\): assert failed: i < n, 'too many' \(m.py:9\)",
        ):
            f()
        with pytest.raises(RuntimeError, match="returned 5"):
            kernel("BLOCK { return 5; } GRID(1, 1, 1)", [], flags=flags)()


def test_ranks_out_of_range_alone() -> None:
    f = kernel(
        "BLOCK { ts_peer(ctx, (void*)a[0], (int32_t)a[1], 0); return 0; } GRID(1, 1, 1)",
        [P(TENSOR, F32, [1]), P(INT, I32)],
    )
    f(torch.zeros(1), 0)
    with pytest.raises(RuntimeError, match="rank 1 is out of range: the team has 1 rank"):
        f(torch.zeros(1), 1)


def test_ordinary_tensors_are_not_symmetric() -> None:
    for kind in (SYMM, SIGNAL):
        with pytest.raises(
            TypeError, match="^TS:notsymm:0:-1:symmetric memory of this rank:an ordinary tensor$"
        ):
            nop(P(kind, I64, [None]))(torch.zeros(4, dtype=torch.int64))


# ---- barriers, forks, clusters


@pytest.mark.parametrize("threads", [1, 2])
def test_grid_barriers(threads: int, limits: Callable[..., None]) -> None:
    limits(threads=threads)
    f = kernel(
        """BLOCK { int64_t* x = (void*)a[0]; for (int k = 1; k <= 20; k++) { x[bx] = k; ts_barrier(ctx, 5, 1, 0);
        for (int i = 0; i < 33; i++) if (x[i] != k) return 1; ts_barrier(ctx, 5, 1, 0); } return 0; } GRID(33, 1, 1)""",
        [P(TENSOR, I64, [33], True)],
        flags=WAITS,
    )
    for _ in range(10):
        f(torch.zeros(33, dtype=torch.int64))


def test_forked_executors_wait_for_one_another_and_meet(limits: Callable[..., None]) -> None:
    limits(threads=2)
    f = kernel(
        """REGION(0) { int64_t* o = (void*)frame[0]; if (index < 3) ts_wait(ctx, o + index + 1, 1, 0, 0);
                       ts_signal(ctx, o + index, 1, 0); ts_barrier(ctx, 3, 4, 0);
                       for (int i = 0; i < 4; i++) if (o[i] != 1) return 1; ts_barrier(ctx, 5, 4, 0); return 0; }
           REGION(1) { int64_t inner[2] = {frame[0], index}; ts_fork(ctx, 2, inner, 3); return inner[1] != index + 30; }
           REGION(2) { ts_barrier(ctx, 3, 6, 0); if (index == 2) frame[1] += 30; return 0; }
           BLOCK { int64_t frame[1] = {a[0] + bx * 32}; ts_fork(ctx, 0, frame, 4); ts_fork(ctx, 1, frame, 2);
                   ts_fork(ctx, 1, frame, 0); return 0; } GRID(7, 1, 1)""",
        [P(TENSOR, I64, [7, 4], True)],
        flags=WAITS,
        nregions=3,
    )
    for _ in range(20):
        f(torch.zeros(7, 4, dtype=torch.int64))


def test_forks_without_waits_run_one_after_the_other() -> None:
    f = kernel(
        "REGION(0) { int64_t* o = (void*)a[0]; o[index] = index + frame[0]; return 0; }"
        "BLOCK { int64_t frame[1] = {10}; ts_fork(ctx, 0, frame, 5); return 0; } GRID(1, 1, 1)",
        [P(TENSOR, I64, [5], True)],
        nregions=1,
    )
    out = torch.zeros(5, dtype=torch.int64)
    f(out)
    assert out.tolist() == [10, 11, 12, 13, 14]


def test_clusters_share_arenas_and_barriers(limits: Callable[..., None]) -> None:
    limits(threads=2)
    # Each block writes its place in the cluster into its own arena and reads its neighbour's.
    f = kernel(
        """BLOCK { int32_t me = bx % 2 + 2 * (by % 3); *(int32_t*)arena = 100 * (bx / 2) + me; ts_barrier(ctx, 4, 1, 0);
        int32_t* next = ts_cluster_arena(ctx, (me + 1) % 6, 0); ((int32_t*)a[0])[bx + 4 * by] = *next;
        ts_barrier(ctx, 4, 1, 0); return 0; } GRID(4, 6, 1)""",
        [P(TENSOR, I32, [6, 4], True)],
        arena=100,
        flags=WAITS | CLUSTER,
        cluster=(2, 3, 1),
    )
    expected = [[100 * (x // 2) + (x % 2 + 2 * (y % 3) + 1) % 6 for x in range(4)] for y in range(6)]
    for _ in range(10):
        out = torch.zeros(6, 4, dtype=torch.int32)
        f(out)
        assert out.tolist() == expected
    with pytest.raises(RuntimeError, match="block 7 of a cluster of 2 blocks"):
        kernel(
            "BLOCK { ts_cluster_arena(ctx, 7, 0); return 0; } GRID(2, 1, 1)",
            [],
            flags=CLUSTER,
            cluster=(2, 1, 1),
        )()


def test_deep_stacks_of_a_block(limits: Callable[..., None]) -> None:
    f = kernel(
        """static int64_t down(int n) { volatile char pad[1000]; pad[0] = n; return n ? down(n - 1) + pad[0] - n : 0; }
        BLOCK { return (int32_t)down(150) * 0; } GRID(50, 1, 1)""",
        [],
        flags=WAITS,
    )
    f()


def test_launches_from_several_python_threads(limits: Callable[..., None]) -> None:
    limits(threads=2)
    f, g, wrong = chain(), add(), []

    def work() -> None:
        for _ in range(50):
            flags = torch.zeros(65, dtype=torch.int64)
            flags[64] = 1
            f(flags)
            a, c = torch.randn(300), torch.zeros(300)
            g(a, a, c)
            if not ((flags == 1).all() and torch.equal(c, a + a)):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert not wrong and not any(w.is_alive() for w in workers)


def test_the_pool_is_rebuilt_after_a_fork(limits: Callable[..., None]) -> None:
    limits(threads=3)
    f = chain()
    flags = torch.zeros(65, dtype=torch.int64)
    flags[64] = 1
    f(flags)
    pid = os.fork()
    if pid == 0:
        flags[:64] = 0
        f(flags)
        os._exit(0 if (flags == 1).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    flags[:64] = 0
    f(flags)


# ---- prints and the log


def test_prints(capfd: pytest.CaptureFixture[str]) -> None:
    f = kernel(
        """BLOCK { int64_t shape[2] = {2, 3}, strides[2] = {3, 1}, s1[1] = {1};
        ts_print_i64(ctx, 0, -5); ts_print_f64(ctx, 1, 0.1); ts_print_buf(ctx, 2, (void*)a[0], 0x220, 2, shape, strides);
        ts_print_buf(ctx, 2, (void*)a[1], 0xA08, 1, s1, s1); ts_print_buf(ctx, 2, (void*)a[2], 0x410, 1, s1, s1); return 0; }
        GRID(1, 1, 1)""",
        [P(TENSOR, F32, [2, 3]), P(TENSOR, E4M3, [1]), P(TENSOR, BF16, [1])],
        sites=["print|n|m.py|1|", "print||m.py|2|", "print|A|m.py|3|"],
    )
    f(
        torch.arange(6.0).view(2, 3) / 4,
        torch.tensor([-1.75]).to(torch.float8_e4m3fn),
        torch.tensor([3.5]).bfloat16(),
    )
    head = "block (0, 0, 0) m.py"
    assert capfd.readouterr().out.splitlines() == [
        f"{head}:1: n = -5",
        f"{head}:2: 0.1",
        f"{head}:3: A = float32(2, 3)",
        "[[0, 0.25, 0.5],",
        " [0.75, 1, 1.25]]",
        f"{head}:3: A = float8_e4m3fn(1)",
        "[-1.75]",
        f"{head}:3: A = bfloat16(1)",
        "[3.5]",
    ]


def test_long_prints_show_their_edges(capfd: pytest.CaptureFixture[str]) -> None:
    f = kernel(
        "BLOCK { int64_t n = 2000, s = 1; ts_print_buf(ctx, 0, (void*)a[0], 0x040, 1, &n, &s); return 0; } GRID(1, 1, 1)",
        [P(TENSOR, I64, [2000])],
        sites=["print|A|m.py|3|"],
    )
    f(torch.arange(2000))
    assert capfd.readouterr().out.splitlines()[1] == "[0, 1, 2, ..., 1997, 1998, 1999]"


def test_events_and_traffic() -> None:
    native.clear_events()
    f = kernel(
        "BLOCK { ts_event(ctx, 0, 0, 0, 128); ts_event(ctx, 0, 1, 0, 128); ts_event(ctx, 1, 2, -1, 0); return 0; }"
        "GRID(3, 1, 1)",
        [],
        flags=EVENTS,
        sites=["copy|A|m.py|3|T.copy(A, B, dst=0)", "gemm|C|m.py|5|"],
        name="logged",
    )
    before = time.monotonic_ns()
    f()
    log = native.events()
    assert len(log) == 9 and native.lost_events() == 0
    assert all(before <= e.ns <= time.monotonic_ns() and e.kernel == "logged" for e in log)
    copies = [e for e in log if e.kind == "copy"]
    assert sorted((e.block, e.phase) for e in copies) == [(b, p) for b in range(3) for p in ("begin", "end")]
    assert {(e.name, e.file, e.line, e.rank, e.bytes) for e in copies} == {("A", "m.py", 3, 0, 128)}
    assert native.traffic() == {0: (384, 3)}
    native.clear_events()
    assert native.events() == [] and native.traffic() == {}


def test_a_call_costs_about_a_microsecond() -> None:
    f = kernel(
        "BLOCK { return 0; } GRID(1, 1, 1)",
        [P(TENSOR, F64, [("def", 0)]), P(TENSOR, F64, [("sym", 0)]), P(TENSOR, F64, [None])],
        nsyms=1,
    )
    x = [torch.zeros(8, dtype=torch.float64) for _ in range(3)]
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            f(*x)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 2e-6, f"{best * 1e6:.2f} us a call"
