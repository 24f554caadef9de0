"""From torch tensors to launches: what the functions that people call share."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch

from tilescale import advice, comm, env, log
from tilescale.devices import resolve_target
from tilescale.errors import TileTypeError, TileValueError
from tilescale.jit import compile

if TYPE_CHECKING:
    from tilescale.kernel import Kernel


_STRIDED = torch.strided
INT32 = -(1 << 31), (1 << 31) - 1


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of what people call: arguments that are annotated as tensors must be some. Views of numbers
    with their signs changed are made numbers that lie in memory, which kernels read; but of ``out``, which
    `result` refuses.

    Raises:
        TileTypeError: from the call, for an argument of another kind.
    """
    parameters = inspect.signature(function).parameters
    names = tuple(parameters)
    #: of those that are tensors: whether None is one, too
    wanted = {
        n: "None" in str(p.annotation)
        for n, p in parameters.items()
        if str(p.annotation).startswith("torch.Tensor")
    }

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        resolved = None
        # what is missing, or too much, the function itself says
        for name, value in itertools.chain(zip(names, args, strict=False), kwargs.items()):
            optional = wanted.get(name)
            if optional is None or value is None and optional:
                continue
            if not isinstance(value, torch.Tensor):
                what = f"{name} of {function.__name__} is {type(value).__name__}"
                raise TileTypeError(what, expected="a torch tensor" + (", or None" if optional else ""))
            if value.layout is not _STRIDED or value.is_nested:
                kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
                raise TileTypeError(f"{name} of {function.__name__} is {kind}", expected="a strided tensor")
            if value.is_neg() and name != "out":
                resolved = (resolved or {}) | {name: value.resolve_neg()}
        if resolved:
            args = tuple(resolved.get(n, a) for n, a in zip(names, args, strict=False)) + args[len(names) :]
            kwargs = {n: resolved.get(n, v) for n, v in kwargs.items()}
        return function(*args, **kwargs)

    return call


def target_of(device: torch.device) -> str:
    """What kernels on a device are compiled for: what TILESCALE_TARGET says, else that device."""
    return resolve_target(None, (torch.empty(0, device=device),))


def launch(factory: Callable[..., Any], args: tuple[Any, ...], /, **constants: Any) -> None:
    """Runs the kernel that ``factory(**constants)`` describes on ``args``, its parameters in order; compiled
    once for equal constants. Tensors on a GPU are computed there, others where TILESCALE_TARGET says, else on
    the CPU."""
    kernel(factory, resolve_target(None, args), **constants)(*args)


