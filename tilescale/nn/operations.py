"""Operations with gradients, each by two ways: `torch.library` knows it as ``torch.ops.tilescale.NAME``, with
its results' shapes, so that `torch.compile` keeps it in one graph, and activation checkpointing sees it by
name; and ``call.NAME`` is what layers call.

The dispatcher takes a call through ten Python functions before it reaches ours, and once more in the
backward: a tenth of a millisecond and more for each operation, of which a block of a transformer has twenty
in a step. Small kernels take less. So ``call`` goes straight to the function, by an autograd function of its
own, where nothing stands between that has to see the operation (`straight`), else by the dispatcher.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilescale.errors import TileTypeError

#: the operations, by their names
call: Any = types.SimpleNamespace()

_TENSORS = (Tensor, torch.nn.Parameter)
#: what else schemas have. To ask whether such a value is a tensor takes torch a microsecond
_OTHERS = (str, int, float, bool, type(None))


def define(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes a function the operation ``torch.ops.tilescale.NAME`` and ``call.NAME``: its
    schema, its results' shapes (``fake``), what its backward keeps (``setup``), and its gradients. Without a
    backward it has none, which torch says where one is asked for."""

    def made(function: Callable[..., Any]) -> Any:
        op = torch.library.custom_op(f"tilescale::{name}", function, mutates_args=(), schema=schema)
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(backward, setup_context=setup)
        dispatched = getattr(torch.ops.tilescale, name).default

        differentiable = None if backward is None else _differentiable(name, function, setup, backward)

        def run(*args: Any) -> Any:
            if not straight(args):
                refuse_transform(name)
                _refuse_tangents(name, args)
                return dispatched(*args)
            if torch.is_grad_enabled():
                for a in args:
                    if type(a) in _TENSORS and a.requires_grad:
                        return (dispatched if differentiable is None else differentiable.apply)(*args)
            return function(*args)

        run.__name__, run.__doc__ = name, function.__doc__
        run.function = function  # type: ignore[attr-defined]
        setattr(call, name, run)
        return run

    return made


def _differentiable(
    name: str, function: Callable[..., Any], setup: Callable[..., None] | None, backward: Callable[..., Any]
) -> Any:
    def forward(ctx: Any, *args: Any) -> Any:
        result = function(*args)
        if setup is not None:
            setup(ctx, args, result)
        return result

    steps = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), steps)


def refuse_transform(name: str) -> None:
    """Refuses gradients by transforms of functions, which torch has for no operation that is made as ours.

    Raises:
        TileTypeError: one is under way.
    """
    if torch.compiler.is_compiling():
        return
    innermost = torch._C._functorch.peek_interpreter_stack()
    if innermost is not None and innermost.key() == torch._C._functorch.TransformType.Grad:
        raise TileTypeError(
            f"{name} within torch.func.grad or another transform of functions with gradients",
            expected="gradients by autograd's graph",
            hint="backward() or torch.autograd.grad",
        )


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Refuses derivatives in forward mode. The dispatcher loses them without a word.

    Raises:
        TileTypeError: an argument has some.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for a in args:
        while isinstance(a, Tensor) and torch._C._functorch.is_batchedtensor(a):  # vmap within jvp
            a = torch._C._functorch.get_unwrapped(a)
        if isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None:
            raise TileTypeError(
                f"{name} of a tensor with a tangent (torch.func.jvp, torch.autograd.forward_ad)",
                expected="reverse mode: tilescale's layers have no forward-mode derivatives",
                hint="backward() or torch.autograd.grad",
            )


def straight(args: tuple[Any, ...]) -> bool:
    """Whether nothing has to see a call of these arguments but its function and autograd: no compiler or
    tracer, no mode (fake tensors, a policy of checkpoints, a counter), no transform of functions, no tensor
    of a kind of its own (DTensor), and none that is special."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    ):
        return False
    for a in args:
        kind = type(a)
        if kind in _TENSORS:
            if _is_special(a):
                return False
        elif kind not in _OTHERS and isinstance(a, Tensor):
            return False
    return True


def _is_special(a: Tensor) -> bool:
    """Whether it is not the numbers in its memory: signs are changed when it is read, it has none, or it
    stands for several (``torch.autograd.grad(…, is_grads_batched=True)``)."""
    return a.is_neg() or a.is_meta or torch._C._functorch.is_legacy_batchedtensor(a)
