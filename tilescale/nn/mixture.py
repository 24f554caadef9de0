"""What `ExpertParallelMoE` computes, as one operation of torch and its gradients: tokens go to their experts,
through both products, and back, chunk by chunk, so that what crosses does so beside products (`Beside`).

A chunk is so many of each rank's tokens. It has a plan, a slot of symmetric memory and a range of the rows of
pairs for itself. So chunks that are under way share the memory for what comes back alone, which a combine has
to itself: a team's launches are one sequence, and one that puts into it has ended on all ranks, or they have
read what was put, before the next one does (tilescale/ops/ranks/workspace.py).

A pair's row, its gradient and a token's sum have the same bits as without chunks: a product adds up along k,
a combine in the order of the router's choices. Gradients of weights add up rows of all chunks, one chunk
after another, in float32 within one product, and are rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilescale import ops
from tilescale.errors import TileTypeError, TileValueError
from tilescale.nn import groups, products
from tilescale.nn.beside import Beside
from tilescale.nn.operations import call, define
from tilescale.ops.ranks import experts as of_ranks
from tilescale.ops.ranks.dispatch import planned
from tilescale.ops.ranks.experts import room
from tilescale.ops.ranks.groups import share

# ---- what tokens travel in

#: what tokens may travel in, its greatest number, and how many features share a scale
SMALL, MOST, BLOCK = torch.float8_e4m3fn, 448.0, 128


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (m, H) in 8 bits, and a scale, float32, for each `BLOCK` of a row."""
    blocks = nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).float()
    scales = blocks.abs().amax(2).clamp(min=1e-12) / MOST
    return (blocks / scales[..., None]).flatten(1)[:, : x.shape[1]].to(SMALL).contiguous(), scales


