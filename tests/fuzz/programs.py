"""A program being drawn: its parameters, its text, and what is known of every tile at this point of it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.fuzz.values import FLOATS, PRECISION, Val, join, whole
from tilescale.compiler.sim import numerics


@dataclass
class Param:
    """A parameter of the kernel. ``fill``: how its elements are drawn. ``val``: what is known of them when
    the launch is over (of those of an output; None: of an input, which nobody writes). ``view``: from which
    strides the kernel sees it."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    declared: str
    fill: str
    seed: int
    val: Val | None = None
    steps: int = 1

    def data(self, rank: int) -> Any:
        """Its elements before the launch."""
        draw = np.random.default_rng([self.seed, rank])
        shape = (*self.shape[:-1], self.shape[-1] * self.steps) if self.shape else ()
        made = _DRAW[self.fill](draw, shape, self.dtype)
        return made[..., :: self.steps]


def _small(draw: Any, shape: tuple[int, ...], dtype: str) -> Any:
    q = exact_step(dtype)
    return numerics.encode(draw.integers(-4 * 2**q, 4 * 2**q + 1, shape) / 2.0**q, dtype)


def _special(draw: Any, shape: tuple[int, ...], dtype: str) -> Any:
    made = _small(draw, shape, dtype).astype(np.float64)
    made = np.where(draw.random(shape) < 0.1, np.inf, made)
    made = np.where(draw.random(shape) < 0.1, -np.inf, made)
    made = np.where(draw.random(shape) < 0.1, np.nan, made)
    return numerics.encode(made, dtype)


def _integers(low: int, high: int) -> Any:
    return lambda draw, shape, dtype: draw.integers(0 if dtype[0] == "u" else low, high + 1, shape).astype(
        dtype
    )


def _full(draw: Any, shape: tuple[int, ...], dtype: str) -> Any:
    low, high = numerics.limits(dtype)
    return draw.integers(low, high, shape, dtype, endpoint=True)


_DRAW: dict[str, Any] = {
    "small": _small,
    "special": _special,
    "real": lambda draw, shape, dtype: numerics.encode(draw.uniform(-4, 4, shape), dtype),
    "positive": lambda draw, shape, dtype: numerics.encode(draw.uniform(0.5, 4, shape), dtype),
    "few": _integers(-9, 9),
    "full": _full,
    "bits": lambda draw, shape, dtype: draw.integers(0, 2, shape).astype(bool),
    "zero": lambda draw, shape, dtype: np.zeros(shape, numerics.storage(dtype)),
    "counters": lambda draw, shape, dtype: np.zeros(shape, np.int64),
}


def exact_step(dtype: str) -> int:
    """q such that multiples of 2**-q up to four are exact in a float dtype, with room for a few sums."""
    return {"float8_e4m3fn": 1, "float8_e5m2": 0}.get(dtype, 2)


def known(fill: str, dtype: str) -> Val:
    """What is known of elements drawn so."""
    if fill == "zero":
        return Val(dtype, 0, 0)
    if dtype == "bool":
        return whole(dtype)
    if fill == "full":
        return whole(dtype)
    if fill == "few":
        return Val(dtype, 0 if dtype[0] == "u" else -9, 9)
    if fill in ("small", "special"):
        return Val(dtype, -4.0, 4.0, exact_step(dtype), special=fill == "special")
    slack = 2.0 ** (2 - PRECISION[dtype])
    return Val(dtype, -4 - slack if fill == "real" else 0.5 - slack, 4 + slack, None)


@dataclass
class Memory:
    """What several names may stand for: what is known of its elements (None: nobody has written all of
    them)."""

    val: Val | None = None
    frozen: bool = False  # in a loop whose later rounds would see what this one writes
    viewed: bool = False  # under two dtypes: nothing that is known of one says anything of the other


@dataclass
class Tile:
    name: str
    dtype: str
    shape: tuple[int, ...]
    scope: str
    memory: Memory

    @property
    def val(self) -> Val | None:
        v = self.memory.val
        if v is None or v.dtype == self.dtype:
            return v
        return (
            None if self.dtype in FLOATS or v.dtype in FLOATS or self.dtype == "bool" else whole(self.dtype)
        )


@dataclass(frozen=True)
class Index:
    """An integer at hand: a block's or loop's number. ``constant``: it is Python's, so an index made of it
    must lie inside."""

    text: str
    lo: int
    hi: int
    constant: bool = False


