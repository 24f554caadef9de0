"""Programmatic dependent launches: ``T.Kernel(…, pdl=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler.cuda import emulate, engines, toolchain
from tilescale.compiler.cuda.describe import DEPENDENT, description
from tilescale.compiler.cuda.engines import EmulationError
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.description import parameter_words
from tilescale.compiler.passes import pipeline


def scaled(pdl: bool = True) -> Any:
    @T.prim_func
    def scaled(A: T.Tensor((300,), "float32"), C: T.Tensor((300,), "float32")):
        with T.Kernel(3, threads=128, pdl=pdl) as b:
            for i in T.Parallel(100):
                C[b * 100 + i] = A[b * 100 + i] * 2

    return scaled


def product() -> Any:
    @T.prim_func
    def product(A: T.Tensor((128, 200), "bfloat16"), B: T.Tensor((200, 128), "bfloat16"), C: T.Tensor((128, 128), "float32")):
        with T.Kernel(2, threads=128, pdl=True) as by:
            a, b = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((64, 128), "bfloat16")
            acc = T.alloc_fragment((64, 128), "float32")
            T.clear(acc)
            for k in T.Pipelined(T.ceildiv(200, 64), num_stages=2):
                T.copy(A[by * 64, k * 64], a)
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, acc)
            T.copy(acc, C[by * 64, 0])

    return product


KERNELS: dict[str, Any] = {
    "loads": (scaled, {"A": data((300,), "float32", 1), "C": empty((300,), "float32")}),
    "TMA": (product, {"A": data((128, 200), "bfloat16", 1), "B": data((200, 128), "bfloat16", 2), "C": empty((128, 128), "float32")}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_tensors_are_touched_behind_the_launches_in_front(name: str):
    make, args = KERNELS[name]
    agree(make(), args)
    made, program = lowered(make())
    assert made.dependent
    with pytest.raises(EmulationError, match="before the launches in front"):
        emulate.run(edited(made, lambda n, a: None if n == "ts::await_launches" else ...), program, args)


def test_the_text_and_the_launch():
    made, program = lowered(product())
    text = print_kernel(made).text
    wait = text.index("ts::await_launches();\n  ts::admit_launches();")
    assert text.index("ts::mbarrier_init") < wait < text.index("ts::tma_load")
    assert description(made, program, parameter_words(program))[5] & DEPENDENT
    made, program = lowered(scaled())
    assert "__restrict__" not in print_kernel(made).text  # its memory changes while it runs
    assert "__restrict__" in print_kernel(lowered(scaled(pdl=False))[0]).text


def persistent() -> Any:
    """Five tiles for three blocks; what is multiplied by is found by a number that a tensor has."""

    @T.prim_func
    def persistent(
        A: T.Tensor((640, 200), "bfloat16"), B: T.Tensor((2, 200, 128), "bfloat16"), which: T.Tensor((1,), "int32"),
        C: T.Tensor((640, 128), "float32"),
    ):  # fmt: skip
        with T.Kernel(3, threads=128, pdl=True) as block:
            a, b = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((64, 128), "bfloat16")
            acc = T.alloc_fragment((128, 128), "float32")
            for tile in T.Persistent(5, 3, block):
                row = tile * 128
                T.clear(acc)
                for k in T.Pipelined(T.ceildiv(200, 64), num_stages=3):
                    T.copy(A[row, k * 64], a)
                    T.copy(B[which[0], k * 64, 0], b)
                    T.gemm(a, b, acc)
                T.copy(acc, C[row, 0])

    return persistent


ASKING: dict[str, tuple[Callable[[], Any], dict[str, Any], int]] = {
    "a tile for each block": (*KERNELS["TMA"], 2 * (1 + 2)),
    "blocks that stay": (
        persistent,
        {"A": data((640, 200), "bfloat16", 1), "B": data((2, 200, 128), "bfloat16", 2), "which": np.array([1], np.int32),
         "C": empty((640, 128), "float32")}, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_what_the_first_copies_fetch_is_asked_for_in_front_of_the_wait(name: str, monkeypatch: pytest.MonkeyPatch):
    make, args, each = ASKING[name]
    asked: dict[Any, list[Any]] = {}
    loaded: dict[Any, list[Any]] = {}
    blocks: dict[int, Any] = {}
    find = engines.find

    def noted(name: str) -> Any:
        function = find(name)
        if name not in ("ts::tma_load", "ts::tma_prefetch"):
            return function

        def call(b: Any, m: Any, *rest: Any) -> None:
            early = name == "ts::tma_prefetch"
            tmap, *where = rest if early else (rest[1], *rest[3:])
            assert m.sum() == 1 and b.early[m].all() == early
            box = (id(tmap.array), *(int(engines.one(m, x)) for x in where))
            blocks[id(b.engines)] = b.engines  # kept, so that no other has its number
            (asked if early else loaded).setdefault(id(b.engines), []).append(box)
            function(b, m, *rest)

        return call

    monkeypatch.setattr(engines, "find", noted)
    agree(make(), args)
    assert asked.keys() == loaded.keys() and all(len(boxes) == each for boxes in asked.values())
    for block, boxes in asked.items():  # in the order of the copies, without those that a tensor places
        assert boxes == [x for x in loaded[block] if x[0] in {b[0] for b in boxes}][:each]


def test_older_architectures_wait_as_ever():
    program, _ = pipeline.run(scaled().trace(), passes=pipeline.gpu_passes("sm_80"))
    made = Lowering(program, "sm_80").run()
    assert not made.dependent and "launches" not in print_kernel(made).text


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str):
    made = toolchain.compile_cubin(print_kernel(lowered(KERNELS[name][0]())[0]), "sm_90a")
    assert not made.serialised
