"""What people call on the host takes no word that it ignores: every parameter of every public function,
method and command is read, and the words of those that make, run and measure kernels change what comes
out."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale import comm, layout, ops
from tilescale.eager import Eager
from tilescale.errors import TileError
from tilescale.jit import Factory
from tilescale.kernel import Kernel
from tilescale.launch import bench as bench_command
from tilescale.launch import check as check_command
from tilescale.launch import doctor, start
from tilescale.launch import trace as trace_command
from tilescale.profiler import Profiler

#: What is taken for TileLang's sources and changes nothing, as docs/LANGUAGE.md says.
NOTHING = {f"layout.make_{kind}_layout": {"k_major"} for kind in ("swizzled", "wgmma_swizzled")}
_COMPILER = {"pass_configs", "execution_backend", "target_host", "verbose", "compile_flags"}
#: TileLang's words for how its compiler and its clocks work, which the log says (docs/TILELANG.md).
SAID = {
    "tilescale.compile": _COMPILER,
    "tilescale.jit": {*_COMPILER, "debug_root_path", "mode"},
    "Kernel.get_kernel_source": {"kernel_only"},
    "Profiler.do_bench": {"backend", "device", "early_stop_baseline"},
}
#: Exceptions, data and what takes whatever a kernel's author declared.
_CLASSES = (Kernel, Profiler, Factory, Eager)


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in tilescale.__all__:
        value = getattr(tilescale, name)
        if inspect.isfunction(value):
            yield f"tilescale.{name}", value
    for module, names in ((comm, comm.__all__), (ops, ops.HOME), (layout, layout.__all__)):
        for name in names:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__.split('.')[-1]}.{name}", inspect.unwrap(value)
    for kind in _CLASSES:
        for name, value in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}", value
    for module in (bench_command, check_command, start, trace_command, doctor):
        for name, value in vars(module).items():
            if isinstance(value, click.Command):
                yield f"{module.__name__.split('.')[-1]}.{name}", inspect.unwrap(value.callback)


PUBLIC = dict(public())


def test_there_is_much_to_look_at():
    wanted = {
        "tilescale.jit",
        "tilescale.autotune",
        "comm.empty",
        "ops.matmul",
        "Kernel.check",
        "Profiler.do_bench",
        "layout.plot_layout",
    }
    assert wanted <= PUBLIC.keys() and len(PUBLIC) > 60
    assert sum(name.partition(".")[0] in ("check", "start", "trace", "doctor") for name in PUBLIC) >= 4, list(
        PUBLIC
    )


def unread(function: Callable[..., Any]) -> set[str]:
    """The parameters that a function's body does not read. What only raises NotImplementedError has none."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    read = {
        n.id
        for s in node.body
        for n in ast.walk(s)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    return set(inspect.signature(function).parameters) - read - {"self"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_read(name: str):
    assert unread(PUBLIC[name]) == NOTHING.get(name, set())


def test_the_check_itself():
    def forgets(a: int, b: int, *, c: int = 0) -> int:
        b = 3
        return a

    assert unread(forgets) == {"b", "c"}


# ---- what comes out


@T.prim_func
def one(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
    with T.Kernel(4) as b:
        B[b] = A[b] + 1


@T.prim_func
def two(A: T.Tensor((4,), "float32"), B: T.Tensor((4,), "float32")):
    with T.Kernel(4) as b:
        B[b] = A[b] + 2


@T.prim_func
def sized(A: T.Tensor((T.dynamic("n"),), "float32")):
    with T.Kernel(1):
        A[0] = 1


def factory(k: int = 1) -> Any:
    return one if k == 1 else two


def other(k: int = 1) -> Any:
    return two


class Said:
    """What a call answers, as text that two calls can be compared by."""

    def __init__(self, make: Callable[[], Any]):
        self.make = make

    def __str__(self) -> str:
        try:
            value = self.make()
        except (TileError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"
        if isinstance(value, Kernel):
            return f"{value.label} {value.target} {value.out_idx} {value.instrument} {value.get_kernel_source('tile')}"
        return repr(value)


compiled = functools.partial(tilescale.compile, target="sim")


@functools.cache
def kernel() -> Kernel:
    return compiled(one)


def benched(**words: Any) -> Any:
    """How often a kernel is called, or what its inputs were."""
    seen: list[Any] = []
    kernel().get_profiler().do_bench(
        lambda a, b: seen.append(float(np.asarray(a)[0])), **{"warmup": 0, "rep": 0.5, **words}
    )
    return seen


def refusing(*_: Any) -> None:
    raise AssertionError("called")


def supplied(**words: Any) -> list[float]:
    return [float(x) for x in np.asarray(kernel().get_profiler(**words).inputs()[0])]


def near(reference: Callable[..., Any], **words: Any) -> None:
    kernel().get_profiler().assert_allclose(reference, **words)


def close(a: Any) -> Any:
    return np.asarray(a) + 1.001


#: function → for each parameter two calls that differ in it alone
PAIRS: dict[str, dict[str, tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "tilescale.compile": {
        "func": (lambda: compiled(one), lambda: compiled(two)),
        "out_idx": (lambda: compiled(one), lambda: compiled(one, out_idx=-1)),
        "target": (lambda: tilescale.compile(one, target="sim"), lambda: tilescale.compile(one, target="no")),
        "instrument": (lambda: compiled(one), lambda: compiled(one, instrument=True)),
        "name": (lambda: compiled(one), lambda: compiled(one, name="mine")),
    },
    "tilescale.jit": {
        "func": (
            lambda: tilescale.jit(factory, target="sim")(),
            lambda: tilescale.jit(other, target="sim")(),
        ),
        "out_idx": (
            lambda: tilescale.jit(target="sim")(factory)(),
            lambda: tilescale.jit(target="sim", out_idx=-1)(factory)(),
        ),
        "target": (
            lambda: tilescale.jit(target="sim")(factory)(),
            lambda: tilescale.jit(target="no")(factory)(),
        ),
        "instrument": (
            lambda: tilescale.jit(target="sim")(factory)(),
            lambda: tilescale.jit(target="sim", instrument=True)(factory)(),
        ),
    },
    "Kernel.get_profiler": {
        "tensor_supply": (lambda: supplied(), lambda: supplied(tensor_supply="one")),
        "tensor_supply_type": (lambda: supplied(), lambda: supplied(tensor_supply_type="one")),
        "extents": (
            lambda: compiled(sized).get_profiler(n=4).extents,
            lambda: compiled(sized).get_profiler(n=8).extents,
        ),
    },
    "Kernel.get_kernel_source": {
        "kind": (lambda: kernel().get_kernel_source("tile"), lambda: kernel().get_kernel_source("no"))
    },
    "Profiler.do_bench": {
        "fn": (lambda: kernel().get_profiler().do_bench(print, return_mode="no"), lambda: len(benched()) > 0),
        "func": (
            lambda: isinstance(kernel().get_profiler().do_bench(warmup=0, rep=0), float),
            lambda: kernel().get_profiler().do_bench(func=refusing, warmup=0, rep=0),
        ),
        "dynamic_symbolic_constraints": (
            lambda: len(benched()) < 3000,
            lambda: len(benched(dynamic_symbolic_constraints={"no": 4})) < 3000,
        ),
        "warmup": (lambda: len(benched()) < 3000, lambda: len(benched(warmup=60)) < 3000),
        "rep": (lambda: len(benched()) < 3000, lambda: len(benched(rep=60)) < 3000),
        "return_mode": (
            lambda: isinstance(
                kernel().get_profiler().do_bench(lambda: 0, warmup=0, rep=0, return_mode="all"), list
            ),
            lambda: isinstance(
                kernel().get_profiler().do_bench(lambda: 0, warmup=0, rep=0, return_mode="min"), list
            ),
        ),
        "args": (lambda: benched()[0], lambda: benched(args=[np.full(4, 7.0), np.zeros(4)])[0]),
        "input_tensors": (
            lambda: benched()[0],
            lambda: benched(input_tensors=[np.full(4, 7.0), np.zeros(4)])[0],
        ),
        "n_warmup": (lambda: len(benched()) < 3000, lambda: len(benched(n_warmup=4000)) < 3000),
        "n_repeat": (lambda: len(benched()) < 3000, lambda: len(benched(n_repeat=4000)) < 3000),
        "quantiles": (
            lambda: isinstance(kernel().get_profiler().do_bench(lambda: 0, warmup=0, rep=0), list),
            lambda: isinstance(
                kernel().get_profiler().do_bench(lambda: 0, warmup=0, rep=0, quantiles=[0.5, 0.9]), list
            ),
        ),
    },
    "Profiler.assert_allclose": {
        "reference": (lambda: near(lambda a: np.asarray(a) + 1), lambda: near(lambda a: np.asarray(a) + 5)),
        "rtol": (lambda: near(close, rtol=0, atol=0), lambda: near(close, rtol=10, atol=0)),
        "atol": (lambda: near(close, rtol=0, atol=0), lambda: near(close, rtol=0, atol=1)),
        "max_mismatched_ratio": (
            lambda: near(close, rtol=0, atol=0),
            lambda: near(close, rtol=0, atol=0, max_mismatched_ratio=1.0),
        ),
        "input_tensors": (
            lambda: near(lambda a: np.zeros(4, "float32")),
            lambda: near(
                lambda a: np.zeros(4, "float32"),
                input_tensors=[np.full(4, 7.0, "float32"), np.zeros(4, "float32")],
            ),
        ),
    },
}


@pytest.mark.parametrize("name", PAIRS)
def test_words_change_what_comes_out(name: str):
    # Is told in the log, as docs/LANGUAGE.md says.
    nothing = SAID.get(name, set())
    assert {*PAIRS[name], *nothing} == {p for p in inspect.signature(PUBLIC[name]).parameters if p != "self"}
    for parameter, (first, second) in PAIRS[name].items():
        assert str(Said(first)) != str(Said(second)), f"{parameter} of {name} changes nothing"


def test_words_that_contradict_each_other_are_refused(tmp_path: Path):
    made = T.Fragment((8, 4), lambda i, j: (i * 4 + j, 0))
    ones, eights = (lambda n=16: torch.ones(n, n)), (lambda: torch.ones(16, 16).to(torch.float8_e4m3fn))
    for call, message in (
        (
            lambda: kernel().get_profiler("one", tensor_supply_type="zero"),
            "tensor_supply= and tensor_supply_type=",
        ),
        (lambda: layout.plot_layout(made, "acc", tmp_path / "a.svg"), "a layout, which has no name"),
        (lambda: ops.matmul(ones(), ones(), out=ones(), out_dtype=torch.float16), "float16"),
        (
            lambda: ops.fp8_matmul(
                eights(), eights().T, ones(1), ones(1), out=ones(), out_dtype=torch.float16
            ),
            "float16",
        ),
    ):
        with pytest.raises(TileError, match=message):
            call()


def test_memory_of_another_size_than_it_has_is_refused(clean_env: dict[str, str]):
    program = (
        "from tilescale import comm\n"
        "comm.init(32 << 20); comm.init(); comm.init(32 << 20)\n"
        "try:\n    comm.init(64 << 20)\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_env, capture_output=True, text=True, timeout=60
    )
    assert "init(heap_size=67108864) after an init() that made 33554432 bytes" in done.stdout, done.stderr
