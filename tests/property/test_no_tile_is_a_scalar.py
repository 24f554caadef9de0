"""A tile is no scalar, anywhere: every word of the language refuses one in each place that is not for tiles.

The words are those that ``tilescale.language`` has. A new one needs nothing here, unless it takes tiles
(their parameters are in ``TILES``), or unless a call with plain numbers is not one that it accepts
(``SAMPLES``, ``SCALES``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from typing import Any

import pytest

import tilescale.language as T
from tests.unit.language.test_words import NOTHING
from tilescale.compiler.builder import state as bld
from tilescale.errors import TileError
from tilescale.language.vectors import VECTORS

#: parameters that take tiles, counters or barriers, by name; and those of single words
TILES = {
    "src",
    "values",
    "indices",
    "dst",
    "buffer",
    "out",
    "A",
    "B",
    "C",
    "A_sparse",
    "E",
    "counter_",
    "barrier",
    "tile",
}
OF_WORDS = {
    "any_of": {"conditions"},
    "all_of": {"conditions"},
    "print": {"obj"},
    "copy": {"operands", "signal"},
    "atomic_add": {"dst", "value"},
    "atomic_max": {"dst", "value"},
    "atomic_min": {"dst", "value"},
    **{f"atomic_{kind}": {"dst", "value"} for kind in ("or", "and", "xor")},
    "atomic_exch": {"dst"},
    "atomic_addx2": {"dst", "value"},
    "atomic_addx4": {"dst", "value"},
    "gemm": {"A", "B", "C", "mbar"},
    "wgmma_gemm": {"A", "B", "C"},
    "cp_async_barrier_noinc": {"barrier"},
    "signal": {"counter_"},
    "put": {"target", "signal"},
    "put_packets": {"src", "box"},
    "get_packets": {"box", "dst"},
    "atomic_store": {"dst", "value"},
    "atomic_load": set(),
    "im2col": {"img", "col"},
    "c2d_im2col": {"img", "col"},
    "access_ptr": {"base"},
    "mbarrier_arrive_expect_tx": {"mbarrier"},
    "address_of": {"base"},
    "tvm_access_ptr": {"data"},
    "annotate_restrict_buffers": {"buffers"},
    "warpgroup_fence_operand": {"buffer_or_ptr", "offset", "num_regs", "dtype"},
    **{f"ld{kind}{bits}": {"src"} for kind in "gs" for bits in (32, 64, 128, 256)},
    **{f"st{kind}{bits}": {"dst"} for kind in "gs" for bits in (32, 64, 128, 256)},
    # decide nothing
    "annotate_compile_flags": {"flags"},
    # decide nothing
    "annotate_consumer_reg_alloc": {"reg_count"},
    "annotate_producer_reg_dealloc": {"reg_count"},
}
#: no words of a kernel's body: what declares kernels and makes layouts
NOT_IN_KERNELS = {
    "Buffer",
    "FragmentBuffer",
    "LocalBuffer",
    "SharedBuffer",
    "alloc_global",
    # two functions, what a reduction among threads is by, and the reduction, which stands inside of that
    "comm_reducer",
    "attr",
    "tvm_thread_allreduce",
    # only behind T.rng_init; only some dtypes (tests/unit/ops/test_random.py, test_mma_sync.py, tests/unit/cuda/test_extern.py)
    "rng_rand",
    "rng_rand_float",
    "dp4a",
    "mma_sync",
    "ldmatrix",
    # only in a loop (tests/unit/ops/test_warp_reduce.py)
    "loop_break",
    # only of an accumulator, in T.Parallel (tests/unit/ops/test_reducer.py)
    "reducer_init",
    "reducer_update",
    "Ref",
    "Var",
    # rewritten before they are called (tests/unit/language/test_tilelang_words.py)
    "While",
    "If",
    "Then",
    "Else",
    "Tensor",
    "StridedTensor",
    "SymmTensor",
    "Signal",
    "Packets",
    "GemmWarpPolicy",
    "PrimFunc",
    "prim_func",
    "macro",
    "inline",
    "Layout",
    "Fragment",
    "dtype",
    "canonical",
    "const",
    "dyn",
    "dynamic",
    "symbolic",
    "empty",
}
#: words that are given tiles alone, or as keys of a dictionary
ANNOTATIONS = {"finalize_reducer", "annotate_layout", "annotate_l2_hit_ratio", "annotate_safe_value"}
#: votes, of integers here
VOTES = (
    "any_sync",
    "all_sync",
    "ballot_sync",
    "ballot",
    "match_any_sync",
    "match_all_sync",
    "syncthreads_count",
    "syncthreads_and",
    "syncthreads_or",
)
REDUCED = ("sum", "max", "min", "bitand", "bitor")
SCALES = {
    **dict.fromkeys(
        [
            "shfl_xor",
            "shfl_up",
            "shfl_down",
            "shfl_sync",
            "tvm_warp_shuffle",
            "tvm_warp_shuffle_up",
            "tvm_warp_shuffle_down",
            *VOTES,
            *(f"warp_reduce_{op}" for op in REDUCED),
            "activemask",
            "tvm_warp_activemask",
            "sync_warp",
            "tvm_storage_sync",
            "named_barrier_arrive",
            "get_thread_binding",
            "get_lane_idx",
            "get_warp_idx",
            "get_warp_idx_sync",
            "get_warp_group_idx",
            "shuffle_elect",
        ],
        "thread",
    ),
    **dict.fromkeys(
        [
            "copy",
            "put",
            "put_packets",
            "get_packets",
            "signal",
            "wait",
            "test",
            "sync_grid",
            "sync_global",
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "all_to_all",
            "broadcast",
        ],
        "device",
    ),
    **dict.fromkeys(["inc_max_nreg", "dec_max_nreg", "set_max_nreg"], "warpgroup"),
}


class Things:
    """What calls are made of, in the kernel that is traced."""

    def __init__(self, A: Any, S: Any, P: Any, box: Any, n: Any):
        self.box = box
        self.address: Any = None
        self.shared, self.half = T.alloc_shared((64, 64), "float32"), T.alloc_shared((64, 64), "float16")
        self.fragment, self.row = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64,), "float32")
        self.ints, self.int_row = T.alloc_fragment((64, 64), "int32"), T.alloc_fragment((64,), "int32")
        self.ints_of_block = T.alloc_shared((64, 64), "int32")
        self.best, self.best_index = T.alloc_fragment((64, 1), "float32"), T.alloc_fragment((64, 1), "int32")
        self.places = T.alloc_fragment((64, 8), "uint8")
        self.barrier = T.alloc_barrier(1)
        self.tensor, self.counters, self.symmetric, self.number = A, S, P, n
        self.scalar = A[0, 0]

    def tiles(self) -> list[Any]:
        return [
            self.tensor,
            self.tensor[0:4, 0],
            self.shared,
            self.shared[3, :],
            self.fragment[0:2, 0:2],
            self.int_row,
        ]


#: words of pairs, and how many they take
PAIRS = {"add": 2, "sub": 2, "mul": 2, "max": 2, "min": 2, "fma": 3, "abs": 1}


def samples(t: Things) -> dict[str, dict[str, Any]]:
    """word → the arguments of a call that it accepts, those with a default left out."""
    reduction = {"buffer": t.fragment, "out": t.row}
    pair = T.float32x2(t.scalar, t.scalar)

    def words(n: int) -> Any:
        return T.uint32(t.number) if n == 1 else getattr(T, f"uint32x{n}")(t.number)

    bits = {"buffer": t.ints, "out": t.int_row}
    return {
        **{f"reduce_{op}": reduction for op in ("sum", "max", "min", "prod", "abssum", "absmax")},
        **{f"reduce_{op}": bits for op in ("bitand", "bitor", "bitxor")},
        "reduce": {**reduction, "reduce_type": "sum"},
        "copy": {"operands": (t.symmetric[0, :, :], t.symmetric[1, :, :]), "dst": 0, "signal": t.counters[0]},
        "gemm_sp": {"A_sparse": t.half[:, 0:32], "E": t.places, "B": t.half, "C": t.fragment},
        "gemm": {"A": t.half, "B": t.half, "C": t.fragment},
        **{word: {"src": t.fragment, "values": t.row, "indices": t.int_row} for word in ("argmax", "argmin")},
        "topk": {"src": t.fragment, "values": t.best, "indices": t.best_index, "k": 1},
        "cumsum": {"src": t.shared},
        "cummax": {"src": t.shared},
        "fill": {"buffer": t.shared, "value": t.scalar},
        "clear": {"buffer": t.shared},
        "warpgroup_fence_operand": {"buffer_or_ptr": t.fragment},
        "atomic_store": {"dst": t.tensor[0, 0], "value": 1},
        "atomic_load": {"src": t.tensor[0, 0]},
        **{f"atomic_{kind}": {"dst": t.tensor[0, 0], "value": t.scalar} for kind in ("add", "max", "min")},
        **{
            f"atomic_{kind}": {"dst": t.ints_of_block[0, 0], "value": t.number}
            for kind in ("or", "and", "xor", "exch")
        },
        **{f"atomic_addx{k}": {"dst": t.tensor[0, 0], "value": t.shared[0, 0]} for k in (2, 4)},
        "signal": {"counter_": t.counters[0]},
        "wait": {"counter_": t.counters[0]},
        "test": {"counter_": t.counters[0]},
        "put": {"value": t.scalar, "target": t.symmetric[0, 0, 0], "dst": 0, "signal": t.counters[0]},
        "put_packets": {"src": t.fragment[0, 0:8], "box": t.box[0, :], "dst": 0},
        "get_packets": {"box": t.box[0, :], "dst": t.fragment[0, 0:8]},
        **{word: {"src": t.symmetric[0, :, :], "dst": t.symmetric} for word in ("all_gather",)},
        "all_to_all": {"src": t.symmetric, "dst": t.symmetric},
        "broadcast": {"src": t.symmetric[0, :, :], "dst": t.symmetric[1, :, :]},
        "reduce_scatter": {"src": t.symmetric, "dst": t.shared[0:8, 0:8]},
        "all_reduce": {"src": t.symmetric[0, :, :]},
        "tma_copy": {"src": t.tensor[0, 0], "dst": t.shared, "barrier": t.barrier[0]},
        **{word: {"barrier": t.barrier[0]} for word in ("mbarrier_arrive", "barrier_arrive", "barrier_wait")},
        "mbarrier_arrive_expect_tx": {"mbarrier": t.barrier[0], "tx": 128},
        "mbarrier_expect_tx": {"barrier": t.barrier[0], "tx": 128},
        "mbarrier_wait_parity": {"barrier": t.barrier[0], "parity": 0},
        **{f"{word}2": dict.fromkeys("xyz"[:n], pair) for word, n in PAIRS.items()},
        "extract_lane": {"vector": pair, "lane": 0},
        "Broadcast": {"value": t.scalar, "lanes": 4},
        "Ramp": {"base": t.number, "stride": 1, "lanes": 2},
        **{f"ldg{bits}": {"src": t.tensor[0, 0]} for bits in (32, 64, 128, 256)},
        **{f"lds{bits}": {"src": t.shared[0, 0]} for bits in (32, 64, 128)},
        **{f"stg{n * 32}": {"dst": t.tensor[0, 0], "value": words(n)} for n in (1, 2, 4, 8)},
        **{f"sts{n * 32}": {"dst": t.shared[0, 0], "value": words(n)} for n in (1, 2, 4)},
        **{vector: {"values": (t.scalar,)} for vector in VECTORS},
        "transpose": {"src": t.shared, "dst": t.half},
        "async_copy": {"src": t.tensor, "dst": t.shared},
        "let": {"var": T.int32(), "value": t.number},
        "annotate_pass_configs": {"configs": {}},
        "annotate_compile_flags": {"flags": []},
        "annotate_restrict_buffers": {"buffers": (t.tensor,)},
        "view": {"buffer": t.shared},
        **dict.fromkeys(("make_tensor", "make_tensor_from_addr"), {"ptr": t.address, "shape": (64, 64)}),
        "reshape": {"buffer": t.shared, "shape": (32, 128)},
        "alloc_shared": {"shape": (4,)},
        "alloc_fragment": {"shape": (4,)},
        "alloc_local": {"shape": (4,)},
        "alloc_buffer": {"shape": (4,), "scope": "local"},
        "alloc_var": {"dtype": "int32"},
        "alloc_reducer": {"shape": (4,)},
        "tvm_warp_shuffle": {"mask": 0xFFFFFFFF, "value": t.scalar, "warp_id": 0, "width": 32},
        **{
            f"tvm_warp_shuffle_{way}": {"mask": 0xFFFFFFFF, "value": t.scalar, "offset": 1, "width": 32}
            for way in ("up", "down")
        },
        **{f"warp_reduce_{op}": {"value": t.number} for op in REDUCED},
        "named_barrier_arrive": {"barrier_id": 1, "thread_count": 64},
        "parallel": {"extents": (4,)},
        "thread_binding": {"begin": 0, "end": 128, "thread": "threadIdx.x"},
        "ws": {"warp_group_idx": (0,)},
        **dict.fromkeys(
            ("im2col", "c2d_im2col"),
            {
                "img": T.reshape(t.shared, (1, 8, 8, 64)),
                "col": t.fragment,
                "nhw_step": t.number,
                "c_step": 0,
                "kernel": 1,
                "stride": 1,
                "dilation": 1,
                "pad": 0,
            },
        ),
        "access_ptr": {"base": t.shared, "access_type": "r", "extents": (1, 4)},
        "address_of": {"base": t.shared},
        "tvm_access_ptr": {"ptype": "float32", "data": t.shared.data, "offset": 0, "extent": 4},
        "type_annotation": {"dtype": "float32"},
        "tvm_storage_sync": {"storage_scope": "shared"},
        "call_extern": {"args": ("f", t.scalar)},
        "call_pure_extern": {"dtype": "float32", "func_name": "f", "args": (t.scalar,)},
        "ptx_cp_async": {
            "dst_access_ptr": T.access_ptr(t.shared[0, 0], "w", 4),
            "src_access_ptr": T.access_ptr(t.tensor[0, 0], "r", 4),
            "num_elems": 4,
        },
        "cp_async_barrier_noinc": {"barrier": t.barrier},
        "wgmma_gemm": {"A": t.half, "B": t.half, "C": t.fragment},
        "import_source": {"source_code": "// nothing"},
        "rng_init": {"seed": t.number},
        "cast": {"value": t.scalar, "dtype": "int32"},
        "Cast": {"dtype": "int32", "value": t.scalar},
        "reinterpret": {"a": "int32", "b": t.scalar},
        "Kernel": {"grid": (4,)},
        "ClusterKernel": {"grid": (4,), "cluster_dims": 2},
        "PersistentTileScheduler": {"num_m_tiles": 4, "num_n_tiles": 4},
        "Scale": {"name": "grid"},
        "Persistent": {"domain": (4, 4), "wave_size": 2, "index": t.number},
        "Parallel": {"extents": (4,)},
        "grid": {"extents": (4,)},
        **dict.fromkeys(("ceildiv", "cdiv"), {"a": t.number, "b": 2}),
        "ldexp": {"x": t.scalar, "n": t.number},
        "__ldg": {"x": t.tensor[0, 0]},
        "index_to_coordinates": {"index": t.number, "shape": (8, 8)},
        "align_up": {"a": t.number, "b": 2},
        "infinity": {},
        "max_value": {"dtype": "int32"},
        "min_value": {"dtype": "int32"},
        "device_assert": {"condition": t.number > 0},
        "assume": {"condition": True},
        "print": {"obj": t.scalar},
        **dict.fromkeys(["inc_max_nreg", "dec_max_nreg"], {"reg_count": 64}),
        "set_max_nreg": {"reg_count": 64, "is_inc": 1},
        "annotate_min_blocks_per_sm": {"n": 2},
        **dict.fromkeys(
            ["shift_left", "shift_right", "bitwise_and", "bitwise_or", "bitwise_xor"], {"a": t.number, "b": 1}
        ),
        **dict.fromkeys(["bitwise_not", "popcount", "clz"], {"x": t.number}),
        **dict.fromkeys(["truncdiv", "truncmod"], {"a": t.number, "b": 3}),
        **dict.fromkeys(
            ["serial", "Serial", "unroll", "Unroll", "vectorized", "Vectorized"], {"args": (t.number,)}
        ),
        "Pipelined": {"start": t.number},
        **{word: {"value" if "match" in word else "predicate": t.number} for word in VOTES},
        **{
            word: {"value": t.scalar, lanes: 1}
            for word, lanes in (
                ("shfl_xor", "offset"),
                ("shfl_up", "delta"),
                ("shfl_down", "delta"),
                ("shfl_sync", "srcLane"),
            )
        },
    }


def words() -> list[str]:
    found = []
    for name in sorted(T.__all__):
        value = getattr(T, name)
        if (
            name not in NOT_IN_KERNELS
            and name not in ANNOTATIONS
            and callable(value)
            and not isinstance(value, str)
        ):
            found.append(name)
    return found


def takes_tiles(word: str, parameter: str) -> bool:
    return parameter in OF_WORDS.get(word, TILES)


def called(word: str, given: dict[str, Any]) -> None:
    """``T.word(…)`` with arguments by name, those of ``*args`` in their place."""
    parameters = list(inspect.signature(getattr(T, word)).parameters.values())
    several = next(
        (k for k, p in enumerate(parameters) if p.kind is p.VAR_POSITIONAL and p.name in given), None
    )
    keywords, positional = dict(given), []
    if several is not None:
        rest = keywords.pop(parameters[several].name)
        positional = [keywords.pop(p.name) for p in parameters[:several]] + list(
            rest if isinstance(rest, tuple) else (rest,)
        )
    getattr(T, word)(*positional, **keywords)


def places(word: str, t: Things) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a call that is right, and the parameters that are not for tiles."""
    parameters = list(inspect.signature(getattr(T, word)).parameters.values())
    default = {p.name: t.scalar for p in parameters if p.default is p.empty}
    return samples(t).get(word, default), [
        p.name for p in parameters if not takes_tiles(word, p.name) and p.name not in NOTHING.get(word, ())
    ]


