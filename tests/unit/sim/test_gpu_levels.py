"""What GPUs' schedules make of every kernel (roles, depths, late releases, products and stores in flight)
runs on the simulator without a finding and leaves the bits that its tile program leaves; and what is said
where something in flight is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.gpu.gemms import gemm
from tests.kernels import instead_of_kernels
from tests.unit.cuda.corpus import example
from tests.unit.cuda.emulated import data
from tests.unit.cuda.test_hopper import CASES, arguments
from tests.unit.passes.seeded_gpu import HOPPER, seeded, two_products
from tilescale.arrays import as_numpy
from tilescale.compiler.checks.run import check, launch
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.ir.operations import name_of
from tilescale.compiler.ops.tma import tma_store
from tilescale.compiler.ops.wgmma import FREE, wgmma
from tilescale.compiler.passes.pipeline import gpu_scheduled, tile_level
from tilescale.compiler.tvm_compat import structural_map, tirx
from tilescale.ops import MODULES, load
from tilescale.ops.case import Case, Op

#: small cases of each operation that are run
MOST = 4


def equal(kernel: Any, args: dict[str, Any], arch: str = "sm_90a", seeds: int = 1) -> None:
    """A kernel's tile program and its scheduled program leave the same bits, without a finding."""
    report = check(kernel, 1, args, level="both", seeds=seeds, arch=arch)
    assert report, report


@pytest.mark.parametrize("shape, options, seed", CASES, ids=str)
def test_gemms(shape: tuple[int, int, int], options: dict[str, Any], seed: int):
    kernel = gemm(*shape, **options)
    equal(kernel, arguments(*shape, options), seeds=2)
    program = gpu_scheduled(tile_level(kernel), target("sm_90a"))
    assert [r.form for r in program.schedule.rings] == ["roles"] and not program.notes


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_persistent_gemms(blocks: int, arch: str):
    options = {
        "BM": 64,
        "BN": 64,
        "threads": 128,
        "stages": 3,
        "blocks": blocks,
        "panel": 2,
        "out": "float32",
    }
    equal(gemm(200, 136, 200, **options), arguments(200, 136, 200, options), arch, seeds=2)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "name, constants, options, shapes",
    [
        ("01_vector_add", (1000,), {}, dict.fromkeys("ABC", (1000,))),
        ("02_gemm", (70, 80), {}, {"A": (100, 80), "B": (80, 70), "C": (100, 70)}),
        ("03_softmax", (9, 70), {}, {"X": (9, 70), "Y": (9, 70)}),
        (
            "04_flash_attention",
            (1, 1, 130, 16),
            {"causal": True, "BM": 32, "BN": 32},
            dict.fromkeys("QKVO", (1, 1, 130, 16)),
        ),
    ],
)
def test_examples(name: str, constants: Any, options: Any, shapes: dict[str, Any], arch: str):
    equal(
        example(name, constants, options),
        {p: data(s, "float32", k) for k, (p, s) in enumerate(shapes.items())},
        arch,
    )


