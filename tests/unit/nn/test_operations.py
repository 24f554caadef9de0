"""Layers' operations: the two ways of a call are one, and each is taken where it has to be."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import tilescale.nn.norm  # it defines the operation
from tilescale.errors import TileTypeError
from tilescale.nn.operations import call, straight


class Seen(TorchDispatchMode):
    """Keeps the names of operations that pass the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Kind(torch.Tensor):
    """A tensor of a kind of its own."""


def normed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(7, 24, generator=g, dtype=torch.float64).requires_grad_()
    w = torch.randn(24, generator=g, dtype=torch.float64).requires_grad_()
    y = call.rms_norm(x, w, 1e-5)
    y.backward(torch.randn(7, 24, generator=g, dtype=torch.float64))
    assert x.grad is not None and w.grad is not None
    return y.detach(), x.grad, w.grad


def test_both_ways_give_the_same_bits():
    direct = normed()
    with Seen() as seen:
        dispatched = normed()
    assert [n for n in seen.names if n.startswith("tilescale")] == [
        "tilescale.rms_norm.default", "tilescale.rms_norm_backward.default"
    ]  # fmt: skip
    assert all(a.equal(b) for a, b in zip(direct, dispatched, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_a_call_goes_straight_where_nothing_has_to_see_it():
    x = torch.ones(3)
    asked: list[bool] = []
    assert straight((x, 2, "text", None, torch.nn.Parameter(x)))
    assert not straight((x, x.as_subclass(Kind)))
    with Seen():
        assert not straight((x,))
    with FakeTensorMode():
        assert not straight((x,))
    with torch.device("cpu"):  # a mode of functions
        assert not straight((x,))
    with forward_ad.dual_level():
        assert not straight((x,))

    def asks(v: torch.Tensor) -> torch.Tensor:
        asked.append(straight((v,)))
        return v + 1

    torch.func.vmap(asks)(x)
    torch.jit.trace(asks, (x,), check_trace=False)
    assert asked == [False, False]
    assert straight((x,))


def test_no_gradients_of_gradients():
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    w = torch.ones(8, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(call.rms_norm(x, w, 1e-5).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("grad", [False, True])
def test_no_derivatives_in_forward_mode(grad: bool):
    x, w = (torch.ones(*shape, 8, dtype=torch.float64, requires_grad=grad) for shape in ((4,), ()))
    normed = lambda x: call.rms_norm(x, w, 1e-5)  # noqa: E731
    told = "rms_norm of a tensor with a tangent.*\n.*reverse mode"
    for f in (normed, torch.func.vmap(normed)):
        with pytest.raises(TileTypeError, match=told):
            torch.func.jvp(f, (x.detach()[None],), (x.detach()[None],))
    with forward_ad.dual_level():
        assert normed(x).shape == x.shape  # without a tangent
        with pytest.raises(TileTypeError, match=told):
            normed(forward_ad.make_dual(x, x.detach()))


def test_no_gradients_by_transforms():
    x, w = torch.ones(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    summed = lambda x: call.rms_norm(x, w, 1e-5).sum()  # noqa: E731
    for f in (torch.func.grad(summed), torch.func.vmap(torch.func.grad(summed)), torch.func.jacrev(summed)):
        with pytest.raises(TileTypeError, match=r"rms_norm within torch.func.grad.*\n.*\n.*backward"):
            f(x[None])


def test_no_graph_where_nobody_wants_one():
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert call.rms_norm(x, w, 1e-5).grad_fn is None
    with torch.no_grad():
        assert call.rms_norm(x.requires_grad_(), w, 1e-5).grad_fn is None
    assert type(call.rms_norm(x, w, 1e-5).grad_fn).__name__ == "rms_normBackward"


def test_tensors_that_are_not_the_numbers_in_their_memory_go_by_the_dispatcher():
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert call.rms_norm(torch._neg_view(x), w, 1e-5).equal(-call.rms_norm(x, w, 1e-5))
    assert call.rms_norm(x.to("meta"), w.to("meta"), 1e-5).shape == x.shape
    x.requires_grad_()
    y, every = call.rms_norm(x, w, 1e-5), torch.eye(32, dtype=torch.float64).view(32, 4, 8)
    (batched,) = torch.autograd.grad(y, x, every, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for dy in every]
    assert batched.equal(torch.stack(one_by_one))


FOLDER = Path(tilescale.nn.norm.__file__).parent


@functools.cache
def operations_of(name: str) -> tuple[set[str], set[str], set[str]]:
    """Of a file of layers: the operations that it defines, those that it calls, the other files it imports."""
    defined, called, imported = set(), set(), set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "define":
            assert isinstance(node.args[0], ast.Constant)
            defined.add(str(node.args[0].value))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "call":
            called.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilescale.nn"):
            words = [a.name for a in node.names] if node.module == "tilescale.nn" else [str(node.module)[13:]]
            imported |= {w for w in words if (FOLDER / f"{w}.py").exists()}
    return defined, called, imported


@pytest.mark.parametrize("name", sorted(f.stem for f in FOLDER.glob("[a-z]*.py")))
def test_a_layer_alone_has_its_operations(name: str):
    """Each layer's file is imported when the layer is used: what it calls is defined in it, or in a file that
    it imports."""
    reached, ahead = set(), {name}
    while ahead:
        reached |= ahead
        ahead = {other for n in ahead for other in operations_of(n)[2]} - reached
    called, defined = ({op for n in reached for op in operations_of(n)[k]} for k in (1, 0))
    assert called <= defined
