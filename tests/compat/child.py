"""Runs one program in a process of its own and writes what became of it, a line of JSON an event.

Modes: "compile": tensors have no data (torch's meta device), every kernel that the program makes is traced,
lowered for sm_90a and printed, calls of kernels do nothing. "nvcc" also compiles the text. "cpu" and "cuda":
the program itself, its measurements cut short. "time": its measurements. "peer" and "peer-time": the same of the
program as it was, under TileLang.
"""

from __future__ import annotations

import dis
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from tests.compat import figures, measure

TARGET = "cuda:sm_90a"


class Events:
    """Lines of a file, each written at once: a process that is killed has said what it knew."""

    def __init__(self, path: str, folder: str):
        self.file = open(path, "a", buffering=1)  # open as long as the process runs
        self.folder = folder

    def say(self, **event: Any) -> None:
        self.file.write(json.dumps(event) + "\n")

    def kernel(self, func: Any, what: str, error: BaseException | None = None) -> None:
        where = os.path.relpath(func.__code__.co_filename, self.folder)
        self.say(
            kind=what, file=where, kernel=func.__qualname__, error=None if error is None else shown(error)
        )


def shown(error: BaseException) -> str:
    """An error in a line: for one of TileScale's its message, for others the type too."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    message = getattr(error, "message", None)
    if message is not None:
        return f"{message} ({error.hint})" if getattr(error, "hint", None) else str(message)
    return f"{type(error).__name__}: {first}"


class Anything:
    """Stands for what is not there: a module that is not installed, the value of a tensor without data. Every
    use of it gives another one."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Anything()

    def __iter__(self) -> Any:
        frame = sys._getframe(1)
        word = next((i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti), None)
        names = word.arg if word is not None and word.opname == "UNPACK_SEQUENCE" and word.arg else 2
        return iter([Anything() for _ in range(names)])  # as many as are asked for

    def _same(self, *_: Any) -> Any:
        return Anything()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __neg__ = __getitem__ = __matmul__ = __and__ = _same
    __lshift__ = __rshift__ = __rlshift__ = __rrshift__ = __rmod__ = __xor__ = _same
    __or__ = __invert__ = __enter__ = __rpow__ = _same
    __lt__ = __gt__ = __le__ = __ge__ = _same

    def __eq__(self, other: object) -> Any:
        return False if other is None or isinstance(other, type) else Anything()

    def __ne__(self, other: object) -> Any:
        return True if other is None or isinstance(other, type) else Anything()

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True

    def __exit__(self, *_: Any) -> None:
        pass

    def __instancecheck__(self, value: Any) -> bool:
        return False

    def __setitem__(self, index: Any, value: Any) -> None:
        pass

    def __float__(self) -> float:
        return 1.0

    def __int__(self) -> int:
        return 1

    __index__ = __int__

    def __format__(self, spec: str) -> str:
        return "?"

    def __len__(self) -> int:
        return 1


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are neither TileLang's nor installed. What only references and other implementations need
    does not keep a program's kernels from being compiled."""

    NAMES = (
        "fla",
        "flash_attn",
        "triton",
        "flash_mla",
        "flashinfer",
        "bitblas",
        "transformers",
        "vllm",
    )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        made = types.ModuleType(spec.name)
        made.__path__ = []  # type: ignore[attr-defined]
        made.__getattr__ = lambda name: _attribute(name)  # type: ignore[method-assign]
        return made

    def exec_module(self, module: Any) -> None:
        pass


