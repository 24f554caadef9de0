"""Run by test_launcher.py in a process whose libcuda.so.1 is fake_cuda.c: makes launches and prints what the
driver saw, as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tilescale
import tilescale.language as T
from tests.unit.cuda.thread_kernels import I32, kernel, pointer
from tilescale import native, tracing
from tilescale.compiler.cuda import toolchain
from tilescale.compiler.cuda.describe import description
from tilescale.compiler.cuda.ops.tma import TensorMap
from tilescale.compiler.description import parameter_words
from tilescale.compiler.gpu.kernel import Source, ThreadKernel
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.cuda import synchronize


class DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class DLManaged(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class OnGpu:
    """An array that says it lies on a GPU."""

    is_cuda = True

    def __init__(self, array: np.ndarray, device: int = 0):
        self.array, self.device, self.dtype, self.shape = array, device, array.dtype.name, array.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, **_: Any) -> Any:
        a, n = self.array, self.array.ndim
        code = {"f": 2, "i": 0, "u": 1}[a.dtype.kind]
        self.extents, self.strides = (
            (ctypes.c_int64 * n)(*a.shape),
            (ctypes.c_int64 * n)(*(s // a.itemsize for s in a.strides)),
        )
        self.held = DLManaged(
            DLTensor(
                a.ctypes.data,
                DLDevice(2, self.device),
                n,
                DLDataType(code, a.itemsize * 8, 1),
                self.extents,
                self.strides,
                0,
            ),
            None,
            None,
        )
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.held), b"dltensor", None)


N, M = T.dynamic("n"), T.dynamic("m")


@T.prim_func
def scale(A: T.Tensor((N,), "float16"), B: T.Tensor((N,), "float16"), f: T.float32, w: T.int8):
    with T.Kernel(T.ceildiv(N, 128), threads=128) as bx:
        for i in T.Parallel(128):
            B[bx * 128 + i] = A[bx * 128 + i] * f


@T.prim_func
def mapped(A: T.Tensor((N, M), "float32"), C: T.StridedTensor((64, 32), (M, 1), "float32")):
    with T.Kernel(2, 4, T.min(N, 3), threads=256):
        for i, j in T.Parallel(64, 32):
            C[i, j] = A[i, j]


def launcher(thread: ThreadKernel, program: Any, name: str = "k") -> Callable[..., None]:
    table = description(thread, program, parameter_words(program))
    return native.make_cuda_kernel(
        b"cubin", struct.pack(f"<{len(table)}q", *table), name, thread.name, "\n".join(thread.sites)
    )


def scaled(**more: Any) -> Callable[..., None]:
    program = scale.trace()
    f, w, n = tirx.Var("f", "float32"), tirx.Var("w", "int8"), tirx.Var("n", I32)
    A, B = pointer("A", "float16"), pointer("B", "float16")
    body = tirx.BufferStore(B, tirx.BufferLoad(A, [n]), [n])
    sources = (
        Source("param", 1),
        Source("param", 0),
        Source("param", 2),
        Source("param", 3),
        Source("symbol", 0),
        Source("world"),
    )
    params = [B, A, f, w, n, tirx.Var("world", I32)]
    return launcher(
        kernel("scale", params, body, grid=((n + 127) // 128, 1, 1), sources=sources, **more), program
    )


def tensor_mapped() -> Callable[..., None]:
    program = mapped.trace()
    table, n = tirx.Var("map", ir.PointerType(ir.PrimType("uint8"))), program.symbols["n"]
    made = kernel(
        "mapped",
        [table],
        tirx.Evaluate(tirx.IntImm(I32, 0)),
        block=256,
        grid=(2, 4, tirx.min(n, tirx.IntImm(I32, 3))),
        sources=(Source("map", 0),),
        maps=(TensorMap(0, (64, 32), 128, 256),),
        shared_bytes=100_000,
        cluster=(2, 1, 1),
        cooperative=True,
        dependent=True,
    )
    return launcher(made, program)


def asserting() -> Callable[..., None]:
    """Its function takes the failure record alone."""
    record, sites = (
        pointer("failure", "int64"),
        ("assert||a.py|3|first", "assert||b.py|12|A | B is too great"),
    )
    return launcher(
        kernel(
            "asserts", [record], tirx.Evaluate(tirx.IntImm(I32, 0)), sources=(Source("failure"),), sites=sites
        ),
        scale.trace(),
    )


class Driver:
    """What the fake remembers."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        names = [
            "launches",
            "loads",
            "encodes",
            "grid",
            "block",
            "shared",
            "stream",
            "nattrs",
            "attrs",
            "device",
            "pushed",
            "attribute",
        ]
        counts = dict.fromkeys(names, 1) | {"grid": 3, "block": 3, "attrs": 16, "attribute": 2}
        self.layout, at = {}, 0
        for name in names:
            self.layout[name] = (at, counts[name])
            at += counts[name]
        self.words = (ctypes.c_int64 * at).in_dll(lib, "fake")
        self.map = (ctypes.c_int64 * 19).in_dll(lib, "fake_map")
        self.sizes = (ctypes.c_int64 * 16).in_dll(lib, "fake_sizes")
        self.params = (ctypes.c_char * 512 * 16).in_dll(lib, "fake_params")
        self.fail, self.current = (
            ctypes.c_int64.in_dll(lib, "fake_fail"),
            ctypes.c_int64.in_dll(lib, "fake_current"),
        )
        self.symbol = (ctypes.c_char * 64).in_dll(lib, "fake_symbol")

    def seen(self) -> dict[str, Any]:
        return {
            name: list(self.words[a : a + n]) if n > 1 else self.words[a]
            for name, (a, n) in self.layout.items()
        }

    def expect(self, *sizes: int) -> None:
        self.sizes[:] = [*sizes, *[0] * (16 - len(sizes))]

    def bytes(self, k: int) -> bytes:
        return bytes(self.params[k])[: self.sizes[k]]


