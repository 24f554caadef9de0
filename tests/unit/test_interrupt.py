"""Ctrl-C ends a kernel that runs, whatever it does: blocks one after another, a loop that never ends, on one
thread and on several."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import tilescale
import tilescale.language as T
from tilescale import native


@pytest.fixture(params=["1", "2"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESCALE_NUM_THREADS", request.param)
    native.configure()
    # Jobs in a shell's background begin with it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    native.configure()


def is_interrupted(call: Callable[[], object]) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    assert time.monotonic() - begin < 5
    timer.join()


@tilescale.jit
def many_blocks(blocks):
    @T.prim_func
    def main(A: T.Tensor((blocks,), "float32")):
        with T.Kernel(blocks) as b:
            v = T.alloc_var("float32")
            v = 0.0
            for _i in T.serial(1_000_000):
                v = T.sin(v) + 1.0
            A[b] = v

    return main


@tilescale.jit
def polls(blocks):
    @T.prim_func
    def main(A: T.Tensor((blocks,), "int32")):
        with T.Kernel(blocks) as b:
            seen = T.alloc_var("int32")
            seen = 0
            while seen == 0:
                seen = T.atomic_load(A[b])

    return main


def test_blocks_one_after_another(threads: None) -> None:
    a = np.zeros(100_000, "float32")
    is_interrupted(lambda: many_blocks(100_000)(a))
    many_blocks(4)(a[:4])  # and the next launch runs
    assert np.isfinite(a[:4]).all()


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_loop_that_never_ends(threads: None, blocks: int) -> None:
    is_interrupted(lambda: polls(blocks)(np.zeros(blocks, "int32")))
    polls(blocks)(np.ones(blocks, "int32"))


@tilescale.jit
def long(blocks, form):
    @T.prim_func
    def main(A: T.Tensor((blocks,), "float32"), n: T.int32):
        with T.Kernel(blocks) as b:
            v = T.alloc_var("float32")
            v = 0.0
            if form == "an argument":
                for _i in T.serial(n):
                    v = T.sin(v) + 1.0
            elif form == "a constant":
                for _i in T.serial(2_000_000_000):
                    v = T.sin(v) + 1.0
            else:
                for _j in T.serial(n // 1_000_000_000):
                    for _i in T.serial(2_000_000_000):
                        v = T.sin(v) + 1.0
            A[b] = v

    return main


@pytest.mark.parametrize("form", ["an argument", "a constant", "inside a short one"])
def test_one_long_loop(threads: None, form: str) -> None:
    kernel = long(2, form)  # compiled before the signal comes
    is_interrupted(lambda: kernel(np.zeros(2, "float32"), 2_000_000_000))


def test_a_loop_in_rounds_runs_every_iteration_once() -> None:
    @tilescale.jit
    def count(form):
        @T.prim_func
        def main(A: T.Tensor((140000,), "int32"), C: T.Tensor((2,), "int32"), n: T.int32):
            with T.Kernel(1):
                c = T.alloc_var("int32")
                c = 0
                for i in T.serial(n if form == "dynamic" else 140000):
                    if i % 5 == 1:
                        continue
                    if form == "break" and i == n:
                        break
                    if i < 140000:
                        A[i] += 1
                    c += 1
                C[0] = c

        return main

    for form, n, ends in (
        ("dynamic", 0, 0),
        ("dynamic", -3, 0),
        ("dynamic", 1 << 16, 1 << 16),
        ("dynamic", 140000, 140000),
        ("dynamic", 700, 700),
        ("constant", 0, 140000),
        ("break", 517, 517),
    ):
        a, c = np.zeros(140000, "int32"), np.zeros(2, "int32")
        count(form)(a, c, n)
        want = np.zeros(140000, "int32")
        want[:ends] = np.arange(ends) % 5 != 1
        assert np.array_equal(a, want), (form, n)
        assert c[0] == want.sum()
