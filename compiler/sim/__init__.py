"""The simulator: all ranks and blocks of a launch as coroutines of one process, every access checked against
the memory model.

run.py       the two entries: `launch` computes on given arrays, `check` tries schedules and gathers findings
prepare.py   a tile program → Python functions of an executor, once; expr.py and nest.py: its scalars and
T.Parallel loops machine.py   executors, blocks, ranks; counters and barriers; the main loop; schedule.py
chooses who runs next overlap.py   unordered launches of a program, which overlap memory.py    tiles and
tensors, and beside each element who wrote and read it last, as vector-clock epochs numerics.py  what
arithmetic means: dtypes, rounding, conversions findings.py  what is reported, printed like a compiler's
errors; printing.py: what T.print shows
"""