@tilescale.jit
def twice(A, block: int = 128):
    n = T.dynamic("n")
    A: T.Tensor((n,), "float32")
    B = T.empty((n,), "float32")
    with T.Kernel(T.ceildiv(n, block), threads=128) as bx:
        for i in T.Parallel(block):
            B[bx * block + i] = A[bx * block + i] * 2
    return B


def objects(fake: Driver) -> dict[str, Any]:
    """Calls through kernel objects."""
    run = tilescale.compile(scale, target="cuda")
    a, b = np.zeros(300, "float16"), np.zeros(300, "float16")
    fake.expect(8, 8, 4, 1, 4)
    run(OnGpu(a), B=OnGpu(b), f=2.0, w=1)
    out: dict[str, Any] = {"grid": fake.seen()["grid"], "arch": run.arch}
    out["values"] = [struct.unpack("<f", fake.bytes(2))[0], struct.unpack("<i", fake.bytes(4))[0]]
    out["numpy"] = said(lambda: run(a, OnGpu(b), 2.0, 1))
    out["unaligned"] = said(lambda: run(OnGpu(a.view("int8")[1:-1].view("float16")), OnGpu(b), 2.0, 1))
    out["eager"] = twice.compile(OnGpu(a.astype("float32"))).target
    return out


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # its type is part of what is tested
        return f"{type(error).__name__}: {error}"
    return "nothing"


@T.prim_func
def told(A: T.SymmTensor((64,), "float32"), s: T.Signal((4,)), k: T.Signal((2,), keep=True), n: T.int32):
    with T.Kernel(n, threads=64), T.Scale("device") as (rank, ranks):
        T.copy(A[0:32], A[32:64], dst=(rank + 1) % ranks, signal=s[0])
        T.wait(s[0])


@T.prim_func
def told_without_order(s: T.Signal((4,))):
    with T.Kernel(1, threads=64, ordered=False), T.Scale("device") as (rank, ranks):
        T.signal(s[0], dst=(rank + 1) % ranks)


def exchanged(everyone: bool) -> Any:
    @T.prim_func
    def exchange(box: T.Packets((2, 2), "float32"), n: T.int32):
        with T.Kernel(n, threads=64), T.Scale("device") as (rank, ranks):
            x = T.alloc_fragment((2,), "float32")
            T.fill(x, 1.0)
            T.put_packets(x, box[rank, :], dst=(rank + 1) % ranks)
            if everyone:
                T.get_packets(box[(rank + ranks - 1) % ranks, :], x)

    return exchange


