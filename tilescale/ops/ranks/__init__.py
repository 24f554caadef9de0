"""Operations of several ranks: every rank of a group calls them with its own part.

One file an operation, as in the folder above, with ``OP``, a :class:`~tilescale.ops.ranks.case.RankOp`. What
they share is who takes part (groups.py), the symmetric memory that their kernels work in (workspace.py), and
how their cases are run and compared (case.py).

All of them are collective: every rank of the group makes the same calls in the same order. Operands and
results are ordinary tensors. Kernels put out of an ordinary operand straight into the peers' memory, so that
nothing is copied into the heap first; where a result is gathered, it is copied out of the heap inside the
kernel.

Sums are taken in float32 in a fixed order, what another rank adds rounded to the operands' dtype before it
crosses: all ranks get the same bits, and so does every run.

How rows are split: of M rows over n ranks each has c = ceil(M / n), the last ones fewer or none
(`groups.share`). That is torch.chunk's rule and that of DTensor's Shard.
"""
