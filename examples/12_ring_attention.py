"""Ring attention: the sequence is cut among ranks. Each keeps its queries; blocks of keys and values travel
round the ring, and the running softmax takes one block of them a step.

Look at: two slots a rank. What arrived in one is attended to and passed on while the next block arrives in
the other; a slot is written again only when its readers have said that they are done.
"""

import common
import torch

import tilescale
import tilescale.comm as comm
import tilescale.language as T

LOG2_E = 1.4426950408889634


@tilescale.jit
def kernel(heads, S, D, world, causal=False, BM=64, dtype="bfloat16"):
    """S: queries (keys, values) a rank; the whole sequence is world * S long."""
    tiles = -(-S // BM)
    scale = LOG2_E / D**0.5
    shape = (heads, S, D)

    @T.prim_func
    def ring_attention(
        Q: T.Tensor(shape, dtype),
        KV: T.SymmTensor((2, 2, *shape), dtype),  # slot, K or V; slot 0 holds this rank's at first
        arrived: T.Signal((world, heads)),  # by step, since blocks may be a step apart
        free: T.Signal((world, heads)),
        O: T.Tensor(shape, dtype),
    ):
        with T.Kernel(tiles, heads, threads=128) as (bx, h):
            q, k, v = (T.alloc_shared((BM, D), dtype) for _ in range(3))
            s, o = T.alloc_fragment((BM, BM), "float32"), T.alloc_fragment((BM, D), "float32")
            weights = T.alloc_fragment((BM, BM), dtype)
            top, before, total = (T.alloc_fragment((BM,), "float32") for _ in range(3))
            T.copy(Q[h, bx * BM, 0], q)
            T.clear(o)
            T.clear(total)
            T.fill(top, -T.infinity("float32"))
            with T.Scale("device") as rank, n:
                for step in T.serial(n):
                    slot = step % 2
                    owner = (rank + n - step) % n  # whose keys these are
                    if step > 0:
                        # Acquires this head's keys and values, which the left rank's blocks put.
                        T.wait(arrived[step, h], tiles)
                    if step + 1 < n:
                        if step > 0:
                            # Acquires the right rank's other slot: all its readers are done.
                            T.wait(free[step - 1, h], tiles)
                        piece = KV[slot, 0:2, h, bx * BM : (bx + 1) * BM, 0:D]
                        there = KV[1 - slot, 0:2, h, bx * BM : (bx + 1) * BM, 0:D]
                        # Releases a piece to the right rank.
                        T.copy(piece, there, dst=(rank + 1) % n, signal=arrived[step + 1, h])
                    visible = (
                        T.if_then_else(owner > rank, 0, T.if_then_else(owner == rank, bx + 1, tiles))
                        if causal
                        else tiles
                    )
                    for t in T.serial(visible):
                        T.copy(KV[slot, 0, h, t * BM, 0], k)
                        T.copy(KV[slot, 1, h, t * BM, 0], v)
                        T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                        if causal or S % BM:
                            for i, j in T.Parallel(BM, BM):
                                seen = t * BM + j < S
                                if causal:  # in places of the whole sequence
                                    seen = T.all_of(seen, owner * S + t * BM + j <= rank * S + bx * BM + i)
                                s[i, j] = T.if_then_else(seen, s[i, j], -T.infinity("float32"))
                        T.copy(top, before)
                        T.reduce_max(s, top, dim=1, clear=False)
                        for i, j in T.Parallel(BM, BM):
                            s[i, j] = T.__exp2((s[i, j] - top[i]) * scale)
                        for i in T.Parallel(BM):
                            before[i] = T.__exp2((before[i] - top[i]) * scale)
                            total[i] *= before[i]
                        T.reduce_sum(s, total, dim=1, clear=False)
                        for i, j in T.Parallel(BM, D):
                            o[i, j] *= before[i]
                        T.copy(s, weights)
                        T.gemm(weights, v, o)
                    # Releases this slot to the left rank: read, and passed on.
                    T.signal(free[step, h], dst=(rank + n - 1) % n)
            for i, j in T.Parallel(BM, D):
                o[i, j] /= total[i]
            T.copy(o, O[h, bx * BM, 0])

    return ring_attention


def run(heads, S, D, causal=False, seed=0, launches=1):
    """Launches on this rank; returns the largest error against torch's attention over the whole sequence."""
    rank, world = common.ranks()
    kv = comm.empty((2, 2, heads, S, D), torch.bfloat16)
    arrived, free = comm.signals((world, heads)), comm.signals((world, heads))
    o = torch.empty(heads, S, D, dtype=torch.bfloat16, device=common.device())
    attention, worst = kernel(heads, S, D, world, causal), 0.0
    for launch in range(launches):
        q, k, v = (
            [common.randn(heads, S, D, seed=seed + 3 * launch + i, rank=r).bfloat16() for r in range(world)]
            for i in range(3)
        )
        common.poison(kv)[0] = torch.stack([k[rank], v[rank]])
        common.poison(o)
        attention(q[rank], kv, arrived, free, o)
        whole = torch.nn.functional.scaled_dot_product_attention(
            *(torch.cat(x, 1).float() for x in (q, k, v)), is_causal=causal
        )
        worst = max(worst, common.difference(o, whole[:, rank * S : (rank + 1) * S]))
    return worst


def main(argv=None):
    args = common.arguments(argv, __doc__, heads=2, seq=150, dim=64)
    code = 0
    _, world = common.ranks()
    for causal in (False, True):
        error = run(args.heads, args.seq, args.dim, causal, args.seed)
        what = f"{'causal ' if causal else ''}ring attention, {args.heads}×{world * args.seq}×{args.dim}"
        code |= common.report(what, error, 2e-2)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
