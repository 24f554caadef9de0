"""``T.rng_init``, ``T.rng_rand``, ``T.rng_rand_float``: numbers drawn on the device, the same on every target
(floats of a normal distribution to their functions' last places).

Philox4x32 of ten rounds (Salmon and others, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): a number is
a function of the key, the sequence and its place in the sequence, four places a computation. Places are
counted as cuRAND counts them, whose numbers these are. No operation of the IR: arithmetic of uint32 and
uint64.
"""

from __future__ import annotations

from math import pi, prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.values import Variable, as_expr, binary, const, convert, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ops.alloc import alloc_var
from tilescale.compiler.ops.expert import get_thread_binding
from tilescale.compiler.ops.math import cos, log, sin, sqrt
from tilescale.compiler.tvm_compat import is_expr, tirx
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
PHILOX = ("curandStatePhilox4_32_10_t", "philox")


def rng_init(seed: Any, seq: Any = None, off: Any = 0, generator: str = PHILOX[0]) -> None:
    """Begins a sequence of random numbers, which `rng_rand` draws from, at the scale where it stands.

    Args:
        seed: the key, 64 bits. seq: which of the key's sequences; None: each thread of the grid has one of
            its own. off: the place in it of the first number.

    Raises:
        TileSyntaxError: outside T.Kernel, or in T.Parallel. TileTypeError: what is no integer.
        TileValueError: another generator.
    """
    b, loc = bld.current(), source.current()
    if b.launch is None or any(f.kind in ("parallel", "vectorized") for f in b.frames):
        raise TileSyntaxError("T.rng_init outside of T.Kernel, or in T.Parallel", loc=loc,
                              expected="it in front of the loop that draws")  # fmt: skip
    if generator not in PHILOX:
        raise TileValueError(f"T.rng_init with generator={generator!r}", loc=loc, expected=f'"{PHILOX[0]}"')
    for name, value in (("seed", seed), ("seq", 0 if seq is None else seq), ("off", off)):
        e = to_expr(value, name)
        if isinstance(e, (bool, float)) or (is_expr(e) and "int" not in str(e.ty)):
            raise TileTypeError(f"{name} of T.rng_init is {value}", loc=loc, expected="an integer")
    if seq is None:
        blocks: Any = 0
        for index, extent in zip(reversed(b.launch.block_vars), reversed(b.launch.grid), strict=True):
            blocks = binary("+", binary("*", blocks, as_expr(extent)), index)
        seq = binary("+", binary("*", blocks, b.launch.threads), get_thread_binding())
    made = alloc_var("uint64")
    made.store(_wide(off))
    name = b.give_name(made.buffer, "drawn").name
    b.random = (_words(seed, f"{name}_key"), _words(seq, f"{name}_sequence"), made)


def rng_rand() -> Any:
    """The next number of the sequence: uint32, all values alike.

    In T.Parallel each iteration has the number at its own place, in the order of its loops, whether or not it
    asks for it; behind the loop the sequence goes on behind all of them. So no number depends on a layout.

    Raises:
        TileSyntaxError: without T.rng_init, or in a loop in T.Parallel.
    """
    words, which = _next("rng_rand")
    chosen = words[3]
    for k in (2, 1, 0):
        chosen = tirx.if_then_else(tirx.EQ(which, _wide(k)), words[k], chosen)
    return _bind("random", chosen)


def rng_rand_float(bit: int = 32, dist: str = "uniform") -> Any:
    """A float of the sequence's next number, which it takes as `rng_rand` does: of 32 random bits.

    Args:
        bit: 32 or 64: float32 or float64.
        dist: "uniform": above zero, up to and with one. "normal": of mean 0 and deviation 1, by Box and
            Muller's method: the numbers of an even place and of the next one make two of them.

    Raises:
        TileValueError: another width, or another distribution. TileSyntaxError: as `rng_rand`.
    """
    loc = source.current()
    if bit not in (32, 64) or isinstance(bit, bool):
        raise TileValueError(f"T.rng_rand_float with bit={bit!r}", loc=loc, expected="32 or 64")
    if dist not in ("uniform", "normal"):
        raise TileValueError(
            f"T.rng_rand_float with dist={dist!r}", loc=loc, expected='"uniform" or "normal"'
        )
    dt, word = f"float{bit}", "rng_rand_float"
    words, which = _next(word)

    def unit(word: Any) -> Any:
        """The middle of each of 2^32 parts of the unit interval."""
        return convert(word, dt) * const(2.0**-32, dt) + const(2.0**-33, dt)

    upper = tirx.GE(which, _wide(2))
    first, second = (_bind("random", tirx.if_then_else(upper, words[k + 2], words[k])) for k in (0, 1))
    odd = tirx.EQ(which & _wide(1), _wide(1))
    if dist == "uniform":
        return _bind("uniform", unit(tirx.if_then_else(odd, second, first)))
    radius = _bind("radius", sqrt(const(-2.0, dt) * log(unit(first))))
    angle = _bind("angle", unit(second) * const(2.0 * pi, dt))
    return _bind("normal", radius * tirx.if_then_else(odd, cos(angle), sin(angle)))