def unpacked(rows: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows that `packed` made, as they were but for what 8 bits leave away."""
    wide = scales.repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]
    return (rows.float() * wide).to(dtype)


# ---- products


def grouped(
    a: Tensor, b: Tensor, sizes: Tensor, *, gate: str = "", beside: bool = False, out: Tensor | None = None
) -> Tensor:
    """`ops.grouped_matmul`; on the processor torch's products of float32 and float64, group by group."""
    if not products.by_library(a):
        return ops.grouped_matmul(a, b, sizes, gate=gate, beside=beside, out=out)
    made, row = a.new_empty(a.shape[0], b.shape[2]) if out is None else out, 0
    for k, n in enumerate(_counts(a, sizes)):
        torch.mm(a[row : row + n], b[k], out=made[row : row + n])
        row += n
    return made


def outer(a: Tensor, dy: Tensor, sizes: Tensor, firsts: Tensor | None = None, beside: bool = False) -> Tensor:
    """`ops.grouped_matmul_backward`, or torch's products."""
    if not products.by_library(a):
        return ops.grouped_matmul_backward(a, dy, sizes, firsts=firsts, beside=beside)
    made = a.new_zeros(sizes.shape[-1], a.shape[1], dy.shape[1])
    begins = sizes.cumsum(0) - sizes if firsts is None else firsts
    for at, (row, n) in enumerate(zip(_counts(a, begins), _counts(a, sizes), strict=True)):
        made[at % len(made)] += a[row : row + n].T @ dy[row : row + n]
    return made


def _counts(a: Tensor, numbers: Tensor) -> list[int]:
    """Numbers of groups, which the host looks at on the processor alone.

    Raises:
        TileTypeError: float64 on a GPU.
    """
    if a.device.type != "cpu":
        raise TileTypeError(f"experts of {a.dtype} on {a.device}", expected="bfloat16 or float16")
    return [int(n) for n in numbers.flatten()]


# ---- chunks

#: at most: each has a slot of symmetric memory
CHUNKS = 16


@dataclass(frozen=True)
class Cut:
    """How a rank's tokens are cut: ``count`` chunks of ``each``, fewer in the last one, of ``tokens`` that a
    rank has at most; ``streams``: what crosses does so on a stream of its own."""

    count: int
    each: int
    tokens: int
    streams: bool

    def most(self, c: int) -> int:
        """Tokens of chunk c that a rank has at most."""
        return min(self.each, self.tokens - c * self.each)


def cut(
    chunks: int, tokens: int, x: Tensor, chosen: Tensor, hidden: int, experts: int, ranks: int, exact: bool
) -> Cut:
    """Alike on all ranks. ``chunks``: 0 is everything one after another on the caller's stream.

    Chunks begin at 16 bytes in all tensors of rows: kernels are made for those.

    Raises:
        TileValueError: several chunks of experts that are ``exact``.
    """
    item = x.element_size()
    unit = 16 // math.gcd(16, x.shape[1] * item, hidden * item)
    each = share(share(tokens, max(1, chunks)), unit) * unit
    made = Cut(share(tokens, each), each, tokens, chunks > 0)
    if exact and made.count > 1:
        raise TileValueError(
            f"chunks={chunks} of experts that are exact", expected="1 at most: the host waits for what came"
        )
    return made


def no_plans(x: Tensor, chosen: Tensor, experts: int, ranks: int) -> Tensor:
    """Memory for the plans of all chunks, as `Flow` cuts it, however many there are."""
    few = 2 * ranks + 1 + share(experts, ranks)
    return x.new_empty(x.shape[0] * (chosen.shape[1] + ranks) + CHUNKS * few, dtype=torch.int32)


class Flow:
    """A rank's tokens on their way to their experts and back. ``plans``: of `no_plans`, filled here, or
    ``known`` from the forward."""

    def __init__(
        self, at: Beside, how: Cut, chosen: Tensor, weights: Tensor, experts: int, group: str,
        exact: bool | int, plans: Tensor, known: bool,
    ):  # fmt: skip
        self.at, self.how, self.exact = at, how, exact
        where, (t, K), W = groups.group_of(group), chosen.shape, groups.team(group).size
        pairs, slots = plans[: t * K].view(t, K), plans[t * K : t * (K + W)].view(t, W)
        few = plans[t * (K + W) :].view(CHUNKS, -1).split((W, share(experts, W), W + 1), 1)
        with at.crossing():
            # all plans in front: their blocks wait for each other, so they are to find room at once
            self.sent = [
                planned(
                    self.tokens(chosen, c),
                    self.tokens(weights, c),
                    experts,
                    how.most(c),
                    c,
                    where,
                    out=(self.tokens(pairs, c), self.tokens(slots, c), *(x[c] for x in few)),
                    known=known,
                )  # fmt: skip
                for c in range(how.count)
            ]
            #: the number of pairs that come, on its way to the host beside what is launched next
            self.number = of_ranks.counting(self.sent[0].sizes) if exact is True else None
        self.stride = room(how.each, K, experts, W)[1]

    def tokens(self, t: Tensor, c: int) -> Tensor:
        """Of a tensor of this rank's tokens those of chunk c."""
        return t[c * self.how.each : (c + 1) * self.how.each]

    def room(self, most: int) -> int:
        """Memory for the pairs that come, in steps of a 64th of what could come: numbers differ from step to
        step, and torch's allocator has pieces of few sizes then. The host waits."""
        assert self.number is not None
        step = max(1, most // 64)
        return min(most, max(1, share(self.number(), step)) * step)

    def pairs(self, t: Tensor, c: int) -> Tensor:
        """Of a tensor of all chunks' rows of pairs those of chunk c."""
        return t if self.how.count == 1 else t[c * self.stride :][: len(self.sent[c].index)]

    def there(
        self, c: int, x: Tensor, *, into: Tensor | None = None, small: bool = False,
        marks: Tensor | None = None, alone: bool = False,
    ) -> Arrived:  # fmt: skip
        """Chunk c of x goes to its experts, in 8 bits where ``small``, with its ``marks``. The row of each of
        its pairs lies in ``into``'s range, or in new memory. ``alone``: no product runs beside.

        ``exact``: room for those that came, a number where it is known.
        """
        at, blocks = self.at, self.at.blocks(alone)
        with at.crossing():
            part, S = self.tokens(x, c).contiguous(), 0 if marks is None else marks.shape[1]
            told = None if marks is None else self.tokens(marks, c).contiguous()
            rows, scales = (part, None) if not small else packed(part)
            both = [t for t in (told, scales) if t is not None]
            scales = torch.cat(both, 1) if both else None
            sent = ops.moe_dispatch(rows, scales=scales, like=self.sent[c], blocks=blocks)
            if self.exact:
                if self.exact is True:
                    self.exact = self.room(len(sent.index))
                sent = sent.counted(self.exact)
            self.sent[c] = sent
            came = sent.rows
            if small:
                assert sent.scales is not None
                came = unpacked(came, sent.scales[:, S:], x.dtype)
            found = None
            if marks is not None:  # in front of the rows, so that a product does not keep it waiting
                assert sent.scales is not None
                told = sent.scales if S == sent.scales.shape[1] else sent.scales[:, :S].contiguous()
                found = of_ranks.choices(sent, told, torch.promote_types(x.dtype, torch.float32))
                at.hold(*found)
            made = at.memory(x, len(sent.index), x.shape[1]) if into is None else self.pairs(into, c)
            sent.expanded(came, out=made, blocks=blocks)
            return Arrived(made, at.mark(), found)

    def back(self, c: int, y: Tensor, out: Tensor, weighted: bool, alone: bool = False) -> None:
        """Chunk c's rows of pairs come back: the sums of its tokens into ``out``, which is of all tokens."""
        self.at.follow()
        with self.at.crossing():
            blocks = self.at.blocks(alone)
            ops.moe_combine(y, self.sent[c], weighted=weighted, out=self.tokens(out, c), blocks=blocks)
        self.at.hold(y)

    def places(self) -> tuple[Tensor, Tensor | None]:
        """The sizes of the groups, of all chunks, and the first row of each chunk's part of each group."""
        if self.how.count == 1:
            return self.sent[0].sizes, None
        sizes = torch.stack([sent.sizes for sent in self.sent])
        begins = torch.arange(self.how.count, device=sizes.device)[:, None] * self.stride
        return sizes, (begins + sizes.cumsum(1) - sizes).to(torch.int32)


@dataclass(frozen=True)
class Arrived:
    """What is there behind ``mark``: the rows of a chunk's pairs; where marks went with the tokens also of
    each pair which of its token's choices it is, and its weight."""

    rows: Tensor
    mark: Any
    pairs: tuple[Tensor, Tensor] | None


def _marks(chosen: Tensor, weights: Tensor) -> Tensor:
    """What of a token's choices travels beside it as float32: experts, whose numbers are exact, and weights;
    of float64 also what float32 leaves of them."""
    told = weights.float()
    rest = (weights - told).float()
    return torch.cat([chosen.float(), told, *([rest] if weights.dtype == torch.float64 else [])], 1)


# ---- the operation


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, chosen, weights, gate_up, down, *ctx.rest, _, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # as many zeros as all pairs' rows have numbers
    ctx.save_for_backward(x, chosen, weights, gate_up, down, *output[1:])


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    dy = torch.zeros_like(ctx.saved_tensors[0]) if dy is None else dy  # other ranks may have gradients
    dx, dw, d_up, d_down = call.moe_experts_backward(dy, *ctx.saved_tensors, *ctx.rest)
    need_x, _, need_w, need_up, need_down, *rest = ctx.needs_input_grad
    found = ((dx, need_x), (None, False), (dw, need_w), (d_up, need_up), (d_down, need_down))
    return *(g if need else None for g, need in found), *(None,) * len(rest)


def _experts_like(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, experts: int, tokens: int,
    activation: str, group: str, small: bool, exact: bool, chunks: int, keep: bool, whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ranks = groups.team(group).size
    if exact:
        pairs = torch.library.get_ctx().new_dynamic_size() if keep else 0
    else:  # of all chunks together, however many
        _, pairs = room(tokens, chosen.shape[1], experts, ranks)
    h = x.new_empty((pairs, gate_up.shape[1]) if keep else 0)
    came = x.new_empty((pairs, x.shape[1]) if whole else 0)
    return x.new_empty(x.shape), h, came, no_plans(x, chosen, experts, ranks)


@define(
    "moe_experts",
    "(Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, int experts, SymInt tokens, "
    "str activation, str group, bool small, bool exact, int chunks, bool keep, bool whole) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _experts_like,
    _keep,
    _backward,
)
def moe_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, experts: int, tokens: int,
    activation: str, group: str, small: bool, exact: bool, chunks: int, keep: bool, whole: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the experts make of each token, times the weights, added up; and, to ``keep`` for the gradients,
    the first product's rows of all pairs. Without them its gate is part of the product. ``whole``: and the
    rows that went into it. At last the plans, which the gradients need. ``chunks``: see `cut`; one of them
    has nothing to run beside.

    Rows of pairs are the largest tensors: each goes as soon as nothing needs it. With several chunks a
    chunk's second product writes over what went into the first one."""
    h, came = products.none(x), products.none(x)
    double, by_library = weights.dtype == torch.float64, products.by_library(x)
    ranks = groups.team(group).size
    P, plans = room(tokens, chosen.shape[1], experts, ranks)[1], no_plans(x, chosen, experts, ranks)
    if tokens == 0:
        none = (
            x.new_empty((0, n) if kept else 0) for n, kept in ((gate_up.shape[1], keep), (x.shape[1], whole))
        )
        return torch.empty_like(x), *none, plans
    how = cut(chunks, tokens, x, chosen, down.shape[2], experts, ranks, exact)
    several, up, back = how.count > 1, gate_up.transpose(1, 2), down.transpose(1, 2)
    every = x.new_empty(P, x.shape[1]) if several else None
    h = x.new_empty(P, gate_up.shape[1]) if several and keep else h
    marks, made, shares = _marks(chosen, weights) if double else None, None, weights.float()
    with Beside(x, how.streams and several) as at:
        flow = Flow(at, how, chosen, shares, experts, group, exact, plans, False)
        coming = [flow.there(0, x, into=every, small=small, marks=marks, alone=True)]
        for c in range(how.count):
            if c + 1 < how.count:  # crosses beside this chunk's products
                coming.append(flow.there(c + 1, x, into=every, small=small, marks=marks))
            arrived, sizes, beside = coming[c], flow.sent[c].sizes, bool(at)
            coming[c] = None  # type: ignore[call-overload]  # memory is let go of
            at.wait(arrived.mark)
            rows, pairs = arrived.rows, arrived.pairs
            del arrived
            came = rows if whole and not several else came
            if keep or by_library:
                to = flow.pairs(h, c) if several and keep else None
                first = grouped(rows, up, sizes, beside=beside, out=to)
                rows = rows if several else None
                hidden = ops.gated_activation(first, activation, sizes=sizes)
                h = first if keep and not several else h
                del first
            else:
                hidden = grouped(rows, up, sizes, gate=activation, beside=beside)
                rows = rows if several else None
            y = grouped(hidden, back, sizes, beside=beside, out=None if whole else rows)
            del hidden, rows
            if double:
                assert pairs is not None
                y.mul_(pairs[1][:, None])
            made = x.new_empty(x.shape) if made is None else made  # as late as it can be
            flow.back(c, y, made, not double, alone=c + 1 == how.count)
            del y
    return made, h, every if whole and every is not None else came, plans


@define(
    "moe_experts_backward",
    "(Tensor dy, Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down, Tensor h, "
    "Tensor came, Tensor plans, int experts, SymInt tokens, str activation, str group, bool small, "
    "bool exact, int chunks) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda dy, x, chosen, weights, gate_up, down, *_: tuple(
        t.new_empty(t.shape) for t in (x, weights, gate_up, down)
    ),
)
def moe_experts_backward(
    dy: Tensor, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, h: Tensor,
    came: Tensor, plans: Tensor, experts: int, tokens: int, activation: str, group: str, small: bool,
    exact: bool, chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients by x, weights and both products' matrices, of the rows ``h`` that were kept, or of those that
    are computed again. Tokens travel once more where what ``came`` was not kept: beside the first product
    where there is a stream for it, else behind their gradients, whose rows are no longer needed then. The
    gradients of x come back beside the last product.

    With g = dy · down of a pair, its weight's gradient is the sum of a · g, a being what went into the second
    product; so that product need not be computed again.
    """
    if tokens == 0:
        return tuple(torch.zeros_like(t) for t in (x, weights, gate_up, down))
    how = cut(chunks, tokens, x, chosen, down.shape[2], experts, groups.team(group).size, exact)
    recompute, again, several = h.dim() == 1, came.dim() == 1, how.count > 1
    count: bool | int = (True if recompute else h.shape[0]) if exact else False
    P = room(tokens, chosen.shape[1], experts, groups.team(group).size)[1]
    whole = lambda n: x.new_empty(P, n) if several else None  # noqa: E731
    dys, dh, scaled = whole(x.shape[1]), whole(gate_up.shape[1]), whole(down.shape[2])
    into = whole(x.shape[1]) if again else None
    h = x.new_empty(P, gate_up.shape[1]) if recompute and several else h
    kind = torch.promote_types(x.dtype, torch.float32)
    marks, told, order = _marks(chosen, weights), [], torch.arange(chosen.shape[1], device=x.device)
    shares = weights.float()
    with Beside(x, how.streams) as at:
        early, beside = several or bool(at), bool(at)
        flow = Flow(at, how, chosen, shares, experts, group, count, plans, True)
        steps = Steps(
            _steps(how.count, recompute, again, early),
            lambda of, c, alone: (
                flow.there(c, dy, into=dys, marks=marks, alone=alone)
                if of == "dy"
                else flow.there(c, x, into=into, small=small, alone=alone)
            ),
        )
        for c in range(how.count):
            if early:  # so far in front of the products that what crosses has begun when they do
                steps.launched(2 * (c + 1) + recompute)
            if recompute:
                rows = steps.taken(at, "x", c)
                found = grouped(
                    rows.rows, gate_up.transpose(1, 2), flow.sent[c].sizes, beside=beside,
                    out=flow.pairs(h, c) if several else None,
                )  # fmt: skip
                h = h if several else found
                if early:
                    steps.arrived["x", c] = rows  # for the last product, too
                del rows, found
            dy_there = steps.taken(at, "dy", c)
            sizes = flow.sent[c].sizes
            d = grouped(dy_there.rows, down, sizes, beside=beside)
            assert dy_there.pairs is not None
            choice, weight = dy_there.pairs
            to = None
            if several:
                of_chunk = torch.empty(len(weight), dtype=kind, device=x.device)
                to = (flow.pairs(dh, c), flow.pairs(scaled, c), of_chunk)
            made = ops.scaled_gate_backward(d, flow.pairs(h, c), weight, activation, sizes=sizes, out=to)
            if not several:
                dys, dh, scaled = dy_there.rows, made[0], made[1]
            told.append(torch.where(choice[:, None] == order, made[2][:, None], 0.0))
            del d, dy_there, made, to
        assert dys is not None and dh is not None and scaled is not None
        sizes, firsts = flow.places()
        d_down = outer(dys, scaled, sizes, firsts, beside=beside)
        del scaled
        dx, dw = x.new_empty(x.shape), torch.empty(weights.shape, dtype=kind, device=x.device)
        for c in range(how.count):
            to_rows = flow.pairs(dys, c) if several else None
            dys = dys if several else None
            back = grouped(
                flow.pairs(dh, c), gate_up, flow.sent[c].sizes, beside=beside and several, out=to_rows
            )
            flow.back(c, back, dx, False)
            flow.back(c, told[c], dw, False)
            del back, to_rows
        if again:
            rows_of = [steps.taken(at, "x", c).rows for c in range(how.count)]
            came = rows_of[0] if into is None else into
            del rows_of
        d_up = outer(dh, came, sizes, firsts, beside=beside)
    return dx, dw.to(weights.dtype), d_up, d_down


def _steps(count: int, recompute: bool, again: bool, early: bool) -> list[tuple[str, int]]:
    """What goes to experts in the backward, in the order of launches, which is the same on all ranks:
    gradients, and tokens, for the first product, for the last one or, where ``early``, for both at once."""
    if not early:
        return [*([("x", 0)] if recompute else []), ("dy", 0), *([("x", 0)] if again else [])]
    chunks = range(count)
    if recompute:
        return [(of, c) for c in chunks for of in ("x", "dy")]
    return [("dy", c) for c in chunks] + [("x", c) for c in chunks if again]


class Steps:
    """What goes to experts, step by step: ``launch`` (of what, which chunk, whether it is the first)."""

    def __init__(self, steps: list[tuple[str, int]], launch: Callable[[str, int, bool], Arrived]):
        self.steps, self.launch, self.next = steps, launch, 0
        self.arrived: dict[tuple[str, int], Arrived] = {}

    def launched(self, count: int) -> None:
        """So many of them are, as far as there are so many."""
        while self.next < min(count, len(self.steps)):
            step, self.next = self.steps[self.next], self.next + 1
            self.arrived[step] = self.launch(*step, self.next == 1)

    def taken(self, at: Beside, of: str, c: int) -> Arrived:
        """What arrived, which the caller's stream waits for; nobody else has it then."""
        while (of, c) not in self.arrived:
            assert self.next < len(self.steps), (of, c)
            self.launched(self.next + 1)
        at.wait(self.arrived[of, c].mark)
        return self.arrived.pop((of, c))
