"""A sum of one number of each thread along an axis of the block, as TVM writes it: ``T.attr`` with a
``T.comm_reducer``, and ``T.tvm_thread_allreduce`` in it. No operation of the IR: neighbours in a warp shuffle
their numbers, and what is left goes through shared memory, where all that want the result combine it in the
order of the threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tilescale.compiler.builder import state as bld
from tilescale.compiler.builder.constructs import LoopNest
from tilescale.compiler.builder.values import Variable, as_expr, binary, compare, dtype_of, to_expr
from tilescale.compiler.ir import source
from tilescale.compiler.ir.numbers import constant
from tilescale.compiler.ir.scales import WARP
from tilescale.compiler.ops import async_scope
from tilescale.compiler.ops.alloc import alloc_shared, alloc_var
from tilescale.compiler.ops.base import element
from tilescale.compiler.ops.choices import only_if
from tilescale.compiler.ops.expert import get_thread_binding
from tilescale.compiler.ops.reducer import require_apart
from tilescale.compiler.ops.shuffle import shfl_xor
from tilescale.compiler.tvm_compat import ir, same_expression
from tilescale.errors import TileSyntaxError, TileTypeError, TileValueError

SCOPE = "reduce_scope"


class CommReducer:
    """How numbers are combined, and what begins a combination."""

    def __init__(self, fcombine: Callable[..., Any], identity: Sequence[Any]):
        if not callable(fcombine) or len(identity) != 1:
            raise TileTypeError(
                f"T.comm_reducer of {len(identity)} numbers at once",
                loc=source.current(),
                expected="a function of two numbers, and a list of one that changes nothing",
            )
        self.combine, self.identity = fcombine, identity[0]


def comm_reducer(fcombine: Callable[..., Any], identity: Sequence[Any]) -> CommReducer:
    """What T.tvm_thread_allreduce combines by: ``T.comm_reducer(lambda x, y: x + y, [0])``. The function is
    called while the kernel is traced."""
    return CommReducer(fcombine, identity)


class _Reducing:
    """The scope of a reducer."""

    def __init__(self, reducer: CommReducer):
        self.reducer = reducer

    def __enter__(self) -> None:
        bld.current().reducers.append(self.reducer)

    def __exit__(self, kind: Any, error: Any, tb: Any) -> None:
        if error is None:
            bld.current().reducers.pop()


def attr(node: Any, attr_key: str, value: Any) -> Any:
    """``with T.attr(T.comm_reducer(…), "reduce_scope", …):`` around T.tvm_thread_allreduce, and ``with
    T.attr("default", "async_scope", 1):`` around copies that a thread does not wait for (ops/async_scope.py).
    TVM's other attributes are its compiler's own.

    Raises:
        TileTypeError: another attribute.
    """
    if attr_key == SCOPE and isinstance(node, CommReducer):
        return _Reducing(node)
    if attr_key == async_scope.SCOPE and constant(as_expr(value)) == 1:
        return async_scope.AsyncScope()
    raise TileTypeError(
        f"T.attr of {attr_key!r}",
        loc=source.current(),
        expected=f'T.attr(T.comm_reducer(…), "{SCOPE}", …), T.attr("default", "{async_scope.SCOPE}", 1)',
    )


def evaluate(value: Any) -> None:
    """A value that is made for what making it does, as T.tvm_thread_allreduce is; what is done with it is
    nothing.

    Raises:
        TileTypeError: neither a number nor what such a call gives.
    """
    if value is not None:
        to_expr(value, "the value of T.evaluate")


def tvm_thread_allreduce(
    size: Any, value: Any, pred: Any, result: Any, *axes: Any, dtype: Any = "handle"
) -> None:
    """``result``, an element of each thread's own, becomes the combination of ``value`` over the threads
    along one axis of the block; those with other indices along the other axes combine apart. Along the first
    axis up to 32 neighbours combine by halves, where groups of a power of two of them fill warps: each with
    the one half of the group away, then a quarter, and so on. What these give, and the numbers along other
    axes, are combined in the order of the threads.

    Args:
        size, pred: one number, of all threads. axes: what ``T.get_thread_binding(k)`` gave for one axis.

    Raises:
        TileSyntaxError: outside of T.attr with a reducer. TileTypeError: several numbers, threads left out,
        or no
            axis of the block.
    """
    b, loc = bld.current(), source.current()
    if not b.reducers or b.launch is None or b.executor != "block":
        raise TileSyntaxError(
            "T.tvm_thread_allreduce stands outside of a reducer",
            loc=loc,
            hint="with T.attr(T.comm_reducer(…), …):",
        )
    if constant(as_expr(size)) != 1 or pred is not True or len(axes) != 1 or str(dtype) != "handle":
        raise TileTypeError(
            f"T.tvm_thread_allreduce of {size} numbers along {len(axes)} axes",
            loc=loc,
            expected="one number of every thread, along one axis",
        )
    extents = b.launch.hints.get("axes", (b.launch.threads,))
    along = next((k for k in range(len(extents)) if _same(axes[0], get_thread_binding(k))), None)
    if along is None:
        raise TileTypeError(f"{axes[0]} is no axis of the block", loc=loc, expected="T.get_thread_binding(k)")
    own = element(result, "the result of T.tvm_thread_allreduce")
    require_apart("T.tvm_thread_allreduce", value)
    reducer, kind = b.reducers[-1], str(dtype_of(value))
    if kind != str(own.dtype):
        raise TileValueError(
            f"a result of {own.dtype} of numbers of {kind}", loc=loc, expected=f"one of {kind}"
        )
    thread, step, count = _thread(extents), prod(extents[:along]), extents[along]
    total: Variable = alloc_var(kind, reducer.identity)
    b.give_name(total.buffer, "total")
    lanes = _lanes(extents) if along == 0 else 1
    total.store(value)
    for k in reversed(range(lanes.bit_length() - 1)):
        total.store(reducer.combine(total.load(), shfl_xor(total.load(), 1 << k)))
    if lanes < count:
        # what each group of lanes gives, its first one's, or each thread's own number
        numbers = b.give_name(alloc_shared((b.launch.threads // lanes,), kind), "numbers")
        group = binary("//", thread, lanes)
        first_lane = True if lanes == 1 else compare("==", binary("%", thread, lanes), 0)
        only_if(first_lane, lambda: numbers.store((group,), total.load()))
        axis = binary("//", get_thread_binding(along), lanes)
        first = binary("-", group, binary("*", axis, step))
        total.store(as_expr(reducer.identity, kind))
        for k in LoopNest("serial", [(0, count // lanes, 1)]).trace(("k",)):
            total.store(reducer.combine(total.load(), numbers[binary("+", first, binary("*", k, step))]))
    own.buffer.store(tuple(own.mins), total.load())


def _lanes(extents: tuple[int, ...]) -> int:
    """How many neighbours along the first axis shuffles combine: whole warps, or parts of them that begin
    where groups of so many lanes do."""
    count = extents[0] if extents[0] < WARP else WARP
    return count if prod(extents) % WARP == 0 == extents[0] % count and count.bit_count() == 1 else 1


def _thread(extents: tuple[int, ...]) -> Any:
    """The thread's index in the block."""
    index, step = get_thread_binding(0), 1
    for k, extent in enumerate(extents[:-1]):
        step *= extent
        index = binary("+", index, binary("*", get_thread_binding(k + 1), step))
    return index


def _same(given: Any, axis: Any) -> bool:
    """Whether a value is an axis' index, perhaps by name."""
    value = bld.current().definitions.get(given, given) if isinstance(given, ir.Var) else given
    return same_expression(value, axis)