class Calls:
    """What the driver was asked for on a team: launches of the kernel and of ts_pass, events recorded and
    awaited."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libcuda.so.1")
        self.calls, self.count = (
            (ctypes.c_int64 * 64).in_dll(lib, "fake_calls"),
            ctypes.c_int64.in_dll(lib, "fake_ncalls"),
        )
        self.capturing = ctypes.c_int64.in_dll(lib, "fake_capturing")

    def during(self, call: Callable[[], Any]) -> list[Any]:
        self.count.value = 0
        text = said(call)
        kinds = {1: {2: "kernel", 5: "pass"}, 2: "record", 3: "wait"}
        rows = [self.calls[k : k + 3] for k in range(0, self.count.value, 3)]
        names = [[kinds[w][a], b] if w == 1 else [kinds[w], a] for w, a, b in rows]
        return names if text == "nothing" else [text]


def failures(record: int, number: int) -> list[str]:
    """What is said of launches of kernel ``number`` on the team whose words lie at 4096, as they leave it in
    the host's memory."""
    words, text, told = (ctypes.c_int64 * 14).from_address(record), ctypes.create_string_buffer(2000), []
    late_signal, late_entry, late_exit, late_meeting, _, _, no_rank, no_counter, _, late_packets = range(
        1, 11
    )
    for why, site, rank, value, seen, index in (
        (late_signal, 1, -1, 2, 1, 3),
        (late_entry, 0, 1, 7, 6, -1),
        (late_exit, -1, 0, 7, 6, -1),
        (late_meeting, 1, 1, 7, 6, -1),
        (no_rank, 0, 9, 0, 0, -1),
        (no_counter, 1, -1, 0, 0, -1),
        (late_packets, 1, -1, 7, 5, -1),
        (late_packets, 1, -1, 7, 0, -1),
        (late_packets, 1, -1, 7, -1, -1),
    ):
        words[:] = [2, why, number, 4096, site, 5, 6, 0, rank, 7, value, seen, 0, index]
        native.library().ts_gpu_says(text, len(text))
        told.append(text.value.decode().replace(__file__, "launches.py"))
    words[0] = 0
    return told


