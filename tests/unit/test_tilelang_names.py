"""The host's half of what TileLang's programs call, by its names: tuners, hints, targets, inputs, marks. The
language's half is in tests/unit/language, the programs themselves in tests/compat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.compat import programs
from tests.kernels import refused
from tilescale import env
from tilescale.autotuner import AutoTuner, set_autotune_inputs
from tilescale.backend.target import determine_target
from tilescale.carver.arch import CDNA, CUDA, auto_infer_current_arch, driver
from tilescale.carver.template import MatmulTemplate
from tilescale.contrib import nvcc
from tilescale.devices import parse_target
from tilescale.engine.callback import register_cuda_postproc_callback
from tilescale.engine.lower import lower
from tilescale.engine.param import KernelParam
from tilescale.errors import TileError, TileTypeError, TileValueError
from tilescale.language.fp8 import determine_fp8_type, determine_torch_fp8_type
from tilescale.profiler import do_bench
from tilescale.tools import Analyzer
from tilescale.utils.tensor import TensorSupplyType, get_tensor_supply, torch_assert_close


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No choices of an earlier session; the built runtime is kept."""
    native = env.CACHE_DIR.get() / "native"
    if native.exists():
        (tmp_path / "native").symlink_to(native)
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path))


def scaled(block: int = 32):
    """A factory's function: B = 2 A."""

    @T.prim_func
    def main(A: T.Tensor((64,), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(64 // block, threads=32) as bx:
            for i in T.Parallel(block):
                B[bx * block + i] = A[bx * block + i] * 2

    return main


def test_a_tuner_is_set_up_step_by_step():
    tuner = AutoTuner.from_kernel(scaled, configs=[{"block": 16}, {"block": 64}])
    tuner.set_compile_args(out_idx=[-1], target="cpu", execution_backend="cython")
    found = tuner.set_profile_args(ref_prog=lambda a: a * 2, warmup=0, rep=1, backend="event").run()
    assert found.config["block"] in (16, 64) and found.latency > 0 and found.ref_latency > 0
    assert torch.equal(found.kernel(torch.ones(64)), torch.full((64,), 2.0)) and "main" in found.libcode


def test_a_tuner_finds_no_right_configuration():
    with pytest.raises(TileError, match="none of 1 configurations works"):
        tuner = AutoTuner.from_kernel(scaled, configs=[{"block": 8}])
        tuner.set_compile_args(out_idx=-1, target="cpu").set_profile_args(
            ref_prog=lambda a: a * 3, warmup=0
        ).run()


def test_inputs_of_a_tuner_are_the_caller_s():
    seen = []

    def reference(a: torch.Tensor) -> torch.Tensor:
        seen.append(a.clone())
        return a * 2

    jitted = tilescale.jit(scaled, out_idx=-1, target="cpu")
    words = {"configs": [{"block": 4}], "ref_prog": reference, "warmup": 0, "rep": 1}
    with set_autotune_inputs(torch.full((64,), 7.0)):
        tilescale.autotune(**words)(jitted)()
    tilescale.autotune(
        **{**words, "configs": [{"block": 2}]}, supply_prog=lambda ps: [torch.full((64,), 9.0)]
    )(jitted)()
    assert [float(s[0]) for s in seen] == [7.0, 9.0]
    checked = []
    manual = tilescale.autotune(
        **{**words, "configs": [{"block": 1}]},
        manual_check_prog=lambda got, want: checked.append((got, want)),
    )
    manual(jitted)()
    assert torch.equal(checked[0][0][0], checked[0][1][0])
    with pytest.raises(TileTypeError, match="manual_check_prog"):
        tilescale.autotune(configs=[{"block": 1}], manual_check_prog=print)


def test_inputs_say_what_is_dynamic():
    """A kernel that is tuned ahead of its calls, on the inputs that were set."""

    @tilescale.autotune(configs=[{"block": 8}, {"block": 16}], warmup=0, rep=1)
    @tilescale.jit(target="cpu")
    def eager(A, block: int = 8):
        n = T.dynamic("n")
        A: T.Tensor((n,), "float32")
        B = T.empty((n,), "float32")
        with T.Kernel(T.ceildiv(n, block)) as bx:
            for i in T.Parallel(block):
                B[bx * block + i] = A[bx * block + i] + 1
        return B

    with set_autotune_inputs(torch.arange(40.0)):
        kernel = eager.compile()
    assert kernel.config["block"] in (8, 16) and torch.equal(kernel(torch.ones(24)), torch.full((24,), 2.0))


def test_several_kernels_at_once():
    jitted = tilescale.jit(scaled, out_idx=-1, target="cpu")
    kernels = jitted.par_compile([{"block": 16}, (32,), {"block": -1}], ignore_error=True)
    assert kernels[0] is jitted(block=16) and kernels[1] is not None and kernels[2] is None
    with pytest.raises(TileError):
        jitted.par_compile([{"block": -1}])


def test_hints_are_the_cost_model_s():
    hints = MatmulTemplate(4096, 4096, 4096).with_arch(CUDA("cuda:sm_90a")).recommend_hints(topk=4)
    assert len(hints) == 4 and [h.latency for h in hints] == sorted(h.latency for h in hints)
    for h in hints:
        assert h.block[0] % h.warp[0] == 0 and h.block[1] % h.warp[1] == 0 and h.rstep[0] in (32, 64)
    with pytest.raises(TileTypeError, match="AMD"):
        CDNA("hip")
    assert driver.get_num_sms() > 0


def test_the_work_of_a_product():
    found = Analyzer.analysis(MatmulTemplate(512, 512, 512).equivalent_function(), CUDA("cuda:sm_90a"))
    assert 2 * 512**3 <= found.total_flops < 2.1 * 512**3 and found.total_global_bytes == 3 * 512 * 512 * 2


def test_targets_in_other_spellings():
    tvm_like = SimpleNamespace(kind=SimpleNamespace(name="cuda"), attrs={"arch": "sm_80"})
    for target in ({"kind": "cuda", "arch": "sm_80"}, tvm_like, "cuda -arch=sm_80"):
        assert parse_target(target) == ("cuda", "sm_80")
    assert parse_target({"kind": "llvm"}) == ("cpu", "")
    with pytest.raises(TileValueError, match="there is no target"):
        parse_target({"kind": "fpga"})
    assert nvcc.get_target_compute_version("cuda:sm_90a") == "9.0"
    assert nvcc.get_target_compute_version(determine_target("cpu", True)) == nvcc.get_target_compute_version()
    assert nvcc.parse_compute_version("12.1") == (12, 1)


def test_the_target_of_this_machine():
    assert (
        determine_target("cpu") == "cpu"
        and determine_target({"kind": "cuda", "arch": "sm_90"}) == "cuda:sm_90"
    )
    found = determine_target("cuda:sm_80", return_object=True)
    assert (found.kind.name, found.arch, found.attrs, str(found)) == (
        "cuda",
        "sm_80",
        {"arch": "sm_80"},
        "cuda:sm_80",
    )
    assert parse_target(found) == ("cuda", "sm_80") and lower(scaled(), found).kernel_source.count(
        "__global__"
    )
    here = determine_target(return_object=True)
    assert here.kind.name in ("cpu", "cuda") and str(here) == determine_target()
    assert auto_infer_current_arch().target.startswith("cuda:sm_")
    with pytest.raises(TileValueError, match="no target 'cutedsl'|there is no target"):
        determine_target("cutedsl")


def test_dtypes_in_other_spellings():
    assert T.dtype(torch.float16) is T.float16 and T.dtype("float16") == T.float16
    assert tilescale.DataType("int8").bits == 8 and determine_fp8_type("e5m2") == T.float8_e5m2
    assert determine_torch_fp8_type() is torch.float8_e4m3fn
    from tilescale.language.dtypes import _TORCH_DTYPE_TO_STR

    assert _TORCH_DTYPE_TO_STR[torch.bfloat16] == "bfloat16"
    with pytest.raises(TileTypeError, match="unknown dtype"):
        T.dtype("fp16")
    assert T.int4 == "int4" and T.int4 not in (T.int8, T.uint8)
    assert T.Tensor((4,), T.float4_e2m1fn).shape == (2,)  # bytes


def test_code_without_a_kernel():
    made = tilescale.lower(scaled(), "cuda:sm_90a")
    assert made.target == "cuda:sm_90a" and "__global__" in made.kernel_source and len(made.params) == 2


def test_inputs_and_comparisons():
    param = {"shape": (3, 4), "dtype": "uint8"}
    assert get_tensor_supply(TensorSupplyType.Auto)(param).dtype is torch.uint8
    assert torch.equal(
        get_tensor_supply(TensorSupplyType.One)({"shape": (2,), "dtype": "float16"}), torch.ones(2).half()
    )
    normal = get_tensor_supply(TensorSupplyType.Normal)({"shape": (1000,), "dtype": "float32"})
    assert abs(normal.mean() + 1) < 0.2 and abs(normal.std() - 1) < 0.2
    with pytest.raises(TileValueError, match="extents"):
        get_tensor_supply()({"shape": ("n",), "dtype": "int8"})
    a = torch.zeros(1000)
    b = a.clone()
    b[3] = 1
    assert torch_assert_close(a, b, max_mismatched_ratio=0.001)
    with pytest.raises(AssertionError, match="1 of 1000"):
        torch_assert_close(a, b, max_mismatched_ratio=0.0)
    with pytest.raises(AssertionError, match="shapes"):
        torch_assert_close(a, a[1:])


def test_times_by_counts_and_quantiles():
    calls = []
    assert len(do_bench(lambda: calls.append(0), _n_warmup=3, _n_repeat=5, return_mode="all")) == 5
    low, high = do_bench(lambda: sum(range(1000)), _n_repeat=9, quantiles=[0.1, 0.9], backend="cupti")
    assert low <= high
    with pytest.raises(TileValueError, match="backend"):
        do_bench(lambda: 0, backend="sundial")


def test_what_rewrites_the_compiler_s_text_is_refused():
    with pytest.raises(TileTypeError, match="CUDA text"):
        register_cuda_postproc_callback(lambda code, target: code)


def test_whole_numbers():
    assert [tilescale.next_power_of_2(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert tilescale.cdiv(7, 4) == tilescale.math.cdiv(7, 4) == 2
    tilescale.disable_cache()


def test_marks():
    from tilescale import testing

    testing.set_random_seed(3)
    first = torch.rand(2)
    testing.set_random_seed(3)
    assert torch.equal(first, torch.rand(2))
    mark = testing.requires_package("no_such_package")
    assert mark.args == (True,) and not testing.requires_package("torch").args[0]
    assert testing.requires_cuda_compute_version_ge(99, 0).args == (True,)
    assert "AMD" in testing.requires_cdna().kwargs["reason"]

    @testing.requires_metal
    def a_test():
        pass

    assert a_test.pytestmark[0].name == "skip"
    with pytest.raises(AssertionError):
        testing.torch_assert_close(torch.zeros(3), torch.ones(3))
    testing.torch_assert_close(torch.ones(3), torch.ones(3))
    with pytest.raises(AttributeError):
        _ = testing.no_such_mark
    assert tilescale.tvm.testing.requires_package("no_such_package").args == (True,)


LINES = {
    "import tilelang": "import tilescale as tilelang",
    "    import tilelang.testing": "    import tilescale.testing; import tilescale as tilelang",
    "import tilelang.language as T": "import tilescale.language as T",
    "import tilelang as tl": "import tilescale as tl",
    "from tilelang.profiler import do_bench": "from tilescale.profiler import do_bench",
    "from tilelang import language as T  # noqa": "from tilescale import language as T  # noqa",
    "x = tilelang.jit": "x = tilelang.jit",
    "from tilelang_utils import f": "from tilelang_utils import f",
}


@pytest.mark.parametrize("line", LINES)
def test_only_import_lines_are_changed(line: str):
    assert programs.changed_line(line) == LINES[line]


def test_kernels_are_counted(tmp_path: Path):
    text = """
import tilelang
@tilelang.jit(out_idx=[-1])
def outer(n):
    @T.prim_func
    def main(): ...
    return main
@T.prim_func
def alone(): ...
class C:
    @tilelang.jit
    def eager(A): ...
"""
    assert programs.kernels_of(text) == ["outer", "alone", "C.eager"]
    (tmp_path / "gemm_sm100").mkdir()
    (tmp_path / "gemm_sm100/a.py").write_text(text)
    (tmp_path / "b.py").write_text(text)
    (tmp_path / "c.py").write_text("import torch\n")
    found = programs.programs(tmp_path)
    assert [(p.path, p.left_out) for p in found] == [("b.py", None), ("gemm_sm100/a.py", "Blackwell")]


def test_swizzles_by_tilelang_s_names():
    from tilescale.cuda.intrinsics import get_mma_micro_size, get_swizzle_layout
    from tilescale.layout import make_swizzled_layout

    rows, columns = 16, 64
    wanted = make_swizzled_layout(T.Tensor((rows, columns), "float16"))
    for i in range(rows):
        for j in range(columns):
            row, column = get_swizzle_layout(i, j, columns, "float16")
            assert (row * columns + column) * 2 == wanted.byte(i, j), (i, j)
    assert get_mma_micro_size("int8") == (16, 16, 32)
    from tilescale.cuda.intrinsics.sparse_layout import GROUP_CONFIG, get_e_factor, get_e_replicate_factor

    assert (
        get_e_factor("float16", "int16") == 16 and get_e_factor("float16", "uint8") == 8
    )  # as T.gemm_sp's E has it
    assert GROUP_CONFIG[T.float32] == (1, 2) and get_e_replicate_factor("int8") == 1
    with pytest.raises(TileValueError, match="rows of 48"):
        get_swizzle_layout(0, 0, 48, "float16")


def test_kernels_of_several_programs():
    def copied(n: int):
        @T.prim_func
        def main(A: T.Tensor((n,), "float32"), B: T.Tensor((n,), "float32")):
            with T.Kernel(T.ceildiv(n, 32)) as (bx,):
                for i in T.Parallel(32):
                    B[bx * 32 + i] = A[bx * 32 + i]

        return main

    @T.prim_func
    def wrong(A: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            A[4] = 0

    made = tilescale.par_compile([copied(40), wrong, copied(64)], out_idx=-1, target="cpu", ignore_error=True)
    assert made[1] is None and made[0] is not None and made[2] is not None
    for kernel, n in ((made[0], 40), (made[2], 64)):
        a = torch.randn(n)
        assert torch.equal(kernel(a), a)
    with refused(TileValueError, "index 4 lies outside"):
        tilescale.par_compile([wrong], target="cpu")


def test_the_environment_by_its_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from tilescale.env import env as variables

    monkeypatch.setenv("TILESCALE_LOG", "warning")
    assert tilescale.env.TILELANG_CACHE_DIR == variables.TILELANG_CACHE_DIR == str(env.CACHE_DIR.get())
    assert variables.TILELANG_PRINT_ON_COMPILATION == "0" and variables.is_cache_enabled()
    monkeypatch.setenv("TILESCALE_CACHE_DIR", str(tmp_path / "before"))
    tilescale.env.TILELANG_CACHE_DIR = str(tmp_path / "other")
    assert env.CACHE_DIR.get() == tmp_path / "other"
    monkeypatch.setenv("TILESCALE_TARGET", "cpu")
    with refused(TileValueError, "TILESCALE_TARGET is 'hip'"):
        variables.TILELANG_DEFAULT_TARGET = "hip"
    assert variables.get_default_target() == "cpu"
    for name in ("TILELANG_NO_SUCH_THING", "nothing"):
        with pytest.raises(AttributeError, match=f"env has no {name} here"):
            getattr(variables, name)
    with pytest.raises(AttributeError, match="env has no TILELANG_NO here"):
        tilescale.env.TILELANG_NO = "1"


def test_parameters_say_what_they_are_by_name():
    @T.prim_func
    def main(A: T.Tensor((64, T.dynamic("n")), "float8_e4m3fn"), B: T.Tensor((64,), "bool"), m: T.uint8):
        with T.Kernel(1):
            for i in T.Parallel(64):
                B[i] = T.cast(A[i, 0], "float32") > T.cast(m, "float32")

    a, b, m = tilescale.compile(main, target="cpu").params
    assert isinstance(a, KernelParam) and a["name"] == "A" and a.shape[0] == 64 and len(a.shape) == 2
    assert a.dtype == "float8_e4m3fn" == a.tilelang_dtype() and a.torch_dtype() is torch.float8_e4m3fn
    assert a.is_float8() and not a.is_float4() and not a.is_boolean() and not a.is_scalar()
    assert b.is_boolean() and b.shape == [64] and not b.is_unsigned()
    assert m.is_scalar() and m.is_unsigned() and m.shape == []


def test_where_programs_take_names_from():
    import tilescale.jit
    import tilescale.profiler.bench
    import tilescale.utils.device
    import tilescale.utils.target

    assert tilescale.profiler.bench.do_bench is do_bench
    assert tilescale.utils.target.determine_target is determine_target
    assert (
        torch.empty(1, device=tilescale.utils.device.get_current_device()).is_cuda
        == torch.cuda.is_available()
    )
    assert tilescale.utils.device.get_available_cpu_count() >= 1
    eager = tilescale.jit(lambda A: None, target="cpu")
    assert isinstance(eager, sys.modules["tilescale.jit"].JITImpl)
    assert (
        tilescale.Layout is T.Layout
        and tilescale.Fragment is T.Fragment
        and tilescale.dtypes.float16 == "float16"
    )


def test_modules_of_packages_are_there_without_an_import():
    names = ["contrib.nvcc", "utils.target", "engine.param", "carver.arch"]
    code = f"import tilescale as tilelang\nfor m in ({', '.join('tilelang.' + n for n in names)}): print(m.__name__)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.split() == ["tilescale." + n for n in names]
    with pytest.raises(AttributeError, match="'tilescale.contrib' has no attribute 'hipcc'"):
        tilescale.contrib.hipcc  # noqa: B018


def test_what_kernel_objects_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kernel = tilescale.compile(scaled(), out_idx=-1, target="cpu")
    kernel.print_source_code()
    kernel.show_source("kernel")
    assert capsys.readouterr().out == f"{kernel.kernel_source}\n" * 2
    kernel.export_sources(kernel_path=str(tmp_path / "kernel.txt"))
    assert (tmp_path / "kernel.txt").read_text() == kernel.get_kernel_source()
    assert kernel.n_regs is None is kernel.n_spills and kernel.run_once().shape == (64,)
    with refused(TileValueError, "the text of 'host'", expected="there is no host code"):
        kernel.export_sources(host_path="x")
    with refused(TileValueError, "main has no tuner's result"):
        kernel.get_tuner_result()
    profiler, seen = kernel.get_profiler(), []
    profiler.assert_consistent(repeat=2)
    profiler.manual_assert_close(lambda a: a * 2, manual_check_prog=lambda *lists: seen.append(lists))
    ((got, want),) = seen
    assert torch.equal(got[0], want[0])
    with refused(TileTypeError, "without manual_check_prog"):
        profiler.manual_assert_close(lambda a: a)
    code = tilescale.compile(scaled(), target="cuda:sm_90a")
    code.show_ptx()
    assert ".visible .entry main" in capsys.readouterr().out and code.n_max_threads == 32


def test_consistency_is_looked_at():
    count = [0]

    def other(kernel):
        count[0] += 1
        return lambda a: torch.full((64,), float(count[0]))

    profiler = tilescale.compile(scaled(), out_idx=-1, target="cpu").get_profiler()
    own = profiler.kernel
    profiler.kernel = type("Other", (), {"name": "other", "__call__": lambda self, a: other(own)(a)})()
    profiler.inputs = lambda: [torch.zeros(64)]
    with pytest.raises(AssertionError, match="called again"):
        profiler.assert_consistent(repeat=1)
