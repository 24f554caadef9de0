"""CUDA C++ from thread IR."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from tilescale.compiler.cuda.wgmma import function_text
from tilescale.compiler.gpu.cexpr import POSTFIX, SMALL, Text, dtype_of
from tilescale.compiler.gpu.cprinter import CPrinter
from tilescale.compiler.gpu.kernel import ThreadKernel
from tilescale.compiler.gpu.printed import Printed
from tilescale.compiler.tvm_compat import ir, is_buffer_var, tirx

#: the arena's alignment: what TMA's 128-byte swizzle asks of a tile (PTX ISA, "Tensor Swizzling Modes")
ARENA_ALIGN = 1024
#: parameters that the launcher fills, by their kind
STRUCTS = {"team": "ts::Team", "log": "ts::Log"}


#: functions of CUDA's headers that are never contracted
SMALL_ARITHMETIC = {tirx.Add: "__hadd_rn", tirx.Sub: "__hsub_rn", tirx.Mul: "__hmul_rn"}


class CudaPrinter(CPrinter):
    """Prints one kernel as CUDA C++."""

    types: ClassVar[dict[str, str]] = {
        "bool": "bool", "int8": "int8_t", "int16": "int16_t", "int32": "int", "int64": "int64_t",
        "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
        "float16": "half", "bfloat16": "nv_bfloat16", "float8_e4m3fn": "ts::e4m3", "float8_e5m2": "ts::e5m2",
        "float32": "float", "float64": "double",
    }  # fmt: skip
    words: ClassVar[dict[int, str]] = {2: "uint16_t", 4: "uint32_t", 8: "uint2", 16: "uint4"}
    thread_tags: ClassVar[dict[str, str]] = {
        tag: tag
        for tag in ("blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z")
    }
    # The accurate forms of CUDA's math library, at most 2 ulp, most of them 1 (CUDA C++ Programming Guide,
    # "Mathematical Functions"); the fast ones where T.__exp and its like are written.
    functions: ClassVar[dict[str, str]] = {
        **{
            name: f"{name}f"
            for name in (
                "exp",
                "exp2",
                "exp10",
                "expm1",
                "log",
                "log2",
                "log10",
                "log1p",
                "sqrt",
                "rsqrt",
                "sin",
                "cos",
                "tan",
                "sinh",
                "cosh",
                "tanh",
                "asin",
                "acos",
                "atan",
                "asinh",
                "acosh",
                "atanh",
                "erf",
                "floor",
                "ceil",
                "trunc",
                "pow",
                "fmod",
                "atan2",
                "copysign",
                "hypot",
                "fma",
                "fabs",
                "rint",
                "lgamma",
                "tgamma",
                "remainder",
                "nextafter",
                "fmax",
                "fmin",
            )
        },
        "abs": "fabsf",
        "round": "rintf",
        "nearbyint": "rintf",
        "sigmoid": "ts::sigmoid",
        "isnan": "isnan",
        "isinf": "isinf",
        "isfinite": "isfinite",
        "__exp": "__expf",
        "__exp2": "ts::fast_exp2",
        "__exp10": "__exp10f",
        "__log": "__logf",
        "__log2": "__log2f",
        "__log10": "__log10f",
        "__sin": "__sinf",
        "__cos": "__cosf",
        "__tan": "__tanf",
        "__tanh": "ts::fast_tanh",
        "__rcp": "ts::fast_rcp",
        # never contracted; divisions and square roots are correctly rounded as they are
        "dp4a": "ts::dp4a",
        "ieee_add": "__fadd_rn",
        "ieee_sub": "__fsub_rn",
        "ieee_mul": "__fmul_rn",
    }
    #: float64 has no fast forms: the accurate ones
    double_functions: ClassVar[dict[str, str]] = {
        **{
            f"__{name}": name
            for name in ("exp", "exp2", "exp10", "log", "log2", "log10", "sin", "cos", "tan", "tanh")
        },
        "ieee_add": "__dadd_rn",
        "ieee_sub": "__dsub_rn",
        "ieee_mul": "__dmul_rn",
        "isnan": "isnan",
        "isinf": "isinf",
        "isfinite": "isfinite",
    }

    def includes(self) -> Iterable[str]:
        """CUDA's headers for the 16-bit floats, ours for everything else; only what is used."""
        if "float16" in self.used or self.kernel.imported:
            yield "#include <cuda_fp16.h>"
        if "bfloat16" in self.used or self.kernel.imported:
            yield "#include <cuda_bf16.h>"
        if self.kernel.team and self.kernel.remote:
            yield "#define TS_NVSHMEM"
        yield "#include <ts/ts.cuh>"
        if any(name.startswith("ts::cp_async") for name in self.called):
            yield "#include <ts/ampere.cuh>"
        products = sorted(
            name for name in self.called if name.startswith(("ts::wgmma_m64", "ts::wgmma_sp_m64"))
        )
        if any(name.startswith(("ts::add2", "ts::sub2", "ts::mul2")) for name in self.called):
            yield "#include <ts/packed.cuh>"
        if any(name.startswith(("ts::widen4_e4m3", "ts::narrow_e4m3")) for name in self.called):
            yield "#include <ts/float8.cuh>"
        if any(name.startswith("ts::stmatrix") for name in self.called):
            yield "#include <ts/stmatrix.cuh>"
        if any("red_add" in name for name in self.called):
            yield "#include <ts/red.cuh>"
        if self.kernel.maps or products or any(name.startswith("ts::mbarrier_") for name in self.called):
            yield "#include <ts/hopper.cuh>"
        if any(name.startswith(("ts::cluster_", "ts::shared_")) for name in self.called):
            yield "#include <ts/cluster.cuh>"
        if any(name.startswith("ts::tma_reduce_") for name in self.called):
            yield "#include <ts/tma_reduce.cuh>"
        if any(name.startswith(("ts::add_r", "ts::store_r")) for name in self.called):
            yield "#include <ts/peer_rows.cuh>"
        if self.kernel.dependent or "ts::admit_launches" in self.called:
            yield "#include <ts/dependent.cuh>"
        if self.kernel.team:
            if any(name.startswith("ts::more_registers") for name in self.called):
                yield "#define TS_COLD __forceinline__"
            yield "#include <ts/team.cuh>"
        if any(name.startswith(("ts::put_r", "ts::put_z")) for name in self.called):
            yield "#include <ts/put.cuh>"
        if any(name.endswith(("_packet", "_dense")) for name in self.called):
            yield "#include <ts/packets.cuh>"
        if any(name.startswith("ts::log_") for name in self.called):
            yield "#include <ts/trace.cuh>"
        yield ""
        if products:
            yield "namespace ts {"
            for name in products:
                yield from function_text(name.removeprefix("ts::")).splitlines()
            yield "}  // namespace ts"
            yield ""
        for text in self.kernel.imported:
            yield from (*text.strip("\n").split("\n"), "")

    def small(self, e: Any) -> str | None:
        """A sum, difference or product of 16-bit floats as they lie in memory: rounded once, it is what
        float32's would be when rounded (gpu/packed_halves.py says why). A product and a number are one fused
        multiply-add. By float32 each would take three conversions more."""
        if dtype_of(e) not in ("float16", "bfloat16"):
            return None
        if isinstance(e, tirx.Add):
            for product, other in ((e.b, e.a), (e.a, e.b)):
                if isinstance(product, tirx.Mul) and all(
                    self._is_stored(x) for x in (product.a, product.b, other)
                ):
                    return f"__hfma({self.stored(product.a)}, {self.stored(product.b)}, {self.stored(other)})"
        name = SMALL_ARITHMETIC.get(type(e))
        if name is None or not (self._is_stored(e.a) and self._is_stored(e.b)):
            return None
        return f"{name}({self.stored(e.a)}, {self.stored(e.b)})"

    def x_BitwiseOr(self, e: Any) -> Text:
        """``x & mask | set`` of 32 bits with two constants is one instruction, which ptxas does not see by
        itself."""
        dtype = dtype_of(e)
        both = (
            dtype in ("int32", "uint32") and isinstance(e.b, tirx.IntImm) and isinstance(e.a, tirx.BitwiseAnd)
        )
        if not both or not isinstance(e.a.b, tirx.IntImm):
            return self.bitwise(e)
        mask, bits = (f"{int(x.value) & 0xFFFFFFFF:#x}u" for x in (e.a.b, e.b))
        text = f"ts::and_or({self.value(e.a.a)}, {mask}, {bits})"
        return (f"int({text})" if dtype == "int32" else text), POSTFIX

    def signature(self) -> Iterable[str]:
        """One line a parameter where they do not fit into one."""
        k = self.kernel
        self.scopes[0].add(k.name)
        written = [s.kind == "failure" or s.kind == "param" and s.index in k.written for s in k.sources]
        params = [self._parameter(var, write, STRUCTS.get(source.kind))
                  for var, source, write in zip(k.func.params, k.sources, written, strict=True)]  # fmt: skip
        bounds = f"{k.threads}" if k.min_blocks is None else f"{k.threads}, {k.min_blocks}"
        head = f'extern "C" __global__ void __launch_bounds__({bounds}) {k.name}('
        if len(head) + sum(len(p) + 2 for p in params) < 120:
            return [f"{head}{', '.join(params)}) {{"]
        return [head, *(f"    {p}," for p in params[:-1]), f"    {params[-1]}) {{"]

    def _parameter(self, var: Any, written: bool, struct: str | None) -> str:
        """``__restrict__`` only where nobody writes during the launch: arguments that overlap are refused
        unless all are only read, so such memory does not change, and its loads may be cached and moved. It
        would also hide from the compiler what other threads write between two barriers, so nothing that is
        written has it, nor has symmetric memory, which other ranks write."""
        if not is_buffer_var(var):
            if struct:
                return f"const __grid_constant__ {struct} {self.declare(var)}"
            if isinstance(var.ty, ir.PointerType) or "handle" in dtype_of(var):
                self.used.add("tensormap")
                return f"const __grid_constant__ ts::TensorMap {self.declare(var)}"
            name, dtype = self.declare(var), dtype_of(var)
            if dtype in SMALL:  # passed as a float; rounded here, as a scalar of its dtype is
                self.head.append(f"{name} = float({self.narrowed(name, dtype)});")
            return f"{self.computed_type(dtype)} {name}"
        ctype = self.ctype(str(var.ty.dtype))
        if written or var.ty.storage_scope in ("global.signal", "global.packets"):
            return f"{ctype}* {self.declare(var)}"
        # of a launch that begins early, memory does change: its loads must not move in front of the wait
        lasting = var.ty.storage_scope == "global" and not self.kernel.dependent
        return f"const {ctype}* {'__restrict__ ' if lasting else ''}{self.declare(var)}"

    def arena(self, name: str, size: int) -> str:
        return f"extern __shared__ __align__({ARENA_ALIGN}) uint8_t {name}[];  // {size} bytes"

    def not_finite(self, v: float, dtype: str) -> Text:
        """CUDA's way to write the bits: no header, and the same under NVRTC."""
        code = 0x7FF8 if v != v else 0x7FF0 if v > 0 else 0xFFF0
        if dtype == "float64":
            return f"__longlong_as_double(0x{code:04x}000000000000ull)", POSTFIX
        code = 0x7FC0 if v != v else 0x7F80 if v > 0 else 0xFF80
        return f"__int_as_float(0x{code:04x}0000)", POSTFIX


def print_kernel(kernel: ThreadKernel) -> Printed:
    """A kernel's CUDA C++.

    Raises:
        InternalError: thread IR outside the contract of `tilescale.compiler.cuda`.
    """
    return CudaPrinter(kernel).run()
