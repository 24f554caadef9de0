"""That the two streams of `Beside` are in order, without a GPU: operations on the processor, each booked on the
stream that it would go to, with a vector clock of two. Two accesses of one byte on two streams, one of which
writes, are ordered; and memory that is let go of is no longer in use on the other stream, as an allocator with a
pool for each stream asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilescale.compiler.driver
import tilescale.nn  # noqa: F401
from tests.ranks.harness import run_ranks
from tilescale import comm
from tilescale.nn import mixture
from tilescale.nn.beside import Beside
from tilescale.ops import host
from tilescale.ops.prepared import Plans

OWN, CALLERS = 0, 1
#: of a kernel's arguments those from here on are written
WRITTEN = {"plan": 1, "dispatch": 8, "expand": 3, "choices": 4, "combine": 4}


@dataclass
class Piece:
    """A storage: the stream of its pool, and its accesses: first and last byte, stream, time, whether it is
    written, by whom."""

    alive: StorageWeakRef
    pool: int
    accesses: list[tuple[int, int, int, int, bool, str]] = field(default_factory=list)


class Order(TorchDispatchMode):
    """Books accesses and finds those that nothing orders."""

    def __init__(self) -> None:
        super().__init__()
        self.clocks, self.current = [[0, 0], [0, 0]], CALLERS  # of each stream what it knows of both
        self.inside = False
        self.pieces: dict[int, Piece] = {}
        self.wrong: set[str] = set()

    def behind(self, stream: int, clock: list[int]) -> None:
        self.swept("an event")
        self.clocks[stream] = [max(a, b) for a, b in zip(self.clocks[stream], clock, strict=True)]

    def swept(self, by: str) -> None:
        """Memory that went since the last look is its pool's now; that of the other stream when it goes on, which
        is behind all that the caller's has."""
        for at, piece in [*self.pieces.items()]:
            if piece.alive.expired():
                del self.pieces[at]
                for *_, stream, time, _, whose in (
                    piece.accesses if self.inside or piece.pool == CALLERS else ()
                ):
                    if stream != piece.pool and time > self.clocks[piece.pool][stream]:
                        self.wrong.add(f"let go of in front of {by} and in use by {whose}")

    def book(self, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        self.swept(what)
        me = self.current
        self.clocks[me][me] += 1
        for t, write in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            storage = t.untyped_storage()
            if not t.numel() or not storage.nbytes():
                continue
            piece = self.pieces.get(storage.data_ptr())
            if piece is None:
                piece = self.pieces[storage.data_ptr()] = Piece(StorageWeakRef(storage), me)
            size = t.element_size()
            low = t.storage_offset() * size
            high = low + size * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
            for a, b, stream, time, wrote, whose in piece.accesses:
                near = stream != me and (write or wrote) and a < high and low < b
                if near and time > self.clocks[me][stream]:
                    self.wrong.add(f"{what} and {whose}, which it does not know of")
            piece.accesses.append((low, high, me, self.clocks[me][me], write, what))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        schema, named = func._schema.arguments, dict(kwargs or {})
        named |= {a.name: x for a, x in zip(schema, args, strict=False)}
        into = {a.name for a in schema if a.alias_info and a.alias_info.is_write}
        tensors = {n: [t for t in tree_leaves(x) if isinstance(t, Tensor)] for n, x in named.items()}
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if "empty" in str(func):  # allocated here, by nobody used yet
            self.swept(str(func))
            self.pieces[made.untyped_storage().data_ptr()] = Piece(
                StorageWeakRef(made.untyped_storage()), self.current
            )
        elif not views:
            reads = [t for n, found in tensors.items() if n not in into for t in found]
            new = [] if into else [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            self.book(str(func), reads, [t for n in into for t in tensors[n]] + new)
        return made

    def kernel(self, factory: Any, target: str, /, **constants: Any) -> Callable[..., None]:
        """What is called in the place of a kernel of the library's."""
        return lambda *args: self.launch(factory, target, args, **constants)

    def launch(self, factory: Any, target: str, args: tuple[Any, ...], /, **constants: Any) -> None:
        first = WRITTEN.get(factory.__name__, len(args) - (3 if factory.__name__ == "gradients" else 1))
        lists = [[a for a in part if isinstance(a, Tensor)] for part in (args[:first], args[first:])]
        self.book(factory.__name__, *lists)
        with torch._C._DisableTorchDispatch():
            kernel(factory, target, **constants)(*args)


kernel = host.kernel


class Booked(Beside):
    """Streams that are there, but for what ``without`` leaves out."""

    order: Order
    without = ""

    def __init__(self, like: Tensor, wanted: bool):
        super().__init__(like, wanted)
        self.own, self.callers = (OWN, CALLERS) if wanted else (None, None)

    def __enter__(self) -> Booked:
        super().__enter__()
        self.order.inside = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.own is not None:
            self.order.behind(CALLERS, self.order.clocks[OWN])
        self.order.inside = False
        self.held.clear()

    @contextlib.contextmanager
    def _on(self, stream: int | None) -> Iterator[None]:
        before, self.order.current = self.order.current, CALLERS if stream is None else stream
        yield
        self.order.current = before

    def crossing(self) -> Any:
        return self._on(self.own)

    def follow(self) -> None:
        if self.own is not None and self.without != "follow":
            self.order.behind(OWN, self.order.clocks[CALLERS])

    def mark(self) -> Any:
        return None if self.own is None else [*self.order.clocks[OWN]]

    def wait(self, mark: Any) -> None:
        if mark is not None and self.without != "wait":
            self.order.behind(CALLERS, mark)

    def hold(self, *tensors: Tensor) -> None:
        if self.without != "hold":
            super().hold(*tensors)

    def memory(self, like: Tensor, *shape: int) -> Tensor:
        if self.own is None:
            return like.new_empty(shape)
        with self._on(OWN if self.without == "memory" else CALLERS):
            made = like.new_empty(shape)
        self.follow()
        return made


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"keep": False},
    {"whole": True},
    {"small": True},
    {"exact": True},
    {"small": True, "keep": False},
)


