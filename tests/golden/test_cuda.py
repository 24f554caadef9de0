"""The printed CUDA C++ of kernels: reviewed as text in diffs, and taken by nvcc where there is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.cuda import thread_kernels
from tilescale.compiler.cuda.printer import print_kernel

KERNELS = ("scale", "staged")


@pytest.mark.parametrize("name", KERNELS)
def test_cuda(name: str, golden: Callable[[str, str], None]):
    golden(f"{name}.cu", print_kernel(getattr(thread_kernels, name)()).text)
