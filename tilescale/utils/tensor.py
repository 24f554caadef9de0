"""Inputs and comparisons of torch tensors, by TileLang's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilescale.profiler import TensorSupplyType

__all__ = ["TensorSupplyType", "get_tensor_supply", "is_float8_dtype", "torch_assert_close"]


def is_float8_dtype(dtype: Any) -> bool:
    """Whether a torch dtype is a float of 8 bits."""
    return "float8" in str(dtype)


def get_tensor_supply(supply_type: TensorSupplyType = TensorSupplyType.Integer) -> Callable[[Any], Any]:
    """A function from a parameter of a kernel (an entry of ``kernel.params``, or what TileLang's programs
    take
    for one: an object with ``shape`` and ``dtype``) to a torch tensor, on this machine's GPU if there is one.

    Raises (calls):
        TileValueError: an extent that is not a number.
    """

    def supply(param: Any) -> Any:
        import torch

        from tilescale.errors import TileValueError
        from tilescale.language.dtypes import canonical

        shape = param["shape"] if isinstance(param, dict) else param.shape
        dtype = canonical(param["dtype"] if isinstance(param, dict) else param.dtype)
        if not all(hasattr(e, "__index__") for e in shape):
            raise TileValueError(f"a tensor of the extents {tuple(shape)}", expected="numbers")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        size = [int(e) for e in shape]
        kind = supply_type.value
        if kind in ("zero", "one"):
            made = torch.full(size, float(kind == "one"), device=device)
        elif not dtype.is_float or kind == "integer":
            low, high = (0, 2) if dtype == "bool" else (0, 3) if dtype.startswith("uint") else (-2, 3)
            made = torch.randint(low, high, size, device=device)
        elif kind == "uniform" or kind == "auto":
            made = torch.rand(size, device=device) * 2 - 1
        else:
            made = torch.randn(size, device=device) - int(
                kind == "normal"
            )  # TileLang's Normal has the mean -1
        return made.to(dtype.as_torch())

    return supply


def torch_assert_close(
    tensor_a: Any,
    tensor_b: Any,
    rtol: float = 1e-2,
    atol: float = 1e-3,
    max_mismatched_ratio: float = 0.001,
    verbose: bool = False,
    equal_nan: bool = True,
    **words: Any,
) -> bool:
    """Compares two tensors of one shape; as many of their elements as ``max_mismatched_ratio`` says may
    differ by more than ``atol + rtol * |b|``.

    Raises:
        AssertionError: more differ, or the shapes do; says how many and by how much at most.
    """
    import torch

    from tilescale.compat import unused

    unused("torch_assert_close", words)
    if tensor_a.shape != tensor_b.shape:
        raise AssertionError(f"shapes {tuple(tensor_a.shape)} and {tuple(tensor_b.shape)}")
    a, b = tensor_a.to(torch.float64), tensor_b.to(device=tensor_a.device, dtype=torch.float64)
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    off, allowed = int((~close).sum()), int(max_mismatched_ratio * a.numel())
    if verbose:
        print(f"{off} of {a.numel()} elements differ, {allowed} may")
    if off > allowed:
        worst = float((a - b).abs()[~close].nan_to_num(nan=float("inf")).max())
        raise AssertionError(
            f"{off} of {a.numel()} elements differ (rtol {rtol:g}, atol {atol:g}), "
            f"by {worst:g} at most; {allowed} may"
        )
    return True
