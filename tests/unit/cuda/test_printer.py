"""The CUDA printer: expressions with as few parentheses as C allows a reader, statements, names, source
lines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cuda import thread_kernels as tk
from tilescale.compiler.cuda.printer import CudaPrinter, print_kernel
from tilescale.compiler.gpu.cexpr import Expressions
from tilescale.compiler.ir import spec as levels
from tilescale.compiler.ops import math as language
from tilescale.compiler.tvm_compat import ir, tirx
from tilescale.errors import InternalError

A, H = tk.pointer("A", "float32"), tk.pointer("H", "float16")
BF, E4 = tk.pointer("BF", "bfloat16"), tk.pointer("E4", "float8_e4m3fn")
i, j, n = (tirx.Var(name, "int32") for name in "ijn")
w, u, b, x, d = (
    tirx.Var("w", "int64"),
    tirx.Var("u", "uint32"),
    tirx.Var("b", "int8"),
    tirx.Var("x", "float32"),
    tirx.Var("d", "float64"),
)
p, h = tirx.Var("p", "bool"), tirx.Var("h", "float16")


def f32(v: float) -> Any:
    return tirx.FloatImm("float32", v)


def i64(v: int) -> Any:
    return tirx.IntImm("int64", v)


def wide(e: Any) -> Any:
    return tirx.Cast("int64", e)


def cast(dtype: str, e: Any) -> Any:
    return tirx.Cast(dtype, e)


def math(name: str, *args: Any) -> Any:
    return ir.Call(f"ts.math.{name}", list(args), ret_ty=ir.PrimType(str(args[0].ty)))


def printer() -> CudaPrinter:
    made = CudaPrinter(tk.kernel("k", [A], tirx.Evaluate(tk.int32(0))))
    for var in (A, H, BF, E4, i, j, n, w, u, b, x, d, p, h):
        made.declare(var)
    made.analyzer.bind(j, ir.Range(0, 64))
    return made


CASES = [
    # precedence
    ((i + j) * 2, "(i + j) * 2"),
    (i + j * 2, "i + j * 2"),
    (i - (j - n), "i - (j - n)"),
    (i - j - n, "i - j - n"),
    (i + (j + n), "i + j + n"),
    (x + (x + d.astype("float32")), "x + (x + float(d))"),
    (i * (j * n), "i * (j * n)"),
    (tirx.Div(i, j * n), "i / (j * n)"),
    (tirx.And(i < n, tirx.Or(p, j >= 2)), "i < n && (p || j >= 2)"),
    (tirx.Not(i < n), "!(i < n)"),
    (tirx.EQ(i < n, p), "i < n == p"),
    ((i + j) << 2, "(i + j) << 2"),
    ((i << 2) + j, "(i << 2) + j"),
    ((i & 3) | (j ^ 1), "(i & 3) | (j ^ 1)"),
    (~i, "~i"),
    (i * -1, "-i"),
    (tirx.Sub(tk.int32(0), i), "-i"),
    (i + -64, "i - 64"),
    (i - (j + -1), "i - (j - 1)"),
    (x * f32(-1.0), "-x"),
    ((i < n) & p, "(i < n) & p"),
    # rounding down
    (tirx.floordiv(i, 8), "i >> 3"),
    (tirx.floormod(i, 8), "i & 7"),
    (tirx.floordiv(i + j, 8), "(i + j) >> 3"),
    (tirx.floordiv(j, 6), "j / 6"),
    (tirx.floormod(j, 6), "j % 6"),
    (tirx.floordiv(i, 6), "ts::floordiv(i, 6)"),
    (tirx.floormod(i, n), "ts::floormod(i, n)"),
    (tirx.truncdiv(i, 6), "i / 6"),
    (tirx.floordiv(u, tirx.IntImm("uint32", 6)), "u / 6u"),
    # 64 bits
    (wide(i) * i64(4096) + wide(j), "int64_t(i) * 4096 + j"),
    (wide(i) + wide(j), "int64_t(i) + j"),
    (wide(i) + w, "i + w"),
    (wide(i) + (wide(j) + w), "int64_t(i) + j + w"),
    (w + wide(i + j), "w + (i + j)"),
    (w + i64(7), "w + 7"),
    (i64(1 << 40) + w, "1099511627776L + w"),
    (w < wide(n), "w < n"),
    (wide(i) < wide(n), "int64_t(i) < n"),
    (wide(i) * wide(n), "int64_t(i) * n"),
    (w * wide(n), "w * n"),
    (wide(i) * w, "i * w"),
    (tirx.min(w, i64(3)), "min(w, 3L)"),
    (w - i64(1), "w - 1"),
    (wide(u), "int64_t(u)"),
    (w + wide(u), "w + int64_t(u)"),
    (tirx.BufferLoad(A, [wide(i)]), "A[i]"),
    (tirx.BufferLoad(A, [i64(5)]), "A[5]"),
    (tirx.BufferLoad(A, [wide(i) * i64(64) + wide(j)]), "A[int64_t(i) * 64 + j]"),
    # literals
    (f32(0.1), "0.1f"),
    (f32(1e30), "1e+30f"),
    (f32(3.0), "3.0f"),
    (f32(2.0**-149), "0x1p-149f"),
    (f32(-3 * 2.0**-148), "-0x1.8p-147f"),
    (f32(float("inf")), "__int_as_float(0x7f800000)"),
    (f32(float("-inf")), "__int_as_float(0xff800000)"),
    (f32(float("nan")), "__int_as_float(0x7fc00000)"),
    (tirx.FloatImm("float64", 0.1), "0.1"),
    (tirx.FloatImm("float64", 5e-324), "0x0.0000000000001p-1022"),
    (tirx.FloatImm("float64", float("inf")), "__longlong_as_double(0x7ff0000000000000ull)"),
    (x - f32(-2.0), "x - -2.0f"),
    (tk.int32(-(2**31)), "-2147483647 - 1"),
    (tirx.IntImm("uint32", 7), "7u"),
    (tirx.IntImm("uint64", 7), "7UL"),
    (tirx.IntImm("bool", 1), "true"),
    # what is narrower than int wraps
    (b + b, "int8_t(b + b)"),
    (tirx.max(b, b * b), "int8_t(max(b, int8_t(b * b)))"),
    (tirx.Max(p, tirx.LT(i, n)), "bool(p | i < n)"),
    (tirx.Min(p, tirx.Not(p)), "bool(p & !p)"),
    (b << b, "int8_t(b << b)"),
    # casts
    (cast("float32", i), "float(i)"),
    (cast("int32", x), "ts::to<int>(x)"),
    (cast("uint8", d), "ts::to<uint8_t>(d)"),
    (cast("int32", w), "int(w)"),
    (cast("bool", x), "x != 0"),
    (cast("int32", i < n), "int(i < n)"),
    (cast("float64", x), "double(x)"),
    (cast("float16", x), "float(half(x))"),
    (cast("float16", d), "float(half(d))"),
    (cast("bfloat16", i), "float(nv_bfloat16(float(i)))"),
    (cast("float32", h), "h"),
    (cast("float16", tirx.BufferLoad(E4, [i])), "float(E4[i])"),
    (cast("bfloat16", h), "float(nv_bfloat16(h))"),
    (tirx.reinterpret("int32", x), "ts::bits<int>(x)"),
    (tirx.reinterpret("uint16", tirx.BufferLoad(H, [i])), "ts::bits<uint16_t>(H[i])"),
    (tirx.reinterpret("uint16", h), "ts::bits<uint16_t>(half(h))"),
    # small floats are computed in float
    (tirx.BufferLoad(H, [i]) * h + tirx.FloatImm("float16", 0.1), "float(H[i]) * h + 0.099975586f"),
    (math("exp", tirx.BufferLoad(BF, [i])), "expf(float(BF[i]))"),
    # functions
    (math("exp", x), "expf(x)"),
    (math("exp", d), "exp(d)"),
    (math("__exp", x), "__expf(x)"),
    (math("__exp", d), "exp(d)"),
    (math("round", x), "rintf(x)"),
    (math("rsqrt", d), "rsqrt(d)"),
    (math("pow", x, x + x), "powf(x, x + x)"),
    (math("sigmoid", x), "ts::sigmoid(x)"),
    (math("__exp2", x), "ts::fast_exp2(x)"),
    (math("fma", d, d, d), "fma(d, d, d)"),
    (math("ieee_mul", x, x) + x, "__fmul_rn(x, x) + x"),
    (math("ieee_add", d, d), "__dadd_rn(d, d)"),
    (tirx.abs(x), "fabsf(x)"),
    (tirx.exp(x), "expf(x)"),
    (tirx.max(x, f32(0.0)), "ts::max(x, 0.0f)"),
    (tirx.max(i, n), "max(i, n)"),
    (tirx.popcount(w), "__popcll(w)"),
    (tirx.clz(w), "__clzll(w)"),
    (tirx.clz(i), "__clz(i)"),
    (math("isnan", x), "isnan(x)"),
    (tirx.Select(i < n, x, f32(0.0)), "i < n ? x : 0.0f"),
    (tirx.if_then_else(p, x, x) + x, "(p ? x : x) + x"),
    (tirx.Select(p, tirx.Select(i < n, i, j), n), "p ? (i < n ? i : j) : n"),
    (tirx.Select(p, i, tirx.Select(i < n, i, j)), "p ? i : i < n ? i : j"),
    # a number between two constants: the order that ptxas compiles right
    (tirx.Max(tirx.IntImm("int32", 0), tirx.Min(tirx.IntImm("int32", 23), i)), "min(max(i, 0), 23)"),
    (tirx.Max(tirx.Min(i + j, tirx.IntImm("int32", 7)), tirx.IntImm("int32", -2)), "min(max(i + j, -2), 7)"),
    (tirx.Max(tirx.Min(i, n), tirx.IntImm("int32", 0)), "max(min(i, n), 0)"),
    (tirx.Max(tirx.Min(i, tirx.IntImm("int32", 3)), tirx.IntImm("int32", 5)), "max(min(i, 3), 5)"),
    # calls
    (
        tirx.call_extern("float32", "ts::f", x, h, tirx.address_of(tirx.BufferLoad(H, [i + 1]))),
        "ts::f(x, half(h), &H[i + 1])",
    ),
    (tirx.call_extern("float16", "ts::g", tirx.FloatImm("float16", 0.5)) * h, "float(ts::g(half(0.5f))) * h"),
    (tirx.call_extern("int32", "printf", ir.StringImm('%d "x"\n'), i), 'printf("%d \\"x\\"\\n", i)'),
]


@pytest.mark.parametrize("expression, text", CASES, ids=[t for _, t in CASES])
def test_expressions(expression: Any, text: str):
    assert printer().value(expression) == text


H_i, H_j, BF_i, BF_j = (tirx.BufferLoad(buffer, [at]) for buffer in (H, BF) for at in (i, j))

STORED = [
    (tirx.BufferLoad(H, [i]), "H[i]"),
    (cast("float16", x * x), "half(x * x)"),
    (cast("float16", tirx.BufferLoad(BF, [i])), "half(float(BF[i]))"),
    (tirx.BufferLoad(H, [i]) + h, "half(float(H[i]) + h)"),
    (H_i + H_j, "__hadd_rn(H[i], H[j])"),
    (BF_i - BF_j, "__hsub_rn(BF[i], BF[j])"),
    (H_i * H_j, "__hmul_rn(H[i], H[j])"),
    (BF_i * BF_j + BF_i, "__hfma(BF[i], BF[j], BF[i])"),
    (H_j + H_i * H_i, "__hfma(H[i], H[i], H[j])"),
    (H_i * H_i * H_j, "half(float(H[i]) * float(H[i]) * float(H[j]))"),  # the first product is not rounded
    (H_i * h + H_j, "half(float(H[i]) * h + float(H[j]))"),
    (cast("float32", H_i) + cast("float32", H_j), "float(H[i]) + float(H[j])"),
    (h, "half(h)"),
    (tirx.FloatImm("float16", 0.1), "half(0.099975586f)"),
    (
        tirx.if_then_else(i < n, tirx.BufferLoad(H, [i]), tirx.FloatImm("float16", 0.0)),
        "i < n ? H[i] : half(0.0f)",
    ),
    (tirx.Select(p, cast("float16", x), tirx.BufferLoad(H, [i]) + h), "p ? half(x) : half(float(H[i]) + h)"),
    (cast("float8_e5m2", d), "ts::e5m2(d)"),
    (cast("float8_e4m3fn", i), "ts::e4m3(float(i))"),
]


@pytest.mark.parametrize("expression, text", STORED, ids=[t for _, t in STORED])
def test_what_is_stored_is_rounded_once(expression: Any, text: str):
    assert printer().stored(expression) == text


@pytest.mark.parametrize("name", sorted(CudaPrinter.double_functions))
def test_functions_of_float64_are_no_names_of_their_own(name: str):
    assert name in CudaPrinter.functions


def test_every_function_of_the_language_has_a_name_in_c():
    known = {
        name
        for name in vars(language)
        if name.strip("_") in ("exp", "exp2", "exp10", "log", "log2", "log10", "sin", "cos", "tan")
    }
    known |= {
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "sinh",
        "cosh",
        "asin",
        "acos",
        "atan",
        "sigmoid",
        "erf",
        "floor",
        "ceil",
        "trunc",
        "round",
    }
    known |= {
        "isnan",
        "isinf",
        "isfinite",
        "pow",
        "fmod",
        "atan2",
        "copysign",
        "hypot",
        "fma",
        "ieee_add",
        "ieee_sub",
        "ieee_mul",
    }
    assert known <= set(CudaPrinter.functions)


def test_statements():
    C, acc, flag = tk.pointer("C", "float32"), tk.local("acc", "float32", 4), tk.local("flag", "int32", 1)
    tx, m = tirx.Var("tx", "int32"), tirx.Var("m", "int32")
    body = tirx.SeqStmt(
        [
            tirx.AllocBuffer(acc),
            tirx.AllocBuffer(flag),
            tk.store(flag, 0, tk.int32(1)),
            tirx.Bind(tirx.Var("idle", "int32"), tx + 1),
            tk.loop("k", 4, lambda k: tk.store(acc, k, f32(0.0)), unroll=True),
            tk.loop(
                "k", m, lambda k: tk.store(acc, 0, tk.load(acc, 0) + tk.load(C, k)), annotations={"unroll": 2}
            ),
            tirx.While(
                tk.load(flag, 0) < 9,
                tirx.SeqStmt(
                    [
                        tk.store(flag, 0, tk.load(flag, 0) + 1),
                        tirx.IfThenElse(
                            tk.load(flag, 0) > 5,
                            tirx.Break(),
                            tirx.IfThenElse(tk.load(flag, 0) > 3, tirx.Continue(), tk.store(flag, 0, tx)),
                        ),
                    ]
                ),
            ),
            tirx.For(
                k := tirx.Var("k", "int32"),
                tx,
                m - tx,
                tirx.ForKind.SERIAL,
                tk.store(C, k, tk.load(acc, 0)),
                step=tk.int32(128),
            ),
        ]
    )
    text = print_kernel(
        tk.kernel("k", [C, m], tk.threads(body, {"threadIdx.x": (tx, 128)}), written=(0,))
    ).text
    assert (
        text.split("\n", 2)[2]
        == """\