def on_a_team(fake: Driver) -> dict[str, Any]:
    """Launches on a team of two ranks, both of which are this process."""
    import tvm_ffi

    from tilescale import comm
    from tilescale.compiler import driver
    from tilescale.compiler.driver import backend

    comm.init()
    lib, segment = native.library(), 1 << 20
    arena = np.zeros(segment + 4096, np.uint8)
    base = -(-arena.ctypes.data // 4096) * 4096
    words = [ctypes.c_int64(x) for x in (segment, 8192, 0, 5_000_000_000)]
    lib.ts_gpu_heap(1, 0, (ctypes.c_int64 * 1)(base), *words)
    lib.ts_team_make(1, 2, (ctypes.c_int32 * 2)(0, 0), (ctypes.c_int32 * 2)(1, 1))
    lib.ts_gpu_team_at(1, ctypes.c_int64(4096))
    lib.ts_gpu_tag(ctypes.c_int64(8192), ctypes.c_int64(segment - 8192), 2)
    at = base - arena.ctypes.data

    def piece(offset: int, count: int, dtype: str) -> OnGpu:
        size = np.dtype(dtype).itemsize * count
        return OnGpu(arena[at + offset : at + offset + size].view(dtype))

    def made(prim: Any) -> Callable[..., None]:
        lowered = driver.lower(prim.trace(), "cuda:sm_90a")
        places[prim.name] = [s.kind == "team" for s in lowered.own.sources]
        table = backend("cuda:sm_90a").describe(lowered, instrument=False, fingerprint=77)
        desc = struct.pack(f"<{len(table.desc)}q", *table.desc)
        return native.make_cuda_kernel(b"cubin", desc, prim.name, lowered.own.name, "\n".join(table.sites))

    def ends(name: str, call: Callable[[], Any]) -> list[int]:
        """Ordered, and what is to be done when all blocks have ended, as a kernel is told."""
        fake.expect(*(512 if team else 4 for team in places[name]))
        calls.during(call)
        view = struct.unpack("<4i5q2i", fake.bytes(places[name].index(True))[:64])
        fake.expect(512)  # of ts_pass
        return [view[2], view[9]]

    places: dict[str, list[bool]] = {}
    run, calls = made(told), Calls()
    args = (piece(8192, 64, "float32"), piece(12288, 4, "int64"), piece(16384, 2, "int64"))
    out: dict[str, Any] = {"first": calls.during(lambda: run(*args, 3))}
    carveouts = (ctypes.c_int64 * 6).in_dll(ctypes.CDLL("libcuda.so.1"), "fake_carveout")
    out["carveouts"] = [carveouts[of] for of in (2, 5)]  # of the kernel and ts_pass
    fake.expect(512)  # of ts_pass, a launch without blocks
    calls.during(lambda: run(*args, 0))
    view = struct.unpack("<4i5q2i", fake.bytes(0)[:64])
    bases = struct.unpack("<2q", fake.bytes(0)[64 + 264 : 64 + 264 + 16])
    out["view"] = [
        *view[:3],
        *view[4:5],
        view[7],
        0 < view[8] < 1 << 32,
        view[9],
        *(b == base for b in bases),
    ]
    counters = struct.unpack("<2iq", fake.bytes(0)[64:80])
    out["counters"] = [counters[0], counters[2] == args[1].array.ctypes.data]
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x77):
        out["other stream"] = calls.during(lambda: run(*args, 3))
    other = made(told)
    for number in (1, 2):
        calls.capturing.value = number
        out[f"captured {number}"] = calls.during(lambda: run(*args, 3))
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x55):
            out[f"another branch {number}"] = calls.during(lambda: other(*args, 3))
    calls.capturing.value = 0
    out["no blocks"] = calls.during(lambda: run(*args, 0))
    box, packets = piece(20480, 24, "int64"), [made(exchanged(e)) for e in (True, False)]
    out["exchanged"] = calls.during(lambda: packets[0](box, 1))
    out["with flags"] = calls.during(lambda: packets[1](box, 1))
    out["not counted"] = calls.during(lambda: packets[0](box, 0))
    out["counted"] = calls.during(lambda: packets[1](box, 0))
    counters = struct.unpack("<2iq", fake.bytes(0)[64:80])
    out["box"] = [counters[0], counters[2] == box.array.ctypes.data]
    without_order = made(told_without_order)
    out["unordered"] = calls.during(lambda: without_order(args[1]))
    out["ends"] = [
        ends("told", lambda: run(*args, 3)),
        ends("exchange", lambda: packets[1](box, 1)),
        ends("told_without_order", lambda: without_order(args[1])),
    ]
    out["resident"] = calls.during(lambda: run(*args, 41))
    out["says"] = failures(view[5], view[3])
    out["ordinary"] = calls.during(lambda: run(OnGpu(np.zeros(64, "float32")), *args[1:], 3))
    os.environ["TILESCALE_SPARE"] = "3"
    native.configure()
    beside = made(told)
    out["beside others"] = [calls.during(lambda count=count: beside(*args, count)) for count in (28, 29)]
    del os.environ["TILESCALE_SPARE"]
    native.configure()
    return out


def logged(fake: Driver) -> dict[str, Any]:
    """An instrumented kernel: what it is given to log into, and what is read of two spans there."""
    from tilescale.compiler import driver
    from tilescale.compiler.driver import backend

    lowered = driver.lower(scale.trace(), "cuda:sm_90a", instrument=True)
    table = backend("cuda:sm_90a").describe(lowered, instrument=True, fingerprint=7)
    desc = struct.pack(f"<{len(table.desc)}q", *table.desc)
    run = native.make_cuda_kernel(b"cubin", desc, "traced", lowered.own.name, "\n".join(table.sites))
    kinds = [s.kind for s in lowered.own.sources]
    fake.expect(*(32 if kind == "log" else 8 for kind in kinds))
    a, b = (OnGpu(np.zeros(300, "float16")) for _ in range(2))
    run(a, b, 0.5, 1)
    began = time.monotonic_ns()  # between the comparisons of clocks, as all launches are
    events, taken, capacity, kernel, team = struct.unpack("<3q2i", fake.bytes(kinds.index("log")))
    site = next(k for k, line in enumerate(table.sites) if line.startswith("kernel|"))
    ahead = 1_000_000_007
    slots, lost = ctypes.c_int64.from_address(taken), ctypes.c_int64.from_address(events - 128)
    assert slots.value == lost.value == 0
    for k, (begin, end) in enumerate([(5000, 9000), (6000, 7024)]):
        record = struct.pack(
            "<3q6i",
            began + begin + ahead,
            began + end + ahead,
            0,
            site,
            -1,
            k,
            32 * k,
            kernel,
            team << 16 | 9,
        )
        ctypes.memmove(events + 48 * k, record, 48)
    slots.value, lost.value = 4, 3  # two of the slots were never used; three events found none
    (log,) = native.gpu_logs()
    # Each reading compares clocks anew, and ``log.within`` says nothing of another reading's times.
    with mock.patch.dict(native.events.__globals__, gpu_logs=lambda: [log]):
        read = native.events()
    out = {
        "given": [capacity, team, events % 64],
        "events": [[e.ns - began, e.kernel, e.phase, e.block, e.thread, e.kind, e.device] for e in read],
        "lost": native.lost_events(),
        "clock": [
            len(log.samples),
            [s.gpu - s.host - ahead for s in log.samples],
            log.within,
            log.drift,
            log.tick,
        ],
        "spans": [[s.block, s.rank, s.multiprocessor] for s in log.spans],
    }
    with tempfile.TemporaryDirectory() as folder:
        tracing.leave(Path(folder))
        (path,) = Path(folder).iterdir()
        left = json.loads(path.read_text(encoding="utf-8"))
    out["left"] = [
        left["rank"],
        left["lost"],
        len(left["events"]),
        len(left["clocks"]),
        dict(zip(left["fields"], left["events"][0], strict=True))["waited"],
    ]
    native.clear_events()
    assert slots.value == 0
    return out | {"cleared": [len(native.events()), native.lost_events()]}


