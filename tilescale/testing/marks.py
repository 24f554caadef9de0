"""What tests of TileLang's programs use, by its names: marks that skip a test where the machine lacks
something, seeds, and a main function."""

from __future__ import annotations

import inspect
import operator
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tilescale.compat import requires_package as requires_package
from tilescale.utils.tensor import torch_assert_close as torch_assert_close

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt, "eq": operator.eq,
}  # fmt: skip


def _capability() -> tuple[int, int]:
    """This machine's GPU's; (0, 0) where there is none."""
    from tilescale import native

    return native.cuda_capability() or (0, 0)


def requires_cuda(function: Any = None) -> Any:
    """Skips a test where there is no GPU of NVIDIA's: ``@requires_cuda``, also with parentheses."""
    mark = pytest.mark.skipif(_capability() == (0, 0), reason="needs a GPU of NVIDIA's")
    return mark if function is None else mark(function)


def requires_cuda_compute_version(major: int, minor: int = 0, mode: str = "ge") -> Any:
    """Skips a test where the GPU's compute capability is not ``mode`` ("ge", "gt", "le", "lt", "eq") the
    given one."""
    found = _capability()
    holds = found != (0, 0) and _COMPARE[mode](found, (major, minor))
    return pytest.mark.skipif(
        not holds, reason=f"needs a compute capability {mode} {major}.{minor}, not {found}"
    )


def _compute_version(mode: str) -> Callable[..., Any]:
    def requires(major: int, minor: int = 0) -> Any:
        return requires_cuda_compute_version(major, minor, mode)

    return requires


requires_cuda_compute_version_ge = _compute_version("ge")
requires_cuda_compute_version_gt = _compute_version("gt")
requires_cuda_compute_version_le = _compute_version("le")
requires_cuda_compute_version_lt = _compute_version("lt")
requires_cuda_compute_version_eq = _compute_version("eq")


def _not_there(what: str) -> Callable[..., Any]:
    def requires(function: Any = None) -> Any:
        mark = pytest.mark.skip(reason=f"needs {what}, for which there is no target in this version")
        return mark if function is None else mark(function)

    requires.__doc__ = f"Skips a test: it needs {what}."
    return requires


requires_cuda_or_cdna = requires_cuda
requires_rocm = _not_there("a GPU of AMD's")
requires_cdna = _not_there("a data center GPU of AMD's")
requires_gfx950 = _not_there("an MI350 of AMD's")
requires_metal = _not_there("a GPU of Apple's")


def set_random_seed(seed: int = 42) -> None:
    """Seeds Python's, NumPy's and torch's random numbers."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def main() -> None:
    """Runs the caller's file under pytest and ends with its exit code."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    sys.exit(pytest.main([frame.f_back.f_code.co_filename, *sys.argv[1:]]))
