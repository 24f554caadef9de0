"""Calls that are alike are prepared once (tilescale/ops/prepared.py): what is not alike is prepared anew, and
what has to be looked at in each call is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from tests.ranks.test_rank_ops import port, with_torch
from tilescale import comm, nn, ops
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.ops import host, prepared
from tilescale.ops.ranks import picks
from tilescale.ops.ranks.groups import team_of
from tilescale.ops.ranks.workspace import release, workspace

UNOPTIMISED = {"TILESCALE_CPU_OPTIMIZE": "0"}


def kept() -> int:
    return len(workspace(team_of(None)).plans)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(TileError) as error:
        call()
    return str(error.value)


def numbers(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers, of which all sums and products are exact."""
    g = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, shape, generator=g).to(dtype)


def shifted(t: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, ``by`` numbers behind the beginning of a storage."""
    room = t.new_empty(t.numel() + by)
    room[by:] = t.flatten()
    return room[by:].view(t.shape)


# ---- what is alike


def of_all_kinds() -> list[Any]:
    """Of each operation: whether results are right, and how many calls were prepared."""
    comm.init()
    n, me, found = comm.world_size(), comm.rank(), []

    def seen(name: str, right: bool, before: int) -> None:
        found.append((name, right, kept() - before))

    for dtype in (torch.float32, torch.bfloat16):
        xs = [numbers((6, 16), r, dtype) for r in range(n)]
        w, x = numbers((16, 8), 9, dtype), xs[me]
        whole, total = torch.cat(xs), sum(xs[1:], xs[0])
        calls: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
            "all_gather": (lambda x, **k: ops.all_gather(x, **k), whole),
            "reduce_scatter": (lambda x, **k: ops.reduce_scatter(x, **k), total.chunk(n)[me]),
            "all_reduce": (lambda x, **k: ops.all_reduce(x, **k), total),
            "all_gather_matmul": (lambda x, w=w, **k: ops.all_gather_matmul(x, w, **k), whole @ w),
            "matmul_reduce_scatter": (
                lambda x, w=w, **k: ops.matmul_reduce_scatter(x, w, **k),
                (total @ w).chunk(n)[me],
            ),
            "matmul_all_reduce": (lambda x, w=w, **k: ops.matmul_all_reduce(x, w, **k), total @ w),
        }
        for name, (call, want) in calls.items():
            begun = kept()
            seen(f"{name}, again", all(call(x).equal(want) for _ in range(3)), begun)
            ways: dict[str, Callable[[], torch.Tensor]] = {
                "elsewhere": lambda call=call, x=x: call(shifted(x, 1)),  # type: ignore[misc]
                "out": lambda call=call, x=x, want=want: call(x, out=torch.empty_like(want)),  # type: ignore[misc]
            }
            if name.endswith(("matmul", "matmul_reduce_scatter", "matmul_all_reduce")):
                other = w.T.contiguous().T
                ways["columns"] = lambda call=call, x=x, other=other: call(x, w=other)  # type: ignore[misc]
            for way, given in ways.items():
                begun = kept()
                seen(f"{name}, {way}", all(given().equal(want) for _ in range(2)), begun)
    return found


def test_what_differs_is_prepared_anew():
    """A gather of the steps apart is a call of its own."""
    for found in run_ranks(2, of_all_kinds, timeout=120, env=UNOPTIMISED):
        wrong = [(name, right, new) for name, right, new in found if not right or not 1 <= new <= 2]
        assert not wrong and len(found) == 2 * (3 * 3 + 3 * 4)


def by_environment(folder: Path) -> list[Any]:
    """``folder``: what is measured is kept there."""
    comm.init()
    asked, kernel = [], host.kernel

    def noted(factory: Any, target: str, /, **constants: Any) -> Any:
        asked.append(constants["blocks"])
        return kernel(factory, target, **constants)

    x = torch.arange(60_000.0) + comm.rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "kernel", noted)
        where = SimpleNamespace(readable=lambda name: [folder], writable=lambda name: folder)
        patch.setattr(picks, "folders", where)
        for spare in ("", "130", "130", ""):
            patch.setenv("TILESCALE_SPARE", spare)
            ops.all_gather(x, how="kernel")
        picks.keep(team_of(None), "all_gather", {"how": "kernel", "blocks": 3}, size=x.numel() * 4)
        ops.all_gather(x)
    return asked


def test_the_environment_and_what_was_measured_are_part_of_a_call(tmp_path: Path):
    """Blocks of the kernels that are asked for, each time that a call is prepared. An empty variable is
    another text than none, and means the same."""
    for asked in run_ranks(2, by_environment, tmp_path, env=UNOPTIMISED):
        assert asked == [asked[0], 2, 3] and asked[0] > 3


# ---- what is looked at in each call


def told_each_time() -> list[Any]:
    comm.init()
    n, me = comm.world_size(), comm.rank()
    room, out = torch.zeros(4, 16), torch.zeros(n * 2, 16)
    x = room[:2]
    said = []
    for _ in range(2):
        ops.all_reduce(x, out=out[:2])
        said.append(refused(lambda: ops.all_reduce(x, out=room[1:3])))
        ops.all_gather(x, out=out)
        said.append(refused(lambda: ops.all_gather(out[1:3], out=out)))
        said.append(refused(lambda: ops.reduce_scatter(x, blocks=1.0)))  # type: ignore[arg-type]
        ops.reduce_scatter(x, blocks=1)
        ops.matmul_all_reduce(x, torch.zeros(16, 4), inner=16 * n)
        said.append(refused(lambda: ops.matmul_all_reduce(x, torch.zeros(16, 4), inner=16.0 * n)))  # type: ignore[arg-type]
        said.append(refused(lambda: ops.matmul_all_reduce(x, torch.zeros(16, 4), activation=["relu"])))  # type: ignore[arg-type]
        said.append(refused(lambda: ops.all_gather(x, how="by pigeon")))
    # in symmetric memory peers write the result, elsewhere they do not: the same shape, and right both times
    symmetric, plain = comm.zeros((n * 2, 16), torch.float32), torch.zeros(n * 2, 16)
    want = torch.cat([torch.full((2, 16), float(r)) for r in range(n)])
    right = [ops.all_gather(x + me, out=to, how="kernel").equal(want) for to in (plain, symmetric) * 2]
    return [said, right]


def test_what_is_refused_is_refused_each_time():
    for said, right in run_ranks(2, told_each_time, env=UNOPTIMISED):
        words = ("share memory", "share memory", "blocks=1.0", "inner=32.0", "activation=['relu']", "pigeon")
        assert len(said) == 2 * len(words)
        assert all(word in text for word, text in zip(words * 2, said, strict=True))
        assert right == [True] * 4


# ---- how long it is kept


def until_the_end() -> list[Any]:
    seen = []
    for _ in range(2):
        comm.init()
        x = torch.full((4, 8), float(comm.rank() + 1))
        team = team_of(None)
        seen.append([ops.all_reduce(x, group=team).equal(torch.full((4, 8), 3.0)), kept()])
        release()
        seen.append([ops.all_reduce(x, group=team).equal(torch.full((4, 8), 3.0)), kept()])
        comm.finalize()
        seen.append(refused(lambda team=team, x=x: ops.all_reduce(x, group=team)))  # type: ignore[misc]
    comm.init()
    seen.append(refused(lambda: ops.all_reduce(x, group=team)))
    there = weakref.ref(team)
    del team
    gc.collect()  # errors have frames, which have the team
    return [*seen, there() is None]


def test_what_was_prepared_ends_with_its_job():
    for seen in run_ranks(2, until_the_end, env=UNOPTIMISED):
        assert seen[:2] == seen[3:5] == [[True, 1], [True, 1]]
        assert "not initialised" in seen[2] and "not initialised" in seen[5]
        assert "none of this job" in seen[6]
        assert seen[7], "what was prepared keeps its team alive"


def test_the_oldest_go_first():
    plans, made = prepared.Plans(most=3), []

    def of(key: Any) -> Any:
        return plans.of((key,), lambda: made.append(key) or f"for {key}")

    assert [of(k) for k in "aabcabcd"] == [f"for {k}" for k in "aabcabcd"] and made == list("abcd")
    assert of("b") == "for b" and of("a") == "for a" and made == list("abcda") and len(plans) == 3
    assert plans.of(None, lambda: "once") == "once" and len(plans) == 3
    assert plans.of((["no hash"],), lambda: "as it is") == "as it is" and len(plans) == 3
    plans.clear()
    assert of("d") == "for d" and made[-1] == "d" and len(plans) == 1


def test_what_fails_is_not_kept():
    plans = prepared.Plans()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            plans.of((1,), lambda: 1 / 0)
    assert len(plans) == 0 and plans.of((1,), lambda: 5) == 5


def test_products_of_one_rank():
    """Another place, order or dtype is another call; errors come each time."""
    a, b = numbers((6, 16), 0), numbers((16, 8), 1)
    want = a @ b
    for _ in range(2):
        assert ops.matmul(a, b).equal(want) and ops.matmul(shifted(a, 1), b).equal(want)
        assert ops.matmul(a.T.contiguous().T, b).equal(want) and ops.matmul(a, b.T.contiguous().T).equal(want)
        half = ops.matmul(a.half(), b.half())
        assert half.dtype == torch.float16 and half.equal(want.half())
        assert ops.matmul(a, b, activation="relu").equal(want.relu())
        out = torch.empty(6, 8)
        assert ops.matmul(a, b, out=out) is out and out.equal(want)
        with pytest.raises(TileTypeError):
            ops.matmul(a, b.half())
        with pytest.raises(TileValueError):
            ops.matmul(a, b, out=torch.empty(8, 6).T)
        with pytest.raises(TileValueError):
            ops.matmul(a, b, out=torch._neg_view(torch.empty(6, 8)))


# ---- parts of DTensors


def of_a_mesh() -> list[Any]:
    from torch.distributed.tensor import DTensor

    mesh = dist.init_device_mesh("cpu", (comm.world_size(),), mesh_dim_names=("tp",))["tp"]
    layer = nn.ColumnParallelLinear(4, 6, group=mesh)
    dy, found = torch.arange(12.0).view(4, 3), []
    for part in (lambda: layer.weight.to_local(), lambda: layer.local("weight")):
        layer.weight.grad = None
        part().T.backward(dy)  # which does not lie as the weight does
        grad = layer.weight.grad
        described = (type(grad) is DTensor, grad.placements == layer.weight.placements, tuple(grad.shape))
        found.append((*described, grad.full_tensor().tolist()))
    part().T.backward(dy)
    found.append((layer.weight.grad.to_local().equal(2 * dy.T), layer.weight.grad.is_contiguous()))
    return found


def test_a_parts_gradient_is_what_torch_makes_of_it():
    for theirs, ours, both in run_ranks(2, with_torch, port(), of_a_mesh):
        assert ours == theirs and ours[:2] == (True, True) and both == (True, True)
