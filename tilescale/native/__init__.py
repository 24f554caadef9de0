"""The small C runtime of the CPU target: threads, fibers, waits, launches, symmetric memory.

``make_kernel`` turns a compiled kernel into a function; ``docs/ARCHITECTURE.md`` says what kernels may call.
"""

from __future__ import annotations

from tilescale.native.build import cache_dir, compiler, configure, import_tvm_ffi, library, make_kernel, wait_timeout

__all__ = ["cache_dir", "compiler", "configure", "import_tvm_ffi", "library", "make_kernel", "wait_timeout"]
