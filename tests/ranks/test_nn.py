"""tilescale.nn on ranks that are processes: every layer and its gradients beside the unsharded one's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor  # once here, not in each of the forked ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import tilescale.compiler.driver
import tilescale.nn
from tests.ranks import nn_checks, nn_edges, nn_heads, nn_memory, nn_models
from tests.ranks.harness import run_ranks
from tilescale import comm
from tilescale.errors import CommError, LaunchError
from tilescale.ops.ranks.gather_gemm import Config, product_and_rows

# Layers are many kernels that run for microseconds. The operations' own tests (tests/unit/ops) and the training
# examples run optimised ones.
pytestmark = pytest.mark.usefixtures("unoptimised")


def slow(value: object) -> object:
    """What shows again what others do, or whose kernels take long to compile."""
    return pytest.param(value, marks=pytest.mark.slow)


def load_compiler() -> None:
    """The parts of torch.compile, before ranks are forked: they are there at once then."""
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))


def small(results: list[dict[str, float]], allowed: float) -> None:
    worst = {
        f"rank {r}: {k}": e for r, errors in enumerate(results) for k, e in errors.items() if not e <= allowed
    }
    assert all(results) and not worst, worst


@pytest.mark.parametrize("world", [2, 3, slow(1), slow(4), slow(8)])
def test_gradients_are_those_of_the_whole(world: int):
    small(run_ranks(world, nn_checks.on_mesh, nn_checks.port(), nn_checks.everything, timeout=120), 1e-10)


@pytest.mark.parametrize("world", [2, slow(1), slow(-2), slow(3), slow(4), slow(8)])
def test_experts(world: int):
    """With a minus all kinds of them on two ranks."""
    run = (nn_checks.on_mesh, nn_checks.port(), nn_checks.experts, world != 2)
    small(run_ranks(abs(world), *run, timeout=120), 1e-10)


def uneven(more: int, home: int) -> str:
    """What a rank is told that brings other tokens than the next one, and does not say so. All tokens go to
    the experts of rank ``home``."""
    comm.init()
    layer = tilescale.nn.ExpertParallelMoE(16, 24, 4, 2)
    with torch.no_grad():
        layer.router.copy_((torch.arange(4) // 2 == home).float()[:, None].expand(4, 16))
    return told(layer, torch.ones(4 + more * comm.rank(), 16))


def told(layer: torch.nn.Module, x: torch.Tensor) -> str:
    with pytest.raises((LaunchError, CommError)) as refused:
        layer(x)
    return str(refused.value)


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("more", [1, 300])
def test_uneven_tokens_without_rows(more: int, home: int):
    """Rank 0, which brings fewer, has no room for what comes, unless rank 1 has seen before that the shapes
    differ; at rank 1 all fits."""
    for rank, text in enumerate(run_ranks(2, uneven, more, home, timeout=120)):
        assert f"ExpertParallelMoE: ranks' inputs do not fit together: x is ({4 + more * rank}, 16)" in text
        assert f"on rank {rank} of 2" in text and "rows= of the layer" in text, text


def uneven_rows(kind: str) -> str:
    comm.init()
    how = {"sequence_parallel": kind != "RowParallelLinear alike", "dtype": torch.float64}
    layer = getattr(tilescale.nn, kind.removesuffix(" alike"))(16, 16, **how)
    return told(layer, torch.ones(64 + 8 * comm.rank(), 16 if kind[0] == "C" else 8, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["RowParallelLinear", "RowParallelLinear alike", "ColumnParallelLinear"])
def test_uneven_rows_without_rows(kind: str):
    for rank, text in enumerate(run_ranks(2, uneven_rows, kind, timeout=120)):
        x = f"x is ({64 + 8 * rank}, {16 if kind[0] == 'C' else 8}) of torch.float64 on rank {rank} of 2"
        assert kind.removesuffix(" alike") in text and x in text and "rows= of the" in text, text


@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.bfloat16)])
def test_sequences_that_are_cut_among_ranks(dtype: torch.dtype):
    small(run_ranks(2, nn_checks.on_mesh, nn_checks.port(), nn_checks.contexts, dtype, timeout=120), 1e-10)


@pytest.mark.parametrize("world", [4, slow(2), slow(8)])
def test_key_heads_fewer_than_ranks(world: int):
    load_compiler()
    run = (nn_checks.on_mesh, nn_checks.port(), nn_heads.everything)
    small(run_ranks(world, *run, timeout=120), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, slow(torch.bfloat16)])
def test_key_heads_fewer_than_ranks_of_cut_sequences(dtype: torch.dtype):
    small(run_ranks(4, nn_checks.on_mesh, nn_checks.port(), nn_heads.contexts, dtype, timeout=240), 1e-10)


@pytest.mark.parametrize(
    "way", [(4, (1, 2), 1), (2, (4,), 2), slow((1, (4,), 1)), slow((4, (2, 1), 2))], ids=str
)
def test_checkpoints_of_key_heads_fewer_than_ranks(tmp_path: Path, way: tuple[int, tuple[int, ...], int]):
    """From so many ranks to others, of so many key heads."""
    (world, others, kv), folder = way, str(tmp_path / "checkpoint")
    small(run_ranks(world, nn_checks.on_mesh, nn_checks.port(), nn_heads.saved, folder, kv), 0.0)
    for ranks in others:
        run = (nn_checks.on_mesh, nn_checks.port(), nn_heads.resumed, folder, kv)
        small(run_ranks(ranks, *run), 1e-10)


def gradients_of_others() -> bool:
    """Gradients that nobody gave are zeros, those of gradients an error, and copies go without a graph."""
    comm.init()

    class Swallowed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> None:
            return None

    like, n = {"dtype": torch.float64}, comm.world_size()
    x, targets = torch.randn(4, 8, **like).requires_grad_(), torch.zeros(4 * n, dtype=torch.int64)
    experts = tilescale.nn.ExpertParallelMoE(8, 8, n, 1, aux_loss=True, **like)
    loss = tilescale.nn.LinearCrossEntropy(8, n, **like)
    kept = tilescale.nn.ColumnParallelLinear(8, n, keep_gathered=True, **like)
    (Swallowed.apply(experts(x)).sum() + Swallowed.apply(loss(x, targets)) + x.sum()).backward()
    Swallowed.apply(kept(x)).sum().backward()
    assert x.grad is not None and x.grad.equal(torch.ones_like(x))
    for how in ({"sequence_parallel": False}, {"keep_gathered": True}, {}):
        gated = tilescale.nn.ColumnParallelLinear(8, 16 * n, gate="silu", **how, **like)
        Swallowed.apply(gated(x)).sum().backward()
        assert gated.weight.grad is not None and not gated.weight.grad.any() and "gate='silu'" in str(gated)
    rows = x.detach().requires_grad_()
    y = gated(rows)
    (y if comm.rank() else Swallowed.apply(y)).sum().backward()
    assert rows.grad is not None and rows.grad.any()  # from other ranks' columns where not from the own
    assert experts.aux_loss is not None and copy.deepcopy(experts).aux_loss is None
    (dx,) = torch.autograd.grad(loss(x, targets), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        dx.square().sum().backward()
    return True


def test_gradients_that_nobody_gave_and_gradients_of_gradients():
    assert all(run_ranks(2, gradients_of_others))


def of_fake_tensors(meta: bool) -> list[tuple[int, ...]]:
    """Layers that nobody runs, as tools do that add up memory: shapes follow from shapes alone."""
    comm.init()
    n, like = comm.world_size(), {"dtype": torch.float64}
    with torch.device("meta") if meta else FakeTensorMode():
        layers = (
            tilescale.nn.ParallelMLP(8, 8 * n, **like),
            tilescale.nn.ExpertParallelMoE(8, 8, n, 1, **like),
        )
        x = torch.randn(4, 8, requires_grad=True, **like)
        for layer in layers:
            layer(x).sum().backward()
        assert x.grad is not None
        return [tuple(p.grad.shape) for layer in layers for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("meta", [False, True])
def test_layers_of_fake_tensors(meta: bool):
    assert run_ranks(2, of_fake_tensors, meta) == [[(16, 8), (8, 8), (2, 8), (1, 16, 8), (1, 8, 8)]] * 2


def gathered_rows() -> list[bool]:
    """The gathered operand beside a product, of both kernels and of the steps apart, with uneven rows."""
    comm.init()
    rank, right = comm.rank(), []
    for config in (
        Config(False),
        *(Config(True, pull, 64, 64, 32, 2, 128, 5, 2, 16, 48) for pull in (False, True)),
    ):
        for rows in (128, 100):
            x = nn_checks.normal(rows, 50, seed=rows, dtype=torch.bfloat16)
            w = nn_checks.normal(50, 40, seed=1 + rank, dtype=torch.bfloat16)
            y, every, _ = product_and_rows(nn_checks.mine(x), w, rows=rows, config=config, whole=True)
            right += [bool(every.equal(x)), nn_checks.off(y, x.double() @ w.double()) < 0.01]
    return right


def test_the_gathered_operand_is_whole():
    assert all(map(all, run_ranks(2, gathered_rows)))


def test_what_pytorch_does_around_layers():
    load_compiler()
    small(run_ranks(2, nn_checks.on_mesh, nn_checks.port(), nn_checks.around, timeout=120), 1e-10)


@pytest.mark.slow
def test_sixteen_bits():
    both = lambda mesh: nn_checks.sixteen(mesh) | nn_edges.sixteen(mesh)  # noqa: E731
    small(run_ranks(2, nn_checks.on_mesh, nn_checks.port(), both, timeout=240), 1e-10)


def test_checkpoints_go_to_other_numbers_of_ranks(tmp_path: Path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, nn_checks.on_mesh, nn_checks.port(), nn_checks.saved, folder)
    for world in (3, 1):
        small(run_ranks(world, nn_checks.on_mesh, nn_checks.port(), nn_checks.resumed, folder), 1e-10)


def test_fully_shard_along_another_axis():
    def of(mesh: Any) -> dict[str, float]:
        found = nn_checks.fully_sharded(mesh) | nn_edges.plain_parameters_fully_sharded(mesh)
        return found | nn_edges.drawn_behind_fully_shard(mesh)

    small(run_ranks(4, nn_checks.on_mesh, nn_checks.port(), of), 1e-10)


def test_fully_shard_of_key_heads_fewer_than_ranks():
    small(run_ranks(4, nn_checks.on_mesh, nn_checks.port(), nn_heads.fully_sharded), 1e-10)


def test_edges_and_gradients_by_differences():
    small(run_ranks(2, nn_edges.all_edges, nn_checks.port(), timeout=120), 1e-10)


@pytest.mark.parametrize(("steps", "count"), [(60, 5), pytest.param(1000, 20, marks=pytest.mark.slow)])
def test_nothing_leaks(steps: int, count: int):
    """Memory after many steps is as after 10, and after many jobs in a process as after 2."""
    ports = [nn_checks.port() for _ in range(count)]
    for grown in run_ranks(2, nn_memory.jobs, ports, (10, steps), 2, timeout=300):
        assert grown == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_memory_of_experts(world: int):
    """With ``exact`` it does not grow with the ranks, and is nearly that of torch's operations of one rank."""
    for of in run_ranks(world, nn_checks.on_mesh, nn_checks.port(), nn_memory.experts):
        assert of["exact"] < 1.2 * of["torch"] and of["exact"] < 1.2 * of["all"] / world, of
        assert of["recompute"] < of["torch"], of


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_gradients_by_all_differences(world: int):
    """Every number for itself, as far as ranks are few."""
    every = lambda mesh: nn_edges.differences(world > 3, every=True)  # noqa: E731
    small(run_ranks(world, nn_checks.on_mesh, nn_checks.port(), every, timeout=400), 1e-10)


@pytest.mark.parametrize("world", [2, slow(1), slow(3)])
def test_models_of_hugging_face(world: int):
    pytest.importorskip("transformers.models.llama.modeling_llama")
    pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    load_compiler()
    small(run_ranks(world, nn_checks.on_mesh, nn_checks.port(), nn_models.everything, timeout=120), 1e-6)
