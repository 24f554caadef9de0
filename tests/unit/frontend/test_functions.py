"""What a kernel may call and refer to: closures, globals, helpers, macros, methods; and where errors in them
point."""

from __future__ import annotations

import functools
import linecache
import textwrap
import types

import pytest
import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import TileError, TileNameError, TileSyntaxError, TileTypeError, TileValueError

SCALE = 5


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def clamp_to(x, low, high):
    """A plain helper: no control flow over device values, so it needs no mark."""
    return T.min(T.max(x, low), high)


@T.macro
def collatz_steps(start, limit):
    n = T.alloc_var("int32", start)
    steps = T.alloc_var("int32")
    while n != 1 and steps < limit:
        if n % 2 == 0:
            n //= 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def test_closures_globals_helpers_and_macros():
    inner = 7
    table = {"a": 1, "b": [2, 3]}

    def offset(i):
        return i * inner + table["b"][1]

    @T.macro
    def twice(f, x):
        if x > 2:
            y = f(x)
        else:
            y = f(f(x))
        del y
        return f(f(x))

    @T.macro
    def both(x):
        return x + 1, x * 2

    @T.prim_func
    def kernel(C: T.Tensor((8, 8), "int32")):
        with T.Kernel(8) as b:
            C[0, b] = offset(b) + SCALE
            C[1, b] = clamp_to(b, 2, 5)
            C[2, b] = collatz_steps(b + 1, 100)
            C[3, b] = twice(lambda v: v * 3, b)
            p, q = both(b)
            C[4, b] = p * 100 + q
            square = lambda v: v * v  # noqa: E731
            C[5, b] = square(b) + sum([k * b for k in range(3)])
            C[6, b] = functools.reduce(lambda x, y: x + y, [b + k for k in range(4)])
            C[7, b] = max(b, 3) + min(b, 2)

    c = ints(8, 8)
    run(kernel)(c)
    steps = []
    for n in range(1, 9):
        count = 0
        while n != 1:
            n, count = n // 2 if n % 2 == 0 else 3 * n + 1, count + 1
        steps.append(count)
    r = range(8)
    assert c.tolist() == [
        [b * 7 + 3 + 5 for b in r],
        [min(max(b, 2), 5) for b in r],
        steps,
        [9 * b for b in r],
        [(b + 1) * 100 + 2 * b for b in r],
        [b * b + 3 * b for b in r],
        [4 * b + 6 for b in r],
        [max(b, 3) + min(b, 2) for b in r],
    ]


def test_nested_functions_follow_device_conditions_like_the_kernel_around_them():
    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32")):
        with T.Kernel(8) as b:

            def put(value):
                if b % 2 == 0:
                    C[b] = value
                else:
                    C[b] = -value

            put(b + 10)

    c = ints(8)
    run(kernel)(c)
    assert c.tolist() == [b + 10 if b % 2 == 0 else -(b + 10) for b in range(8)]


def test_factories_trace_the_same_source_with_other_constants():
    def make(n, flag):
        @T.prim_func
        def kernel(C: T.Tensor((n,), "int32")):
            with T.Kernel(n) as b:
                if flag:
                    C[b] = n
                else:
                    C[b] = b

        return kernel

    for n, flag in ((3, True), (5, False)):
        c = ints(n)
        run(make(n, flag))(c)
        assert c.tolist() == ([n] * n if flag else list(range(n)))


def test_methods_can_make_kernels_and_be_macros():
    class Model:
        def __init__(self, width):
            self.width = width

        @T.macro
        def activation(self, x):
            if x > self.width:
                y = x  # only under the device if, used nowhere
            return T.max(x, self.width)

        def kernel(self):
            @T.prim_func
            def main(C: T.Tensor((8,), "int32")):
                with T.Kernel(8) as b:
                    C[b] = self.activation(b)

            return main

    c = ints(8)
    run(Model(4).kernel())(c)
    assert c.tolist() == [max(b, 4) for b in range(8)]


def test_annotations_postponed_and_not():
    n = 4

    def local(width):
        @T.prim_func
        def kernel(A: T.Tensor((n, width), "float32"), C: T.Tensor((n, width), "float32")):
            with T.Kernel(n) as b:
                for i in T.Parallel(width):
                    C[b, i] = A[b, i] + width

        return kernel

    a, c = torch.randn(4, 6), torch.zeros(4, 6)
    run(local(6))(a, c)
    assert c.equal(a + 6)

    space: dict = {}
    source = (
        "import tilescale.language as T\n@T.prim_func\ndef kernel(C: T.Tensor((3,), T.int32), s: T.int32):\n"
        + textwrap.indent("with T.Kernel(3) as b:\n    C[b] = b + s\n", "    ")
    )
    notebook(source, space)
    c = ints(3)
    run(space["kernel"])(c, 4)
    assert c.tolist() == [4, 5, 6]


