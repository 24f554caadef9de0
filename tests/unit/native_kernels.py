"""Small kernels in C for the runtime's tests: what the compiler would emit, written by hand."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilescale import native

F32, F64, BF16, I64, I32, U8, BOOL, E4M3, E5M2 = (
    (2, 32),
    (2, 64),
    (4, 16),
    (0, 64),
    (0, 32),
    (1, 8),
    (6, 8),
    (10, 8),
    (12, 8),
)
native.import_tvm_ffi()  # before ranks are forked: each would import it

WAITS, DEVICE, UNORDERED, CLUSTER, EVENTS = 1, 2, 4, 8, 16
TENSOR, INT, FLOAT, SYMM, SIGNAL, KEEP = range(6)

HEADER = """
#include <stdint.h>
#include <stddef.h>
void ts_wait(void*, int64_t*, int64_t, int32_t, int32_t);
void ts_signal(void*, int64_t*, int64_t, int32_t);
void* ts_peer(void*, void*, int32_t, int32_t);
void ts_barrier(void*, int32_t, int32_t, int32_t);
void ts_team_sync(void*, int32_t);
void ts_meet_among(void*, int32_t, int32_t, int32_t, const int32_t*);
void* ts_cluster_arena(void*, int32_t, int32_t);
void ts_fork(void*, int32_t, int64_t*, int32_t);
void ts_fail(void*, int32_t);
void ts_print_i64(void*, int32_t, int64_t);
void ts_print_f64(void*, int32_t, double);
void ts_print_buf(void*, int32_t, const void*, int32_t, int32_t, const int64_t*, const int64_t*);
void ts_event(void*, int32_t, int32_t, int32_t, int64_t);
#define REGION(k) int32_t ts_region_##k(void* ctx, const int64_t* a, uint8_t* arena, int64_t* frame, int32_t index)
#define BLOCK int32_t ts_block(void* ctx, const int64_t* a, uint8_t* arena, int32_t bx, int32_t by, int32_t bz)
#define GRID(x, y, z) int32_t ts_grid(const int64_t* a, int64_t out[3]) { out[0] = (x); out[1] = (y); out[2] = (z); return 0; }
"""


@dataclass(frozen=True)
class P:
    """A parameter of the description; extents: an int must match, ("def", k) defines symbol k, ("sym", k)
    repeats it, None is free."""

    kind: int
    dtype: tuple[int, int] = F32
    shape: Sequence[Any] = ()
    written: bool = False
    name: str = ""
    strides: Sequence[Any] | None = None

    def words(self) -> list[int]:
        out = [
            self.kind,
            *self.dtype,
            int(self.written),
            len(self.shape),
            *_rules(self.shape),
            int(self.strides is not None),
        ]
        return out + (_rules(self.strides) if self.strides is not None else [])


def _rules(values: Sequence[Any]) -> list[int]:
    out: list[int] = []
    for v in values:
        out += [3, 0] if v is None else [0, v] if isinstance(v, int) else [{"def": 1, "sym": 2}[v[0]], v[1]]
    return out


def build(source: str) -> str:
    """Compiles the kernel's C source to a shared object (once for each text) and returns its path."""
    text = HEADER + source
    folder = Path(tempfile.gettempdir()) / f"ts-native-tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    out = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:  # ranks that start together compile once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            _compile(text, out)
    return str(out)


def _compile(text: str, out: Path) -> None:
    aside = out.with_suffix(".tmp")
    line = [*native.compiler(), "-O2", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(aside)]
    subprocess.run(line, input=text.encode(), check=True)
    aside.rename(out)


def kernel(
    source: str,
    params: Sequence[P],
    *,
    nsyms: int = 0,
    arena: int = 0,
    threads: int = 64,
    flags: int = 0,
    cluster: tuple[int, int, int] = (1, 1, 1),
    max_blocks: int = 0,
    shared: int = 0,
    nregions: int = 0,
    fingerprint: int = 1,
    sites: Sequence[str] = (),
    name: str = "k",
) -> Callable[..., None]:
    """The launcher of a kernel written in C (see HEADER for what it may call)."""
    head = [1, len(params), nsyms, arena, threads, flags, *cluster, max_blocks, shared, nregions, fingerprint]
    words = [w for p in params for w in p.words()]
    lines = [*sites, *(f"param|{p.name}|||" for p in params)]
    desc = struct.pack(f"<{len(head) + len(words)}q", *head, *words)
    return native.make_kernel(build(source), desc, "\n".join(lines), name)
