"""What the targets of all GPUs share: from scheduled tile IR to thread IR, and thread IR as C.

A target adds its architectures, its own instructions (as lowerings, and as overrides of `lower.Lowering`), a
subclass of `cprinter.CPrinter`, headers with the functions ``ts::…`` that the shared half calls, and a
toolchain. Nothing here imports a target.

**Thread IR for GPUs**, what `lower` makes and a printer prints: one tirx.PrimFunc a kernel
(`kernel.ThreadKernel`).

- Statements: For (serial; ``ForKind.UNROLLED`` is ``#pragma unroll``, an annotation ``unroll: n`` is
  ``#pragma unroll n``), While, IfThenElse, Bind (``const T x = …;``), BufferStore, Evaluate, SeqStmt,
  AllocBuffer, DeclBuffer, Break, Continue, and AttrStmt ``thread_extent`` around the rest for
  ``blockIdx.{x,y,z}`` and ``threadIdx.x``, whose IterVar's variable gets the value.
- An access has one index, counted in elements of the buffer's dtype: int32, or int64 where memory is global.
- Buffers by storage scope. ``global``, ``global.symm``, ``global.signal``, ``global.packets``: parameters,
  pointers. ``shared``: one AllocBuffer of uint8, the arena (`kernel.arena`), and DeclBuffers at constant byte
  offsets in it (`kernel.placed`). ``local…``: AllocBuffers, arrays in registers whose extent is constant;
  those of one element are plain variables.
- Values: an expression over a small float (float16, bfloat16, float8_*) is computed in float32 and rounded
  when it is stored or cast, as docs/LANGUAGE.md has it; lowerings need not widen. In memory fp8 is
  ``ts::e4m3`` and ``ts::e5m2``, a byte each. Float to integer saturates and takes NaN to zero; fp8 e4m3 has
  no infinity and overflows to NaN. ``//`` and ``%`` round down.
- Scalar functions: ``ts.math.<name>`` calls as the front end makes them, or tirx's own of the same name.
- Vector accesses: a Ramp index of stride 1 on both sides of a store of one dtype, 2, 4, 8 or 16 bytes in all,
  at an address that is a multiple of that; zeros may be stored the same way (Broadcast). Arithmetic is
  written in scalar loops over registers.
- Instructions: ``tirx.call_extern("dtype", "ts::name", args…)`` for the functions of ``include/ts/*.cuh``.
  Arguments and results have the C++ type of their dtype in memory (half, nv_bfloat16, ts::e4m3 …); addresses
  are ``tirx.address_of(load)``, or ``tirx.buffer_data(buffer)`` for a buffer's first element.
- A call's attribute ``comment`` is printed behind its statement: the pair of accesses that a barrier orders.
- Parameters, in order: the kernel's own (pointers; scalars by value), what the launcher makes of them
  (`ThreadKernel.maps`, variables of handle type), symbolic extents as int32, rank, world; only those that are
  used. `ThreadKernel.sources` says where the launcher takes each from.
- Reads outside a tensor give zero and writes there are dropped: the lowering guards them.
"""
