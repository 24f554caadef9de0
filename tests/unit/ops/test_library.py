"""tilescale.ops on the simulator and on the CPU: every operation on its small cases against float64; imports;
what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import tilescale.ops
from tests.kernels import instead_of_kernels
from tilescale.errors import TileTypeError, TileValueError
from tilescale.ops import HOME, MODULES, RANK_MODULES, load, w4a16
from tilescale.ops import rows as cuts
from tilescale.ops.case import Case, Op, as_tuple, worst

#: the first case of each is optimised on the CPU
SMALL = [
    pytest.param(load(m), c, id=f"{load(m).name}: {c}", marks=[] if k else [pytest.mark.optimised])
    for m in MODULES
    for k, c in enumerate(c for c in load(m).cases if c.small)
]


def poisoned(like: tuple[torch.Tensor, ...]) -> tuple[Any, list[torch.Tensor]]:
    """Outputs that hold NaN (or their dtype's least number), each in the middle of memory that must stay as
    it is."""
    rooms, outs = [], []
    for t in like:
        bits = (
            torch.full((t.numel() + 256,), 0x55, dtype=torch.uint8)
            .repeat_interleave(t.element_size())
            .view(t.dtype)
        )
        out = bits[128 : 128 + t.numel()].view(t.shape)
        out.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min)
        rooms.append(bits)
        outs.append(out)
    return (outs[0] if len(outs) == 1 else tuple(outs)), rooms


@pytest.mark.parametrize("target", ["sim", "cpu"])
@pytest.mark.parametrize("op, case", SMALL)
def test_meaning(op: Op, case: Case, target: str, monkeypatch: pytest.MonkeyPatch):
    """Into memory of its own and into poisoned memory: within what rounding explains, the same bits, nothing
    beside it touched."""
    monkeypatch.setenv("TILESCALE_TARGET", target)
    arguments = op.draw(**case.shape)
    got, want = as_tuple(op.run(**arguments)), op.reference(**arguments)
    assert len(got) == len(want)
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.value.shape and worst(g, w) <= 1, (
            f"result {k} of {case}: {worst(g, w)} times what rounding explains"
        )
    out, rooms = poisoned(got)
    again = as_tuple(op.run(**arguments, out=out))
    for g, a, w, room in zip(got, again, want, rooms, strict=True):
        alike = a.contiguous().view(torch.uint8).equal(g.contiguous().view(torch.uint8))
        assert alike if arguments.get("deterministic", True) else worst(a, w) <= 1
        assert (room[:128].view(torch.uint8) == 0x55).all() and (room[-128:].view(torch.uint8) == 0x55).all()


@pytest.mark.parametrize("target", ["sim", "cpu"])
def test_rows_that_do_not_count(target: str, monkeypatch: pytest.MonkeyPatch):
    """Behind the rows that sizes add up to, gates and their gradients write nothing."""
    monkeypatch.setenv("TILESCALE_TARGET", target)
    scale = torch.rand(9)
    h, dy = torch.randn(9, 40), torch.randn(9, 20)
    for sizes in ([2, 0, 3], [0], [0, 9]):
        count = sum(sizes)
        given = {"sizes": torch.tensor(sizes, dtype=torch.int32)}
        y, dh = torch.full((9, 20), 7.0), torch.full((9, 40), 7.0)
        tilescale.ops.gated_activation(h, out=y, **given)
        tilescale.ops.gated_activation_backward(dy, h, out=dh, **given)
        assert (y[count:] == 7).all() and (dh[count:] == 7).all()
        assert y[:count].equal(tilescale.ops.gated_activation(h)[:count])
        assert dh[:count].equal(tilescale.ops.gated_activation_backward(dy, h)[:count])
        found = (torch.full((9, 40), 7.0), torch.full((9, 20), 7.0), torch.full((9,), 7.0))
        tilescale.ops.scaled_gate_backward(dy, h, scale, out=found, **given)
        want = tilescale.ops.scaled_gate_backward(dy, h, scale)
        assert all(
            (f[count:] == 7).all() and f[:count].equal(w[:count]) for f, w in zip(found, want, strict=True)
        )


@pytest.mark.parametrize("n", [19, 3001, 9000, 9001, 262145])
def test_infinities_in_a_softmax(n: int):
    """However rows are cut: minus infinities are zeros, also where all that a block or a turn has are some;
    rows of them alone and rows with an infinity or a NaN are NaN."""
    rows = torch.randn(5, n)
    rows[0, n // 5 :] = -torch.inf
    rows[1, : n - 3] = -torch.inf
    rows[2] = -torch.inf
    rows[3, n // 2] = torch.inf
    rows[4, n - 1] = torch.nan
    for x in (rows, rows.bfloat16()):
        got, want = tilescale.ops.softmax(x), x.double().softmax(-1)
        assert got[2:].isnan().all() and want[2:].isnan().all()
        assert torch.allclose(
            got[:2].double(), want[:2], rtol=2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-14, atol=0
        )
        assert (got[:2][want[:2] == 0] == 0).all()


@pytest.mark.parametrize(
    "columns, rows",
    [
        (7, 1),
        (19, 5000),
        (1000, 3),
        (3001, 200),
        (9001, 2),
        (33000, 60),
        (131056, 1),
        (262128, 999),
        (300001, 4),
    ],
)
def test_cuts_have_every_column(columns: int, rows: int):
    """Of every dtype: all columns are somewhere, a thread has no more of them than registers, words are
    whole."""
    for dtype, size in cuts.BYTES.items():
        each, word = (16 if size == 8 else 32), 16 // size
        cut = cuts.cut(columns, dtype, rows, 132)
        assert cut.width * cut.turns >= columns and cut.rows * cut.width <= cut.threads * each * 2
        blocks = cuts.shared(columns, dtype, rows, 132)
        share = cuts.share(columns + word - 1, dtype, blocks) if blocks > 1 else None
        if share is not None:
            assert (
                share.blocks * share.width >= columns + word - 1 and share.width % (share.threads * word) == 0
            )
            assert (
                share.width <= share.threads * (each if share.threads == 1024 else each * 3 // 2)
                and share.threads <= 1024
                and blocks in (2, 4, 8)
            )


@pytest.mark.parametrize("module", MODULES)
def test_lists(module: str):
    """Each operation is tested small and ragged and has something to be measured against where it is
    measured."""
    op = load(module)
    assert len({str(c) for c in op.cases}) == len(op.cases), "a case stands in the list twice"
    assert any(c.small for c in op.cases)
    assert op.peers or not any(c.bar for c in op.cases)
    for c in op.cases:
        assert not (c.small and c.bar)
        if c.bar:
            assert op.flops(**c.shape) + op.moved(**c.shape) > 0


def test_names():
    """A file is not called like a function in it, in whose place importing it would put itself."""
    assert not set(HOME) & {m.rpartition(".")[2] for m in (*MODULES, *RANK_MODULES)}
    for name in HOME:
        assert callable(getattr(tilescale.ops, name)) and getattr(tilescale.ops, name).__doc__


def test_torch_comes_with_the_first_operation(clean_env: dict[str, str]):
    code = "import sys, tilescale.ops; a = 'torch' in sys.modules; tilescale.ops.matmul; print(a, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False True"), done.stderr


def test_what_matmul_refuses():
    a, b = torch.zeros(4, 8), torch.zeros(8, 16)
    for wrong in (
        lambda: tilescale.ops.matmul(a, b.T),
        lambda: tilescale.ops.matmul(a, torch.zeros(8)),
        lambda: tilescale.ops.matmul(a, b, activation="swish"),
        lambda: tilescale.ops.matmul(a, b, torch.zeros(4)),
        lambda: tilescale.ops.matmul(a, b, out=torch.zeros(16, 4)),
        lambda: tilescale.ops.matmul(a, b, out=torch.zeros(16, 4).T),
        lambda: tilescale.ops.matmul(a[:0], b),
    ):
        with pytest.raises(TileValueError):
            wrong()
    for wrong in (
        lambda: tilescale.ops.matmul(a, b.half()),
        lambda: tilescale.ops.matmul(a.double(), b.double()),
        lambda: tilescale.ops.matmul(a, b, out_dtype=torch.bfloat16),
    ):
        with pytest.raises(TileTypeError):
            wrong()


@pytest.mark.parametrize("panels", [False, True])
def test_packed_weights_come_back(panels: bool):
    values = torch.randint(0, 16, (72, 384), generator=torch.Generator().manual_seed(1))
    packed = w4a16.pack(values, panels=panels)
    assert tuple(packed.shape) == w4a16.shapes(72, 384)[panels]
    assert torch.equal(w4a16.unpack(packed, 72, 384).long(), values)


def test_matrices_that_lie_neither_way_are_copied():
    a, b = torch.randn(6, 20)[:, ::2], torch.randn(10, 8)
    assert torch.allclose(tilescale.ops.matmul(a, b), a @ b, atol=1e-4)


def test_sequences_that_fill_no_wave_are_cut_finer(monkeypatch: pytest.MonkeyPatch):
    """200 sequences of two blocks on 132 multiprocessors: three waves of 198, and two sequences in parts; the
    same on a small scale."""
    from tilescale.ops import host
    from tilescale.ops.latent_attention import plan

    assert plan(132, 2, 128, 132) == ((0, 132, 1),) and plan(64, 2, 128, 132) == ((0, 64, 1),)
    head, tail = plan(200, 2, 128, 132)
    assert head == (0, 198, 1) and tail[:2] == (198, 200) and tail[2] > 8
    assert len(plan(4, 1, 32, 3)) == 2
    monkeypatch.setattr(host, "multiprocessors", lambda device: 3)
    op = load("latent_attention")
    arguments = op.draw(batch=4, heads=8, context=2000, latent=64, rope=16, ragged=True)
    (want,) = op.reference(**arguments)
    assert worst(op.run(**arguments), want) <= 1


def test_what_rows_and_attention_refuse():
    ops, x = tilescale.ops, torch.zeros(4, 8)
    q, cache, n = (
        torch.zeros(2, 16, 80, dtype=torch.bfloat16),
        torch.zeros(2, 100, 80, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.int32),
    )
    page, table = torch.zeros(5, 64, 80, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.int32)
    g = load("attention_backward").draw(1, 2, 20, 16, kv_heads=1)
    for wrong in (
        lambda: ops.softmax(x.T),
        lambda: ops.softmax(x, out=torch.zeros(8, 4)),
        lambda: ops.rms_norm(x, torch.zeros(4)),
        lambda: ops.rms_norm(x.T, torch.zeros(4)),
        lambda: ops.mla_decode(q, cache[..., :40], n, latent=64),
        lambda: ops.mla_decode(q, cache, n, latent=80),
        lambda: ops.mla_decode(q, cache[:1], n, latent=64),
        lambda: ops.mla_decode(q, cache, n[:1], latent=64),
        lambda: ops.mla_decode(q, page[:, :48].contiguous(), n, latent=64, table=table),
        lambda: ops.mla_decode(q, page.transpose(0, 1), n, latent=64, table=table),
        lambda: ops.mla_decode(q[:0], cache[:0], n[:0], latent=64),
        lambda: ops.attention_gradients(**{**g, "o": g["o"][:, :1]}),
        lambda: ops.attention_gradients(**{**g, "k": g["k"][..., :8], "v": g["v"][..., :8]}),
        lambda: ops.attention_gradients(**{**g, "lse": g["lse"][..., :8]}),
        lambda: ops.attention_gradients(**{**g, "q": g["q"].transpose(1, 2).contiguous().transpose(1, 2)}),
        lambda: ops.attention_gradients(**{**g, "q_starts": n}),
    ):
        with pytest.raises(TileValueError):
            wrong()
    for wrong in (
        lambda: ops.softmax(x.int()),
        lambda: ops.rms_norm(x, torch.zeros(8, dtype=torch.float16)),
        lambda: ops.mla_decode(q.float(), cache.float(), n, latent=64),
        lambda: ops.mla_decode(q, cache, n.long(), latent=64),
        lambda: ops.attention_gradients(**{**g, "do": g["do"].float()}),
        lambda: ops.attention_gradients(**{**g, "lse": g["lse"].double()}),
    ):
        with pytest.raises(TileTypeError):
            wrong()


def test_gradients_of_sequences_read_no_rows_of_none():
    """What a forward pass leaves in rows of no sequence is undefined: it may be no number."""
    from tilescale import ops

    draw = torch.Generator().manual_seed(1)
    q, k, v, do = (torch.randn(40, 2, 16, generator=draw).bfloat16() for _ in range(4))
    ends = {"causal": True}
    ends |= dict.fromkeys(("q_starts", "k_starts"), torch.tensor([5, 10, 30], dtype=torch.int32))
    out = torch.full_like(q, torch.nan), torch.full((2, 40), torch.nan)
    o, lse = ops.flash_attention(q, k, v, **ends, longest=20, out=out)
    found = ops.attention_gradients(do, q, k, v, o, lse, **ends, longest=(20, 20))
    for at in (slice(5, 10), slice(10, 30)):
        alone = [t[at].transpose(0, 1)[None].contiguous() for t in (do, q, k, v, o)]
        want = ops.attention_gradients(*alone, lse[:, at][None].contiguous(), causal=True)
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x[at], y[0].transpose(0, 1), atol=0.02, rtol=0.02)


def test_what_is_no_tensor_is_refused():
    from tilescale import ops

    x = torch.ones(8, 8)
    for call in (
        lambda: ops.softmax([1.0]),
        lambda: ops.matmul(x.numpy(), x),
        lambda: ops.matmul(x, x, bias=[1.0]),
    ):
        with pytest.raises(TileTypeError, match="of (softmax|matmul) is (list|ndarray)"):
            call()


def test_tiles_of_attention():
    """Short queries, few keys and few tiles under a causal mask get blocks of one warpgroup; keys of no more
    than a tile get one stage."""
    from tilescale.ops.attention import Tile, keys_of_tile, tile_of

    assert tile_of(200, queries=3, keys=3) == tile_of(256, True, 1, 132, 3, 3, 744) == Tile(64, 16, 128, 0)
    assert tile_of(128, False, 2, 132, 256, 896, 24) == Tile(64, 128, 128, 2)
    assert tile_of(128, False, 2, 132, 256, 30000, 24).BM == 128, "long walks are shared"
    assert tile_of(96, False, 1, 132, 128, 4, 143) == Tile(64, 16, 128, 1)
    assert tile_of(96, queries=64, keys=64) == Tile(64, 64, 128, 1)
    assert tile_of(112, queries=102, keys=102, heads=2736, packed=True) == Tile(64, 64, 128, 2)
    assert tile_of(128, True, 30, 132, 3744, 3744, 2) == Tile(64, 128, 128, 2)
    assert tile_of(128, True, 30, 132, 3744, 3744, 3).BM == 128, "90 tiles fill the GPU better than 180"
    assert tile_of(168, True, 121, 132, 15407, 15407, 4) == Tile(128, 64, 256, 2)
    assert [keys_of_tile(80, n) for n in (16, 17, 64, 80, 168, 240)] == [16, 64, 64, 80, 64, 80]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("tokens, tile", [(150, (64, 64, 128, 1)), (4000, (64, 128, 128, 2))])
def test_packed_keys_are_tokens(
    tokens: int, tile: tuple[int, ...], kv_heads: int, monkeypatch: pytest.MonkeyPatch
):
    """As many as the queries' tokens: the queries' own. Others may all be one sequence's."""
    from tilescale.ops import attention

    taken: list[attention.Tile] = []
    instead_of_kernels(monkeypatch, lambda factory, args, **constants: taken.append(constants["tile"]))
    starts, k = (
        torch.tensor([0, 50, 100, 150], dtype=torch.int32),
        torch.zeros(tokens, kv_heads, 16, dtype=torch.bfloat16),
    )
    q = torch.zeros(150, 4, 16, dtype=torch.bfloat16)
    tilescale.ops.flash_attention(q, k, k, q_starts=starts, k_starts=starts, longest=50)
    assert taken == [attention.Tile(*tile)]


def test_who_goes_first_under_a_causal_mask():
    from tilescale.ops.attention_backward import is_longest_first

    assert is_longest_first(True, 6, 50, 132) and not is_longest_first(False, 6, 50, 132)
    assert not is_longest_first(True, 32, 32, 132), "many waves: a head's blocks side by side"
    assert not is_longest_first(True, 1, 50, 132), "all walks are alike"


@pytest.mark.parametrize("turned", [0, 1, 2])
def test_gradients_of_heads_turn_back(turned: int):
    """The way back is the transpose of the way there: ⟨there(h), d⟩ = ⟨h, back(d)⟩."""
    given = load("rotary").draw(2, 4, 2, 37, 16, "float64", turned)
    angles = [given.get(k) for k in ("cos", "sin")]
    made = tilescale.ops.rotary_heads(**given)
    grads = [torch.randn_like(t) for t in made]
    back = tilescale.ops.rotary_heads_backward(*grads, *angles)
    there = sum(float((t * g).sum()) for t, g in zip(made, grads, strict=True))
    assert abs(there - float((given["h"] * back).sum())) < 1e-9