def notebook(source: str, space: dict, name: str = "<ipython-input-7-abcdef>") -> None:
    """Runs a cell as notebooks do: its text is known to linecache and to nobody else."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), space)


def test_errors_in_a_notebook_cell_show_its_line():
    space: dict = {"__name__": "__main__"}
    source = "import tilescale.language as T\n@T.prim_func\ndef kernel(C: T.Tensor((3,), T.int32)):\n"
    source += "    with T.Kernel(3) as b:\n        C[b] = T.foo(b)\n"
    notebook(source, space, "/tmp/ipykernel_12/345.py")
    with refused(TileError, "the language has no T.foo", at="T.foo"):
        space["kernel"].trace()


def test_a_kernel_whose_source_is_lost_is_refused():
    space: dict = {}
    exec(
        "import tilescale.language as T\n@T.prim_func\ndef kernel(C: T.Tensor((3,), T.int32)):\n    pass\n",
        space,
    )
    with refused(TileSyntaxError, "the source of kernel cannot be read", write="define the kernel in a file"):
        space["kernel"].trace()


def test_the_truth_of_a_device_value_in_an_unmarked_helper_is_refused():
    def branches(x):
        return 1 if x > 2 else 0

    def equal(x):
        return 1 if x == 2 else 0

    def unequal(x):
        return 1 if x != 2 else 0

    def variables(x):
        return 1 if x else 0

    def contained(x):
        return 1 if x in (1, 2) else 0

    def make(helper, cell):
        @T.prim_func
        def kernel(C: T.Tensor((4,), "int32")):
            with T.Kernel(4) as b:
                v = T.alloc_var("int32", 2) if cell else b
                C[b] = helper(v)

        return kernel

    for cell in (False, True):
        for helper, at in (
            (branches, "x > 2"),
            (equal, "x == 2"),
            (unequal, "x != 2"),
            (variables, "x"),
            (contained, "x in (1, 2)"),
        ):
            try:
                make(helper, cell).trace()
            except TileSyntaxError as error:
                assert "@T.macro" in str(error), error
                assert error.loc is not None and error.loc.line == helper.__code__.co_firstlineno + 1, error
            else:
                pytest.fail(
                    f"{helper.__name__}({'variable' if cell else 'expression'}) at {at} was decided while tracing"
                )


def test_tvm_may_still_compare_its_own_expressions_while_a_kernel_is_traced():
    from tilescale.compiler.tvm_compat import tirx

    x, y = tirx.Var("x", "int32"), tirx.Var("y", "int32")
    assert not (x == y) and x == x and bool(x != y)

    @T.prim_func
    def kernel(
        A: T.Tensor((T.dynamic("m"), T.dynamic("n")), "float32"),
        C: T.Tensor((T.dynamic("m"), T.dynamic("n")), "float32"),
    ):
        with T.Kernel(T.ceildiv(A.shape[0], 4), T.ceildiv(A.shape[1], 4)) as (x, y):
            t = T.alloc_shared((4, 4), "float32")
            T.copy(A[x * 4, y * 4], t)
            T.copy(t[0:2, 0:4], C[x * 4 : x * 4 + 2, y * 4 : y * 4 + 4])
            T.copy(t[2:4, 0:4], C[x * 4 + 2 : x * 4 + 4, y * 4 : y * 4 + 4])

    a, c = torch.randn(9, 10), torch.zeros(9, 10)
    run(kernel)(a, c)
    assert c.equal(a)


def test_unknown_names_suggest_what_was_meant():
    A_shared = 3

    @T.prim_func
    def local_typo(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as block_x:
            C[block_x] = blok_x + A_shared

    @T.prim_func
    def global_typo(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = SCALES * b

    @T.prim_func
    def nothing_close(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = zzz_unheard_of(b)

    @T.prim_func
    def before_bound(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = late
            late = 3

    def helper():
        return colums

    @T.prim_func
    def in_helper(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = helper()

    with refused(TileNameError, "'blok_x' is not defined", at="blok_x", write="block_x"):
        local_typo.trace()
    with refused(TileNameError, "'SCALES' is not defined", at="SCALES", write="SCALE"):
        global_typo.trace()
    with refused(
        TileNameError, "'zzz_unheard_of' is not defined", at="zzz_unheard_of", write="define 'zzz_unheard_of'"
    ):
        nothing_close.trace()
    with refused(TileNameError, "'late' is not defined", at="late"):
        before_bound.trace()
    with refused(TileNameError, "'colums' is not defined", at="colums"):
        in_helper.trace()


def test_unknown_words_of_the_language():
    @T.prim_func
    def typo(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            t = T.alloc_shard((4,), "int32")
            C[b] = t[0]

    @T.prim_func
    def keyword(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(4):
            a = T.alloc_shared((4, 4), "float32")
            T.gemm(a, a, a, transposeB=True)

    @T.prim_func
    def kernel_keyword(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(4, thread=128):
            pass

    @T.prim_func
    def dtype(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(4):
            T.alloc_shared((4, 4), "flaot16")

    @T.prim_func
    def scale(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(4):
            with T.Scale("devices"):
                pass

    @T.prim_func
    def missing(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(4):
            T.copy(A)

    with refused(TileError, "the language has no T.alloc_shard", at="T.alloc_shard", write="T.alloc_shared"):
        typo.trace()
    with refused(
        TileTypeError,
        "unexpected keyword argument 'transposeB'",
        at="T.gemm(a, a, a, transposeB=True)",
        write="transpose_B",
    ):
        keyword.trace()
    with refused(
        TileTypeError, "unexpected keyword argument 'thread'", at="T.Kernel(4, thread=128)", write="threads"
    ):
        kernel_keyword.trace()
    with refused(
        TileTypeError, "unknown dtype 'flaot16'", at='T.alloc_shared((4, 4), "flaot16")', write="float16"
    ):
        dtype.trace()
    with refused(
        TileValueError, "there is no scale 'devices'", at='T.Scale("devices")', write='T.Scale("device")'
    ):
        scale.trace()
    with refused(TileTypeError, "T.copy takes a source and a destination, not 1", at="T.copy(A)"):
        missing.trace()
    with pytest.raises(AttributeError, match=r"the language has no T.Kernl\n.*write instead: T.Kernel"):
        T.Kernl  # noqa: B018
    assert not hasattr(T, "nothing_like_it")


def test_kernels_that_are_none():
    with refused(TileTypeError, "parameter 'A' of kernel f has no annotation", at="A", expected="T.Tensor"):

        @T.prim_func
        def f(A):
            pass

    @T.prim_func
    def no_launch(A: T.Tensor((4,), "float32")):
        pass

    @T.prim_func
    def two_launches(A: T.Tensor((4,), "float32")):
        with T.Kernel(4):
            pass
        with T.Kernel(4):
            pass

    @T.prim_func
    def returns(A: T.Tensor((4,), "float32")):
        with T.Kernel(4) as b:
            A[b] = 0
        return A

    @T.prim_func
    def outside(A: T.Tensor((4,), "float32")):
        T.alloc_shared((4,), "float32")

    with refused(TileSyntaxError, "kernel no_launch has no launch", write="with T.Kernel("):
        no_launch.trace()
    with refused(TileSyntaxError, "two_launches has 2 launches", write="tilescale.compile(two_launches)"):
        two_launches.trace()
    with refused(TileSyntaxError, "kernel returns returns a value", write="tensor parameter"):
        returns.trace()
    with refused(
        TileSyntaxError, "T.alloc_shared stands outside T.Kernel", at='T.alloc_shared((4,), "float32")'
    ):
        outside.trace()
    with refused(TileSyntaxError, "called outside a kernel", at="T.barrier()"):
        T.barrier()
    with refused(TileTypeError, "kernel that is not compiled yet", write="tilescale.compile(no_launch)"):
        no_launch(torch.zeros(4))
    with refused(TileTypeError, "extent 0 of A is 'm'", expected="T.dynamic"):

        @T.prim_func
        def bad_extent(A: T.Tensor(("m",), "float32")):
            with T.Kernel(4):
                pass

        bad_extent.trace()


def test_an_error_of_the_users_own_python_keeps_its_type_and_traceback():
    def broken(x):
        return {}[x]

    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4):
            C[0] = broken("key")

    with pytest.raises(KeyError) as caught:
        kernel.trace()
    assert any(frame.lineno + 0 and frame.name == "broken" for frame in caught.traceback)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(ZeroDivisionError, "division"), (KeyError, "KeyError: 'a'"), (IndexError, "IndexError: list index")],
)
def test_pythons_own_errors_have_the_kernels_place(kind: type[Exception], said: str):
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4):
            if kind is ZeroDivisionError:
                C[0] = 1 // 0
            elif kind is KeyError:
                C[0] = {}["a"]
            else:
                C[0] = [1][1]

    at = {ZeroDivisionError: "1 // 0", KeyError: '{}["a"]', IndexError: "[1][1]"}[kind]
    with refused(TileError, said, at=at):
        kernel.trace()
    with pytest.raises(kind) as caught:
        kernel.trace()
    assert type(caught.value.__cause__) is kind


@pytest.mark.parametrize(
    ("text", "write"),
    [
        ("__syncthreads()", "T.barrier()"), ("atomicAdd(C[0], 1)", "T.atomic_add(A[i], x)"), ("C[0] = threadIdx.x", 'T.Scale("thread")'),
        ("C[0] = __shfl_xor_sync(1, C[0], 1)", "T.shfl_xor"), ("C[0] = tl.program_id(0)", "T.Kernel(gx, gy)"), ("copy(C, C)", "T.copy"),
        ("C[0] = tl.exp(C[1])", "T.exp"), ("C[0] = idx", "define 'idx'"),
        ("for k in T.Pipelined(4, stages=3): C[0] = k", "num_stages"),
    ],
)  # fmt: skip
def test_words_of_other_languages_have_a_hint(text: str, write: str):
    body = f"@T.prim_func\ndef kernel(C: T.Tensor((4,), 'int32')):\n    with T.Kernel(4):\n        {text}\n"
    linecache.cache["<foreign>"] = (len(body), None, body.splitlines(True), "<foreign>")
    space = {"T": T, "__name__": "foreign"}
    exec(compile(body, "<foreign>", "exec"), space)
    with refused(TileError, "", write=write):
        space["kernel"].trace()


def test_tracebacks_point_to_the_users_lines():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            t = T.alloc_shared((4,), "int32")
            if b > 2:
                T.copy(t, C[0:3])

    with pytest.raises(TileValueError) as caught:
        kernel.trace()
    first = kernel.func.__code__.co_firstlineno
    mine = [e.lineno + 1 for e in caught.traceback if str(e.path) == __file__ and e.name == "kernel"]
    assert mine == [first + 5]
    assert caught.value.loc.line == first + 5


def test_statements_keep_their_lines():
    from tilescale.compiler.tvm_compat import structural_walk, tirx

    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = 1
            if b > 1:
                C[b] = 2
            T.print(b)

    first = kernel.func.__code__.co_firstlineno
    lines: list[int] = []
    body = kernel.trace().func.body
    structural_walk(body, (tirx.BufferStore, lambda s: lines.append(s.span.line - first)))
    structural_walk(body, (tirx.IfThenElse, lambda s: lines.append(s.span.line - first)))
    structural_walk(body, (tirx.Evaluate, lambda s: lines.append(s.span.line - first)))
    assert sorted(lines) == [3, 4, 5, 6]


def test_a_runaway_python_loop_is_stopped():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            for k in range(10**9):
                x = k
                C[b] = x

    import tilescale.compiler.builder.state as builder

    limit, builder.STATEMENT_LIMIT = builder.STATEMENT_LIMIT, 50
    try:
        with refused(TileValueError, "more than 50 statements", at="C[b] = x", write="T.serial"):
            kernel.trace()
    finally:
        builder.STATEMENT_LIMIT = limit


def test_a_refused_trace_leaves_nothing_behind():
    @T.prim_func
    def bad(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            with T.Scale("warp"):
                for i in T.serial(4):
                    if i > 2:
                        while i < b:
                            T.nothing()

    with refused(TileError, "T.nothing"):
        bad.trace()

    @T.prim_func
    def good(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = b

    c = ints(4)
    run(good)(c)
    assert c.tolist() == [0, 1, 2, 3]


def test_only_functions_are_kernels():
    with pytest.raises(TileTypeError, match="takes a plain function"):
        T.prim_func(functools.partial(print))
    with pytest.raises(TileTypeError, match="takes a plain function"):
        T.macro(3)
    assert isinstance(collatz_steps, T.macro(lambda: None).__class__)
    assert isinstance(clamp_to, types.FunctionType)
