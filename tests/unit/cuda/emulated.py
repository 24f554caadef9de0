"""Kernels on the emulated GPU against the simulator: ``agree(kernel, args)``."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilescale.compiler import emulator
from tilescale.compiler.checks.run import launch
from tilescale.compiler.cuda.lower import Lowering
from tilescale.compiler.cuda.targets import target
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.ir.nests import nest_of
from tilescale.compiler.ir.scales import Executor
from tilescale.compiler.ir.walks import walk
from tilescale.compiler.layout import Fragment
from tilescale.compiler.layout.loops import choose, fragments_of
from tilescale.compiler.layout.match import Slots, by_counting, by_digits, seen_by
from tilescale.compiler.passes import pipeline
from tilescale.compiler.passes.owners import first_holders
from tilescale.compiler.sim import numerics
from tilescale.env import WITHOUT
from tilescale.fingerprint import Fingerprint, Unhashable

#: relative to the greatest magnitude of a result: sums of a few hundred terms in another order
TOLERANCE = {
    "float64": 1e-13,
    "float32": 2e-6,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 0.13,
    "float8_e5m2": 0.26,
}


def agree(
    kernel: Any, args: dict[str, Any], *, exact: bool = False, arch: str = "sm_90a", seed: int = 0
) -> dict[str, Any]:
    """Runs a launch on both; integers agree to the bit, floats to their dtype's tolerance, all of them to the
    bit with ``exact``."""
    got = run(kernel, args, arch, seed)
    want = launch(kernel, 1, args).arrays[0]
    for name, array in got.items():
        same(array, want[name], name, exact)
    return got


def run(kernel: Any, args: dict[str, Any], arch: str, seed: int) -> dict[str, Any]:
    """A launch on the emulated threads, its layouts counted first."""
    made = lowered(kernel, arch).count()
    if made.kernel.team:  # blocks that meet
        return emulator.run_ranks(made.kernel, made.program, [args], seed)[0]
    return emulator.run(made.kernel, made.program, args, seed)


@dataclass
class Made:
    """A kernel's thread IR, and the program that it was made of; whether its layouts have been counted."""

    kernel: ThreadKernel
    program: Any
    counted: bool = False

    def count(self) -> Made:
        if not self.counted:
            check_layouts(self.program)
            self.counted = True
        return self


#: the kernels that were made last, the latest at the end
_LATEST: OrderedDict[tuple[str, str], Made] = OrderedDict()


def lowered(kernel: Any, arch: str = "sm_90a", remote: str = "") -> Made:
    """A kernel for GPUs. Many tests ask for one kernel: it is made once, by the key under which the
    compiler's own cache would keep it; what has none is made each time. Nobody changes what this gives."""
    try:
        fingerprint = Fingerprint()
        fingerprint.value((kernel.func, kernel.params), kernel.name)
    except Unhashable:
        return _lowered(kernel, arch, remote)
    key = fingerprint.hexdigest(), " ".join((arch, remote, *WITHOUT.get()))
    made = _LATEST.pop(key, None) or _lowered(kernel, arch, remote)
    _LATEST[key] = made
    if len(_LATEST) > 32:
        _LATEST.popitem(last=False)
    return made


def _lowered(kernel: Any, arch: str, remote: str) -> Made:
    program, _ = pipeline.run(kernel.trace(), target(arch, remote))
    return Made(Lowering(program).run(), program)