def lenient(package: str, *names: str) -> None:
    """Functions of a package that is installed give Anything where they refuse what there is."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return

    def either(own: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return own(*args, **kwargs)
            except Exception:  # noqa: BLE001  # it has classes of its own for what it does not know
                return Anything()

        return call

    for name in names:
        setattr(module, name, either(getattr(module, name)))


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        if name == "__version__":
            return "0.0"
        if name == "__file__":
            return "nowhere.py"
        raise AttributeError(name)
    return Anything()


# ---- torch without a GPU


def without_data(device: str) -> None:
    """From here on torch's "cuda" is ``device``: "meta", whose tensors have no data, or "cpu"."""
    import torch
    from torch.overrides import TorchFunctionMode

    meta = device == "meta"

    def moved(value: Any) -> Any:
        if isinstance(value, (int,)) and not isinstance(value, bool):
            return value
        text = str(value) if isinstance(value, (str, torch.device)) else ""
        return torch.device(device) if text.startswith("cuda") else value

    class Elsewhere(TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            name = getattr(func, "__name__", "")
            if "device" in kwargs:
                kwargs["device"] = (
                    torch.device(device) if isinstance(kwargs["device"], int) else moved(kwargs["device"])
                )
            if name == "cuda":
                whole = not args[0].is_floating_point() and args[0].numel() <= 1 << 16
                return args[0] if whole else args[0].to(device)
            if name == "to" and len(args) > 1 and isinstance(args[0], torch.Tensor):
                if meta and not args[0].is_floating_point() and args[0].numel() <= 1 << 16 and len(args) == 2:
                    args = (args[0], *(a for a in args[1:] if not str(a).startswith("cuda")))
                    if len(args) == 1 and not kwargs:
                        return args[0]
                args = (args[0], *map(moved, args[1:]))
            if any(isinstance(a, Anything) for a in (*args, *kwargs.values())):
                return Anything()
            if not meta:
                return func(*args, **kwargs)
            return shaped(func, args, kwargs)

    faults = (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError)
    makes = {"tensor", "arange", "randint", "randperm", "zeros", "ones", "full", "empty", "as_tensor"}

    def shaped(func: Any, args: Any, kwargs: Any) -> Any:
        """What a function gives where most tensors have no data. Small ones of whole numbers have: programs make
        extents of them."""
        if getattr(func, "__name__", "") in makes and kwargs.get("device") is not None:
            try:
                made = func(*args, **{**kwargs, "device": "meta"})
                if not made.is_floating_point() and made.numel() <= 1 << 16:
                    return func(*args, **{**kwargs, "device": "cpu"})
            except faults:
                pass
        try:
            return func(*args, **kwargs)
        except faults:
            pass
        moved_args = [
            a.to("meta") if isinstance(a, torch.Tensor) and a.device.type == "cpu" else a for a in args
        ]
        try:
            return func(*moved_args, **kwargs)
        except faults:
            return Anything()

    class Properties:
        multi_processor_count, total_memory, name, major, minor = 132, 141 << 30, "NVIDIA H200", 9, 0
        L2_cache_size, warp_size, regs_per_multiprocessor = 50 << 20, 32, 65536
        shared_memory_per_block_optin, shared_memory_per_multiprocessor = 227 << 10, 228 << 10
        max_threads_per_multi_processor, gcnArchName = 2048, ""

    class Event:
        def __init__(self, *_: Any, **__: Any):
            pass

        def record(self, *_: Any) -> None:
            pass

        wait = synchronize = record

        def elapsed_time(self, *_: Any) -> float:
            return 1.0

    def answer(value: Any) -> Any:
        def answers(*_: Any, **__: Any) -> Any:
            return value

        return answers  # one function for each name: torch keeps a table by function

    cuda: Any = torch.cuda
    for name, value in {
        "is_available": True, "get_device_capability": (9, 0), "get_device_properties": Properties(),
        "get_device_name": Properties.name, "current_device": 0, "device_count": 1, "synchronize": None,
        "empty_cache": None, "set_device": None, "manual_seed": None, "manual_seed_all": None,
        "current_stream": Anything(),
    }.items():  # fmt: skip
        setattr(cuda, name, answer(value))
    cuda.Event, cuda.device = Event, Anything
    if meta:
        for owner, names in (
            (torch.testing, ["assert_close", "assert_allclose"]),
            (torch, ["save", "manual_seed"]),
        ):
            for name in names:
                setattr(owner, name, answer(None))

        def of_data(name: str, value: Any) -> Any:
            own = getattr(torch.Tensor, name)
            return lambda self, *a, **k: value if self.is_meta else own(self, *a, **k)

        for name, value in {
            "item": 1, "tolist": [1, 1], "__bool__": True, "__float__": 1.0, "__int__": 1, "__index__": 1,
            "__format__": "?", "numpy": Anything(),
        }.items():  # fmt: skip
            setattr(torch.Tensor, name, of_data(name, value))
        torch.compile = lambda function=None, **_: function or (lambda f: f)  # type: ignore[assignment]
        own_backward = torch.Tensor.backward

        def backward(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                own_backward(self, *args, **kwargs)
            except faults:
                pass

        torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
        torch.Tensor.grad = property(lambda self: Anything(), lambda self, value: None)  # type: ignore[assignment]
        torch.Generator = type("Generator", (Anything,), {})  # type: ignore[assignment,misc]
        torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    if not meta:

        class Generator(torch.Generator):  # it is made by no function that the mode sees
            def __new__(cls, device: Any = "cpu") -> Any:
                return super().__new__(cls, moved(device))

        torch.Generator = Generator  # type: ignore[misc]
    Elsewhere().__enter__()
    if meta:
        torch.set_default_device("meta")


# ---- kernels that are compiled and not run


class Compiled:
    """A kernel that was compiled and is not run: what a call would return has no data."""

    def __init__(self, program: Any, outputs: list[int], returns: list[int], text: str):
        self.program, self.outputs, self.returns, self.text = program, outputs, returns, text
        self.config: dict[str, Any] = {}
        self.latency = self.ref_latency = 1.0
        self.params = program.params

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        from tilescale.language.symbolic import settle

        known: dict[str, int] = {}
        given = [p for k, p in enumerate(self.program.params) if k not in self.outputs]
        values = dict(zip([p.name for p in given], args)) | kwargs
        for p in given:
            shape = getattr(values.get(p.name), "shape", None)
            for symbol, extent in zip(getattr(p.spec, "shape", ()), shape or ()):
                known[str(symbol)] = extent
        made = []
        for k in self.returns:
            spec = self.program.params[k].spec
            try:
                shape = [
                    known.get(str(e), e) if not isinstance(e, int) else e for e in map(settle, spec.shape)
                ]
                made.append(torch.empty(shape, dtype=spec.dtype.as_torch(), device="meta"))
            except (TypeError, AttributeError):
                made.append(Anything())
        return tuple(made) if len(made) > 1 else made[0] if made else None

    def get_kernel_source(self, *_: Any, **__: Any) -> str:
        return self.text

    def get_profiler(self, *_: Any, **__: Any) -> Any:
        return Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


def compile_only(events: Events, build: bool) -> None:
    """Kernels of this process are made for sm_90a, and not run."""
    import tilescale
    import tilescale.eager
    import tilescale.profiler
    import tilescale.tuning.tuner as tuner
    from tilescale.compiler import driver, static
    from tilescale.errors import TileError

    jit = importlib.import_module("tilescale.jit")  # the package's attribute of that name is the function
    done: dict[Any, Any] = {}

    def make(func: Any, key: Any, trace: Any, outputs: Any) -> Any:
        if key in done:
            return done[key]
        program, made = None, Anything()
        try:
            program, text = trace(0), ""
            for part in range(program.launches):
                program = trace(part)
                lowered = driver.lower(program, TARGET)
                static.require(program)
                back = driver.backend(TARGET)
                printed = back.text(lowered, "cuda")
                text += printed
                if build:
                    path = Path(os.environ["TILESCALE_CACHE_DIR"]) / f"{os.getpid()}-{len(done)}-{part}.cubin"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.with_suffix(".cu").write_text(printed)
                    back.build(lowered, path)
            out = [k for k, p in enumerate(program.params) if p.output] if outputs is None else list(outputs)
            made = Compiled(program, out, program.returns if outputs is None else out, text)
        except TileError as error:
            events.kernel(func, "refused", error)
            if program is not None:  # what comes behind it in the program has its results to go on with
                out = (
                    [k for k, p in enumerate(program.params) if p.output]
                    if outputs is None
                    else list(outputs)
                )
                made = Compiled(program, out, program.returns if outputs is None else out, "")
        except Exception as error:  # noqa: BLE001  # whatever it is, it is in the table
            events.kernel(func, "refused", error)
            events.say(kind="traceback", text=traceback.format_exc()[-3000:])
        else:
            events.kernel(func, "compiled")
        done[key] = made
        return made

    def compile(func: Any, out_idx: Any = None, target: Any = None, **_: Any) -> Any:
        outer = getattr(func, "_compat_owner", None)
        outputs = jit.normal_out_idx(out_idx, len(func.params), func)
        return make(outer or func.func, (id(func), outputs), func.trace, outputs)

    def factory(self: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(a, Anything) for a in (*args, *kwargs.values())):
            events.say(
                kind="note", text=f"{self.func.__name__} was made with what depends on a tensor's values"
            )
            return Anything()
        try:
            made = self.prim_func(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # the table has it
            events.kernel(self.func, "refused", error)
            return Anything()
        made._compat_owner = self.func
        return compile(made, self.out_idx)

    def eager(self: Any, tensors: Any, constants: Any) -> Any:
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        def trace(part: int) -> Any:
            args = {
                name: TensorArg(name, tuple(map(int, t.shape)), self._dtype(name, t), "tensor")
                for name, t in tensors.items()
            }
            return trace_eager(self.func, args, dict(constants), part=part)

        key = (id(self), str({n: (t.shape, t.dtype) for n, t in tensors.items()}), str(constants))
        return make(self.func, key, trace, None)

    def ahead(self: Any, given: Any) -> Any:
        from tilescale.compiler.frontend.trace import TensorArg, trace_eager

        parameters = self.signature.parameters
        constants = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
        constants.update({k: v for k, v in given.items() if k in parameters})
        sizes = {k: v for k, v in given.items() if k not in parameters}
        names = [n for n in parameters if n not in constants]
        unknown = [n for n in names if parameters[n].annotation in ("int", "float", "str", int, float, str)]
        if unknown:
            events.say(
                kind="note", text=f"{self.name} is compiled without {', '.join(unknown)}, a tuner's choice"
            )
            return Anything()

        def trace(part: int) -> Any:
            tensors = {n: TensorArg(n, None, None, "tensor") for n in names}
            return trace_eager(self.func, tensors, dict(constants), sizes, part)

        return make(self.func, (id(self), str(given)), trace, None)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, Anything) for a in (*args, *kwargs.values())):
            events.say(kind="note", text=f"{self.name} was called with what depends on a tensor's values")
            return Anything()
        tensors, constants = self._split(args, kwargs)
        return self._kernel(tensors, constants)(*tensors.values())

    def first(self: Any, key: Any, given: Any, args: Any, kwargs: Any) -> Any:
        return self.candidates(given, args, kwargs)[0], 1.0

    jit.Factory._make = factory  # type: ignore[method-assign]
    jit.compile = tilescale.compile = compile  # type: ignore[assignment]
    tilescale.eager.Eager._kernel = eager  # type: ignore[method-assign]
    tilescale.eager.Eager._ahead = ahead  # type: ignore[method-assign]
    tilescale.eager.Eager.__call__ = call  # type: ignore[method-assign]
    tuner.Autotuned._find = first  # type: ignore[method-assign]
    tilescale.profiler.do_bench = lambda *_, **__: 1.0


# ---- the program


def preload(device: str | None, jobs: int = 1) -> None:
    """Imports, in the process that forks the others, what all of them need. It starts no thread and does not
    touch a GPU."""
    import torch
    import torch.testing

    torch.set_num_threads(1 if device is None else max(1, (os.cpu_count() or 1) // jobs))


def run(mode: str, folder: str, file: str, events: Events, lock: str | None = None) -> None:
    path = Path(folder) / file
    os.chdir(path.parent)
    sys.path[:0] = [str(path.parent), folder]
    compiling = mode in ("compile", "nvcc")
    if compiling or mode == "cpu":
        without_data("meta" if compiling else "cpu")
    if compiling:
        sys.meta_path.insert(0, StandIn())
        lenient("einops", "rearrange", "repeat", "reduce", "einsum")
        compile_only(events, mode == "nvcc")
    elif mode.startswith("peer"):
        figures.hook_peer(events.say, mode == "peer")
    else:
        figures.hook(events.say, mode != "time", mode != "cpu")
    sys.argv = [str(path)]
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001  # the table has it
        events.say(kind="import", error=shown(error))
        events.say(kind="traceback", text=traceback.format_exc()[-3000:])
        return
    events.say(kind="import", error=None)
    timing = mode in ("time", "peer-time")
    if timing:
        measure.gate(lock)
        events.say(kind="began")
        if measure.of_program(vars(module), path, events.say):
            return
    try:
        if path.name.startswith("test_"):
            if not compiling:  # the programs make their kernels themselves
                tests(module, events)
        elif compiling:
            going_on(path, events)
        else:
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (0, None):
            events.say(kind="run", error=f"exit code {leaving.code}")
            return
    except BaseException as error:  # noqa: BLE001  # the table has it
        events.say(kind="run", error=shown(error))
        events.say(kind="traceback", text=traceback.format_exc()[-3000:])
        return
    events.say(kind="run", error=None)
    if mode in ("cuda", "peer"):  # so that what it needs is compiled
        measure.of_program(vars(module), path, events.say)


def going_on(path: Path, events: Events) -> None:
    """The program as `__main__`, whose host code goes on behind what fails, and its other entries; the first
    failure is the run's."""
    from tests.compat import lenient
    from tests.compat.entries import ENTRIES

    errors: list[BaseException] = []
    module = types.ModuleType("__main__")
    hook = lenient.failed(errors.append, Anything)
    module.__dict__.update({"__file__": str(path), lenient.HOOK: hook})
    was, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(lenient.compiled(path.read_text(), str(path)), module.__dict__)
        for text in ENTRIES.get(os.path.relpath(path, events.folder), ()):
            try:
                eval(text, module.__dict__)
            except Exception as error:  # noqa: BLE001  # the table has it
                errors.insert(0, error)
    finally:
        sys.modules["__main__"] = was
    if errors:
        raise errors[0]


def tests(module: Any, events: Events) -> None:
    """The test functions of a file, each by itself."""
    failed = None
    for name, function in list(vars(module).items()):
        if not name.startswith("test_") or not callable(function):
            continue
        for values in _parameters(function):
            try:
                function(**values)
            except BaseException as error:  # noqa: BLE001  # the table has it
                if type(error).__name__ == "Skipped":
                    continue
                failed = failed or error
                events.say(kind="test", name=name, error=shown(error))
                events.say(kind="traceback", text=traceback.format_exc()[-3000:])
            else:
                events.say(kind="test", name=name, error=None)
    if failed is not None:
        raise failed


def _parameters(function: Any) -> list[dict[str, Any]]:
    """What pytest.mark.parametrize gives a test."""
    axes = []
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "parametrize":
            names = (
                [n.strip() for n in mark.args[0].split(",")]
                if isinstance(mark.args[0], str)
                else mark.args[0]
            )
            axes.append([dict(zip(names, v if len(names) > 1 else (v,))) for v in mark.args[1]])
    return [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)]
