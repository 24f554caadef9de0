"""Kernels of scalar arithmetic alone, drawn by a seed, and the text that is printed for GPUs, run on this
machine's processor.

The emulator runs the tree that is printed. What C makes of the text is its own matter: a truth is an int
there, and what is narrower than an int is computed as one. So here the text itself is compiled, by a C++
compiler, one thread runs after another, and what comes out is compared with the CPU target and the simulator.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import tilescale
from tilescale.compiler import cuda

#: elements of a row, which the blocks' shares go beyond, and blocks
N, BLOCKS = 70, 3
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPILER = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
OPTIONS = ("-O1", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-w", "-shared", "-fPIC")
#: what CUDA declares of all that such kernels need
HEADER = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
struct Place { int x, y, z; };
static Place threadIdx, blockIdx;
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
#define EXTREME(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EXTREME(int) EXTREME(unsigned) EXTREME(long) EXTREME(unsigned long)
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long x) { return __builtin_popcountl(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long x) { return x ? __builtin_clzl(x) : 64; }
"""


class Draw:
    """Expressions of a dtype, as text. Loads are ``x_DTYPE[k, i]``; divisors and shifts are in range."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.named: dict[str, list[str]] = {}

    def number(self, dtype: str, depth: int) -> str:
        rng = self.rng
        if depth == 0 or rng.random() < 0.12:
            return self.leaf(dtype)
        if dtype == "float32":
            return rng.choice((self.leaf, lambda _: self.float_of(depth)))(dtype)
        one = lambda: self.number(dtype, depth - 1)  # noqa: E731
        small = lambda: self.small(dtype, depth - 1)  # noqa: E731
        kind = rng.randrange(15)
        if kind < 3:
            return f"({small()} {rng.choice('+-*')} {small()})"
        if kind < 5:
            return f"({one()} {rng.choice('&|^')} {one()})"
        if kind == 5:
            return rng.choice((f"(~{one()})", f"T.bitwise_not({one()})"))
        if kind == 6:
            sign = rng.choice(("<<", ">>"))
            by = f"({one()} & {cast(7, dtype)})"
            # of 8 and 16 bits it is one of 32
            return f"T.cast({small()} << {by}, {dtype!r})" if sign == "<<" else f"({one()} >> {by})"
        if kind == 7:
            by = f"({one()} & {cast(7, dtype)}) + {cast(rng.randint(1, 5), dtype)}"
            return f"({one()} {rng.choice(('//', '%'))} ({by}))"
        if kind == 8:
            name = rng.choice(("truncdiv", "truncmod"))
            by = cast(rng.choice([2, 3, 4, 7, 8, 16] + ([] if dtype[0] == "u" else [-2, -3, -8])), dtype)
            return f"T.{name}({one()}, {by})" if rng.random() < 0.5 else f"({one()} // {by})"
        if kind == 9:
            return f"T.{rng.choice(('min', 'max'))}({one()}, {one()})"
        if kind == 10:
            return f"T.if_then_else({self.truth(depth - 1)}, {one()}, {one()})"
        if kind == 11:
            return f'T.cast({self.number(rng.choice(INTS), depth - 1)}, "{dtype}")'
        if kind == 12:
            return f'T.cast({self.truth(depth - 1)}, "{dtype}")'
        if kind == 13 and dtype[-2:] in ("32", "64"):  # a narrower one would become an int32
            return f"({small()} {rng.choice('+-*')} {rng.randint(0, 9)})"
        # -x of what is narrower is an int32
        return f"(-{small()})" if dtype[-2:] in ("32", "64") and rng.random() < 0.5 else f"T.abs({small()})"

    def small(self, dtype: str, depth: int) -> str:
        """What 32 and 64 bits with a sign can add up and multiply: they must not overflow."""
        made = self.number(dtype, depth)
        most = {"int32": 97, "int64": 1_000_003}.get(dtype)
        return made if most is None else f"({made} % {cast(most, dtype)})"

    def float_of(self, depth: int) -> str:
        return f'T.cast({self.number(self.rng.choice(("int8", "int16", "uint8")), depth - 1)}, "float32")'

    def truth(self, depth: int) -> str:
        rng, kind = self.rng, self.rng.randrange(9)
        if depth <= 0 or kind < 3:
            dtype = rng.choice((*INTS, "float32"))
            a, b = self.number(dtype, max(0, depth - 1)), self.number(dtype, max(0, depth - 1))
            return f"({a} {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {b})"
        a, b = self.truth(depth - 1), self.truth(depth - 1)
        if kind < 5:
            return f"({a} {rng.choice('&|^')} {b})"
        if kind == 5:
            return rng.choice((f"(~{a})", f"(not {a})", f"T.bitwise_not({a})"))
        if kind == 6:
            return rng.choice((f"({a} and {b})", f"({a} or {b})"))
        if kind == 7:
            return f"T.if_then_else({self.truth(depth - 1)}, {a}, {b})"
        return f"T.{rng.choice(('any_of', 'all_of'))}({a}, {b})"

    def leaf(self, dtype: str) -> str:
        if dtype != "float32" and self.rng.random() < 0.2:
            return cast(self.rng.randint(0 if dtype[0] == "u" else -9, 9), dtype)
        if (names := self.named.get(dtype)) and self.rng.random() < 0.3:
            return self.rng.choice(names)
        return f"x_{dtype}[{self.rng.randrange(3)}, {self.place()}]"

    def place(self) -> str:
        """Where an element is read; beyond a tensor's end lies zero."""
        if self.rng.random() < 0.6:
            return "i"
        k = self.rng.randint(1, 5)
        return self.rng.choice((
            f"i + {k}", f"i - {k}", f"i * {k} % {N}", f"{N - 1} - i", f"i // {k}", f"i ^ {k}", f"(i + {k}) % {N}",
            f"T.min(i * {k}, {N - 1})", f"T.if_then_else(i % {k + 1} == 0, i, {k})", "i // 8 * 8 + i % 8 // 2",
        ))  # fmt: skip

    def assigned(self, to: str, dtype: str, depth: int) -> list[str]:
        """Statements, perhaps one of two, that give ``to`` a value."""
        make = lambda: self.truth(depth) if dtype == "bool" else self.number(dtype, depth)  # noqa: E731
        if self.rng.random() < 0.7:
            return [f"{to} = {make()}"]
        return [f"if {self.truth(depth - 1)}:", f"    {to} = {make()}", "else:", f"    {to} = {make()}"]