@functools.cache
def kernel(factory: Callable[..., Any], target: str, /, **constants: Any) -> Kernel:
    """The compiled kernel of a factory's prim_func. What would make it faster is no warning, nor what the
    static checks had no steps for: its lines are not the caller's."""
    text = ", ".join(f"{k}={v}" for k, v in constants.items())
    with advice.withheld(), log.own_kernel():
        return compile(factory(**constants), target=target, name=f"{factory.__name__}({text})")


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has; an H200's 132 for devices that have none, so that they choose
    the same configuration."""
    return (
        int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132
    )


def units(device: torch.device) -> int:
    """How many multiprocessors of a device kernels of several ranks may keep: those that TILESCALE_SPARE does
    not leave to others. Ranks that share a GPU (`comm.sharing`) have a part each: where NVIDIA's MPS runs
    them side by side, blocks of one rank that wait for another one's must leave it room."""
    return max(1, multiprocessors(device) // comm.sharing() - env.SPARE.get())


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block can have; an H200's for devices that have none, or of which torch
    does not say it."""
    of = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(of, "shared_memory_per_block_optin", 232_448))


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Whether blocks of a cluster reach each other's shared memory there: on GPUs from sm_90, and on devices
    that are none."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def dtype_name(tensor: torch.Tensor) -> str:
    return dtype_of(tensor.dtype)


def narrowed(numbers: torch.Tensor) -> torch.Tensor:
    """Integers as int32, contiguous. What int32 does not hold becomes its least or its greatest number, which
    kernels refuse, and not another one."""
    if numbers.dtype == torch.int64:
        numbers = numbers.clamp(*INT32)
    return numbers.to(torch.int32).contiguous()


@functools.cache
def dtype_of(dtype: torch.dtype) -> str:
    """A dtype's name in the language."""
    return str(dtype).removeprefix("torch.")


def result(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: torch.Tensor,
    what: str = "out",
) -> torch.Tensor:
    """``out``, as `taking` checks it, or a new tensor on ``like``'s device."""
    taking(out, shape, dtype, what)
    return torch.empty(shape, dtype=dtype, device=like.device) if out is None else out


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def absent(like: torch.Tensor) -> torch.Tensor:
    """A number that a kernel takes in place of a tensor that it neither reads nor writes."""
    return _nothing(like.dtype, like.device)


def taking(out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, what: str = "out") -> None:
    """Refuses what does not take a result.

    Raises:
        TileValueError, TileTypeError: ``out`` has another shape or dtype, or is not contiguous.
    """
    if out is None:
        return
    if tuple(out.shape) != shape or not out.is_contiguous():
        lies = "" if out.is_contiguous() else ", not contiguous"
        raise TileValueError(f"{what} is {tuple(out.shape)}{lies}", expected=f"{shape}, contiguous")
    if out.is_neg() or out.is_conj():
        said = "a view of numbers with their signs changed" if out.is_neg() else "a conjugated view"
        raise TileValueError(f"{what} is {said}", expected="numbers as they lie in memory")
    if out.dtype != dtype:
        raise TileTypeError(f"{what} is {dtype_name(out)}", expected=dtype_of(dtype))


def matrix(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, bool]:
    """A matrix as rows that lie one behind another, and whether those are its columns. One that is neither
    way contiguous is copied.

    Raises:
        TileValueError: no matrix.
    """
    if tensor.dim() != 2:
        raise TileValueError(f"{what} has {tensor.dim()} axes", expected="a matrix")
    if tensor.is_contiguous():
        return tensor, False
    if tensor.T.is_contiguous():
        return tensor.T, True
    return tensor.contiguous(), False


def lying(tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The first that `matrix` gives, where the second is known."""
    return tensor.T if transposed else tensor.contiguous()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one: the same elements in the same order."""
    lie = zip(a.shape, a.stride(), b.stride(), strict=False)
    return (a.data_ptr(), a.shape, a.dtype) == (b.data_ptr(), b.shape, b.dtype) and all(
        n == 1 or s == t for n, s, t in lie
    )


#: steps that a look at two strided tensors may take, as of the launcher
_TANGLED = 10_000


class _Bytes:
    """A tensor's memory as NumPy describes it. NumPy compares addresses alone, so they may be a GPU's."""

    def __init__(self, of: torch.Tensor):
        size = of.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(of.shape),
            "strides": tuple(s * size for s in of.stride()),
            "typestr": f"|V{size}",
            "data": (of.data_ptr(), False),
        }


def _end(of: torch.Tensor) -> int:
    """The address behind a tensor's last byte."""
    last = sum((n - 1) * s for n, s in zip(of.shape, of.stride(), strict=True))
    return of.data_ptr() + of.element_size() * (last + 1)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a byte belongs to both; also where strides are too tangled to tell."""
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    if _end(a) <= b.data_ptr() or _end(b) <= a.data_ptr():
        return False
    if a.is_contiguous() and b.is_contiguous():
        return True
    x, y = (numpy.asarray(_Bytes(t)) for t in (a, b))
    try:
        return bool(numpy.shares_memory(x, y, max_work=_TANGLED))  # type: ignore[arg-type]  # NumPy's stub knows the named values alone
    except numpy.exceptions.TooHardError:
        return True