@dataclass
class Program:
    """A drawn kernel: ``text`` is a Python module that defines ``main``."""

    seed: int
    text: str
    params: list[Param]
    scalars: dict[str, Any]
    ranks: int
    pipelined: bool
    dynamic: bool = False

    def args(self, rank: int) -> dict[str, Any]:
        """The arguments of one rank, by name and in order."""
        return {**{p.name: p.data(rank) for p in self.params}, **self.scalars}


@dataclass
class Draft:
    """The state of drawing: what the generators of statements share."""

    rng: random.Random
    lines: list[str] = field(default_factory=list)
    depth: int = 0
    params: list[Param] = field(default_factory=list)
    scalars: dict[str, Any] = field(default_factory=dict)
    tiles: list[Tile] = field(default_factory=list)
    indices: list[Index] = field(default_factory=list)  # at hand outside nests
    counts: dict[str, int] = field(default_factory=dict)
    blocks: tuple[Index, ...] = ()  # those that together number the tiles of the launch
    repeats: int = 1  # how often a statement here may run, over all blocks
    once: bool = True  # whether every block runs the statements here
    pipelined: bool = False
    dims: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17)
    depth_of_loops: int = 0

    def name(self, stem: str) -> str:
        self.counts[stem] = self.counts.get(stem, -1) + 1
        return f"{stem}{self.counts[stem]}"

    def emit(self, text: str) -> None:
        self.lines.append("    " * (self.depth + 2) + text)

    @contextlib.contextmanager
    def inside(self, head: str) -> Iterator[None]:
        """A block of statements under ``head``; never empty."""
        self.emit(head)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    def param(
        self,
        stem: str,
        kind: str,
        dtype: str,
        shape: tuple[int, ...],
        fill: str,
        *,
        written: Val | None = None,
        **more: Any,
    ) -> Param:
        name = self.name(stem)
        extents = (
            more.pop("extents", None)
            or "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
        )
        declared = {
            "tensor": f'T.Tensor({extents}, "{dtype}")',
            "symm": f'T.SymmTensor({extents}, "{dtype}")',
            "signal": f"T.Signal({extents})",
        }.get(kind, kind)
        made = Param(
            name,
            kind if kind in ("tensor", "symm", "signal") else "tensor",
            dtype,
            shape,
            declared,
            fill,
            self.rng.randrange(2**32),
            written,
            **more,
        )
        self.params.append(made)
        return made

    def tile(self, dtype: str, shape: tuple[int, ...], scope: str | None = None) -> Tile:
        scope = scope or self.rng.choice(("shared", "shared", "fragment"))
        made = Tile(self.name("t"), dtype, shape, scope, Memory())
        self.emit(f'{made.name} = T.alloc_{scope}({shape}, "{dtype}")')
        self.tiles.append(made)
        return made

    def readable(self, dtype: str | None = None, axes: int | None = None) -> list[Tile]:
        """Tiles that every element of has been written."""
        return [
            t
            for t in self.tiles
            if t.val is not None
            and (dtype is None or t.dtype == dtype)
            and (axes is None or len(t.shape) == axes)
        ]

    def writable(self, dtype: str | None = None) -> list[Tile]:
        return [t for t in self.tiles if not t.memory.frozen and (dtype is None or t.dtype == dtype)]

    def wrote(self, tile: Tile, val: Val, *, all_of_it: bool = True) -> None:
        """A tile's elements (some of them) are now as ``val`` says."""
        tile.memory.val = val if all_of_it else join(tile.val, val)

    def dtype(self, floats: float = 0.6) -> str:
        if self.rng.random() < 0.06:
            return "bool"
        if self.rng.random() < floats:
            return self.rng.choice(
                ("float32",) * 6 + ("float16", "bfloat16") * 2 + ("float64", "float8_e4m3fn", "float8_e5m2")
            )
        return self.rng.choice(
            ("int32",) * 4 + ("int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64")
        )

    def fill_of(self, dtype: str) -> str:
        if dtype == "bool":
            return "bits"
        if dtype in FLOATS:
            return self.rng.choice(("small",) * 4 + ("real",) * 3 + ("positive", "positive", "special"))
        return self.rng.choice(
            ("few", "few", "full") if dtype not in ("int32", "int64") else ("few", "few", "few", "full")
        )

    def shape(self, axes: int | None = None, most: int = 600) -> tuple[int, ...]:
        axes = axes or self.rng.choice((1, 2, 2, 2, 3))
        while True:
            made = tuple(self.rng.choice(self.dims) for _ in range(axes))
            if np.prod(made) <= most:
                return made
