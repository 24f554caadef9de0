"""A compiled kernel, called with torch tensors, NumPy arrays and numbers.

A call goes straight to the launcher in C, which checks the arguments; what is here in Python only looks at a
call that was refused. Where a call allocates outputs, or an extent is an expression that C does not compute,
a few lines are generated in front of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tilescale import devices, log, native, whole_rows
from tilescale.absent import stand_in
from tilescale.arrays import as_numpy, numpy_dtype
from tilescale.cache import Entry
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.explain import declaration, explain, extent_text, is_numpy, is_torch, place, written
from tilescale.parameter import KernelParam
from tilescale.pointed import Pointers, address_in

if TYPE_CHECKING:
    from tilescale.compiler.ir.program import TileProgram

#: dtypes that NumPy does not hand over by DLPack → DLPack's code, bits, and the integer of that width
_RETYPED = {"bfloat16": (4, 16, "uint16"), "float8_e4m3fn": (10, 8, "uint8"), "float8_e5m2": (12, 8, "uint8")}


class NoResources(TileTypeError, AttributeError):
    """Registers and occupancy of a kernel that is none of a GPU's; also an AttributeError, so that hasattr
    works."""


class Launchable:
    """A compiled kernel and its calls: what profilers, reports and files need of one.
    `tilescale.kernel.Kernel` is the whole."""

    #: the same kernel for the other kind of memory, where the target was "auto" and a call decided
    #: (undecided.py)
    elsewhere: Callable[[str], Launchable] | None = None

    def __init__(
        self,
        entry: Entry,
        label: str,
        program: Callable[[], TileProgram],
        *,
        out_idx: Sequence[int] = (),
        returns: Sequence[int] | None = None,
        from_cache: bool = False,
        instrument: bool = False,
    ):
        self.name: str = entry.meta["name"]
        self.device = devices.of_kernel(entry.meta)
        if "arch" in entry.meta:
            self.arch: str = entry.meta["arch"]
        if instrument and self.device.mute:
            log.say(
                "warning",
                f"{label}: {self.device.mute} log no events (instrument=True has no effect)",
                once=True,
            )
        self.label = label
        self.params = [KernelParam(p) for p in entry.meta["params"]]
        self.out_idx = tuple(out_idx)
        self.from_cache = from_cache
        self.instrument = instrument
        self.config: dict[str, Any] | None = None
        self.latency: float | None = None
        self.entry = entry
        self._meta, self._sites = entry.meta, entry.sites
        self._program = program
        self.returns = tuple(self.out_idx if returns is None else returns)
        self.texts: dict[str, str] = {}
        self.has_program = True
        self._inputs = [k for k in range(len(self.params)) if k not in self.out_idx]
        self._launch = self._launcher(entry)
        plain = not self.out_idx and not self.returns and not any(map(_unchecked, self.params))
        plain = plain and not any(p.get("of") == "float4_e2m1fn" or p.get("pointer") for p in self.params)
        plain = plain and not any(p.get("untouched") for p in self.params)
        self._run: Callable[..., Any] = self._launch if plain else _Front(self).function
        if any((entry.meta.get("on_ranks") or {}).values()):
            self._run = self._refusing(self._run)
        self._second: Callable[[Launchable, dict[str, int]], Callable[..., Any]] | None = None

    def _launcher(self, entry: Entry) -> Callable[..., Any]:
        """See `Device.load`."""
        return self.device.load(entry, self.label)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = self._positional(args, kwargs)
        try:
            return self._run(*args)
        except TileError:
            raise  # it says already what a person needs
        except (TypeError, ValueError, RuntimeError, BufferError, AttributeError, IndexError) as error:
            refused = error
        return self._again(args, refused)

    def _refusing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run`` behind a look at how many ranks launch: on some numbers the static checks refuse the
        kernel, before anything runs."""

        def launch(*args: Any) -> Any:
            refused = self._meta["on_ranks"].get(str(self._team_size(args)))
            if refused is not None:
                raise TileValueError(
                    refused["message"],
                    loc=place(refused["loc"]),
                    expected=refused["expected"],
                    hint=refused["hint"],
                )
            return run(*args)

        return launch

    def _team_size(self, args: tuple[Any, ...]) -> int:
        """How many ranks make this launch together: those whose memory its symmetric arguments are, or
        all."""
        comm = sys.modules.get("tilescale.comm")
        backend = None if comm is None else comm.behind()
        if backend is None:
            return 1
        for k, arg in zip(self._inputs, args, strict=False):  # what does not fit is refused by the launcher
            if self.params[k]["kind"] in ("symm", "signal", "packets") and (at := _address(arg)) is not None:
                found = backend.find(at)
                if found is not None:
                    return len(found[0].team.members)
        return int(backend.place.size)

    # -- calls that were refused
    # ----------------------------------------------------------------------------------
    @property
    def symbols(self) -> list[str]:
        """The names of the kernel's T.dynamic extents."""
        return list(self._meta["symbols"])

    @property
    def resources(self) -> dict[str, Any]:
        """On GPUs what the compiler and the launch take: ``registers`` and ``stack`` (bytes) a thread,
        ``spill_stores`` and ``spill_loads`` (bytes; not there where the compiler did not tell), ``shared``
        and ``dynamic_shared`` (bytes a block), ``threads`` a block; ``blocks`` a multiprocessor holds,
        ``occupancy`` (the share of its threads) and ``bound`` (what limits it), where the architecture's
        limits are known.

        Raises:
            NoResources: a kernel of another target, which takes none of these.
        """
        if "resources" not in self._meta:
            raise NoResources(
                f"{self.name} is a kernel of the target {self.target}, which takes nothing of a GPU",
                hint='target="cuda"',
            )
        found: dict[str, Any] = self._meta["resources"]
        return found

    @property
    def compiled(self) -> dict[str, Any]:
        """What the compiler says of its work on GPUs: ``copies``, ``loops``, ``mechanisms``, ``notes``, as
        `report` shows them."""
        return {k: self._meta[k] for k in ("copies", "loops", "mechanisms", "notes") if k in self._meta}

    @property
    def launches(self) -> int:
        """How many launches a call makes, one after the other."""
        return int(self._meta.get("launches", 1))

    @property
    def multiples(self) -> dict[str, int]:
        """What the values of symbolic extents are promised to be multiples of (``T.dynamic(…,
        multiple_of=8)``)."""
        return dict(self._meta["multiples"])

    @property
    def target(self) -> str:
        """What the kernel runs on: "cpu", "cuda" or "sim"."""
        return self.device.name

    @property
    def built_for(self) -> str:
        """The target as the compiler takes it, with its architecture: "cpu", "cuda:sm_90a"."""
        return f"{self.target}:{self._meta['arch']}" if "arch" in self._meta else self.target

    def program(self) -> TileProgram:
        """The kernel as tile IR, traced again."""
        return self._program()

    def with_second(self, make: Callable[[Launchable, dict[str, int]], Callable[..., Any]] | None) -> None:
        """Calls whose rows are whole vectors go to the kernel that ``make`` gives for these multiples of
        symbols (tilescale/whole_rows.py)."""
        if make is not None:
            self._second, self._run = make, whole_rows.chooser(self, self._run, make)

    @property
    def has_second(self) -> bool:
        """Whether calls whose rows are whole vectors take another kernel (tilescale/whole_rows.py)."""
        return isinstance(self._run, whole_rows.Chooser)

    @property
    def collective(self) -> bool:
        """Whether ranks meet in a launch, so that all must make it."""
        return bool(self._meta["collective"])

    @property
    def inputs(self) -> list[str]:
        """The names of the parameters that a call takes, in order."""
        return [self.params[k]["name"] for k in self._inputs]

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        names = self.inputs
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name in given:
                raise self._call_error(f"{name} is given twice")
            if name not in names:
                raise self._call_error(f"there is no parameter {name!r}")
            given[name] = value
        missing = [n for n in names if n not in given]
        if missing or len(args) > len(names):
            raise self._count_error(len(args) + len(kwargs), missing)
        return tuple(given[n] for n in names)

    def _call_error(self, message: str) -> TileTypeError:
        return TileTypeError(
            f"{self.name}: {message}",
            loc=place(self._meta["loc"]),
            expected=f"{self.name}({', '.join(self.inputs)})",
        )

    def _count_error(self, given: int, missing: list[str]) -> TileTypeError:
        what = f"; {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing" if missing else ""
        return self._call_error(
            f"{given} argument{'' if given == 1 else 's'} for {len(self._inputs)} parameters{what}"
        )

    def _again(self, args: tuple[Any, ...], error: Exception) -> Any:
        """A refused call: arguments that lie in the other kind of memory, or only have to be handed over
        differently, are; everything else becomes an error."""
        if self.elsewhere is not None:
            device = devices.device_of(args)
            if device not in (None, self.target):
                return self.elsewhere(device)(*args)
        if len(args) != len(self._inputs):
            raise self._count_error(len(args), self.inputs[len(args) :]) from None
        text = str(error)
        if not text.startswith("TS:"):  # an argument could not be handed over, so nothing has run
            handed = tuple(
                self._handed_over(self.params[k], a) for k, a in zip(self._inputs, args, strict=True)
            )
            if all(a is b for a, b in zip(handed, args, strict=True)):
                raise self._unusable(args) or error
            try:
                return _given_back(self._run(*handed), handed, args)
            except TileError:
                raise
            except (TypeError, ValueError, RuntimeError) as second:
                text = str(second)
                if not text.startswith("TS:"):
                    raise self._unusable(args) or second from None
        full: list[Any] = [None] * len(self.params)
        for k, a in zip(self._inputs, args, strict=True):
            full[k] = a
        raise explain(self.device, self._meta, self._sites, full, text) from None

    def _handed_over(self, p: dict[str, Any], arg: Any) -> Any:
        """An argument in a form that DLPack can carry: NumPy has no names for bfloat16 and fp8, and shares no
        read-only arrays."""
        if not is_numpy(arg):
            return arg
        if not arg.flags.writeable:
            if p["written"]:
                raise TileValueError(
                    f"{self.name}: {p['name']} is read-only, and the kernel writes it",
                    loc=place(p["loc"]),
                    hint=f"{p['name']}.copy()",
                )
        return self._carried(arg)

    def _carried(self, array: Any) -> Any:
        """A NumPy array as the launcher takes it."""
        if not array.flags.writeable:
            array = _writable_view(array)
        return _retyped(array) if array.dtype.name in _RETYPED else array

    def _unusable(self, args: tuple[Any, ...]) -> Exception | None:
        """What is wrong with an argument that is no tensor that DLPack carries to this machine's memory."""
        for k, arg in zip(self._inputs, args, strict=True):
            p = self.params[k]
            if p["kind"] == "scalar":
                continue
            if is_torch(arg) and (
                arg.device.type != self.device.memory or arg.layout != sys.modules["torch"].strided
            ):
                if arg.device.type != self.device.memory:
                    return explain(
                        self.device, self._meta, self._sites, self._full(args), f"TS:device:{k}:-1:1:0"
                    )
                return TileTypeError(
                    f"{self.name}: {p['name']} has the layout {arg.layout}",
                    loc=place(p["loc"]),
                    expected=declaration(p),
                    hint=f"{p['name']}.to_dense()",
                )
            if not is_torch(arg) and not is_numpy(arg) and not hasattr(arg, "__dlpack__"):
                return explain(
                    self.device, self._meta, self._sites, self._full(args), f"TS:kind:{k}:-1:tensor:object"
                )
            name = str(getattr(arg, "dtype", "")).removeprefix("torch.")
            if name and name != p["dtype"]:
                return explain(
                    self.device,
                    self._meta,
                    self._sites,
                    self._full(args),
                    f"TS:dtype:{k}:-1:{p['dtype']}:{name}",
                )
        return None

    def _full(self, args: tuple[Any, ...]) -> list[Any]:
        full: list[Any] = [None] * len(self.params)
        for k, a in zip(self._inputs, args, strict=True):
            full[k] = a
        return full

    def __repr__(self) -> str:
        shown = ", ".join(f"{p['name']}: {declaration(p)}" for p in self.params)
        return f"<kernel {self.name}({shown})>"