def looked(
    without: str, kinds: tuple[dict[str, Any], ...] = KINDS, counts: tuple[int, ...] = (1, 2, 4)
) -> Any:
    """What nothing orders, of a forward and a backward of each kind in so many chunks."""
    comm.init()
    wrong: set[str] = set()
    mixture.Beside, Booked.without = Booked, without
    Plans.of = lambda self, key, make: make()  # each call takes its kernels anew
    forward, backward = mixture.moe_experts.function, mixture.moe_experts_backward.function
    for kind in kinds:
        for chunks in counts:
            given = {"small": False, "exact": False, "keep": True, "whole": False} | kind
            if given["exact"] and chunks > 1:
                continue
            g = torch.Generator().manual_seed(comm.rank())
            x, dy = (torch.randn(16, 12, generator=g) for _ in range(2))
            up, down = torch.randn(3, 20, 12, generator=g), torch.randn(3, 12, 10, generator=g)
            weights, chosen = torch.rand(16, 6, generator=g).topk(2)
            names = ",".join(map(str, range(comm.world_size())))
            inputs = (x, chosen.int(), weights, up, down)
            rest = (3 * comm.world_size(), 16, "silu", names, given["small"], given["exact"], chunks)
            order = Booked.order = Order()
            host.kernel = order.kernel
            try:
                with order:
                    y, *kept = forward(*inputs, *rest, given["keep"], given["whole"])
                    grads = backward(dy, *inputs, *kept, *rest)
                    del y, kept, grads
                    order.swept("the end")
            finally:
                host.kernel = kernel
            wrong |= {f"{kind} {chunks}: {w}" for w in order.wrong}
    return sorted(wrong)


def test_streams_are_in_order():
    for found in run_ranks(2, looked, "", timeout=120):
        assert found == []


@pytest.mark.parametrize("without", ["follow", "wait", "hold", "memory"])
def test_what_is_left_out_is_found(without: str):
    for found in run_ranks(2, looked, without, KINDS[:1], (1, 3), timeout=120):
        assert found