def check_layouts(program: Any) -> None:
    """Every layout holds each element, in a place of its own; every nest runs each iteration in as many
    threads as hold it, and one of them stands for all."""
    for buffer, layout in program.layouts.items():
        shape = [int(e) for e in buffer.ty.shape]
        index = np.indices(layout.shape)
        assert all(e <= w for e, w in zip(shape, layout.shape, strict=True)), buffer.name
        if isinstance(layout, Fragment):
            held = layout.holders()
            assert layout.covers and set(held[held >= 0].tolist()) == set(
                range(int(np.prod(layout.shape)))
            ), buffer.name
        else:
            assert len(np.unique(layout.byte(*index))) == index[0].size if shape else True, buffer.name
            assert int(layout.byte(*index).max()) + layout.bits // 8 <= layout.bytes, buffer.name
    for s, ex in walk(program.func.body, Executor("block", program.launch.threads)):
        nest = nest_of(s)
        loop = choose(nest, program.layouts, ex.threads)[0] if nest is not None else None
        if loop is None:
            continue
        for a in fragments_of(nest):
            held = seen_by(program.layouts[a.buffer], ex.threads)
            quick = by_digits(loop, a.indices, held, a.mode != "read")
            counted = by_counting(loop, a.indices, held, a.mode != "read")
            assert quick is None or type(quick) is type(counted), (s, quick, counted)
            assert not isinstance(quick, Slots) or agree_on_slots(loop, quick, counted), (s, quick, counted)
        values, inside = loop.values
        flat = np.zeros(inside.shape, np.int64)
        for i, extent in zip(values, loop.extents, strict=True):
            flat = flat * extent + i
        copies, total = len(loop.fragment.copies), int(np.prod(loop.extents))
        assert (np.bincount(flat[inside], minlength=total) == copies).all(), s
        once = inside & first_holders(loop)[:, None]
        assert (np.bincount(flat[once], minlength=total) == 1).all(), s


def agree_on_slots(loop: Any, quick: Any, counted: Any) -> bool:
    """Whether digits say what counting finds, in the rounds in which some thread runs."""
    rounds = loop._counters()
    table = quick.base + sum(
        (c * k for c, k in zip(rounds, quick.coefficients, strict=True)),
        np.zeros(loop.values[1].shape[1], np.int64),
    )
    runs = loop.values[1].any(0)
    return bool((table[runs] == np.asarray(counted.table)[runs]).all())


def same(a: Any, b: Any, name: str, exact: bool) -> None:
    dtype = str(a.dtype)
    if exact or dtype not in TOLERANCE:
        assert np.array_equal(a.view(np.uint8) if a.ndim else a, b.view(np.uint8) if b.ndim else b), (
            f"{name}:\n{a}\n{b}"
        )
        return
    x, y = (v.astype(np.float64) for v in (a, b))
    assert np.array_equal(np.isnan(x), np.isnan(y)), name
    scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isfinite(y), y, 0)))) if y.size else 1.0)
    finite = np.isfinite(x) & np.isfinite(y)
    assert np.array_equal(x[~finite], y[~finite], equal_nan=True), name
    worst = np.abs(x[finite] - y[finite]).max() if finite.any() else 0.0
    assert worst <= TOLERANCE[dtype] * scale, f"{name}: {worst} of {scale}"


def data(shape: tuple[int, ...], dtype: str, seed: int = 0, scale: float = 1.0) -> Any:
    """Random numbers: normal floats, small integers."""
    draw = np.random.default_rng(seed)
    if dtype in numerics.FLOATS:
        return numerics.encode(draw.standard_normal(shape) * scale, dtype)
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    return draw.integers(0 if dtype.startswith("u") else -5, 6, shape).astype(dtype)


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    return np.zeros(shape, numerics.storage(dtype))


def agree_on_ranks(
    kernel: Any, args: list[dict[str, Any]], seeds: int = 2, arch: str = "sm_90a", remote: str = ""
) -> None:
    """Runs a launch of several ranks on both, the emulated threads under several orders; ``args``: one entry
    a rank. ``remote``: "nvshmem" where ranks are reached by its calls."""
    want = launch(kernel, len(args), {name: [a[name] for a in args] for name in args[0]}).arrays
    made = lowered(kernel, arch, remote).count()
    for seed in range(seeds):
        for rank, arrays in enumerate(emulator.run_ranks(made.kernel, made.program, args, seed)):
            for name, array in arrays.items():
                same(array, want[rank][name], f"{name} of rank {rank}", False)
