"""A program whose last rank never signals: the others' launches end by their time limit and say what they waited for."""

from __future__ import annotations

import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T


@tilescale.jit
def kernel():
    @T.prim_func
    def lonely(s: T.Signal((2, 3)), awaited: T.int64):
        with T.Kernel(2, threads=64) as bx:
            with T.Scale("device") as rank, n:
                if rank + 1 < n:
                    T.signal(s[0, 1], dst=(rank + 1) % n)
                T.wait(s[0, 1], awaited)

    return lonely


def main() -> None:
    comm.init()
    s = comm.signals((2, 3))
    kernel()(s, 2)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