def _address(tensor: Any) -> int | None:
    """Where a tensor's memory begins; None where NumPy cannot see it."""
    if is_torch(tensor):
        return int(tensor.data_ptr())
    try:
        return int(as_numpy(tensor).__array_interface__["data"][0])
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError):
        return None


def _unchecked(p: dict[str, Any]) -> bool:
    """Whether a parameter has an extent or a stride that is an expression, which the launcher does not
    compute."""
    return any(isinstance(e, list) for e in (*p.get("shape", ()), *(p.get("strides") or ())))


def _given_back(result: Any, handed: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """A call's result, with the caller's own arguments where it returns what was handed over in their
    place."""
    if isinstance(result, tuple):
        return tuple(_given_back(r, handed, args) for r in result)
    return next((a for h, a in zip(handed, args, strict=True) if h is result), result)


def _retyped(array: Any) -> Any:
    code, bits, integer = _RETYPED[array.dtype.name]
    return native.retype(array.view(integer), code, bits)


class _Writable:
    """NumPy's description of an array with the word "read-only" left out; ``array`` keeps the memory
    alive."""

    def __init__(self, array: Any):
        held = array.__array_interface__
        self.array, self.__array_interface__ = array, {**held, "data": (held["data"][0], False)}


def _writable_view(array: Any) -> Any:
    """The memory of a read-only array as one that DLPack shares. The kernel was compiled not to write this
    parameter."""
    import numpy

    return numpy.asarray(_Writable(array)).view(array.dtype)


def _bytes_of(value: Any) -> Any:
    """A torch tensor of pairs of 4-bit floats, or of bytes with a sign, as one of bytes; anything else as it
    is."""
    torch = sys.modules.get("torch")
    if torch is not None and is_torch(value) and value.dtype in (torch.float4_e2m1fn_x2, torch.int8):
        return value.view(torch.uint8)
    return value


def _pairs_of(value: Any) -> Any:
    """Bytes that a call allocated, as torch's pairs of 4-bit floats."""
    return value.view(sys.modules["torch"].float4_e2m1fn_x2)


class _Front:
    """The generated lines in front of a launch: extents read off the inputs, expressions checked, outputs
    allocated."""

    def __init__(self, kernel: Launchable):
        self.kernel = kernel
        self.params = kernel.params
        self.names: dict[str, Any] = {
            "launch": kernel._launch,
            "Tensor": type(None),
            "is_torch_call": self.is_torch_call,
        }
        self.lines: list[str] = []
        self.known: dict[str, str] = {}
        pointers = [at for at, k in enumerate(kernel._inputs) if self.params[k].get("pointer")]
        if pointers:  # a tensor behind one is judged by the call's other arguments
            of = Pointers(kernel.name, kernel.device, self.params, kernel._inputs)
            self.names["address_in"] = lambda at, args: address_in(of, at, args, _address)
            self.lines.append(f"given = ({' '.join(f'a{k},' for k in kernel._inputs)})")
            self.lines += [f"a{kernel._inputs[at]} = address_in({at}, given)" for at in pointers]
        for k in kernel._inputs:
            if self.params[k].get("untouched"):
                self.names["stand_in"] = self.stand_in
                given = " ".join(f"a{i}," for i in kernel._inputs)
                self.lines.append(f"if a{k} is None: a{k} = stand_in({k}, ({given}))")
            if self.pairs(k):
                self.names["bytes_of"] = _bytes_of
                self.lines.append(f"a{k} = bytes_of(a{k})")
            self.read(k)
        for k in kernel._inputs:
            self.check(k)
        self.allocate()
        arguments = ", ".join(f"a{k}" for k in range(len(self.params)))
        self.lines.append(f"launch({arguments})")
        results = ", ".join(f"o{k}" if k in kernel.out_idx else f"a{k}" for k in kernel.returns)
        if results:
            self.lines.append(f"return {results}")
        head = ", ".join(f"a{k}" for k in kernel._inputs)
        text = f"def call({head}):\n" + "".join(f"    {line}\n" for line in self.lines)
        exec(compile(text, f"<call of {kernel.name}>", "exec"), self.names)
        self.function: Callable[..., Any] = self.names["call"]

    def read(self, k: int) -> None:
        """Symbols that stand alone in an input's shape or strides, where the launcher takes them from."""
        self.names["stride_of"], p = _stride_of, self.params[k]
        shape = [(e, f"a{k}.shape[{axis}]") for axis, e in enumerate(p.get("shape", ()))]
        strides = [(e, f"stride_of(a{k}, {axis})") for axis, e in enumerate(p.get("strides") or ())]
        for e, text in (*shape, *strides):
            if isinstance(e, str) and e not in self.known and self.wanted(e):
                self.known[e] = f"s{len(self.known)}"
                self.lines.append(f"{self.known[e]} = {text}")

    def pairs(self, k: int) -> bool:
        """Whether torch has a dtype of its own for two of a parameter's numbers: the launcher takes bytes."""
        return bool(self.params[k].get("of") == "float4_e2m1fn")

    def stand_in(self, k: int, args: tuple[Any, ...]) -> Any:
        """See `absent.stand_in`."""
        return stand_in(self.params, self.kernel._inputs, self.kernel.multiples, k, args)

    def wanted(self, symbol: str) -> bool:
        return any(
            symbol in _symbols(e)
            for k, p in enumerate(self.params)
            for e in (*p.get("shape", ()), *(p.get("strides") or ()))
            if isinstance(e, list) or k in self.kernel.out_idx
        )

    def code(self, e: Any, k: int) -> str:
        if isinstance(e, int):
            return str(e)
        if isinstance(e, str):
            if e not in self.known:
                p, extent = self.params[k], extent_text(written(self.params, e))
                raise TileValueError(
                    f"the extent {extent} of {p['name']} is in no shape of an argument of {self.kernel.name}"
                    ", so no call says what it is",
                    loc=place(p["loc"]),
                    hint=f"leave {p['name']} out of out_idx and pass it",
                )
            return self.known[e]
        op, a, b = e[0], self.code(e[1], k), self.code(e[2], k)
        return f"{op}({a}, {b})" if op in ("min", "max") else f"({a} {op} {b})"

    def check(self, k: int) -> None:
        p = self.params[k]
        for axis, e in enumerate(p.get("shape", ())):
            if isinstance(e, list):
                self.lines += [
                    f"want = {self.code(e, k)}",
                    f"if len(a{k}.shape) == {len(p['shape'])} and a{k}.shape[{axis}] != want:",
                    f'    raise ValueError(f"TS:shape:{k}:{axis}:{{want}}:{{a{k}.shape[{axis}]}}")',
                ]
        for axis, e in enumerate(p.get("strides") or ()):
            if isinstance(e, list):
                self.lines += [
                    f"want = {self.code(e, k)}",
                    f"if stride_of(a{k}, {axis}) != want:",
                    f'    raise ValueError(f"TS:stride:{k}:{axis}:{{want}}:{{stride_of(a{k}, {axis})}}")',
                ]

    def allocate(self) -> None:
        kernel = self.kernel
        if not kernel.out_idx:
            return
        tensors = [f"a{k}" for k in kernel._inputs if self.params[k]["kind"] != "scalar"]
        first = f"type({tensors[0]}) is Tensor or " if tensors else ""
        device = f"{tensors[0]}.device" if tensors and kernel.device.gpu else "device"
        self.lines.append(f"if {first}is_torch_call({', '.join(tensors)}):")
        numpy_lines = []
        for k in kernel.out_idx:
            p = self.params[k]
            if p["kind"] != "tensor" or p["strides"] is not None:
                raise TileTypeError(
                    f"{kernel.name}: out_idx names {p['name']}, which is {declaration(p)}",
                    loc=place(p["loc"]),
                    expected="T.Tensor, of which a call can allocate one",
                    hint=f"leave {p['name']} out of out_idx and pass it",
                )
            listed = ", ".join(self.code(e, k) for e in p["shape"])
            shape = f"({listed},)" if listed else "()"
            # As separate arguments extents are parsed faster than as a tuple; without any, torch wants the
            # tuple.
            made = "zeros" if p.get("added") else "empty"
            self.lines.append(
                f"    a{k} = o{k} = torch_{made}({listed or '()'}, dtype=torch_{p['dtype']}, device={device})"
            )
            if self.pairs(k):
                self.names["pairs_of"] = _pairs_of
                self.lines.append(f"    o{k} = pairs_of(a{k})")
            numpy_lines.append(f"    a{k} = o{k} = numpy_{made}({shape}, {p['dtype']!r})")
            if p["dtype"] in _RETYPED:
                numpy_lines.append(f"    a{k} = retyped(o{k})")
        self.names.update(numpy_empty=numpy_empty, numpy_zeros=numpy_zeros, retyped=kernel._carried)
        self.lines += ["else:", *numpy_lines]

    def is_torch_call(self, *tensors: Any) -> bool:
        """Whether outputs are torch tensors: as the first tensor is, or without one where torch is loaded."""
        torch = sys.modules.get("torch")
        if torch is None or not (is_torch(tensors[0]) if tensors else True):
            return False
        if self.names["Tensor"] is not torch.Tensor:
            self.names.update(
                Tensor=torch.Tensor,
                torch_empty=torch.empty,
                torch_zeros=torch.zeros,
                device=torch.device(self.kernel.device.memory),
            )
            for k in self.kernel.out_idx:
                dtype = self.params[k]["dtype"]
                self.names[f"torch_{dtype}"] = getattr(torch, dtype)
        return True


def _symbols(e: Any) -> set[str]:
    if isinstance(e, str):
        return {e}
    return set().union(*map(_symbols, e[1:])) if isinstance(e, list) else set()


def _stride_of(tensor: Any, axis: int) -> int:
    """In elements."""
    if is_numpy(tensor):
        return int(tensor.strides[axis]) // int(tensor.itemsize)
    return int(tensor.stride(axis))


def numpy_zeros(shape: tuple[int, ...], dtype: str) -> Any:
    import numpy

    return numpy.zeros(shape, numpy_dtype(dtype))


def numpy_empty(shape: tuple[int, ...], dtype: str) -> Any:
    import numpy

    return numpy.empty(shape, numpy_dtype(dtype))
