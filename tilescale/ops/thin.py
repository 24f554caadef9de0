"""16-bit floats whose rows begin anywhere, as words: products of a matrix and a few vectors (`vectors`),
which ``matmul`` takes where one side has few rows or columns, and `widened`, which writes other operands anew
with longer rows.

Products by few vectors are bound by reading the long operand, and threads multiply: tensor cores would have
nothing to do.

Four neighbours in memory are a word. A tensor is read as whole words and its last one to four numbers
(`words`), and four numbers that begin anywhere are parts of two words, of which a warp's neighbours read the
second one too, so that it comes from the L1 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import tilescale.language as T
from tilescale.ops.activations import activated
from tilescale.ops.gemm_kernels import ceil_div

#: numbers of a word
WORD = 4
#: vectors at most
FEW = 8


class Thin(NamedTuple):
    """A block has ``groups`` of ``lanes`` threads. Where the long operand's rows are of k, each group has
    ``rows`` of them and its lanes walk along k; otherwise its lanes have four columns each, and the groups
    take four steps of k in turn. ``ahead`` such steps are under way at once; k is cut into ``split``
    shares."""

    lanes: int
    groups: int
    rows: int
    ahead: int
    split: int


def fits(M: int, N: int, K: int, *tensors: torch.Tensor) -> bool:
    """Whether `vectors` takes such operands; places in them, and behind them as far as a block reaches, are
    numbers of 32 bits."""
    return min(M, N) <= FEW and all(WORD < t.numel() < 1 << 30 and t.data_ptr() % 8 == 0 for t in tensors)


def cut(long: int, few: int, K: int, along: bool, units: int) -> Thin:
    """How a product of ``long`` rows is cut. ``along``: rows of k lie one behind another. Blocks enough to
    fill the GPU several times, by shares of k where one block would otherwise walk for longer than it takes
    to add them (docs/history/shapes.md)."""
    if along:
        lanes = 128 if K >= 512 and long < 64 * units else min(32, 1 << (ceil_div(K, WORD) - 1).bit_length())
        rows = next((r for r in (4, 2) if long >= 8 * r * units), 1)
        if lanes == 128:
            rows = 4 if long >= (4 if few > 4 else 12) * units else 1
        groups, ahead = 128 // lanes, 4 if rows == 1 else 2
        blocks, steps = ceil_div(long, groups * rows), ceil_div(K, lanes * WORD)
        split = (
            min(ceil_div(8 * units, blocks), ceil_div(steps, 5)) if steps >= 16 and blocks < 5 * units else 1
        )
        return Thin(lanes, groups, rows, ahead, split)
    lanes = min(32, 1 << (ceil_div(long, WORD) - 1).bit_length())
    if (steps := ceil_div(K, 256 // lanes * WORD)) > 12:
        blocks = ceil_div(long, lanes * WORD)
        split = min(ceil_div(8 * units, blocks), ceil_div(steps, 2), 128) if blocks < 3 * units else 1
        return Thin(lanes, 256 // lanes, 1, 2 if few <= 4 else 1, split)
    while lanes > 4 and steps > 1 and ceil_div(long, lanes * WORD) < units:  # few columns: more threads for k
        lanes //= 2
        steps = ceil_div(K, 256 // lanes * WORD)
    groups = min(256 // lanes, 1 << (ceil_div(K, WORD) - 1).bit_length())
    return Thin(lanes, groups, 1, 2 if few <= 4 and steps > 1 else 1, 1)


def words(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous tensor of 16-bit numbers in whole words, and its last numbers, of which there is one at
    least."""
    whole = (t.numel() - 1) // WORD * WORD
    return t.view(-1)[:whole].view(torch.uint64), t.view(-1)[whole:].view(torch.uint16)


def flat(name: str) -> tuple[Any, Any]:
    """The types of what `words` gives."""
    return T.Tensor((T.dynamic(f"{name}_words"),), "uint64"), T.Tensor((T.dynamic(f"{name}_rest"),), "uint16")


