"""T.argmax, T.argmin and T.topk on the GPU itself, by the checks that the emulator's tests make."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

from tests.gpu import device  # noqa: E402
from tests.unit.ops import test_argmax  # noqa: E402
from tests.unit.ops.test_argmax import FLOATS, INTEGERS, check, hard  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the emulator would run runs on the GPU."""
    monkeypatch.setattr(test_argmax, "run", lambda kernel, args, target: device.run(kernel, args))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_every_dtype(dtype: str):
    check(hard((5, 37), dtype), dtype, 1, 7, "cuda")


@pytest.mark.parametrize("where", ["shared", "fragment"])
@pytest.mark.parametrize("threads", [32, 96, 256])
@pytest.mark.parametrize("shape, axis, k", [((3, 64, 40), 1, 3), ((1, 1000), 0, 1000), ((70, 33), 1, 2)])
def test_shapes(shape: tuple[int, ...], axis: int, k: int, threads: int, where: str):
    check(hard(shape, "float32", 1), "float32", axis, k, "cuda", threads=threads, where=where)