@contextlib.contextmanager
def scale(word: str) -> Any:
    name = SCALES.get(word)
    if name is None:
        yield
    else:
        with T.Scale(name):
            yield


def trace(word: str, attempt: Any) -> None:
    """A kernel of one statement, with all kinds of memory around it."""

    def kernel(
        A: T.Tensor((64, 64), "float32"),
        S: T.Signal((4,)),
        P: T.SymmTensor((8, 8, 8), "float32"),
        box: T.Packets((4, 8), "float32"),
        table: T.Tensor((4,), T.ptr),
        n: T.int32,
    ):
        with T.Kernel(1, threads=128):
            t = Things(A, S, P, box, n)
            t.address = table[0]
            with scale(word):
                attempt(t)

    T.prim_func(kernel).trace()


@pytest.mark.parametrize("word", words())
def test_no_word_takes_a_tile_for_a_scalar(word: str):
    accepted: list[str] = []

    def attempt(t: Things) -> None:
        given, parameters = places(word, t)
        called(word, given)  # what is refused below is refused for the tile
        for parameter in parameters:
            for tile in t.tiles():
                builder = bld.current()
                frames, bodies = len(builder.frames), len(builder.bodies)
                try:
                    called(word, {**given, parameter: tile})
                except TileError:
                    del builder.frames[frames:], builder.bodies[bodies:]
                else:
                    accepted.append(f"{parameter}={tile}")

    trace(word, attempt)
    assert not accepted, f"T.{word} takes a tile for a scalar: {accepted}"