def last(rest: Any) -> Any:
    """The word that begins with the last numbers, zeros behind them."""
    parts = [T.cast(rest[e], "uint64") << T.cast(16 * e, "uint64") for e in range(WORD)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def word(X: Any, end: Any, at: Any, shifted: bool) -> Any:
    """Four numbers from ``at`` on, zeros outside of the tensor. ``end``: its last word; ``shifted``: ``at``
    may be no multiple of four."""
    n, q = X.shape[0], at >> 2
    low = T.if_then_else(q == n, end, X[q])
    if not shifted:
        return low
    high, by = T.if_then_else(q + 1 == n, end, X[q + 1]), T.cast((at & 3) * 16, "uint64")
    return (low >> by) | ((high << T.cast(1, "uint64")) << (T.cast(63, "uint64") - by))


def kept(K: int, k: Any) -> Any:
    """The bits of four steps of k from ``k`` on that there are."""
    bits = T.min(T.max(K - k, 0), WORD) * 16
    ones = T.cast(0xFFFFFFFF, "uint64") << T.cast(32, "uint64") | T.cast(0xFFFFFFFF, "uint64")
    return T.if_then_else(bits == 0, T.cast(0, "uint64"), ones >> T.cast((64 - bits) & 63, "uint64"))


def number(w: Any, e: int, dtype: str) -> Any:
    """One of a word's four as float32."""
    return T.cast(T.reinterpret(T.cast(w >> T.cast(16 * e, "uint64"), "uint16"), dtype), "float32")


def vectors(
    M: int | None,
    N: int | None,
    K: int,
    few: int,
    swap: bool,
    along: bool,
    across: bool,
    dtype: str,
    out: str,
    bias: bool,
    activation: str,
    lanes: int,
    groups: int,
    rows: int,
    ahead: int,
    split: int,
) -> Any:
    """C = act(A · B + bias) or, with ``split``, its (split, M, N) sums, as `gemm_kernels.product` has them.

    L, the long operand, is (long, K), or (K, long) if not ``along``; S has ``few`` vectors: (few, K), or (K,
    few) if ``across``. ``swap``: L is B, and C (few, long). None for M or N: any number.
    """
    M, N = T.dynamic("M") if M is None else M, T.dynamic("N") if N is None else N
    long = N if swap else M
    held, threads = rows if along else WORD, lanes * groups
    (L_words, L_rest), (S_words, S_rest) = flat("L"), flat("S")
    width = T.ceildiv(N, 4) * 4
    shape, kind = ((M, N), out) if split == 1 else ((split, M, width), "float32")
    step = WORD * (lanes if along else groups)  # of k
    turns = ceil_div(ceil_div(ceil_div(K, step), split), ahead)
    block = groups * rows if along else lanes * WORD  # of the long side

    @T.macro
    def body(L, Lrest, S, Srest, bias, C):
        with T.Kernel(T.ceildiv(long, block), split, threads=threads) as (bx, bz):
            L_end, S_end = last(Lrest), last(Srest)
            part = T.alloc_fragment((groups, lanes, held, few), "float32")
            spread = T.Fragment((groups, lanes), lambda g, l: (g * lanes + l, 0))
            T.annotate_layout({part: T.Fragment(part.shape, lambda g, l, h, c: (g * lanes + l, h * few + c))})
            T.clear(part)
            for t in T.serial(turns):
                for g, l in T.Parallel(groups, lanes, loop_layout=spread):
                    for u in range(ahead):
                        k = ((bz * turns + t) * ahead + u) * step + (l if along else g) * WORD
                        keep = kept(K, k)
                        # Each word a name: loaded once, all of them before the first is needed.
                        some, given = (
                            [],
                            [],
                        )
                        for i in range(few):
                            v = (
                                word(S, S_end, k * few + i * WORD, False)
                                if across
                                else word(S, S_end, k + i * K, K % WORD > 0) & keep
                            )
                            some.append(v)
                        for i in range(rows if along else WORD):
                            if along:
                                w = (
                                    word(L, L_end, ((bx * groups + g) * rows + i) * K + k, K % WORD > 0)
                                    & keep
                                )
                            else:
                                w = word(L, L_end, (k + i) * long + (bx * lanes + l) * WORD, True)
                            given.append(w)
                        short = []
                        for i in range(WORD * few):
                            e, c = divmod(i, few)
                            y = (
                                number(some[i // WORD], i % WORD, dtype)
                                if across
                                else number(some[c], e, dtype)
                            )
                            short.append(y)
                        for h in range(held):
                            for e in range(WORD):
                                x = number(given[h], e, dtype) if along else number(given[e], h, dtype)
                                for c in range(few):
                                    part[g, l, h, c] += x * short[e * few + c]
            total = T.alloc_fragment((groups if along else lanes, held, few), "float32")
            T.reduce_sum(part, total, dim=1 if along else 0)
            for g, h, c in T.Parallel(*total.shape):
                i = (bx * (groups if along else lanes) + g) * held + h
                if i < long:
                    x = total[g, h, c]
                    if split > 1:
                        if swap:
                            C[bz, c, i] = x
                        else:
                            C[bz, i, c] = x
                    elif swap:
                        C[c, i] = activated(x if bias is None else x + bias[i], activation)
                    else:
                        C[i, c] = activated(x if bias is None else x + bias[c], activation)

    @T.prim_func
    def thin(L: L_words, Lrest: L_rest, S: S_words, Srest: S_rest, C: T.Tensor(shape, kind)):
        body(L, Lrest, S, Srest, None, C)

    @T.prim_func
    def thin_bias(
        L: L_words,
        Lrest: L_rest,
        S: S_words,
        Srest: S_rest,
        bias: T.Tensor((N,), out),
        C: T.Tensor(shape, kind),
    ):
        body(L, Lrest, S, Srest, bias, C)

    return thin_bias if bias and split == 1 else thin


def widened(both: bool, shifted: bool, rows: int = 8, columns: int = 128, threads: int = 256) -> Any:
    """A matrix with zeros behind its rows: To (R, W) of From (R, C), W a multiple of eight and C at least; of
    ``both`` operands in one launch. Words go in and out; without ``shifted`` C is a multiple of four. One
    kernel serves all extents."""
    (From_words, From_rest), (From2_words, From2_rest) = flat("A"), flat("B")
    to, to2 = (T.Tensor((T.dynamic(f"R{k}"), T.dynamic(f"W{k}", multiple_of=2)), "uint64") for k in (1, 2))

    def blocks(to: Any) -> Any:
        return T.ceildiv(to.shape[0], rows) * T.ceildiv(to.shape[1], columns)

    @T.macro
    def part(From, rest, To, C, block):
        end = last(rest)
        wide = T.ceildiv(To.shape[1], columns)
        for i, j in T.Parallel(rows, columns):
            row, column = block // wide * rows + i, block % wide * columns + j
            if row < To.shape[0] and column < To.shape[1]:
                To[row, column] = word(From, end, T.cast(row, "int64") * C + column * WORD, shifted) & kept(
                    C, column * WORD
                )

    @T.prim_func
    def widen(From: From_words, rest: From_rest, To: to, C: T.int32):
        with T.Kernel(blocks(To), threads=threads) as block:
            part(From, rest, To, C, block)

    @T.prim_func
    def widen_both(
        From: From_words,
        rest: From_rest,
        To: to,
        C: T.int32,
        From2: From2_words,
        rest2: From2_rest,
        To2: to2,
        C2: T.int32,
    ):
        with T.Kernel(blocks(To) + blocks(To2), threads=threads) as block:
            if block < blocks(To):
                part(From, rest, To, C, block)
            else:
                part(From2, rest2, To2, C2, block - blocks(To))

    return widen_both if both else widen
