"""What the training examples share: the text, the loop with its bar, loss curve and checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

from tilescale import comm, ops

#: bytes are the tokens; some words more make the vocabulary a multiple of 1 to 4, 6 and 8 ranks
WORDS = 264
TEXT = Path(__file__).resolve().parent.parent / "docs" / "LANGUAGE.md"


def start() -> Any:
    """Joins the ranks, torch's job too, and gives a mesh of all of them, of one axis."""
    rank, world = common.ranks()
    kind = common.device().type
    if kind == "cuda":
        torch.cuda.set_device(common.device())
    if not dist.is_initialized():
        shared = kind == "cpu" or torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        backend = "gloo" if shared else "nccl"
        if world == 1 and "MASTER_PORT" not in os.environ:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend, rank=rank, world_size=world)
    return dist.init_device_mesh(kind, (world,), mesh_dim_names=("tp",))


def options(doc: str | None, **sizes: int) -> argparse.ArgumentParser:
    """``--name N`` for each size, and what all training examples take."""
    parser = common.options(doc, **sizes)
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help="learning rate, default 0.001")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="takes checkpoints, loss.json and loss.png"
    )
    parser.add_argument(
        "--save-every", type=common.positive, metavar="N", help="steps; without it at the end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="goes on from the latest checkpoint in --folder"
    )
    return parser


def batch_of(text: torch.Tensor, step: int, batch: int, length: int, seed: int) -> torch.Tensor:
    """(batch, length + 1) bytes of the text, the same on all ranks and in every run for a step."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text) - length - 1, (batch,), generator=draw)
    return text[starts[:, None] + torch.arange(length + 1)].to(common.device())


class Checkpoints:
    """Distributed checkpoints in a folder: one that is written whole is named in ``latest``, so that a job
    that ends while it writes leaves the one before."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def latest(self) -> Path | None:
        """The newest one."""
        name = self.folder / "latest" if self.folder else None
        return self.folder / name.read_text() if self.folder and name and name.exists() else None

    def save(self, model: torch.nn.Module, by: torch.optim.Optimizer, losses: list[float]) -> None:
        """Parameters, the optimizer's states and the losses so far; collective."""
        if self.folder is None:
            return
        here = self.folder / f"step-{len(losses)}"
        dcp.save({"model": model.state_dict(), "optimizer": by.state_dict()}, checkpoint_id=here)
        if comm.rank() == 0:
            (here / "losses.json").write_text(json.dumps(losses))
            aside = self.folder / "latest.new"
            aside.write_text(here.name)
            aside.replace(self.folder / "latest")
        dist.barrier()

    def load(self, model: torch.nn.Module, by: torch.optim.Optimizer) -> list[float]:
        """The latest one, on any number of ranks; the losses until then. Learning rates stay those of now."""
        found = self.latest()
        if found is None:
            return []
        for p in model.parameters():  # a step of nothing: so that the optimizer has states to load into
            p.grad = torch.zeros_like(p)
        rates = [g["lr"] for g in by.param_groups]
        for g in by.param_groups:
            g["lr"] = 0.0
        by.step()
        by.zero_grad()
        state = {"model": model.state_dict(), "optimizer": by.state_dict()}
        try:
            dcp.load(state, checkpoint_id=found)
            losses = list(json.loads((found / "losses.json").read_text()))
        except (CheckpointException, OSError, ValueError) as error:
            causes = getattr(error, "failures", None) or {0: (error, None)}
            cause = str(next(iter(causes.values()))[0]).splitlines()[0]
            raise SystemExit(
                f"--resume: {found} cannot be read: {cause}\n  expected: a whole checkpoint of a model of "
                f"these sizes; {found.parent / 'latest'} has its name, and may have that of an older one"
            ) from None
        model.load_state_dict(state["model"])
        by.load_state_dict(state["optimizer"])
        for g, lr in zip(by.param_groups, rates, strict=True):
            g["lr"] = lr
        return losses


class Stopped:
    """Whether any rank was asked to end (SIGTERM): all ranks learn it in the same step."""

    def __init__(self) -> None:
        self.asked = torch.zeros(1, device=common.device())
        self.before = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked.fill_(1.0)

    def everywhere(self) -> bool:
        return bool(ops.all_reduce(self.asked).item())

    def restore(self) -> None:
        signal.signal(signal.SIGTERM, self.before)


def train(
    model: torch.nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor], args: argparse.Namespace,
    after: Callable[[], None] = lambda: None,
) -> list[float]:  # fmt: skip
    """``args.steps`` steps of AdamW, and ``after`` each of them; the losses, which are alike on all ranks."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    if args.length > len(text) - 2:
        raise SystemExit(
            f"--length {args.length}: expected {len(text) - 2} at most, {TEXT.name} is no longer"
        )
    by = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.01)
    checkpoints, first = Checkpoints(args.folder), comm.rank() == 0
    if args.resume and args.folder is None:
        raise SystemExit("--resume: expected --folder DIR, which has the checkpoint")
    losses = checkpoints.load(model, by) if args.resume else []
    if args.resume and not losses and first:
        print(f"no checkpoint in {args.folder}: begins at step 0", flush=True)
    begun, began, stopped, board = len(losses), time.perf_counter(), Stopped(), board_of(args.folder)
    bar = tqdm(total=args.steps, initial=begun, disable=not first, unit="step", leave=False)
    for step in range(begun, args.steps):
        by.zero_grad()
        loss = loss_of(batch_of(text, step, args.batch, args.length, args.seed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        by.step()
        after()
        losses.append(loss.item())
        speed = (step + 1 - begun) * args.batch * args.length / (time.perf_counter() - began)
        bar.update()
        bar.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s")
        if board is not None:
            board.add_scalar("loss", losses[-1], step)
            board.add_scalar("tokens/s", speed, step)
        if stopped.everywhere():
            break
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            checkpoints.save(model, by, losses)
    bar.close()
    stopped.restore()
    if len(losses) > begun:
        checkpoints.save(model, by, losses)
    if first:
        seconds, steps = time.perf_counter() - began, len(losses) - begun
        speed = f"{steps * args.batch * args.length / seconds:,.0f} tokens/s"
        went = f"loss {losses[0]:.4f} to {losses[-1]:.4f}" if losses else "no step"
        print(f"step {len(losses)} of {args.steps}, {comm.world_size()} ranks: {went}, {speed}", flush=True)
        if args.folder is not None:
            (args.folder / "loss.json").write_text(json.dumps(losses))
            picture(losses, args.folder / "loss.png")
    return losses


def board_of(folder: Path | None) -> Any:
    """TensorBoard's writer on rank 0, where it is installed and there is a folder."""
    if comm.rank() or folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def picture(losses: list[float], to: Path) -> None:
    """The loss curve, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"no {to.name}: matplotlib is not installed", flush=True)
        return
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.grid(alpha=0.3)
    figure.savefig(to, dpi=120, bbox_inches="tight")