def by_graphs(fake: Driver) -> dict[str, Any]:
    """Calls that come again: how many graphs were made, given other arguments, launched and destroyed behind
    each of some calls."""
    import tvm_ffi

    graphs, out = (ctypes.c_int64 * 4).in_dll(ctypes.CDLL("libcuda.so.1"), "fake_graphs"), dict[str, Any]()
    capturing = ctypes.c_int64.in_dll(ctypes.CDLL("libcuda.so.1"), "fake_capturing")
    fake.expect(8, 8, 4, 1, 4, 4)
    run, arrays = scaled(), [np.zeros(300, "float16") for _ in range(3)]
    on = [OnGpu(a) for a in arrays]

    def after(*calls: tuple[Any, ...]) -> list[Any]:
        launches, was = fake.seen()["launches"], list(graphs)
        for each in calls:
            run(*each)
        at = struct.unpack("<q", fake.bytes(1))[0], struct.unpack("<f", fake.bytes(2))[0]
        right = at == (calls[-1][0].array.ctypes.data, calls[-1][2])
        return [
            fake.seen()["launches"] - launches,
            [now - then for now, then in zip(graphs, was, strict=True)],
            right,
        ]

    first, second = (on[0], on[1], 0.5, 1), (on[2], on[1], 0.25, 1)
    out["twice"] = after(first, first)
    out["often"] = after(first, first)
    out["other number"] = after((*first[:2], 0.125, 1))
    out["in turn"] = after(*[second, first] * 4)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x77):
        out["other stream"] = after(*[first] * 4) + [fake.seen()["stream"]]
    capturing.value = 1
    out["captured"] = after(first)
    capturing.value = 0
    out["other shape"] = after((OnGpu(arrays[0][:200]), OnGpu(arrays[1][:200]), 0.5, 1)) + [
        fake.seen()["grid"]
    ]
    rows = []
    for stream in list(range(0x81, 0x86)) * 3:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            rows.append(after(first))
    out["many streams"] = [
        sum(row[0] for row in rows),
        [sum(kind) for kind in zip(*(row[1] for row in rows), strict=True)],
        rows[-1][2],
    ]
    out["again"] = after(*[first] * 3)
    was = graphs[3]
    del run
    out["destroyed"] = graphs[3] - was
    fake.fail.value, run = 6, scaled()
    out["refused"] = after(*[first] * 5)
    fake.fail.value = 0
    fake.expect()
    return out


