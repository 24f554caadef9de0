"""The tile language: ``import tilescale.language as T``.

What declares a kernel lives here and is free of TVM; an operation lives in its own file under
``compiler/ops`` and is loaded when a kernel that uses it is first traced.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tilescale.errors import TileError

from .annotations import Packets, Ref, Signal, StridedTensor, SymmTensor, Tensor
from .dtypes import ALL as _DTYPES
from .dtypes import NARROW as _NARROW
from .dtypes import PTR as ptr
from .dtypes import TFLOAT32 as tfloat32
from .dtypes import canonical, dtype
from .funcs import PrimFunc, macro, prim_func
from .symbolic import Sym as Var
from .symbolic import align_up, ceildiv, const, dyn, dynamic, index_to_coordinates
from .vectors import VECTORS as _VECTORS

Buffer = Tensor
#: TileLang's names for what a macro is given, in annotations, which nothing reads there
SharedBuffer = FragmentBuffer = LocalBuffer = Tensor
inline = macro
cdiv = ceildiv
symbolic = dynamic

#: module under tilescale.compiler → the names that it exports. To add an operation: its file, and one line
#: here.
_EXPORTS: dict[str, str] = {
    "frontend.launch": "Kernel Scale use_swizzle annotate_min_blocks_per_sm annotate_layout "
    "annotate_l2_hit_ratio annotate_safe_value "
    "get_rank get_world_size get_block_binding ClusterKernel",
    "frontend.extents": "get_block_bindings get_block_extent get_block_extents get_thread_bindings "
    "get_thread_extent get_thread_extents",
    "frontend.tvm_forms": "While If Then Else let loop_break thread_return",
    "frontend.groups": "ws",
    "ops.allreduce": "comm_reducer attr evaluate tvm_thread_allreduce",
    "ops.reducer": "alloc_reducer reducer_init reducer_update finalize_reducer",
    "ops.registers": "disable_warp_group_reg_alloc no_set_max_nreg annotate_producer_reg_dealloc "
    "annotate_consumer_reg_alloc annotate_pass_configs annotate_compile_flags annotate_restrict_buffers "
    "warpgroup_arrive warpgroup_commit_batch warpgroup_fence_operand",
    "ops.im2col": "im2col c2d_im2col",
    "layout.made": "Layout Fragment",
    "ops.alloc": "alloc_shared alloc_fragment alloc_local alloc_var alloc_signal alloc_global "
    "alloc_buffer empty view reshape",
    "ops.loops": "serial Serial unroll Unroll vectorized Vectorized Parallel Pipelined Persistent "
    "grid parallel",
    "ops.scheduler": "PersistentTileScheduler",
    "ops.copy": "copy",
    "ops.moved": "transpose async_copy",
    "ops.fill": "fill clear",
    "ops.gemm": "gemm wgmma_gemm GemmWarpPolicy",
    "ops.gemm_sp": "gemm_sp",
    "ops.reduce": "reduce reduce_sum reduce_max reduce_min reduce_abssum reduce_absmax reduce_prod "
    "reduce_bitand reduce_bitor "
    "reduce_bitxor",
    "ops.argmax": "argmax argmin topk",
    "ops.logical": "any_of all_of",
    "ops.cumsum": "cumsum cummax",
    "ops.atomic": "atomic_add atomic_max atomic_min atomic_addx2 atomic_addx4 atomic_load atomic_store "
    "atomic_or atomic_and atomic_xor atomic_exch",
    "ops.thread_copies": "ptx_cp_async ptx_commit_group ptx_wait_group cp_async_barrier_noinc",
    "ops.extern": "import_source call_extern call_pure_extern access_ptr tvm_access_ptr "
    "type_annotation address_of dp4a",
    "ops.random": "rng_init rng_rand rng_rand_float",
    "ops.print": "print",
    "ops.assertion": "assume device_assert",
    "ops.pointer": "make_tensor make_tensor_from_addr",
    "ops.sync": "barrier sync_grid sync_global cluster_sync signal wait",
    "ops.cluster": "cluster_arrive cluster_arrive_relaxed cluster_wait block_rank_in_cluster",
    "ops.dependent": "pdl_sync pdl_trigger",
    "ops.test": "test",
    "ops.put": "put",
    "ops.packets": "put_packets get_packets",
    "ops.mma_sync": "mma_sync",
    "ops.ldmatrix": "ldmatrix",
    "ops.shuffle": "sync_threads named_barrier_arrive sync_warp tvm_storage_sync tvm_warp_shuffle "
    "tvm_warp_shuffle_up tvm_warp_shuffle_down shfl_sync shfl_xor shfl_up shfl_down",
    "ops.warp_reduce": "warp_reduce_sum warp_reduce_max warp_reduce_min warp_reduce_bitand warp_reduce_bitor",
    "ops.vote": "any_sync all_sync ballot_sync ballot activemask tvm_warp_activemask match_any_sync "
    "match_all_sync syncthreads_count syncthreads_and syncthreads_or",
    "ops.mbarrier": "alloc_barrier alloc_cluster_barrier mbarrier_arrive mbarrier_arrive_expect_tx "
    "mbarrier_expect_tx mbarrier_wait_parity barrier_arrive barrier_wait tma_copy "
    "tma_store_arrive tma_store_wait",
    "ops.expert": "set_max_nreg inc_max_nreg dec_max_nreg fence_proxy_async wait_wgmma warpgroup_wait "
    "get_thread_binding thread_binding "
    "get_lane_idx get_warp_idx get_warp_idx_sync get_warp_group_idx shuffle_elect",
    "ops.collective": "all_gather reduce_scatter all_reduce all_to_all broadcast",
    "ops.math": "cast if_then_else max min abs exp exp2 exp10 log log2 log10 log1p sqrt rsqrt sin cos tan "
    "tanh sigmoid erf pow power "
    "floor ceil round nearbyint trunc fmod "
    "isnan isinf isfinite infinity max_value min_value clamp sinh cosh asin "
    "acos atan atan2 asinh acosh atanh fast_rcp "
    "floordiv floormod truncdiv truncmod shift_left shift_right bitwise_and bitwise_or bitwise_xor "
    "bitwise_not "
    "reinterpret __exp __exp2 __exp10 __log __log2 __log10 __sin __cos __tan "
    "ieee_sqrt ieee_fsqrt ieee_add ieee_sub "
    "ieee_mul ieee_fdiv "
    "ieee_fmaf ieee_frcp ieee_frsqrt popcount clz copysign hypot likely __ldg Cast Select",
    "ops.expressions": "And Or Not Add Sub Mul Div Mod FloorDiv FloorMod Min Max EQ NE LT LE GT GE",
    "builder.lanes": "Ramp",
    "ops.lanes_of": "Broadcast extract_lane abs2 add2 sub2 mul2 fma2 max2 min2 ldg32 ldg64 ldg128 ldg256 "
    "stg32 stg64 stg128 stg256 lds32 lds64 lds128 sts32 sts64 sts128",
    "ops.rounding": "nextafter ldexp",
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = [
    "Buffer",
    "FragmentBuffer",
    "LocalBuffer",
    "SharedBuffer",
    "Packets",
    "PrimFunc",
    "Ref",
    "Signal",
    "StridedTensor",
    "SymmTensor",
    "Tensor",
    "Var",
    "canonical",
    "align_up",
    "cdiv",
    "ceildiv",
    "const",
    "dtype",
    "dyn",
    "index_to_coordinates",
    "dynamic",
    "inline",
    "macro",
    "prim_func",
    "symbolic",
    "ptr",
    "tfloat32",
    *_NARROW,
    *_DTYPES,
    *_VECTORS,
    *_HOME,
]
globals().update({name: d for name, d in _DTYPES.items() if name != "bool"})
globals().update(_NARROW)
globals().update(_VECTORS)
globals()["bool"] = _DTYPES["bool"]
float8_e4m3 = _DTYPES["float8_e4m3fn"]
half, float, double, int, long, short, uint = (
    _DTYPES[n] for n in ("float16", "float32", "float64", "int32", "int64", "int16", "uint32")
)


class UnknownName(TileError, AttributeError):
    """A name that the language does not have; also an AttributeError, so that hasattr works."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        import difflib

        from .elsewhere import INSTEAD

        close = difflib.get_close_matches(name, __all__, 1)
        raise UnknownName(
            f"the language has no T.{name}", hint=INSTEAD.get(name) or (f"T.{close[0]}" if close else None)
        )
    value = getattr(import_module(f"tilescale.compiler.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