def _next(word: str) -> tuple[list[Any], Any]:
    """The four words of a computation, and which of them is the next number of the sequence, which goes
    on."""
    b, loc = bld.current(), source.current()
    if b.random is None:
        raise TileSyntaxError(f"T.{word} without T.rng_init", loc=loc, hint="T.rng_init(seed) in front of it")
    key, sequence, drawn = b.random
    outer = next((f for f in reversed(b.frames) if f.kind == "parallel"), None)
    place, count = drawn.load(), 1
    if outer is not None:
        inner = b.frames[b.frames.index(outer) + 1 :]
        variables, ranges = outer.nest
        plain = all(isinstance(x, int) for r in ranges for x in r) and all(r[2] == 1 for r in ranges)
        if any(f.kind not in ("if", "nest") for f in inner if f.device) or not plain:
            raise TileSyntaxError(
                f"T.{word} in a loop in T.Parallel", loc=loc,
                expected="one number an iteration of T.Parallel, whose extents are constants",
            )  # fmt: skip
        count = prod(high - low for low, high, _ in ranges)
        before = sum(isinstance(act, _Advance) for act in outer.after) * count
        linear: Any = tirx.const(before, "int32")
        step = count
        for v, (low, high, _) in zip(variables, ranges, strict=True):
            step //= high - low
            linear = linear + (v - low) * step
        place = place + _wide(linear)
        outer.after.append(_Advance(drawn, count))
    elif any(f.kind == "vectorized" for f in b.frames):
        raise TileSyntaxError(f"T.{word} in T.vectorized", loc=loc, expected="T.Parallel or T.serial")
    at = _bind("place", place)
    block = _bind("block", at >> _wide(2))
    words = _philox([_low(block), _high(block), *sequence], key)
    which = _bind("word", at & _wide(3))
    if outer is None:
        drawn.store(drawn.load() + _wide(1))
    return words, which


class _Advance:
    """Behind a T.Parallel: the sequence goes on behind the numbers of its iterations."""

    def __init__(self, drawn: Variable, count: int):
        self.drawn, self.count = drawn, count

    def __call__(self) -> None:
        self.drawn.store(self.drawn.load() + _wide(self.count))


def _philox(counter: list[Any], key: list[Any]) -> list[Any]:
    """Four random words of a counter of four words and a key of two."""
    c, k = counter, key
    for _ in range(ROUNDS):
        p = [
            _bind("product", tirx.const(m, "uint64") * _wide(c[i]))
            for m, i in zip(MULTIPLIERS, (0, 2), strict=True)
        ]
        c = [
            _bind("c", _high(p[1]) ^ c[1] ^ _u32(k[0])),
            _bind("c", _low(p[1])),
            _bind("c", _high(p[0]) ^ c[3] ^ _u32(k[1])),
            _bind("c", _low(p[0])),
        ]
        k = [(x + w) & WORD if isinstance(x, int) else x + _u32(w) for x, w in zip(k, WEYL, strict=True)]
    return c


def _words(value: Any, name: str) -> list[Any]:
    """The lower and the upper 32 bits: numbers where the value is one."""
    e = to_expr(value)
    if isinstance(e, int):
        return [e & WORD, e >> 32 & WORD]
    whole = _bind(name, _wide(e))
    return [_low(whole), _high(whole)]


def _bind(name: str, value: Any) -> Any:
    b = bld.current()
    var = tirx.Var(b.unique(name), str(value.ty))
    b.emit(tirx.Bind(var, value, b.span()))
    return var


def _wide(value: Any) -> Any:
    return tirx.const(value & (1 << 64) - 1, "uint64") if isinstance(value, int) else convert(value, "uint64")


def _u32(value: Any) -> Any:
    return tirx.const(value, "uint32") if isinstance(value, int) else value


def _low(value: Any) -> Any:
    return tirx.Cast("uint32", value & tirx.const(WORD, "uint64"))


def _high(value: Any) -> Any:
    return tirx.Cast("uint32", value >> tirx.const(32, "uint64"))
