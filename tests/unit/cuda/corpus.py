"""Kernels that are compiled for GPUs without one: the examples and the variants of Hopper's GEMM, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tests.gpu.gemms import gemm
from tests.gpu.ranks import module
from tests.kernels import instead_of_kernels
from tilescale.compiler.advice import Advice
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.printer import print_kernel
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.passes import pipeline

#: the examples of one rank, and for which constants they are compiled
OF_ONE_RANK = {
    "01_vector_add": ((1000,), {}),
    "02_gemm": ((400, 500), {}),
    "03_softmax": ((500, 1000), {}),
    "04_flash_attention": ((1, 4, 300, 64), {"causal": True}),
}
GEMMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16, B transposed": {"dtype": "float16", "trans_b": True},
    "A transposed": {"trans_a": True, "out": "float32"},
    "one warpgroup": {"BM": 128, "BN": 128, "threads": 128},
    "three warpgroups": {"BM": 192, "BN": 128, "threads": 384, "stages": 3},
    "three warpgroups, wide": {"BM": 192, "threads": 384, "stages": 3},
    "warpgroups side by side": {"BM": 64, "BN": 128, "stages": 2},
    "narrow": {"BM": 64, "BN": 48, "BK": 32, "threads": 128, "stages": 3},
    "one stage": {"BM": 128, "BN": 128, "stages": 1},
    "panels": {"panel": 3},
    "ragged": {"M": 1000, "N": 776, "K": 520},
    "persistent": {"blocks": 132, "panel": 16},
    "persistent, ragged": {"M": 1000, "N": 776, "K": 520, "BN": 128, "blocks": 5},
}


def example(name: str, args: Any, options: Any) -> Any:
    """An example's kernel for these constants, traced afresh."""
    return module(name).kernel.__wrapped__(*args, **options)


#: which of them are compiled for Ampere too: where none of this is Hopper's own, one is as good as many
ON_AMPERE = ("plain", "float16, B transposed", "A transposed", "ragged")


def kernels(arch: str) -> dict[str, Callable[[], Any]]:
    """Name → what makes the prim_func."""
    made: dict[str, Callable[[], Any]] = {}
    for name, (args, options) in OF_ONE_RANK.items():
        made[name] = lambda name=name, args=args, options=options: example(name, args, options)
    for name, options in GEMMS.items():
        if arch != "sm_90a" and name not in ON_AMPERE:
            continue
        made[f"gemm, {name}"] = lambda options=options: gemm(**{"M": 4096, "N": 7168, "K": 4096, **options})
    return made


def cases_of_ops(arch: str) -> list[tuple[str, Any, Any]]:
    """(name, operation, case): the first small case of each operation of tilescale.ops, and the first and the
    last that it is measured on; for Ampere the first alone."""
    from tilescale.ops import MODULES, load

    made = []
    for name in MODULES:
        op = load(name)
        measured = [c for c in op.cases if c.bar is not None]
        for case in [
            *[c for c in op.cases if c.small][:1],
            *measured[:1],
            *(measured[1:][-1:] if arch == "sm_90a" else []),
        ]:
            made.append((f"{op.name}: {case}", op, case))
    return made


def kernels_of_case(op: Any, case: Any, monkeypatch: Any, arch: str = "sm_90a") -> list[Any]:
    """The prim_funcs that a call of an operation launches on such a GPU, none of which runs."""
    from torch._subclasses import FakeTensorMode

    from tilescale.ops import host

    made: dict[tuple[Any, str], Any] = {}

    def launch(factory: Callable[..., Any], args: tuple[Any, ...], /, **constants: Any) -> None:
        made.setdefault((factory, str(constants)), factory(**constants))

    instead_of_kernels(monkeypatch, launch)
    monkeypatch.setattr(host, "shared_memory", lambda device: target(arch).shared_bytes)
    monkeypatch.setattr(host, "has_clusters", lambda device: arch == "sm_90a")
    with nullcontext() if case.small else FakeTensorMode():  # tensors without memory: a benchmark's are large
        op.run(**op.draw(**case.shape))
    return list(made.values())


def printed(prim: Any, arch: str) -> Printed:
    """A kernel's code. What is printed here is as fast as its author could write it: nothing advises
    otherwise, but to pad the rows of a case that has odd ones on purpose."""
    program, _ = pipeline.run(prim.trace(), target(arch))
    assert not [n for n in program.notes if isinstance(n, Advice) and "padded to rows" not in n.hint], (
        program.notes
    )
    return print_kernel(Lowering(program).run())


def compiled(prim: Any, arch: str) -> toolchain.Cubin:
    """A kernel's cubin."""
    return toolchain.compile_cubin(printed(prim, arch), arch)