def main() -> dict[str, Any]:
    out: dict[str, Any] = {
        "missing": native.cuda_missing(),
        "capability": [native.cuda_capability(), native.cuda_capability(7)],
    }
    fake, run = Driver(), scaled()
    a, b = np.zeros(300, "float16"), np.zeros(300, "float16")
    args = (OnGpu(a), OnGpu(b), 0.1, -3)
    if out["missing"]:
        return out | {"call": said(lambda: run(*args))}
    import tvm_ffi

    fake.expect(8, 8, 4, 1, 4, 4)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), 0x1234):
        run(*args)
    values = [struct.unpack("<q", fake.bytes(k))[0] for k in (0, 1)]
    out["scale"] = fake.seen() | {
        "pointers": [values[0] == b.ctypes.data, values[1] == a.ctypes.data],
        "scalars": [
            struct.unpack("<f", fake.bytes(2))[0],
            struct.unpack("<b", fake.bytes(3))[0],
            *(struct.unpack("<i", fake.bytes(k))[0] for k in (4, 5)),
        ],
        "symbol": fake.symbol.value.decode(),
    }
    run(*args)
    out["again"] = fake.seen()
    out["empty"] = said(lambda: run(OnGpu(a[:0]), OnGpu(b[:0]), 1.0, 1)), fake.seen()["launches"]
    out["refused"] = {
        "device": said(lambda: run(a, OnGpu(b), 1.0, 1)),
        "dtype": said(lambda: run(OnGpu(a.astype("float32")), OnGpu(b), 1.0, 1)),
        "shape": said(lambda: run(OnGpu(a), OnGpu(b[:7]), 1.0, 1)),
        "gpu": said(lambda: run(OnGpu(a), OnGpu(b, 1), 1.0, 1)),
        "overlap": said(lambda: run(OnGpu(a), OnGpu(a), 1.0, 1)),
        "range": said(lambda: run(OnGpu(a), OnGpu(b), 1.0, 300)),
        "nargs": said(lambda: run(OnGpu(a))),
    }
    fake.current.value = 0
    run(OnGpu(a, 1), OnGpu(b, 1), 1.0, 1)
    out["other device"] = fake.seen()
    fake.current.value = -1
    run(*args)
    out["no context"] = fake.seen()
    fake.current.value, fake.fail.value = 0, 2
    out["launch fails"] = said(lambda: scaled()(*args))
    fake.fail.value = 1
    out["load fails"] = said(lambda: scaled()(*args))
    fake.fail.value = 0

    maps = tensor_mapped()
    fake.expect(128)
    A, C = np.zeros((5, 64), "float32"), np.zeros((64, 64), "float32")[:, :32]
    before = fake.seen()["encodes"]
    maps(OnGpu(A), OnGpu(C))
    out["mapped"] = fake.seen() | {
        "map": list(fake.map),
        "of A": struct.unpack("<q", fake.bytes(0)[:8])[0] == A.ctypes.data,
    }
    others = [np.zeros((k, 64), "float32") for k in (1, 2, 3)]
    counts = []
    for each in (A, *others, A, *others):
        maps(OnGpu(each), OnGpu(C))
        counts.append(fake.seen()["encodes"] - before)
    out["encodes"], out["grids"] = counts, fake.seen()["grid"]
    nothing = np.zeros((5, 0), "float32")
    out["empty map"] = [
        said(lambda: maps(OnGpu(nothing), OnGpu(np.lib.stride_tricks.as_strided(C, (64, 32), (0, 4))))),
        *fake.map,
    ]
    base = struct.unpack("<q", fake.bytes(0)[:8])[0]
    out["empty map"] += [base % 16, list((ctypes.c_float * 4).from_address(base))]
    odd = np.zeros((5, 70), "float32")[:, :66]
    out["tma"] = said(
        lambda: maps(OnGpu(np.zeros((5, 63), "float32")), OnGpu(np.zeros((64, 63), "float32")[:, :32]))
    )
    out["align"] = said(lambda: maps(OnGpu(np.zeros(5 * 64 + 1, "float32")[1:].reshape(5, 64)), OnGpu(C)))
    out["contig"] = said(lambda: maps(OnGpu(odd), OnGpu(C)))
    out["graphs"] = by_graphs(fake)
    out["log"] = logged(fake)
    out["team"] = on_a_team(fake)
    if toolchain.find_nvcc() is not None:
        out["objects"] = objects(fake)
    fake.expect()
    fake.fail.value = 4
    out["failed"] = [
        said(call)
        for call in (
            asserting().__call__,
            lambda: asserting()(*args),
            native.cuda_synchronize,
            lambda: run(*args),
        )
    ]
    told = ctypes.create_string_buffer(200)
    native.library().ts_gpu_says(told, len(told))
    out["failed"] += [said(synchronize), native.cuda_failure(), told.value.decode()]
    return out


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
