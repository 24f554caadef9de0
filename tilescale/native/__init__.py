"""The small C runtime: threads, fibers, waits, launches, symmetric memory of the CPU target; launches of the CUDA target.

``make_kernel`` turns a compiled kernel into a function; ``docs/ARCHITECTURE.md`` says what kernels may call.
"""

from __future__ import annotations

from tilescale.native.build import (
    compiler,
    configure,
    cuda_capability,
    cuda_failure,
    cuda_missing,
    import_tvm_ffi,
    library,
    make_cuda_kernel,
    make_kernel,
    retype,
)
from tilescale.native.events import Event, clear_events, events, lost_events, traffic

__all__ = [
    "Event", "clear_events", "compiler", "configure", "cuda_capability", "cuda_failure", "cuda_missing", "events", "import_tvm_ffi",
    "library", "lost_events", "make_cuda_kernel", "make_kernel", "retype", "traffic",
]  # fmt: skip
