"""What a program is compiled for, as data: what passes and lowerings ask of a machine. A program carries its
target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A machine. The tables are the targets' own (compiler/cuda/targets.py).

    name: what people write. arch: which of several; "" where there is one. family: a target of which it has
    all lowerings but those that it registers itself; "gpu": blocks are threads that share registers and
    shared memory. shared_bytes: what a block may have of it. wave: so many threads run in step, and give each
    other values by shuffles. named_barriers: threads of a block, fewer than all, have barriers of their own
    (PTX ISA, "barrier"). async_copies: threads copy from global to shared memory beside what they compute
    (PTX ISA, "cp.async"). tensor_copies: one thread has boxes of tensors copied, which signal a barrier (PTX
    ISA, "cp.async.bulk.tensor"). matrix_products: a warp multiplies fragments (PTX ISA, "mma"; of sparse
    operands "mma.sp"). group_products: warpgroups multiply tiles in shared memory beside what they compute
    (PTX ISA, "wgmma"). counting_barriers: barriers in shared memory count bytes that come (PTX ISA,
    "mbarrier.expect_tx"). proxies: what units beside the threads touch takes a fence (PTX ISA, "Async
    proxy"). moves_registers: warpgroups give registers to each other ("setmaxnreg"). clusters: blocks of a
    cluster reach each other's shared memory. dependent_launches: a kernel may begin before the one before it
    ends. matrix_stores: a warp stores 8 × 8 matrices at once (PTX ISA, "stmatrix"). wide_atomics: a pair of
    bfloat16, or 16 bytes of float32, is added at once. float8_pairs: two float8_e4m3fn are converted at once
    (PTX ISA, "cvt"). remote: how other ranks' memory is reached: "" by addresses, "nvshmem" by that
    library's calls.
    """

    name: str
    arch: str = ""
    family: str = ""
    shared_bytes: int = 0
    wave: int = 0
    named_barriers: bool = False
    async_copies: bool = False
    tensor_copies: bool = False
    matrix_products: bool = False
    group_products: bool = False
    counting_barriers: bool = False
    proxies: bool = False
    moves_registers: bool = False
    clusters: bool = False
    dependent_launches: bool = False
    matrix_stores: bool = False
    wide_atomics: bool = False
    float8_pairs: bool = False
    remote: str = ""

    @property
    def gpu(self) -> bool:
        return self.family == "gpu"

    def __str__(self) -> str:
        return f"{self.name}:{self.arch}" if self.arch else self.name


#: the processor that the compiler runs on
CPU = Target("cpu")
