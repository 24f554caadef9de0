"""Programmatic dependent launches: ``T.Kernel(…, pdl=True)``."""

from __future__ import annotations

from typing import Any

import pytest

import tilescale.language as T
from tests.unit.cuda.emulated import agree, data, empty
from tests.unit.cuda.test_hopper import edited, lowered
from tilescale.compiler import emulator
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.describe import DEPENDENT, description
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.description import parameter_words
from tilescale.compiler.emulator import EmulationError
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
    def product(
        A: T.Tensor((128, 200), "bfloat16"),
        B: T.Tensor((200, 128), "bfloat16"),
        C: T.Tensor((128, 128), "float32"),
    ):
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
    "TMA": (
        product,
        {
            "A": data((128, 200), "bfloat16", 1),
            "B": data((200, 128), "bfloat16", 2),
            "C": empty((128, 128), "float32"),
        },
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_tensors_are_touched_behind_the_launches_in_front(name: str):
    make, args = KERNELS[name]
    agree(make(), args)
    made, program = lowered(make())
    assert made.dependent
    with pytest.raises(EmulationError, match="before the launches in front"):
        emulator.run(edited(made, lambda n, a: None if n == "ts::await_launches" else ...), program, args)


def test_the_text_and_the_launch():
    made, program = lowered(product())
    text = print_kernel(made).text
    wait = text.index("ts::await_launches();\n  ts::admit_launches();")
    assert text.index("ts::mbarrier_init") < wait < text.index("ts::tma_load")
    assert description(made, program, parameter_words(program))[5] & DEPENDENT
    made, program = lowered(scaled())
    assert "__restrict__" not in print_kernel(made).text  # its memory changes while it runs
    assert "__restrict__" in print_kernel(lowered(scaled(pdl=False))[0]).text


def test_older_architectures_wait_as_ever():
    program, _ = pipeline.run(scaled().trace(), target("sm_80"))
    made = Lowering(program).run()
    assert not made.dependent and "launches" not in print_kernel(made).text


@pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("name", KERNELS)
def test_it_compiles(name: str):
    made = toolchain.compile_cubin(print_kernel(lowered(KERNELS[name][0]())[0]), "sm_90a")
    assert not made.serialised
