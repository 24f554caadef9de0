"""Kernels that are ready to use, on torch tensors: ``tilescale.ops.matmul(a, b)``.

One file an operation, which has

- its kernels: functions of compile-time constants that return a ``@T.prim_func``, plain tile programs without
  expert primitives;
- the function that people call: it checks its tensors, picks a configuration by what class of shape they are,
  compiles once and launches on the tensors' device (and torch's current stream);
- a reference in torch, in higher precision, with the error that rounding explains;
- ``OP``, an :class:`~tilescale.ops.case.Op`: all that with one list of shapes, which the tests and the
  benchmarks read.

None of them is part of autograd's graph: a result has no ``grad_fn``. Layers with gradients are in
`tilescale.nn`.

To add one: the file, and a line in ``HOME`` for each function that people call. A file has another name than
the functions in it, whose place the module would take when it is imported. Nothing here imports torch until
an operation is named.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilescale.ops.case import Op
    from tilescale.ops.ranks.case import RankOp

#: a function that people call → its file
HOME = {
    "all_gather": "ranks.gather",
    "all_gather_grouped_matmul": "ranks.grouped_gather",
    "all_gather_matmul": "ranks.gather_gemm",
    "all_reduce": "ranks.reduce",
    "all_to_all": "ranks.exchange",
    "attention_gradients": "attention_backward",
    "broadcast": "ranks.spread",
    "cross_entropy_gradient": "word_loss",
    "cross_entropy_parts": "word_loss",
    "dispatch_grouped_matmul": "ranks.dispatch_gemm",
    "flash_attention": "attention",
    "fp8_matmul": "fp8_gemm",
    "gated_activation": "gated",
    "gated_activation_backward": "gated_backward",
    "gated_matmul": "gated_gemm",
    "grouped_matmul": "grouped",
    "grouped_matmul_backward": "grouped_backward",
    "grouped_matmul_combine": "ranks.gemm_combine",
    "grouped_matmul_reduce_scatter": "ranks.grouped_scatter",
    "matmul": "gemm",
    "matmul_all_reduce": "ranks.gemm_reduce",
    "matmul_reduce_scatter": "ranks.gemm_scatter",
    "mla_decode": "latent_attention",
    "moe_combine": "ranks.combine",
    "moe_dispatch": "ranks.dispatch",
    "moe_permute": "permute",
    "moe_route": "routing",
    "moe_unpermute": "permute",
    "reduce_scatter": "ranks.scatter",
    "ring_attention": "ranks.ring",
    "ring_attention_backward": "ranks.ring_backward",
    "rms_norm": "rms_norms",
    "rms_norm_backward": "rms_norms_backward",
    "rotary_heads": "rotary",
    "rotary_heads_backward": "rotary",
    "scaled_gate_backward": "scaled_gates",
    "softmax": "row_softmax",
    "ulysses_attention": "ranks.ulysses",
    "ulysses_attention_backward": "ranks.ulysses_backward",
    "w4a16_matmul": "w4a16",
}
#: files, each of which has an ``OP``
MODULES = tuple(sorted({m for m in HOME.values() if not m.startswith("ranks.")}))
#: the same of operations of several ranks, whose ``OP`` is a :class:`~tilescale.ops.ranks.case.RankOp`
RANK_MODULES = tuple(sorted({m for m in HOME.values() if m.startswith("ranks.")}))

__all__ = ["HOME", "MODULES", "RANK_MODULES", "load", "load_ranks", *HOME]


def load(module: str) -> Op:
    """The operation of one of ``MODULES``."""
    op: Op = import_module(f"tilescale.ops.{module}").OP
    return op


def load_ranks(module: str) -> RankOp:
    """The operation of one of ``RANK_MODULES``."""
    op: RankOp = import_module(f"tilescale.ops.{module}").OP
    return op


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'tilescale.ops' has no attribute {name!r}")
    value = getattr(import_module(f"tilescale.ops.{HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
