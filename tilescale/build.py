"""From a kernel's function to a `Kernel`: the disk cache where it has the code, the compiler where it has
not."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilescale import advice, cache, devices, env, log
from tilescale.cache import Entry
from tilescale.fingerprint import Fingerprint, Unhashable, environment
from tilescale.kernel import Kernel
from tilescale.language.funcs import PrimFunc
from tilescale.language.symbolic import SymExpr, settle
from tilescale.several import Several

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram
    from tilescale.launching import Launchable

_LABEL = 400
_unkept: list[tempfile.TemporaryDirectory[str]] = []


def label_of(name: str, constants: dict[str, Any]) -> str:
    """``gemm(M=64, dtype=float16)``: a kernel with its constants, for reports and for ranks that compare what
    they launch."""
    shown = []
    for key, value in constants.items():
        known = settle(value)
        if isinstance(known, (int, float, str, bool, SymExpr)) and len(str(known)) < 64:
            shown.append(f"{key}={known}")
    text = f"{name}({', '.join(shown)})" if shown else name
    return text if len(text) <= _LABEL else text[: _LABEL - 2] + "…)"


def captured(func: Any) -> dict[str, Any]:
    """The closure values of a function, by name."""
    out = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        try:
            out[name] = cell.cell_contents
        except ValueError:  # a name that the enclosing function has not bound yet
            continue
    return out


def key_of(what: str, *values: Any) -> str | None:
    """The cache key of a kernel made from ``values``; None, said once, where something in it has no hash."""
    fp = Fingerprint()
    fp.put(*environment())
    try:
        for value in values:
            fp.value(value, what)
    except Unhashable as error:
        log.say("info", f"{what} is not cached on disk: {error.message}", once=True)
        return None
    return fp.hexdigest()


def number_of(key: str) -> int:
    """64 bits of a key, as ranks compare them."""
    return int.from_bytes(bytes.fromhex(key)[:8], "little", signed=True)


def ranks() -> int | None:
    """On how many ranks a kernel will run at most, for the static checks. Nothing is known where nobody has
    called `comm.init` (nor imported it: then this does not either)."""
    comm = sys.modules.get("tilescale.comm")
    return comm.world_size() if comm is not None and comm.is_initialized() else None


def for_this_job(key: str, entry: Entry, program: Callable[[], TileProgram]) -> Entry:
    """A cached entry that knows what the static checks say of it on all ranks of this job. Where it was made
    in a job of another size it is traced and checked now, by one of the ranks that ask at once: only that one
    loads the compiler, and the disk remembers."""
    n = ranks()
    if n is None or not entry.meta["collective"] or str(n) in entry.meta["on_ranks"]:
        return entry
    # Not the kernel's own lock, which an eager kernel's caller may hold; nobody who holds this one takes
    # another.
    with cache.locked(key, "ranks-"):
        entry = cache.lookup(key) or entry
        if str(n) in entry.meta["on_ranks"]:
            return entry
        from tilescale.compiler import driver

        meta = {**entry.meta, "on_ranks": {**entry.meta["on_ranks"], **driver.on_ranks(program(), n)}}
        return cache.amend(entry, meta)


def compiled(
    key: str | None,
    program: Callable[[], TileProgram],
    label: str,
    instrument: bool,
    target: str,
    *,
    locked: bool = False,
) -> tuple[Entry, bool]:
    """The compiled kernel behind a key, and whether it came from the disk. ``program`` traces it; ``locked``:
    the caller holds a lock of the cache and has looked already."""

    def build(path: str) -> tuple[dict[str, Any], list[int], list[str]]:
        from tilescale.compiler import driver

        start = time.perf_counter()
        number = None if key is None else number_of(key)
        made = driver.compile_program(
            program(), path, target=target, instrument=instrument, fingerprint=number, world=ranks()
        )
        by = f" by {made.meta['compiler']}" if "compiler" in made.meta else ""
        log.say("info", f"compiled {label} for {target}{by} in {(time.perf_counter() - start) * 1e3:.0f} ms")
        for note in made.meta.get("notes", ()):  # what the passes did that the author may not expect
            log.say("info", note)
        return made.meta, made.desc, made.sites

    if key is not None and env.DUMP.get() is None:
        entry, cached = (cache.store(key, build, label), False) if locked else cache.get(key, build, label)
        return (for_this_job(key, entry, program) if cached else entry), cached
    if key is not None:
        log.say(
            "info", "TILESCALE_DUMP is set: kernels are compiled anew, so that every pass is seen", once=True
        )
    if not _unkept:  # removed when the process ends
        _unkept.append(tempfile.TemporaryDirectory(prefix="tilescale-"))
    handle, path = tempfile.mkstemp(suffix=".so", dir=_unkept[0].name)
    os.close(handle)
    meta, desc, sites = build(path)
    return Entry(path, desc, sites, meta), False


def kernel_of(
    entry: Entry,
    cached: bool,
    label: str,
    program: Callable[[], TileProgram],
    instrument: bool,
    out_idx: tuple[int, ...] | None = None,
) -> Kernel:
    """A `Kernel`. ``out_idx`` None: an eager kernel, whose trace says what it allocates and returns."""
    returns: Any = entry.meta["returns"] if out_idx is None else out_idx
    if out_idx is None:
        allocated = [k for k, p in enumerate(entry.meta["params"]) if p["output"]]
    else:
        allocated = list(with_workspaces(out_idx, entry.meta["params"]))
    made = Kernel(
        entry, label, program, out_idx=allocated, returns=returns, from_cache=cached, instrument=instrument
    )
    made.with_second(for_whole_rows)
    if not made.has_second:  # which calls take which is known at the calls
        advice.give(entry.meta)
    return made


def for_whole_rows(kernel: Launchable, multiples: dict[str, int]) -> Kernel:
    """The same kernel with a promise of its symbols, compiled or taken from the cache; it explains its own
    errors."""

    def program() -> TileProgram:
        from tilescale.compiler.builder.state import promising

        with promising(multiples):
            return kernel.program()

    key = kernel.entry.key
    key = None if key is None else digest(f"{key} rows {sorted(multiples.items())}")
    label = f"{kernel.label}, whole rows"
    entry, cached = compiled(key, program, label, kernel.instrument, kernel.built_for)
    advice.give(entry.meta)
    return Kernel(
        entry, label, program, out_idx=kernel.out_idx, returns=kernel.returns, from_cache=cached,
        instrument=kernel.instrument,
    )  # fmt: skip


def with_workspaces(out_idx: tuple[int, ...], params: list[dict[str, Any]]) -> tuple[int, ...]:
    """What a call allocates: its results, and the memory of its launches."""
    return (*out_idx, *(k for k, p in enumerate(params) if p["output"] and k not in out_idx))


def loaded(
    key: str | None,
    program: Callable[[], TileProgram],
    label: str,
    instrument: bool,
    target: str,
    out_idx: tuple[int, ...] | None = None,
) -> Kernel:
    """The kernel behind a key. A cached object that does not load is thrown away and built again, once."""
    entry, cached = compiled(key, program, label, instrument, target)
    try:
        return kernel_of(entry, cached, label, program, instrument, out_idx)
    except RuntimeError as error:
        if not cached or key is None:
            raise
        log.say("warning", f"the cached kernel {label} does not load ({error}) and is rebuilt")
    cache.discard(key)
    return kernel_of(*compiled(key, program, label, instrument, target), label, program, instrument, out_idx)


def from_prim_func(
    func: PrimFunc, out_idx: tuple[int, ...], instrument: bool, name: str | None, target: str
) -> Kernel:
    """The kernel of a prim_func for a target ("cpu", "cuda:sm_90a")."""
    label = name or label_of(func.name, captured(func.func))

    def part(k: int) -> Kernel:
        key = key_of(func.name, func, instrument, *([k] if k else []), *devices.code_key(target))
        return loaded(key, lambda: func.trace(k), label_of_launch(label, k), instrument, target, out_idx)

    return in_order(part)


def label_of_launch(label: str, k: int) -> str:
    """What launch k, counted from 0, of a call is called."""
    return f"{label}, launch {k + 1}" if k else label


def in_order(part: Callable[[int], Kernel]) -> Kernel:
    """The kernel that ``part(0)`` is, or where its calls make several launches the whole: ``part(k)`` is
    launch
    k."""
    first = part(0)
    count = first.launches
    return first if count == 1 else Several(first, [part(k) for k in range(1, count)])


def digest(text: str) -> str:
    """Of the form of a key."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
