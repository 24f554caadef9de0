"""A simulated call, and its arguments against the kernel's declarations: the checks of the C launcher
(tilescale/native/check.c), in its order and with its texts, which `tilescale.explain` turns into errors for
people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tilescale.arrays import as_numpy, is_tensor
from tilescale.comm import sim
from tilescale.explain import is_torch
from tilescale.kernel import Kernel

_OVERLAP_WORK = 10_000
K = TypeVar("K", bound=Kernel)


@dataclass
class Argument:
    """A tensor argument: the caller's memory as an array, and for symmetric memory where it lies."""

    array: Any
    block: Any = None  # sim.SimBlock
    team: tuple[int, ...] | None = None
    at: tuple[int, int] = (-1, 0)  # the allocation's number among its team's, and the bytes before it there
    output: bool = False  # allocated by the call and not zeroed, so that nobody has written it

    @property
    def address(self) -> int:
        return self.array.__array_interface__["data"][0]

    def given(self) -> Any:
        """What the simulator gets: a masked array where not all of it has been written."""
        import numpy

        if self.output:
            return numpy.ma.MaskedArray(self.array, numpy.ones(self.array.shape, bool))
        mask = (
            None
            if self.block is None
            else self.block.mask(self.address, self.array.shape, self.array.itemsize)
        )
        return self.array if mask is None else numpy.ma.MaskedArray(self.array, mask)

    def take(self, values: Any, unwritten: Any) -> None:
        """What a launch left of it, into the caller's memory."""
        self.array[...] = values  # where nobody wrote, still the pattern that says so
        if self.block is not None:
            self.block.wrote(self.address, self.array.shape, self.array.itemsize, unwritten)


@dataclass
class Call(Generic[K]):
    """One rank's part of a launch."""

    kernel: K
    tensors: dict[str, Argument]
    numbers: dict[str, Any]
    loc: Any

    def values(self) -> dict[str, Any]:
        return {**{name: a.given() for name, a in self.tensors.items()}, **self.numbers}


def bind(kernel: Kernel, args: tuple[Any, ...], backend: Any) -> tuple[dict[str, Argument], dict[str, Any]]:
    """The tensors and the numbers of a call, by parameter.

    Raises:
        TypeError, ValueError: ``TS:<check>:…``, the first thing that does not fit.
    """
    params, tensors, numbers = list[dict[str, Any]](kernel.params), {}, {}
    if len(args) != len(params):
        raise TypeError(f"TS:nargs:-1:-1:{len(params)}:{len(args)}")
    symbols: dict[str, int] = {}
    for k, (p, value) in enumerate(zip(params, args)):
        if p["kind"] == "scalar":
            numbers[p["name"]] = _number(k, p, value)
        else:
            tensors[p["name"]] = _tensor(k, p, value, symbols, kernel.multiples)
    _overlaps(params, tensors)
    if isinstance(backend, sim.SimRank):
        _symmetric(params, tensors, backend)
    for k in kernel.out_idx:
        tensors[params[k]["name"]].output = not params[k].get("added", False)
    return tensors, numbers


def _given(value: Any) -> str:
    names = {type(None): "None", bool: "bool", int: "int", float: "float", str: "str"}
    return "tensor" if is_tensor(value) else names.get(type(value), "object")


def _number(k: int, p: dict[str, Any], value: Any) -> Any:
    dtype = p["dtype"]
    if "float" in dtype:
        if not isinstance(value, (float, int)):
            raise TypeError(f"TS:kind:{k}:-1:float:{_given(value)}")
        return float(value)
    import operator

    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"TS:kind:{k}:-1:int:{_given(value)}") from None
    if is_tensor(value) and getattr(value, "shape", ()) != ():
        raise TypeError(f"TS:kind:{k}:-1:int:tensor")
    bits = 1 if dtype == "bool" else int(dtype.lstrip("uint"))
    low, high = (
        (0, (1 << bits) - 1)
        if dtype == "bool" or dtype.startswith("u")
        else (-(1 << bits - 1), (1 << bits - 1) - 1)
    )
    if not low <= number <= high:
        raise ValueError(f"TS:range:{k}:-1:{dtype}:{number}")
    return number


