"""Forward and backward of a Llama-70B-shaped block, of a block of experts and of a small model, beside
PyTorch's.

    TILESCALE_TARGET=cuda torchrun --nproc-per-node 4 -m tests.bench.bench_layers

Peers of the Llama block and of the model on several GPUs are torch's tensor parallelism (DTensor, sequence
parallel, NCCL + cuBLAS + cuDNN) as it is, and compiled, the model block by block, with its asynchronous
products; on one, the plain module. The model's step is that of its loss, without an optimiser. The peer of
the experts sends pairs by NCCL's all-to-all and multiplies by torch._grouped_mm; on one GPU it sorts in place.
Steps take turns. A figure is the median of the slowest rank's steps, each from a meeting of all ranks on;
another that of a step where `ROW` of them follow each other, as in training. The peak of memory is what torch
allocated in a step, without symmetric memory, which is told beside it.

``llama``, ``moe``, ``model``: that alone. ``small``: shapes for a look, also without a GPU. Experts are also
timed with memory for all pairs that could come, where the host waits for nothing ("room for all"), and, with
``chunks=0,1,2``, in so many chunks, 0 being one after another on one stream. ``graph``: the model's step of ours
also in a CUDA graph, and with its blocks in graphs of their own; ``compiled``: with its blocks compiled, too.
``timeline``: rank 0 tells which kernels ran in a step of each, when and on which stream.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from tests.bench.record import record
from tilescale import comm
from tilescale import nn as tsnn
from tilescale.ops.ranks import workspace
from tilescale.ops.ranks.groups import share

ROW = 4
LLAMA = {"features": 8192, "hidden": 28672, "heads": 64, "kv_heads": 8, "tokens": 8192, "batch": 2}
MOE = {"features": 7168, "hidden": 2048, "experts": 64, "topk": 8, "tokens": 4096}
MODEL = {"layers": 8, "features": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8, "words": 128256, "tokens": 8192,
         "batch": 2}  # fmt: skip
SMALL_MODEL = {"layers": 2, "features": 64, "hidden": 192, "heads": 8, "kv_heads": 4, "words": 96, "tokens": 48,
               "batch": 2}  # fmt: skip
SMALL_LLAMA = {"features": 64, "hidden": 192, "heads": 8, "kv_heads": 4, "tokens": 48, "batch": 2}
SMALL_MOE = {"features": 64, "hidden": 48, "experts": 8, "topk": 2, "tokens": 40}
EPS, ROTARY = 1e-5, 500000.0


# ---- the blocks


class Block(nn.Module):
    """Ours: x (m, features), this rank's rows."""

    def __init__(self, shape: dict[str, int], mesh: Any, like: dict[str, Any]):
        super().__init__()
        how = {"group": mesh, **like}
        self.batch = shape["batch"]
        self.before, self.behind = (tsnn.RMSNorm(shape["features"], EPS, **how) for _ in range(2))
        heads = shape["heads"], shape["kv_heads"]
        self.attention = tsnn.ParallelAttention(shape["features"], *heads, rotary=ROTARY, **how)
        self.mlp = tsnn.ParallelMLP(shape["features"], shape["hidden"], **how)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), self.batch)
        made: Tensor = x + self.mlp(self.behind(x))
        return made


class Model(nn.Module):
    """Ours: words (batch, length + 1) to the loss."""

    def __init__(self, shape: dict[str, int], mesh: Any, like: dict[str, Any]):
        super().__init__()
        how = {"group": mesh, **like}
        self.table = tsnn.VocabParallelEmbedding(shape["words"], shape["features"], **how)
        self.blocks = nn.ModuleList(Block(shape, mesh, like) for _ in range(shape["layers"]))
        self.norm = tsnn.RMSNorm(shape["features"], EPS, **how)
        self.head = tsnn.LinearCrossEntropy(shape["features"], shape["words"], **how)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words[:, :-1].flatten())
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(self.norm(x), words[:, 1:].flatten())
        return made


class Norm(nn.Module):
    def __init__(self, features: int, like: dict[str, Any]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, **like))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, EPS)