extern "C" __global__ void __launch_bounds__(128) k(float* C, int m) {
  const int tx = threadIdx.x;
  float acc[4];
  int flag = 1;
  #pragma unroll
  for (int k_1 = 0; k_1 < 4; ++k_1) {
    acc[k_1] = 0.0f;
  }
  #pragma unroll 2
  for (int k_1 = 0; k_1 < m; ++k_1) {
    acc[0] = acc[0] + C[k_1];
  }
  while (flag < 9) {
    flag = flag + 1;
    if (flag > 5) {
      break;
    } else if (flag > 3) {
      continue;
    } else {
      flag = tx;
    }
  }
  for (int k_1 = tx; k_1 < m; k_1 += 128) {
    C[k_1] = acc[0];
  }
}
"""
    )


def test_names_are_the_authors_and_unique_where_they_are_seen():
    C, tx = tk.pointer("C", "int32"), tirx.Var("tx", "int32")
    first, second, half = tirx.Var("v", "int32"), tirx.Var("v", "int32"), tirx.Var("half", "int32")
    body = tirx.SeqStmt(
        [
            tirx.Bind(first, tx + 1),
            tirx.Bind(second, first + 1),
            tirx.Bind(half, second),
            tk.store(C, tx, half),
            tk.loop("v", 2, lambda v: tk.store(C, v, tk.int32(0))),
            tk.loop("i", 2, lambda k: tk.store(C, k, tk.int32(0))),
            tk.loop("i", 2, lambda k: tk.store(C, k, tk.int32(1))),
        ]
    )
    text = print_kernel(tk.kernel("k", [C], tk.threads(body, {"threadIdx.x": (tx, 32)}))).text
    assert (
        "const int v = tx + 1;\n  const int v_1 = v + 1;\n  const int half_1 = v_1;\n  C[tx] = half_1;\n"
        in text
    )
    assert "for (int v_2 = 0;" in text and text.count("for (int i = 0; i < 2; ++i)") == 2


def test_restrict_where_nobody_writes_alone():
    read, written, peer = (
        tk.pointer("r", "float32"),
        tk.pointer("w", "float32"),
        tk.pointer("s", "float32", "global.symm"),
    )
    flags = tk.pointer("f", "int64", "global.signal")
    body = tk.store(written, 0, tk.load(read, 0) + tk.load(peer, 0) + tirx.Cast("float32", tk.load(flags, 0)))
    text = print_kernel(tk.kernel("k", [read, peer, flags, written], body)).text
    assert "k(const float* __restrict__ r, const float* s, int64_t* f, float* w) {" in text


def test_scalars_of_small_floats_are_rounded_on_arrival():
    text = print_kernel(tk.kernel("k", [h, A], tk.store(A, 0, cast("float32", h)))).text
    assert "k(float h, float* A) {\n  h = float(half(h));\n  A[0] = h;\n" in text


def test_names_that_nobody_reads_are_left_out():
    a, c, e = (tirx.Var(name, "int32") for name in "ace")
    body = tirx.SeqStmt(
        [
            tirx.Bind(a, tk.int32(1)),
            tirx.Bind(c, a + 1),
            tirx.Bind(e, tirx.call_extern("int32", "ts::next")),
            tk.store(A, 0, f32(0.0)),
        ]
    )
    assert "{\n  const int e = ts::next();\n  A[0] = 0.0f;\n}" in print_kernel(tk.kernel("k", [A], body)).text


def test_a_comment_for_each_line_of_the_author(tmp_path: Any):
    source = tmp_path / "own.py"
    source.write_text("first\n    C[tx] = 1  # set\n")
    C, tx = tk.pointer("C", "int32"), tirx.Var("tx", "int32")
    span = tk.span(2, str(source))
    body = tirx.SeqStmt(
        [
            tk.store(C, 0, tk.int32(1), span),
            tk.store(C, 1, tk.int32(1), span),
            tk.store(C, 2, tx, tk.span(7, str(source))),
        ]
    )
    printed = print_kernel(tk.kernel("k", [C], tk.threads(body, {"threadIdx.x": (tx, 32)})))
    assert (
        "  // own.py:2  C[tx] = 1  # set\n  C[0] = 1;\n  C[1] = 1;\n  // own.py:7\n  C[2] = tx;\n"
        in printed.text
    )
    lines = printed.text.splitlines()
    assert len(lines) == len(printed.places)
    assert [str(q) for t, q in zip(lines, printed.places) if t.strip().startswith("C[")] == [
        f"{source}:2",
        f"{source}:2",
        f"{source}:7",
    ]


def test_vector_accesses_are_single_ones():
    a, c, r = tk.pointer("a", "float16"), tk.pointer("c", "float16"), tk.local("r", "float16", 8)
    body = tirx.SeqStmt(
        [
            tirx.AllocBuffer(r),
            tk.store(r, tk.ramp(tk.int32(0), 8), tk.load(a, tk.ramp(i64(8), 8))),
            tk.store(c, tk.ramp(tk.int32(0), 8), tk.load(r, tk.ramp(tk.int32(0), 8))),
            tk.store(c, tk.ramp(tk.int32(8), 4), tirx.Broadcast(tirx.FloatImm("float16", 0.0), 4)),
        ]
    )
    text = print_kernel(tk.kernel("k", [a, c], body)).text
    for line in (
        "alignas(16) half r[8];",
        "*(uint4*)&r[0] = *(const uint4*)&a[8];",
        "*(uint4*)&c[0] = *(const uint4*)&r[0];",
        "*(uint2*)&c[8] = uint2{};",
    ):
        assert line in text


@pytest.mark.parametrize(
    "body, says",
    [
        (
            tk.store(
                A,
                tk.ramp(tk.int32(0), 4),
                tk.load(A, tk.ramp(tk.int32(4), 4)) + tk.load(A, tk.ramp(tk.int32(8), 4)),
            ),
            "vector arithmetic",
        ),
        (
            tk.store(A, tk.ramp(tk.int32(0), 8), tk.load(A, tk.ramp(tk.int32(8), 8))),
            "a vector access of 32 bytes",
        ),
        (tk.store(A, 0, tirx.Let(x, f32(1.0), x)), "no C for the expression Let"),
        (tk.store(A, 0, x), "x is used before it is declared"),
        (tk.store(A, 0, tirx.ldexp(f32(1.0), tk.int32(2))), "no C for the function ldexp"),
        (
            tirx.For(i, tk.int32(0), tk.int32(4), tirx.ForKind.VECTORIZED, tk.store(A, i, f32(0.0))),
            "a loop of kind",
        ),
        (tirx.AllocBuffer(tk.pointer("g", "int8")), "allocated in the scope global"),
    ],
)
def test_what_is_outside_the_contract_is_named(body: Any, says: str):
    with pytest.raises(InternalError, match=says):
        print_kernel(tk.kernel("k", [A], body))


def test_targets_share_the_printer():
    assert issubclass(CudaPrinter, Expressions)
    assert "half" not in vars(Expressions)  # the types are the target's


TWO = ("Add", "Sub", "Mul", "Min", "Max", "LT", "EQ", "Div", "FloorDiv", "FloorMod", "BitwiseAnd", "LShift")


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "float16", "float32", "float64"]
)
def test_operands_are_evaluated_once_and_by_all_lanes(dtype: str):
    """A shuffle is an instruction of the whole warp: written twice, or in a branch, other lanes than those
    that should would meet in it."""
    value = tirx.Var("v", dtype)
    call = tirx.call_extern(dtype, "ts::shuffle_xor", value, tk.int32(1))
    for kind in TWO:
        if dtype.startswith("float") and kind in ("FloorDiv", "FloorMod", "BitwiseAnd", "LShift", "Div"):
            continue
        for e in (
            getattr(tirx, kind)(call, value),
            getattr(tirx, kind)(value, call),
            tirx.Cast("int64", getattr(tirx, kind)(value, call)),
        ):
            made = printer()
            made.declare(value)
            text = made.stored(e)
            assert text.count("ts::shuffle_xor(") == 1, text
            assert not any(sign in text for sign in ("?", "&&", "||")), text


def test_a_shuffle_in_a_branch_is_refused():
    value = tirx.Var("v", "int32")
    call = tirx.call_extern("int32", "ts::shuffle_xor", value, tk.int32(1))
    test = tirx.LT(value, tk.int32(3))
    for e in (
        tirx.if_then_else(test, call, value),
        tirx.Select(test, value, call + 1),
        tirx.Or(test, tirx.LT(call, value)),
    ):
        func = tirx.PrimFunc([A, value], tirx.Evaluate(e))
        with pytest.raises(InternalError, match="a shuffle in a branch of an expression"):
            levels.verify(func, levels.THREAD, "the test")
    fine = tirx.PrimFunc([A, value], tirx.Evaluate(tirx.if_then_else(tirx.LT(call, value), value, value + 1)))
    levels.verify(fine, levels.THREAD, "the test")
