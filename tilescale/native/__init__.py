"""The small C runtime: threads, fibers, waits, launches, symmetric memory of the CPU target; launches of the
CUDA target.

``make_kernel`` turns a compiled kernel into a function; ``docs/RUNTIME.md`` says what kernels may call.
"""

from __future__ import annotations

from tilescale.native.build import (
    adopt,
    compiler,
    configure,
    cuda_capability,
    cuda_failure,
    cuda_missing,
    cuda_synchronize,
    import_tvm_ffi,
    library,
    library_path,
    make_cuda_kernel,
    make_kernel,
    retype,
    runtime_version,
)
from tilescale.native.events import Event, clear_events, events, lost_events, traffic
from tilescale.native.gpu_log import GpuLog, gpu_logs

__all__ = [
    "Event",
    "GpuLog",
    "adopt",
    "clear_events",
    "compiler",
    "configure",
    "cuda_capability",
    "cuda_failure",
    "cuda_missing",
    "cuda_synchronize",
    "events",
    "gpu_logs",
    "import_tvm_ffi",
    "library",
    "library_path",
    "lost_events",
    "make_cuda_kernel",
    "make_kernel",
    "retype",
    "runtime_version",
    "traffic",
]