def angles(length: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (length, dim)."""
    rate = ROTARY ** (-torch.arange(0, dim, 2, device=like.device) / dim)
    at = torch.outer(torch.arange(length, device=like.device), torch.cat([rate, rate]))
    return at.cos().to(like.dtype), at.sin().to(like.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Attention(nn.Module):
    """x (batch, length, features), all rows."""

    def __init__(self, shape: dict[str, int], like: dict[str, Any]):
        super().__init__()
        self.dim = shape["features"] // shape["heads"]
        wide = shape["kv_heads"] * self.dim
        self.q = nn.Linear(shape["features"], shape["features"], bias=False, **like)
        self.k, self.v = (nn.Linear(shape["features"], wide, bias=False, **like) for _ in range(2))
        self.o = nn.Linear(shape["features"], shape["features"], bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        b, s = x.shape[:2]
        q, k, v = (p(x).view(b, s, -1, self.dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        where = angles(s, self.dim, q)
        y = scaled_dot_product_attention(
            turned(q, *where), turned(k, *where), v, is_causal=True, enable_gqa=True
        )
        made: Tensor = self.o(y.transpose(1, 2).reshape(b, s, -1))
        return made


class Gated(nn.Module):
    def __init__(self, shape: dict[str, int], like: dict[str, Any]):
        super().__init__()
        sizes = (shape["features"], shape["hidden"])
        self.gate, self.up = (nn.Linear(*sizes, bias=False, **like) for _ in range(2))
        self.down = nn.Linear(*sizes[::-1], bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return made


class Plain(nn.Module):
    """torch's: x (batch, length, features)."""

    def __init__(self, shape: dict[str, int], like: dict[str, Any]):
        super().__init__()
        self.before, self.behind = (Norm(shape["features"], like) for _ in range(2))
        self.attention, self.mlp = Attention(shape, like), Gated(shape, like)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        made: Tensor = x + self.mlp(self.behind(x))
        return made


class PlainModel(nn.Module):
    """torch's: words (batch, length + 1) to the loss."""

    def __init__(self, shape: dict[str, int], like: dict[str, Any]):
        super().__init__()
        self.table = nn.Embedding(shape["words"], shape["features"], **like)
        self.blocks = nn.ModuleList(Plain(shape, like) for _ in range(shape["layers"]))
        self.norm = Norm(shape["features"], like)
        self.head = nn.Linear(shape["features"], shape["words"], bias=False, **like)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, words[:, 1:].flatten())


def model_by_dtensor(plain: PlainModel, mesh: Any, compiled: bool) -> nn.Module:
    """The same by torch's tensor parallelism; the loss of logits that are cut by words (`loss_parallel`)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows: Any = Shard(1)
    for k, block in enumerate(plain.blocks):
        cut = by_dtensor(block, mesh)
        plain.blocks[k] = torch.compile(cut) if compiled else cut
    plan: dict[str, Any] = {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(plain, mesh, plan)


def by_dtensor(plain: nn.Module, mesh: Any) -> nn.Module:
    """torch's tensor parallelism, sequence parallel, as its tutorial has it for Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows: Any = Shard(1)
    gathers = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "before": SequenceParallel(),
        "attention": gathers,
        **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=rows),
        "behind": SequenceParallel(),
        "mlp": gathers,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    return parallelize_module(plain, mesh, plan)