def some(op: Op) -> list[Case]:
    """Up to `MOST` of an operation's small cases, from all over the list."""
    small = [c for c in op.cases if c.small]
    return small[:: -(-len(small) // MOST)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "op, case", [pytest.param(load(m), c, id=f"{load(m).name}: {c}") for m in MODULES for c in some(load(m))]
)
def test_operations(op: Op, case: Case, arch: str, monkeypatch: pytest.MonkeyPatch):
    """All kernels that a call launches, one with what the one before has left."""

    def both(factory: Callable[..., Any], args: tuple[Any, ...], /, **constants: Any) -> None:
        kernel = factory(**constants)
        names = [p.name for p in kernel.trace().params]
        given = {
            n: as_numpy(a).copy() if isinstance(a, torch.Tensor) and a.dim() else a
            for n, a in zip(names, args, strict=True)
        }
        equal(kernel, given, arch)
        left = launch(kernel, 1, given).arrays[0]
        for name, tensor in zip(names, args, strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.dim():
                as_numpy(tensor)[...] = left[name].reshape(tuple(tensor.shape))

    instead_of_kernels(monkeypatch, both)
    op.run(**op.draw(**case.shape))


# ---- what is said


def findings(
    name: str, build: Callable[[], Any] = two_products, nth: int = 0, order: str = "round_robin"
) -> list[Any]:
    """What is found of a seeded fault."""
    program = gpu_scheduled(tile_level(build()), target(HOPPER["arch"]))
    made = [f for f in seeded(program) if f.name == name][nth]
    return launch(made.program(), 1, order=order, limit=20_000).report.findings


def text(found: list[Any], kind: str, *words: str) -> str:
    texts = [str(f) for f in found if f.kind == kind and all(w in str(f) for w in words)]
    assert texts, "\n\n".join(map(str, found))
    return texts[0]


def test_an_accumulator_that_is_read_before_its_product_is_awaited():
    said = text(
        findings("await_products 3 statements later"),
        "schedule",
        "x[0:64, 0:64] is read while the product of line",
        "has not been awaited",
    )
    assert "T.copy(x, C[0:64, 0:64])" in said and "T.gemm(a, b, x)" in said  # both statements
    assert "the wait for that product in front of what touches x" in said


def test_a_stage_that_is_released_while_a_product_reads_it():
    found = findings("a product not awaited")
    said = text(found, "schedule", "ring 0: round 0 is released while a product in flight reads its stage")
    assert "T.gemm" in said and "the wait for that product in front of the release" in said
    text(found, "race", "reuse of stage", "before its reader is done")


def test_products_that_nobody_awaits():
    text(
        findings("await_products left out"),
        "schedule",
        "this product is in flight when the block ends: nobody awaits it",
    )


def test_a_tile_that_is_written_while_a_store_reads_it():
    build = lambda: gemm(128, 256, 384, out="float32", trans_b=True)  # noqa: E731
    said = text(
        findings("await_stores left out", build),
        "race",
        "writes C_staged",
        "the store is in flight until it is awaited",
    )
    assert "the wait for that store between the two" in said


def test_data_moves_when_it_is_awaited_and_not_before():
    """Against the adversary an accumulator that is read early is what it was before."""
    program = gpu_scheduled(tile_level(two_products()), target(HOPPER["arch"]))
    args = {"A": data((64, 320), "float16", 1), "B": data((320, 64), "float16", 2)}
    right = launch(program, 1, args, order="adversary").arrays[0]["C"]

    def free(s: Any) -> Any:
        return tirx.Evaluate(wgmma(s.value, FREE), s.span) if name_of(s) == "wgmma" else s

    broken = next(
        f
        for f in seeded(program.with_body(structural_map(program.func.body, (tirx.Evaluate, free))))
        if f.name == "await_products left out"
    )
    assert (right != 0).any()
    made = broken.program()
    made.schedule = program.schedule
    assert (launch(made, 1, args, order="adversary", limit=20_000).arrays[0]["C"] == 0).all()


def test_what_a_store_writes_is_not_there_for_the_kernel_itself():
    """Waiting for stores says that they have read their tile, not that anybody may read what they write."""

    @T.prim_func
    def kernel(
        A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float16"), D: T.Tensor((64, 64), "float16")
    ):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float16")
            T.copy(A, tile)
            T.copy(tile, C)
            T.copy(C, D)

    program = tile_level(kernel)

    def bulk(s: Any) -> Any:
        stores = name_of(s) == "copy" and s.value.args[0].source.name == "tile"
        return tma_store(s.value, *s.value.args) if stores else s

    made = program.with_body(structural_map(program.func.body, (tirx.Evaluate, bulk)))
    text(
        launch(made, 1, {"A": data((64, 64), "float16")}).report.findings,
        "race",
        "reads C",
        "the store is in flight",
    )