def cast(value: int, dtype: str) -> str:
    return f'T.cast({value}, "{dtype}")'


def module(seed: int, count: int = 14, depth: int = 4) -> str:
    """A module with the kernel ``kernel``: inputs x_DTYPE (3, N), outputs y0, y1, …; some values have names."""
    d, lines = Draw(seed), []
    dtypes = [d.rng.choice((*INTS, "bool")) for _ in range(count)]
    for k, dtype in enumerate(dtypes):
        if k % 4 == 1:
            named = d.rng.choice(INTS)
            lines.append(f"v{k} = {d.number(named, depth - 1)}")
            d.named.setdefault(named, []).append(f"v{k}")
        lines += d.assigned(f"y{k}[i]", dtype, depth)
    inputs = [f'x_{t}: T.Tensor((3, {N}), "{t}")' for t in (*INTS, "float32")]
    outputs = [f'y{k}: T.Tensor(({N},), "{t}")' for k, t in enumerate(dtypes)]
    head = f"def kernel({', '.join(inputs + outputs)}):"
    return "\n".join(
        [
            "import tilescale.language as T", "", "", "@T.prim_func", head,
            f"    with T.Kernel({BLOCKS}, threads=32) as b:", f"        for j in T.Parallel({-(-N // BLOCKS)}):",
            f"            i = b * {-(-N // BLOCKS)} + j", *(" " * 12 + line for line in lines), "",
        ]
    )  # fmt: skip


def arguments(seed: int, params: list[tuple[str, str]]) -> dict[str, Any]:
    """Inputs with the bounds of their dtypes among them, outputs of zeros."""
    rng, made = np.random.default_rng(seed), {}
    for name, dtype in params:
        if name[0] == "y":
            made[name] = np.zeros(N, dtype)
        elif dtype == "float32":
            made[name] = rng.integers(-40, 40, (3, N)).astype(dtype) / 4
        else:
            info = np.iinfo(dtype)
            x = rng.integers(info.min, info.max, (3, N), dtype=dtype, endpoint=True)
            few = rng.integers(max(info.min, -20), 20, (3, N)).astype(dtype)
            x = np.where(rng.random((3, N)) < 0.6, few, x)
            x[:, :2] = info.min, info.max
            made[name] = x
    return made


def on_this_processor(text: str, name: str, blocks: int, threads: int, args: list[Any], folder: Path) -> None:
    """Runs a kernel's printed text, thread by thread: for kernels whose threads never meet."""
    math = (Path(cuda.__file__).parent / "include/ts/math.cuh").read_text()
    divided = math[math.index("namespace ts {") : math.index("// c + a0 b0")] + "}\n"
    casts = ", ".join(f"*({kind}*)&args[{k}]" for k, kind in enumerate(parameters(text)))
    run = f"""
extern "C" void run(void** args) {{
  for (int t = 0; t < {blocks * threads}; ++t) {{
    blockIdx.x = t / {threads}, threadIdx.x = t % {threads};
    {name}({casts});
  }}
}}
"""
    body = text.replace("#include <ts/ts.cuh>", HEADER + divided)
    (folder / "k.cc").write_text(body + run)
    assert COMPILER is not None
    subprocess.run([COMPILER, *OPTIONS, "k.cc", "-o", "k.so"], cwd=folder, check=True)
    given = (ctypes.c_void_p * len(args))(*(a.ctypes.data for a in args))
    ctypes.CDLL(str(folder / "k.so")).run(given)


def parameters(text: str) -> list[str]:
    """Types of a printed kernel's parameters."""
    inside = text[text.index("(", text.index("extern")) :]
    inside = inside[inside.index(")") + 1 :]
    inside = inside[inside.index("(") + 1 : inside.index(") {")]
    return [p.strip().rsplit(" ", 1)[0].replace("__restrict__", "") for p in inside.split(",")]


def all_ways(kernel: Any, args: dict[str, Any], folder: Path, blocks: int = 1) -> dict[str, dict[str, Any]]:
    """What the kernel makes of the arguments on the CPU target, on the simulator, and by its printed text."""
    made = {way: {n: a.copy() for n, a in args.items()} for way in ("cpu", "sim", "text")}
    for target in ("cpu", "sim"):
        tilescale.compile(kernel, target=target)(*made[target].values())
    text = tilescale.compile(kernel, target="cuda").get_kernel_source()
    on_this_processor(text, kernel.__name__, blocks, 32, list(made["text"].values()), folder)
    return made