#: a statement of a kernel for each place of Python's that wants a scalar; ``X`` is the tile
STATEMENTS = """
if X: pass
if not X: pass
if X and n > 0: pass
if n > 0 and X: pass
if n > 0 or X: pass
while X: break
assert X
y = 1 if X else 0
y = X if n > 0 else 1
y = 1 if n > 0 else X
if X == 0: pass
if 0 != X: pass
if X < 1: pass
if 0 < n < X: pass
if n in (X,): pass
y = X + 1
y = 2.0 * X
y = -X
y = X % 3
y = X << 1
y = ~X
y = +X
y = abs(X)
y = int(X)
y = float(X)
y = bool(X)
y = round(X)
y = min(X, n)
y = max(0, X)
y = pow(X, 2)
y = sum(X)
y = divmod(X, 2)
y = [z for z in X]
y = (*X,)
y, z = X
n in X
v = X
v += X
A[0, 0] = X
A[0, 0] += X
A[X, 0] = 1
y = A[X, 0]
y = A[X:8, 0]
y = A[0:X, 0]
for i in X: pass
for i in range(X): pass
for i in T.serial(X): pass
for i in T.Parallel(X): pass
for i in T.Pipelined(X): pass
for i in T.Parallel(4): A[i, 0] = X
T.copy(P[0, :, :], P[1, :, :], dst=X)
T.copy(P[0, :, :], P[1, :, :], src=X)
T.copy(P[0, :, :], P[1, :, :], dst=0, signal=S[0], value=X)
T.signal(S[0], dst=X)
T.signal(S[X])
T.wait(S[0], value=X)
"""


@pytest.mark.parametrize("statement", STATEMENTS.strip().splitlines())
@pytest.mark.parametrize("tile", ["A", "A[0:2, 0]", "t", "t[1, 0:4]", "f", "f[0:1]"])
def test_no_statement_takes_a_tile_for_a_scalar(statement: str, tile: str, tmp_path):
    text = statement.replace("X", tile)
    path = tmp_path / "kernel_of_one_statement.py"
    path.write_text(
        "import tilescale.language as T\n\n\n@T.prim_func\n"
        'def kernel(A: T.Tensor((8, 8), "float32"), P: T.SymmTensor((8, 8, 8), "float32"), S: T.Signal((4,)), n: T.int32):\n'
        "    with T.Kernel(1, threads=32):\n"
        '        t, f = T.alloc_shared((8, 8), "float32"), T.alloc_fragment((4,), "float32")\n'
        '        v = T.alloc_var("float32")\n'
        '        with T.Scale("device"):\n'
        f"            {text}\n"
    )
    spec = importlib.util.spec_from_file_location("kernel_of_one_statement", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(TileError) as refusal:
        module.kernel.trace()
    assert refusal.value.loc is not None and refusal.value.loc.line == 10, refusal.value
