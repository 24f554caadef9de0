"""The dtypes of the language. A dtype is a string that can also be called: ``T.float32(x)`` converts
``x``."""

from __future__ import annotations

from typing import Any

from tilescale.errors import TileTypeError

#: canonical name → bits
BITS: dict[str, int] = {
    "bool": 8,
    "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
    "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64,
}  # fmt: skip

#: the greatest finite value of each floating dtype
GREATEST: dict[str, float] = {
    "float64": 1.7976931348623157e308,
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}

_ALIASES = {
    "float8_e4m3": "float8_e4m3fn",
    "e4m3_float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "e5m2_float8": "float8_e5m2",
    "e5m2": "float8_e5m2",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
    "short": "int16",
    "char": "int8",
    "uchar": "uint8",
    "bf16": "bfloat16",
    "bool_": "bool",
    "uint": "uint32",
    "float4_e2m1fn_x2": "float4_e2m1fn",
    "float4_e2m1": "float4_e2m1fn",
}


class dtype(str):
    """A dtype by its canonical name; equal to that string, callable as a conversion."""

    __slots__ = ()

    def __new__(cls, value: Any) -> dtype:
        """A dtype by whatever `canonical` knows: ``T.dtype("fp16")`` is refused, ``T.dtype(torch.float16)``
        is T.float16."""
        if isinstance(value, str) and value in BITS:
            return str.__new__(cls, value)
        return canonical(value)

    def __getnewargs__(self) -> tuple[str]:
        return (str(self),)

    def __call__(self, value: Any = ...) -> Any:
        """The value converted; of nothing a cell, for T.let."""
        if value is ...:
            from tilescale.compiler.ops.alloc import alloc_var

            return alloc_var(self)
        from tilescale.compiler.ops.math import cast

        return cast(value, self)

    @property
    def bits(self) -> int:
        return BITS[self]

    @property
    def bytes(self) -> int:
        return BITS[self] // 8

    @property
    def is_float(self) -> bool:
        return "float" in self

    @property
    def is_integer(self) -> bool:
        return "int" in self

    def as_torch(self) -> Any:
        """The torch dtype of the same name."""
        import torch

        return getattr(torch, str(self))

    def __repr__(self) -> str:
        return f"T.{str(self)}"


class _Tf32(dtype):
    """float32, of which products may take the upper 10 bits of mantissa: a tile of T.tfloat32 is one of
    float32, and T.gemm of two of them has ``precision="tf32"``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "T.tfloat32"


class _Pointer(dtype):
    """``T.ptr``: an address of the machine that runs the kernel. A tensor of them is int64; a parameter is a
    tensor, or its address (``T.make_tensor``)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "T.ptr"


ALL: dict[str, dtype] = {name: dtype(name) for name in BITS}
TFLOAT32 = _Tf32("float32")
PTR = _Pointer("int64")


#: TileLang's name for what takes a dtype in any spelling
DataType = dtype


def __getattr__(name: str) -> Any:
    """A dtype by its name; and TileLang's table of torch's dtypes, made when it is asked for: nothing else
    here needs torch."""
    if (found := ALL.get(name) or NARROW.get(name)) is not None:
        return found
    if name != "_TORCH_DTYPE_TO_STR":
        raise AttributeError(name)
    import torch

    return {getattr(torch, known): known for known in BITS if hasattr(torch, known)}


class Narrow(dtype):
    """A dtype of 4 bits. A tensor of them has two in each byte, the first in the lower bits. A tile holds
    each in a number of 8 bits, whose dtype has all their values; what is stored there is rounded to one.

    Attributes:
        held: the dtype of a tile's elements. packed: that of a tensor's bytes.
    """

    held: dtype
    packed: dtype

    def __new__(cls, name: str) -> Narrow:
        made = str.__new__(cls, name)
        made.held, made.packed = map(dtype, _BYTES[name])
        return made

    @property
    def bits(self) -> int:
        return 4

    @property
    def bytes(self) -> int:
        raise TileTypeError(f"an element of {self} has no whole bytes", expected="bits, two elements a byte")

    def as_torch(self) -> Any:
        """What torch holds two of them in: float4_e2m1fn_x2, or integers of 8 bits."""
        import torch

        return getattr(torch, f"{self}_x2" if self.is_float else str(self.packed))


#: dtype of 4 bits → what a tile holds a number in, and a tensor two
_BYTES = {
    "int4": ("int8", "int8"),
    "uint4": ("uint8", "uint8"),
    "float4_e2m1fn": ("float8_e4m3fn", "uint8"),
}
NARROW: dict[str, Narrow] = {name: Narrow(name) for name in _BYTES}
#: dtype of 4 bits → its least and its greatest number
RANGES: dict[str, tuple[float, float]] = {"int4": (-8, 7), "uint4": (0, 15), "float4_e2m1fn": (-6.0, 6.0)}


def held(dt: dtype) -> dtype:
    """The dtype that a tile's elements have in memory."""
    return dt.held if isinstance(dt, Narrow) else dt


def canonical(value: Any) -> dtype:
    """The dtype that a string, a ``T.float32``, a ``torch.float32`` or a NumPy dtype means.

    Raises:
        TileTypeError: the language has no such dtype.
    """
    if isinstance(value, dtype):
        return value
    name = value if isinstance(value, str) else None
    if name is None:
        if value is float:
            name = "float32"
        elif value is int:
            name = "int32"
        elif value is bool:
            name = "bool"
        else:
            name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    name = name.rsplit(".", 1)[-1]
    if name == "tfloat32":
        return TFLOAT32
    name = _ALIASES.get(name, name)
    found = ALL.get(name) or NARROW.get(name)
    if found is None:
        import difflib

        from tilescale.compiler.ir import source

        close = difflib.get_close_matches(name, [*ALL, *_ALIASES], 1)
        raise TileTypeError(
            f"unknown dtype {value!r}",
            loc=source.current(),
            expected="one of " + ", ".join(ALL),
            hint=f'"{close[0]}"' if close else None,
        )
    return found
