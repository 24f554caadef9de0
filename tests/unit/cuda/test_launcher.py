"""The launcher of CUDA kernels, against a driver that only remembers: what reaches it, and what is refused
before."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilescale import native
from tilescale.compiler.cuda import toolchain

needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="there is no nvcc on this machine")
HERE = Path(__file__).resolve().parent


def build(folder: Path) -> None:
    headers = toolchain.headers()
    real = ["-DREAL_HEADER", f"-I{headers}"] if headers is not None and (headers / "cuda.h").exists() else []
    line = [
        *native.compiler(),
        "-shared",
        "-fPIC",
        "-w",
        *real,
        "-Wl,-soname,libcuda.so.1",
        str(HERE / "fake_cuda.c"),
    ]
    subprocess.run([*line, "-o", str(folder / "libcuda.so.1")], check=True)


def run(folder: Path, env: dict[str, str], **more: str) -> Any:
    path = os.pathsep.join(filter(None, [str(folder), env.get("LD_LIBRARY_PATH", "")]))
    # not NVRTC: cuda-python would take this driver for a whole one
    own = {"LD_LIBRARY_PATH": path, "TILESCALE_CUDA_COMPILER": "nvcc"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cuda.launches"],
        env=env | own | more,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HERE.parent.parent.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def seen(driver: Path) -> dict[str, Any]:
    return run(
        driver,
        os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE.parent.parent.parent), os.environ.get("PYTHONPATH")])
            )
        },
    )


def test_pointers_scalars_and_extents_in_the_order_of_the_function(seen: dict[str, Any]):
    got = seen["scale"]
    assert got["pointers"] == [True, True] and got["symbol"] == "scale"
    assert got["scalars"] == [pytest.approx(0.1, abs=1e-8), -3, 300, 1]
    assert (got["grid"], got["block"], got["shared"], got["nattrs"]) == ([3, 1, 1], [128, 1, 1], 0, 0)


def test_the_current_stream_is_used(seen: dict[str, Any]):
    assert seen["scale"]["stream"] == 0x1234
    assert seen["again"]["stream"] == 0


def test_the_compute_capability(seen: dict[str, Any]):
    assert seen["capability"] == [[9, 0], None]


def test_code_is_loaded_once(seen: dict[str, Any]):
    assert seen["scale"]["loads"] == 1 and seen["again"]["loads"] == 1 and seen["again"]["launches"] == 2


def test_an_empty_grid_launches_nothing(seen: dict[str, Any]):
    assert seen["empty"] == ["nothing", 2]


@pytest.mark.parametrize(
    "what, text",
    [
        ("device", "TypeError: TS:device:0:-1:2:1"), ("dtype", "TypeError: TS:dtype:0:-1:float16:float32"), ("shape", "ValueError: TS:shape:1:0:300:7"),
        ("gpu", "ValueError: TS:gpu:1:-1:0:1"), ("overlap", "ValueError: TS:overlap:1:0:"), ("range", "ValueError: TS:range:3:-1:int8:300"),
        ("nargs", "TypeError: TS:nargs:-1:-1:4:1"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(seen: dict[str, Any], what: str, text: str):
    assert seen["refused"][what].startswith(text)


def test_another_device_than_the_current_one(seen: dict[str, Any]):
    pushed = seen["other device"]["pushed"]
    assert pushed == 101  # pushed once, popped once
    assert seen["other device"]["loads"] == 1, "a library serves all devices"
    assert seen["no context"]["pushed"] == 202


def test_refusals_of_the_driver(seen: dict[str, Any]):
    image = "no kernel image is available for execution on the device"
    assert seen["launch fails"] == f"RuntimeError: TS:run:-1:the launch (cuLaunchKernelEx): {image}"
    assert seen["load fails"] == f"RuntimeError: TS:run:-1:loading the code (cuLibraryLoadData): {image}"


def test_calls_that_come_again_are_graphs(seen: dict[str, Any]):
    # Launches; graphs made, given other arguments, launched, destroyed; whether the last call's arguments arrived.
    got = seen["graphs"]
    assert got["twice"] == [2, [0, 0, 0, 0], True]
    assert got["often"] == [2, [1, 0, 2, 0], True]
    assert got["other number"] == [1, [0, 1, 1, 0], True]
    assert got["in turn"] == [8, [0, 8, 8, 0], True]
    assert got["other stream"] == [4, [1, 0, 2, 0], True, 0x77]
    assert got["other shape"] == [1, [0, 1, 1, 0], True, [2, 1, 1]]
    assert got["again"] == [3, [1, 0, 1, 0], True]
    assert got["destroyed"] == 1


def test_launches_that_stay_launches(seen: dict[str, Any]):
    got = seen["graphs"]
    assert got["captured"] == [1, [0, 0, 0, 0], True], "a capture holds the kernel itself"
    assert got["many streams"] == [15, [0, 0, 0, 2], True]
    assert got["refused"] == [5, [0, 0, 0, 0], True], "where the driver makes no graph"


def test_tensor_maps_and_attributes(seen: dict[str, Any]):
    got = seen["mapped"]
    assert got["of A"] and got["grid"] == [2, 4, 3] and got["shared"] == 100_000
    assert got["attribute"] == [8, 100_000]  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert got["nattrs"] == 3
    assert got["attrs"][:12] == [
        4,
        2,
        1,
        1,
        2,
        1,
        got["attrs"][6],
        got["attrs"][7],
        6,
        1,
        got["attrs"][10],
        got["attrs"][11],
    ]
    dims, strides, box, rest = got["map"][:5], got["map"][5:10], got["map"][10:15], got["map"][15:]
    assert (dims[:2], strides[:1], box[:2]) == ([64, 5], [256], [32, 64])
    assert rest == [7, 2, 3, 3]  # float32, two axes, 128-byte swizzle, 256 bytes to L2


def test_tensor_maps_are_kept_by_address_and_shape(seen: dict[str, Any]):
    assert seen["encodes"] == [1, 2, 3, 4, 4, 4, 4, 4]
    assert seen["grids"] == [2, 4, 3]


def test_an_empty_tensor_has_a_map(seen: dict[str, Any]):
    """The driver encodes no extent of zero: the map is of one element, which is zero."""
    said, *rest = seen["empty map"]
    words, at, there = rest[:19], rest[19], rest[20]
    assert (
        said == "nothing"
        and (words[:2], words[5], words[10:12]) == ([1, 1], 16, [32, 64])
        and at == 0
        and there == [0.0] * 4
    )


def test_what_tma_cannot_read_is_refused(seen: dict[str, Any]):
    assert seen["tma"] == "ValueError: TS:tma:0:0:4:63"
    assert seen["align"] == "ValueError: TS:align:0:-1:16:4"
    assert seen["contig"].startswith("ValueError: TS:contig:0:0:")


def test_a_kernel_that_failed_is_named_by_every_call_behind_it(seen: dict[str, Any]):
    refused, itself, synchronised, another, people, untold, others = seen["failed"]
    text = "RuntimeError: TS:failed:asserts|b.py|12|block (2, 1, 0), thread 33: assert failed: A | B is too great"
    assert refused.startswith("TypeError: TS:nargs") and itself == "nothing"  # the launch itself was accepted
    assert synchronised == another == text
    assert (
        people
        == "LaunchError: b.py:12: asserts: block (2, 1, 0), thread 33: assert failed: A | B is too great"
    )
    assert untold == "", "what was raised is not told again when the process ends"
    assert others == "asserts: block (2, 1, 0), thread 33: assert failed: A | B is too great (b.py:12)", (
        "what other ranks hear"
    )


def test_a_launch_on_a_team_is_one_kernel_that_is_told_how_to_end(seen: dict[str, Any]):
    got = seen["team"]
    assert got["first"] == [["kernel", 0]]
    # Rank, size, ordered, limit in ns, control words, a description of 32 bits, an end with exits, arenas.
    assert got["view"] == [1, 2, 1, 5_000_000_000, 4096, True, 2, True, True]
    assert got["ends"] == [[1, 2], [1, 2], [0, 0]], (
        "without order nothing is told, and counters are left alone"
    )
    assert got["counters"] == [1, True], "what is kept is not zeroed"
    assert got["no blocks"] == [["record", 0x77], ["wait", 0], ["pass", 0]], (
        "the others wait for this rank all the same"
    )


def test_what_waits_for_ranks_leaves_shared_memory_to_others(seen: dict[str, Any]):
    assert seen["team"]["carveouts"] == [100, 100]  # CU_SHAREDMEM_CARVEOUT_MAX_SHARED


def test_launches_of_a_team_are_one_sequence(seen: dict[str, Any]):
    got = seen["team"]
    assert got["other stream"] == [["record", 0], ["wait", 0x77], ["kernel", 0x77]]
    for number in (1, 2):
        assert got[f"captured {number}"] == [["kernel", 0]], "what is captured runs when its graph does"
        assert got[f"another branch {number}"] == [["record", 0], ["wait", 0x55], ["kernel", 0x55]]


def test_a_launch_without_order_only_counts(seen: dict[str, Any]):
    assert seen["team"]["unordered"] == [["kernel", 0]]


def test_a_launch_in_which_all_exchange_packets_stands_alone(seen: dict[str, Any]):
    got = seen["team"]
    assert got["exchanged"] == [["kernel", 0]]
    assert got["with flags"] == [["kernel", 0]]


def test_a_launch_without_blocks_counts_as_one_that_uses_a_box(seen: dict[str, Any]):
    assert seen["team"]["not counted"] == []
    assert seen["team"]["counted"] == [["pass", 0]]
    assert seen["team"]["box"] == [1, True]


def test_blocks_that_wait_must_be_resident_together(seen: dict[str, Any]):
    # Ten multiprocessors, four blocks each.
    assert seen["team"]["resident"] == ["ValueError: TS:resident:-1:-1:40:41"]


def test_multiprocessors_that_are_left_to_others(seen: dict[str, Any]):
    fits, refused = seen["team"]["beside others"]  # three of ten
    assert fits == [["kernel", 0]] and refused == ["ValueError: TS:resident:-1:-1:28:29"]


def test_what_a_launch_says_that_failed(seen: dict[str, Any]):
    signal, entry, ending, meeting, rank, counter, *packets = seen["team"]["says"]
    who, last = (
        "told: rank 0, block (5, 6, 0): ",
        "rank 0 launched last told_without_order; s int64(4,) at heap offset 12288",
    )
    assert signal.startswith(f"{who}waited 5 s for s[3]: expected >= 2, the value is 1 (launches.py:")
    assert entry.startswith(
        f"{who}waited 5 s for rank 0 to reach launch 7 of their team (told); {last}, as this rank did: what "
        "waits on that GPU's other streams may leave it no room (docs/OPS.md, Streams) (launches.py:"
    )
    assert ending == f"told: rank 0: waited 5 s for rank 0 to finish launch 7 of their team (told); {last}"
    assert meeting.startswith(
        f"{who}waited 5 s for rank 0 to arrive at the barrier of launch 7 of their team (told); {last}"
    )
    assert rank.startswith(f"{who}rank 9 is out of range: the team has 2 ranks")
    assert counter.startswith(f"{who}an index of s lies outside")
    late = f"{who}waited 5 s for packets of s in launch 7 of those that use it"
    for text, came in zip(
        packets, (": those of launch 5 came last (", ": none came before (", " ("), strict=True
    ):
        assert text.startswith(late + came), text


def test_ordinary_memory_is_refused_for_symmetric_parameters(seen: dict[str, Any]):
    assert seen["team"]["ordinary"] == [
        "TypeError: TS:notsymm:0:-1:symmetric memory of this rank:an ordinary tensor"
    ]


@needs_nvcc
def test_kernel_objects(seen: dict[str, Any]):
    got = seen["objects"]
    assert (got["grid"], got["arch"], got["values"], got["eager"]) == (
        [3, 1, 1],
        "sm_90a",
        [2.0, 300],
        "cuda",
    )


@needs_nvcc
def test_refusals_as_people_read_them(seen: dict[str, Any]):
    text = seen["objects"]["numpy"]
    assert (
        text.startswith("TileTypeError: ")
        and "scale: A is on cpu, and the kernel is compiled for the cuda target" in text
    )
    assert "expected: a tensor on a GPU" in text and "write instead: torch.from_numpy(A).cuda()" in text
    assert 'A: T.Tensor((N,), "float16")' in text  # the declaration, with a caret
    assert "A begins 1 bytes behind a multiple of 2" in seen["objects"]["unaligned"]


def test_a_machine_without_a_gpu_says_so(driver: Path, clean_env: dict[str, str]):
    got = run(driver, clean_env, FAKE_NO_GPU="1")
    assert got["capability"] == [None, None]
    assert (
        got["call"]
        == "RuntimeError: TS:run:-1:the CUDA driver does not start (cuInit): no CUDA-capable device is detected"
    )


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a driver")
def test_a_machine_without_a_driver_says_so():
    assert native.cuda_missing().startswith("this machine has no CUDA driver (libcuda.so.1: ")


def test_instrumented_kernels_log_into_one_memory_and_clocks_are_compared(seen: dict[str, Any]):
    """The fake GPU's clock is a second ahead: times of the log come out as the host's."""
    log = seen["log"]
    assert log["given"] == [1 << 20, 0, 0]
    within, far = log["clock"][2], max(abs(x) for x in log["clock"][1])
    # a fiftieth of the second that the clocks differ by: a busy machine is late by milliseconds
    assert log["clock"][0] == 2 and far <= within < 20_000_000, log
    assert abs(log["clock"][3][0]) <= log["clock"][3][1] and log["clock"][4] == 1000
    begins = [5000, 6000, 7024, 9000]
    assert [abs(e[0] - ns) <= within for e, ns in zip(log["events"], begins, strict=True)] == [True] * 4
    told = [[0, 0], [1, 32], [1, 32], [0, 0]]
    assert [[e[3], e[4]] for e in log["events"]] == told
    assert [e[1:3] + e[5:] for e in log["events"][:3]] == [
        ["traced", "begin", "kernel", 0],
        ["traced", "begin", "kernel", 0],
        ["traced", "end", "kernel", 0],
    ]
    assert log["spans"] == [[0, -1, 9], [1, -1, 9]] and log["lost"] == 3
    assert log["left"] == [0, 3, 4, 1, 0] and log["cleared"] == [0, 0]