class Experts(nn.Module):
    """torch's: pairs in the order of experts, sent by an all-to-all where there are several ranks."""

    def __init__(self, shape: dict[str, int], group: Any, like: dict[str, Any]):
        super().__init__()
        self.topk, self.experts, self.group = shape["topk"], shape["experts"], group
        self.world = dist.get_world_size(group)
        local, H, F = share(self.experts, self.world), shape["features"], shape["hidden"]
        self.router = nn.Parameter(torch.randn(self.experts, H, **like) * H**-0.5)
        self.up = nn.Parameter(torch.randn(local, H, 2 * F, **like) * H**-0.5)
        self.down = nn.Parameter(torch.randn(local, F, H, **like) * F**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x.float() @ self.router.float().T).softmax(-1).topk(self.topk)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token, counts = order // self.topk, flat.bincount(minlength=self.experts)
        rows = x[token]
        if self.world == 1:
            y = self.layer(rows, counts)
        else:
            come = torch.empty_like(counts)
            dist.all_to_all_single(come, counts, group=self.group)
            both = torch.stack([counts, come]).view(2, self.world, -1).sum(2).tolist()  # the host waits
            there = crossed(rows, both[1], both[0], self.group)
            local = len(counts) // self.world
            expert = torch.arange(local, device=x.device).repeat(self.world).repeat_interleave(come)
            by_expert = expert.argsort(stable=True)
            z = self.layer(there[by_expert], come.view(self.world, -1).sum(0))
            y = crossed(torch.zeros_like(z).index_copy(0, by_expert, z), both[0], both[1], self.group)
        terms = y * weights.flatten()[order][:, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, token, terms)

    def layer(self, rows: Tensor, counts: Tensor) -> Tensor:
        if not rows.is_cuda:  # for a look
            gated = [
                silu(r @ u[:, : u.shape[1] // 2]) * (r @ u[:, u.shape[1] // 2 :]) @ d
                for r, u, d in zip(rows.split(counts.tolist()), self.up, self.down, strict=True)
            ]
            return torch.cat(gated)
        product: Any = torch._grouped_mm
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, value = product(rows, self.up, offs=ends).chunk(2, 1)
        made: Tensor = product(silu(gate) * value, self.down, offs=ends)
        return made


def crossed(rows: Tensor, got: list[int], sent: list[int], group: Any) -> Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    made: Tensor = all_to_all_single_autograd(rows, got, sent, group)
    return made


# ---- how they are timed


class Step:
    """Forward and backward of a module."""

    def __init__(self, module: nn.Module, x: Tensor, around: Callable[[], Any] = contextlib.nullcontext):
        self.module, self.x, self.around = module, x, around
        self.dy = torch.randn_like(x.requires_grad_()) if x.is_floating_point() else None
        self.loss: Tensor | None = None

    def run(self) -> None:
        for p in (self.x, *self.module.parameters()):
            p.grad = None
        with self.around():
            y = self.module(self.x)
            y.backward(self.dy)
        self.loss = None if self.dy is not None else y.detach()

    def seconds(self, steps: int = 1) -> float:
        """Of one step, where so many are begun in a row: behind the first, hosts are ahead of their GPUs."""
        if not self.x.is_cuda:
            comm.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                self.run()
            return (time.perf_counter() - start) / steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        comm.barrier()
        begin.record()
        for _ in range(steps):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / steps


class Captured(Step):
    """The same step, captured once in a CUDA graph."""

    graph: Any = None

    def run(self) -> None:
        if self.graph is None:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(3):
                    super().run()
            torch.cuda.current_stream().wait_stream(beside)
            torch.cuda.synchronize()
            comm.barrier()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                super().run()
        self.graph.replay()


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Of each the median milliseconds of the slowest rank, for a step alone and for one of `ROW` in a row, and
    the peak of memory above what lay there."""
    times, rows, peaks = {n: [] for n in steps}, {n: [] for n in steps}, {}  # type: ignore[var-annotated]
    for name, step in steps.items():
        for _ in range(3):
            step.run()
        if step.x.is_cuda:
            torch.cuda.synchronize()
            for p in (step.x, *step.module.parameters()):
                p.grad = None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step.run()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
    for turn in range(rounds):
        for name, step in steps.items():
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, step.seconds())
            times[name].append(max(told))
            if turn % ROW == 0:
                dist.all_gather_object(told, step.seconds(ROW))
                rows[name].append(max(told))
    return {
        n: {
            "ms": statistics.median(times[n]) * 1e3,
            "row_ms": statistics.median(rows[n]) * 1e3,
            "peak_gib": peaks.get(n, 0.0),
        }
        for n in steps
    }


def llama(shape: dict[str, int], mesh: Any, like: dict[str, Any], rounds: int) -> dict[str, Any]:
    world, features = comm.world_size(), shape["features"]
    rows = shape["tokens"] // world
    torch.manual_seed(1)
    steps = {"ours": Step(Block(shape, mesh, like), torch.randn(rows, features, **like))}
    cut = (shape["batch"], shape["tokens"] // shape["batch"], features)
    if world == 1:
        steps["torch"] = Step(Plain(shape, like), torch.randn(cut, **like))
        compare(steps)
    else:
        part = (cut[0], cut[1] // world, features)
        steps["torch"] = Step(by_dtensor(Plain(shape, like), mesh), torch.randn(part, **like))
        if like["device"] == "cuda":
            asynchronous(mesh)
            made = Step(torch.compile(by_dtensor(Plain(shape, like), mesh)), torch.randn(part, **like))
            steps |= {"torch, asynchronous": made} if runs(made) else {}
    found = measure(steps, rounds)
    if "timeline" in sys.argv:
        for name, step in steps.items():
            timeline(name, step)
    return found


def asynchronous(mesh: Any) -> None:
    """From here on torch.compile takes torch's asynchronous products."""
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symmetric

    inductor._micro_pipeline_tp = True
    symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)


def runs(step: Step) -> bool:
    """Whether the peer does; its failure is alike on all ranks, and told."""
    try:
        step.run()
    except Exception as error:  # noqa: BLE001
        print(f"torch's asynchronous products: {type(error).__name__}: {str(error)[:2000]}", flush=True)
        return False
    return True


def model(shape: dict[str, int], mesh: Any, like: dict[str, Any], rounds: int) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    torch.manual_seed(1)  # words are alike on all ranks
    length = shape["tokens"] // shape["batch"]
    words = torch.randint(0, shape["words"], (shape["batch"], length + 1), device=like["device"])
    steps = {"ours": Step(Model(shape, mesh, like), words)}
    if comm.world_size() == 1:
        steps["torch"] = Step(PlainModel(shape, like), words)
    else:
        cut = model_by_dtensor(PlainModel(shape, like), mesh, False)
        steps["torch"] = Step(cut, words, loss_parallel)
        if like["device"] == "cuda":
            asynchronous(mesh)
            made = Step(model_by_dtensor(PlainModel(shape, like), mesh, True), words, loss_parallel)
            steps |= {"torch, asynchronous": made} if runs(made) else {}
    if "compiled" in sys.argv:
        made = Model(shape, mesh, like)
        made.blocks = nn.ModuleList(torch.compile(b) for b in made.blocks)
        steps["ours, compiled"] = Step(made, words)
    if "graph" in sys.argv:
        steps["ours, in a graph"] = Captured(steps["ours"].module, words)
        made = Model(shape, mesh.get_group(), like)  # graphs take parameters that are plain tensors
        x = torch.randn(shape["tokens"] // comm.world_size(), shape["features"], requires_grad=True, **like)
        graphed = torch.cuda.make_graphed_callables(tuple(made.blocks), tuple((x,) for _ in made.blocks))
        made.blocks = nn.ModuleList(graphed)
        steps["ours, blocks in graphs"] = Step(made, words)
    found = measure(steps, rounds)
    for name, step in steps.items():
        assert step.loss is not None
        found[name]["loss"] = float(
            step.loss.full_tensor() if hasattr(step.loss, "full_tensor") else step.loss
        )
    if "timeline" in sys.argv:
        for name, step in steps.items():
            timeline(name, step)
    return found


def compare(steps: dict[str, Step]) -> None:
    """On one rank: both blocks with the same numbers give the same result, within rounding."""
    ours, plain = steps["ours"].module, steps["torch"].module
    with torch.no_grad():
        ours.attention.set_parts(*(getattr(plain.attention, n) for n in "qkvo"))
        ours.mlp.set_parts(plain.mlp.gate, plain.mlp.up, plain.mlp.down)
        x = steps["torch"].x
        want = plain(x).flatten(0, 1).float()
        off = float((ours(x.flatten(0, 1)).float() - want).abs().max() / want.abs().max())
    print(f"the greatest difference is {off:.1e} of the greatest number", flush=True)
    if not off < 2e-2:
        raise SystemExit("the blocks differ")


class Otherwise(nn.Module):
    """A layer of experts whose attributes are others; the parameters are the layer's."""

    def __init__(self, layer: tsnn.ExpertParallelMoE, **others: Any):
        super().__init__()
        self.layer, self.others = layer, others

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.ExitStack() as kept:
            for name, value in self.others.items():
                kept.callback(setattr, self.layer, name, getattr(self.layer, name))
                setattr(self.layer, name, value)
            y: Tensor = self.layer(x)
        return y


def moe(shape: dict[str, int], mesh: Any, like: dict[str, Any], rounds: int) -> dict[str, Any]:
    features = shape["features"]
    torch.manual_seed(1)
    layer = tsnn.ExpertParallelMoE(
        features, shape["hidden"], shape["experts"], shape["topk"], group=mesh, **like
    )
    x = torch.randn(shape["tokens"], features, **like)
    counts = next((w[7:].split(",") for w in sys.argv if w.startswith("chunks=")), [])
    steps = {
        "ours": Step(layer, x),
        "room for all": Step(Otherwise(layer, exact=False, chunks=0), x.clone()),
        **{f"{n} chunks": Step(Otherwise(layer, chunks=int(n)), x.clone()) for n in counts},
        "1 chunk, room for all": Step(Otherwise(layer, exact=False, chunks=1), x.clone()),
        "torch": Step(Experts(shape, mesh.get_group(), like), torch.randn(shape["tokens"], features, **like)),
    }
    found = measure(steps, rounds)
    if "timeline" in sys.argv:
        for name, step in steps.items():
            timeline(name, step)
    return found


def timeline(name: str, step: Step, least: float = 15.0) -> None:
    """Kernels of ``least`` microseconds and more of one step, as rank 0 sees them: when each began, how long it
    took, its stream, its name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        comm.barrier()  # behind the profiler's own beginning, which takes ranks milliseconds each
        step.run()
        if step.x.is_cuda:
            torch.cuda.synchronize()
    ran = [e for e in seen.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]  # type: ignore[union-attr]
    if comm.rank() or not ran:
        return
    first = min(e.start_ns() for e in ran)
    streams = sorted({e.device_resource_id() for e in ran})
    print(f"timeline of {name}: µs from the first kernel, µs, stream, kernel", flush=True)
    for e in sorted(ran, key=lambda e: e.start_ns()):
        if e.duration_ns() / 1e3 >= least:
            at, stream = (e.start_ns() - first) / 1e3, streams.index(e.device_resource_id())
            print(f"{at:9.0f} {e.duration_ns() / 1e3:7.0f} {stream:2d} {e.name()[:60]}", flush=True)


def main() -> int:
    words = sys.argv[1:]
    comm.init()
    rank, world = comm.rank(), comm.world_size()
    kind = str(comm.empty(1).device.type)
    alone = kind == "cuda" and torch.cuda.device_count() >= world
    if not dist.is_initialized():
        store = {"store": dist.HashStore()} if world == 1 else {}
        dist.init_process_group("nccl" if alone else "gloo", rank=rank, world_size=world, **store)
    mesh = dist.init_device_mesh(kind, (world,), mesh_dim_names=("tp",))["tp"]
    like = {"device": kind, "dtype": torch.bfloat16 if kind == "cuda" else torch.float32}
    found, small = {}, "small" in words
    for name, call, shape in (
        ("llama", llama, SMALL_LLAMA if small else LLAMA),
        ("moe", moe, SMALL_MOE if small else MOE),
        ("model", model, SMALL_MODEL if small else MODEL),
    ):
        if name in words or not {"llama", "moe", "model"} & set(words):
            workspace.release(mesh)
            found[name] = {"shape": shape, "found": call(shape, mesh, like, 3 if small else 20)}
            found[name]["symmetric_gib"] = gib = workspace.size(mesh) / 2**30
            if rank == 0:
                print(f"{name:6s} symmetric memory {gib:.3f} GiB", flush=True)
                ours, row = (found[name]["found"]["ours"][t] for t in ("ms", "row_ms"))
                for n, f in found[name]["found"].items():
                    more = f"  {f['row_ms']:.2f} ms in a row"
                    if n != "ours":
                        more += f"  ours is {f['ms'] / ours:.3f} ×, {f['row_ms'] / row:.3f} × in a row"
                    more += f"  loss {f['loss']:.3f}" if "loss" in f else ""
                    print(f"{name:6s} {n:20s} {f['ms']:9.2f} ms {f['peak_gib']:7.2f} GiB{more}", flush=True)
    if rank == 0 and not small:
        record("_".join([f"layers_{world}", *(found if words else ())]), {"ranks": world, "cases": found})
    comm.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
