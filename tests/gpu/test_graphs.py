"""Calls that come again, which the launcher makes by graphs (tilescale/native/gpu_graph.c): the same results
as ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilescale
from tests.gpu.test_launch import add, normal
from tests.gpu.test_streams import agrees, checked, operands, product
from tilescale import native
from tilescale.cuda import synchronize


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.delenv("TILESCALE_LAUNCH_GRAPHS", raising=False)
        native.configure()
        yield
    native.configure()


def sets(count: int) -> list[tuple[Any, Any, Any]]:
    return [(normal(1000 + k), normal(1000 + k), torch.zeros(1000 + k, device="cuda")) for k in range(count)]


def renew(made: list[tuple[Any, Any, Any]]) -> None:
    for a, b, c in made:
        a.normal_(), b.normal_(), c.zero_()


def wrong(made: list[tuple[Any, Any, Any]]) -> list[int]:
    return [k for k, (a, b, c) in enumerate(made) if not torch.equal(c, a + b)]


@pytest.mark.parametrize("count", [1, 2, 20])
def test_arguments_in_turn(count: int):
    """Sets of arguments, each of its own shape."""
    run, made = tilescale.compile(add, target="cuda"), sets(count)
    for _ in range(8):
        renew(made)
        for each in made:
            run(*each)
        assert not wrong(made)


def test_a_graph_that_still_runs_keeps_its_arguments():
    run, made = tilescale.compile(add, target="cuda"), sets(60)
    for each in made:
        run(*each)
    renew(made)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    for each in made:
        for _ in range(4):
            run(*each)
    del run  # its graph goes when it is through
    torch.cuda.synchronize()
    assert not wrong(made)


def test_tensor_maps():
    run, made = product(), [operands() for _ in range(6)]
    for _ in range(6):
        for a, b, c in made:
            a.normal_(), c.zero_()
            run(a, b, c)
        torch.cuda.synchronize()
        assert all(agrees(*each) for each in made)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_streams_in_turn(count: int):
    run, (a, b, c) = tilescale.compile(add, target="cuda"), sets(1)[0]
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(count - 1))]
    torch.cuda.synchronize()
    for k in range(10 * count):
        with torch.cuda.stream(streams[k % count]):
            torch.cuda.current_stream().wait_stream(streams[(k - 1) % count])
            a.normal_()
            run(a, b, c)
            right = (c == a + b).all()
        torch.cuda.synchronize()
        assert bool(right)


def test_captures_in_between():
    run, (a, b, c) = tilescale.compile(add, target="cuda"), sets(1)[0]
    for _ in range(5):
        run(a, b, c)
    torch.cuda.synchronize()
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=other):
        for _ in range(5):
            run(a, b, c)
    for k in range(10):
        a.normal_(), c.zero_()
        if k % 2:
            run(a, b, c)
        else:
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(c, a + b)


@pytest.mark.parametrize("own", [True, False])
def test_threads(own: bool):
    """On streams of their own, and all on one."""
    run, bad = tilescale.compile(add, target="cuda"), []

    def work() -> None:
        made, stream = sets(4), torch.cuda.Stream() if own else torch.cuda.default_stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(50):
                renew(made)
                for each in made:
                    run(*each)
                bad.extend(wrong(made))

    started = [threading.Thread(target=work) for _ in range(6)]
    for t in started:
        t.start()
    for t in started:
        t.join()
    assert not bad


def test_kernels_with_a_failure_record_and_outputs_that_are_made():
    run, made = tilescale.compile(checked, target="cuda"), tilescale.compile(add, -1, target="cuda")
    a, b = normal(1000), torch.zeros(1000, device="cuda")
    for _ in range(20):
        a.normal_()
        run(a, b)
        c = made(a, b)
        synchronize()
        assert torch.equal(b, a + 1) and torch.equal(c, a + b)