def _tensor(
    k: int, p: dict[str, Any], value: Any, symbols: dict[str, int], multiples: dict[str, int]
) -> Argument:
    if not is_tensor(value):
        raise TypeError(f"TS:kind:{k}:-1:tensor:{_given(value)}")
    if is_torch(value) and value.device.type != "cpu":
        raise TypeError(f"TS:device:{k}:-1:1:0")
    array = as_numpy(value)
    if p["written"] and not array.flags.writeable:
        raise ValueError(f"{p['name']} is read-only")  # the kernel object knows how to say it
    if array.dtype.name != p["dtype"]:
        raise TypeError(f"TS:dtype:{k}:-1:{p['dtype']}:{array.dtype.name}")
    if array.ndim != len(p["shape"]):
        raise ValueError(f"TS:ndim:{k}:-1:{len(p['shape'])}:{array.ndim}")
    strides = tuple(s // array.itemsize for s in array.strides)
    if p["strides"] is None and array.size:
        packed = 1
        for axis in range(array.ndim - 1, -1, -1):
            if array.shape[axis] > 1 and strides[axis] != packed:
                raise ValueError(f"TS:contig:{k}:{axis}:{packed}:{strides[axis]}")
            packed *= array.shape[axis]
    for axis, (extent, n) in enumerate(zip(p["shape"], array.shape)):
        want = symbols.setdefault(extent, n) if isinstance(extent, str) else extent
        if isinstance(extent, str) and n % multiples.get(extent, 1):
            raise ValueError(f"TS:multiple:{k}:{axis}:{multiples[extent]}:{n}")
        if isinstance(want, int) and want != n:
            raise ValueError(f"TS:shape:{k}:{axis}:{want}:{n}")
    for axis, (stride, n) in enumerate(zip(p["strides"] or (), strides)):
        want = symbols.setdefault(stride, n) if isinstance(stride, str) else stride
        if isinstance(stride, str) and n % multiples.get(stride, 1):
            raise ValueError(f"TS:multiple:{k}:{axis}:{multiples[stride]}:{n}")
        if isinstance(want, int) and want != n and (array.shape[axis] > 1 or isinstance(stride, str)):
            raise ValueError(f"TS:stride:{k}:{axis}:{want}:{n}")
    address = array.__array_interface__["data"][0]
    if address % array.itemsize:
        raise ValueError(f"TS:align:{k}:-1:{array.itemsize}:{address % array.itemsize}")
    return Argument(array)


def _overlaps(params: list[dict[str, Any]], tensors: dict[str, Argument]) -> None:
    import numpy

    held = [(k, p, tensors[p["name"]].array) for k, p in enumerate(params) if p["name"] in tensors]
    for j, (second, q, b) in enumerate(held):
        for first, p, a in held[:j]:
            if not (p["written"] or q["written"]) or not numpy.may_share_memory(a, b):
                continue
            try:
                shared = numpy.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # NumPy's stub knows the named values alone
            except numpy.exceptions.TooHardError:  # too tangled to decide: take it as overlap
                shared = True
            if shared:
                raise ValueError(f"TS:overlap:{second}:{first}:disjoint memory:the same memory")


def _symmetric(params: list[dict[str, Any]], tensors: dict[str, Argument], rank: sim.SimRank) -> None:
    """Finds symmetric arguments in the rank's memory; all must be of one team."""
    team: tuple[int, ...] | None = None
    for k, p in enumerate(params):
        argument = tensors.get(p["name"])
        if argument is None or not argument.array.size:  # an empty tensor lies nowhere
            continue
        found = rank.find(argument.address)
        if p["kind"] == "tensor":
            if found is not None and argument.array.flags.c_contiguous:
                argument.block = found[1]  # it knows what has been written
            continue
        if found is None:
            what = (
                "a view of another rank's memory" if rank.is_peers(argument.address) else "an ordinary tensor"
            )
            raise TypeError(f"TS:notsymm:{k}:-1:symmetric memory of this rank:{what}")
        allocation, argument.block = found
        argument.team = allocation.team.members
        argument.at = (allocation.offset, argument.address - argument.block.address)
        if team is not None and argument.team != team:
            a, b = ("ranks " + " ".join(map(str, t)) for t in (team, argument.team))
            raise ValueError(f"TS:team:{k}:-1:{a}:{b}")
        team = argument.team
