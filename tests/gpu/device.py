"""Kernels on the GPU: ``run(kernel, args)`` takes and gives NumPy arrays, like the simulator's and the
emulator's ``launch``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import tilescale
from tests.unit.cuda.emulated import same
from tilescale.compiler.checks.run import launch
from tilescale.compiler.emulator.arguments import laid_out, strides_of


def to_gpu(array: Any) -> Any:
    """An array's bits as a torch tensor on the GPU; ml_dtypes are torch's dtypes of the same name."""
    dtype = getattr(torch, array.dtype.name)
    if array.dtype == bool:
        return torch.from_numpy(array.copy()).cuda()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[array.dtype.itemsize]
    bits = np.ascontiguousarray(array).view(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 else "u1")
    return torch.from_numpy(bits.reshape(array.shape).copy()).view(integer).view(dtype).cuda()


def to_numpy(tensor: Any, like: Any) -> Any:
    """The tensor's bits as an array of ``like``'s dtype."""
    size = like.dtype.itemsize
    bits = (
        tensor
        if like.dtype == bool
        else tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    )
    return np.ascontiguousarray(bits.cpu().numpy()).view(like.dtype).reshape(like.shape)


def held(parameter: Any, array: Any) -> Any:
    """An array on the GPU, with the strides that its parameter declares."""
    strides = strides_of(parameter.spec, array, {})
    flat, _ = laid_out(array, strides)
    return (
        to_gpu(flat).reshape(array.shape)
        if strides is None
        else to_gpu(flat).as_strided(array.shape, strides)
    )


def run(kernel: Any, args: dict[str, Any], target: str = "cuda") -> dict[str, Any]:
    """Runs a prim_func once; arrays are copied there and back, numbers passed on."""
    made = tilescale.compile(kernel, target=target)
    parameters = {p.name: p for p in kernel.trace().params}
    given = {name: held(parameters[name], v) if isinstance(v, np.ndarray) else v for name, v in args.items()}
    made(**given)
    torch.cuda.synchronize()
    return {name: to_numpy(given[name], v) for name, v in args.items() if isinstance(v, np.ndarray)}


def agree(
    kernel: Any, args: dict[str, Any], *, exact: bool = False, arch: str = "", seed: int = 0
) -> dict[str, Any]:
    """The results of the GPU, which must be the simulator's; in the place of the emulator's function of this
    name."""
    got = run(kernel, args)
    want = launch(kernel, 1, args).arrays[0]
    for name, array in got.items():
        same(array, want[name], name, exact)
    return got
