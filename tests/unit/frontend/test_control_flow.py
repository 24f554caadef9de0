"""Python's constructs in kernels: over Python values they are Python's own, over device values they become
code."""

from __future__ import annotations

import torch

import tilescale.language as T
from tests.kernels import refused, run
from tilescale.errors import LaunchError, TileSyntaxError, TileTypeError

FACTOR = 3


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def test_device_if_elif_else_and_or_not_and_chained_comparisons():
    @T.prim_func
    def kernel(C: T.Tensor((6, 16), "int32"), n: T.int32):
        with T.Kernel(16) as i:
            if i < 4:
                C[0, i] = 1
            elif i < 8 and not (i == 5 or i == 6):
                C[0, i] = 2
            elif 8 <= i < n:
                C[0, i] = 3
            else:
                C[0, i] = 4
            C[1, i] = 10 if i % 2 == 0 else 20
            C[2, i] = 1 if 2 < i <= 5 < n else 0
            C[3, i] = (i > 3) and (i < 6)
            C[4, i] = i if i != 3 and i != 4 else -i
            if not i:
                C[5, i] = 7
            else:
                C[5, i] = 0 if i & 1 else 1

    c = ints(6, 16)
    run(kernel)(c, 12)
    want = ints(6, 16)
    for i in range(16):
        want[0, i] = 1 if i < 4 else 2 if i < 8 and i not in (5, 6) else 3 if 8 <= i < 12 else 4
        want[1, i] = 10 if i % 2 == 0 else 20
        want[2, i] = 2 < i <= 5 < 12
        want[3, i] = 3 < i < 6
        want[4, i] = i if i not in (3, 4) else -i
        want[5, i] = 7 if i == 0 else 0 if i & 1 else 1
    assert c.equal(want)


def test_the_last_operand_behind_python_values_is_the_result():
    """As in Python: no value of it becomes 0 or 1."""

    @T.prim_func
    def kernel(C: T.Tensor((3, 16), "int32"), n: T.int32):
        with T.Kernel(16) as i:
            none, some = 0, 3
            C[0, i] = none or i + n
            C[1, i] = some and i + n
            C[2, i] = (none or i > 3) + (some or i)

    c = ints(3, 16)
    run(kernel)(c, 5)
    i = torch.arange(16)
    assert torch.equal(c.long(), torch.stack([i + 5, i + 5, (i > 3) + 3]))


def test_and_or_over_device_values_give_an_operand():
    """As in Python: where they are no condition alone, none of their numbers becomes 0 or 1."""

    @T.prim_func
    def kernel(C: T.Tensor((10, 4), "int32"), D: T.Tensor((4,), "float32"), n: T.int32, f: T.float32):
        with T.Kernel(4) as i:
            C[0, i] = i or n
            C[1, i] = i and n
            C[2, i] = i or 7
            C[3, i] = i and 7
            C[4, i] = i > 1 and 5 or 9
            C[5, i] = T.ceildiv(8, i or 4)
            C[6, i] = (i > 1 or n) + (i and i > 2)
            C[7, i] = i and T.atomic_add(C[8, i], 2, return_prev=True) or -1
            C[9, i] = 5 if i < 3 else i > 2
            D[i] = f and 2.5 or n

    c, d = ints(10, 4), torch.zeros(4)
    c[8] = 3
    run(kernel)(c, d, 50, 0.5)
    want = [
        [i or 50, i and 50, i or 7, i and 7, (i > 1 and 5) or 9, -(-8 // (i or 4)), (i > 1 or 50) + (i > 2)]
        + [(i and 3) or -1, 5 if i else 3, 5 if i < 3 else 1]
        for i in range(4)
    ]
    assert c.T.tolist() == want and d.tolist() == [2.5] * 4


def test_what_and_or_and_a_choice_give_is_what_a_cell_holds_then():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            none, cell = 0, T.alloc_var("int32")
            cell = 3
            a, b = none or cell, 1 and cell
            c = cell if none == 0 else 9
            d = cell or 8
            cell = 5
            C[0], C[1], C[2], C[3] = a, b, c, d

    c = ints(4)
    run(kernel)(c)
    assert c.tolist() == [3] * 4


def test_and_or_do_not_evaluate_what_they_need_not():
    seen = []

    def noted(x: int) -> int:
        seen.append(x)
        return x

    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(1) as i:
            if False and noted(1):
                C[0] = 5
            if True or noted(2):
                C[0] = 6
            x = 0 and noted(3)
            y = noted(4) or noted(5)
            C[1] = x
            C[2] = y
            C[3] = None is None and 9
            if i < 1 and 3 < noted(2) < noted(99):
                C[0] = -5

    c = ints(4)
    run(kernel)(c)
    assert c.tolist() == [6, 0, 4, 9]
    assert seen == [4, 2]


def test_a_guard_protects_what_is_behind_it():
    """``i < n and A[i] > 0`` reads nothing outside: the tensor ends at a page that may not be read."""

    @T.prim_func
    def kernel(A: T.Tensor((T.dynamic("n"),), "int32"), C: T.Tensor((64,), "int32"), limit: T.int32):
        with T.Kernel(64) as i:
            if i < limit and A[i] > 0:
                C[i] = A[i]
            else:
                C[i] = A[i] if i < limit else -2
            if limit != 0 and 64 // limit == 2:
                C[i] += 1000

    n = 33
    a, c = torch.arange(n, dtype=torch.int32) - 3, ints(64)
    run(kernel)(a, c, n)
    assert c.tolist() == [int(v) for v in a] + [-2] * (64 - n)
    run(kernel)(a, c, 0)
    assert c.tolist() == [-2] * 64


def test_python_if_for_while_over_python_values():
    sizes = [3, 1, 2]

    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            at = 0
            for k, size in enumerate(sizes):
                for _ in range(size):
                    C[at] = 10 * k
                    at += 1
            n = 3
            while n > 1:
                n -= 1
                if n == 1:
                    break
                C[at] = n
                at = at + 1
            if FACTOR == 3:
                C[at] = FACTOR
            else:
                C[at] = undefined_name  # never run: Python's own if

    c = ints(8)
    run(kernel)(c)
    assert c.tolist() == [0, 0, 0, 10, 20, 20, 2, 3]


def test_device_loops_serial_range_while_grid_unroll_persistent():
    @T.prim_func
    def kernel(C: T.Tensor((8, 64), "int32"), n: T.int32):
        with T.Kernel(4) as b:
            if b == 0:
                total = T.alloc_var("int32")
                for i in T.serial(n):
                    total += i
                C[0, 0] = total
                for i in range(2, n, 3):
                    C[1, i] = i
                for i in T.serial(1, 10, 4):
                    C[2, i] = i
                for i, j in T.grid(3, n):
                    C[3, i * n + j] = i * 100 + j
                for i in T.unroll(5):
                    C[4, i] = i * i
                k = T.alloc_var("int32", init=1)
                steps = T.alloc_var(T.int32)
                while k < n * n and steps < 100:
                    k *= 2
                    steps += 1
                C[5, 0] = k
                C[5, 1] = steps
                for i in T.vectorized(16):
                    C[6, i] = i + 1
            for x, y in T.Persistent((3, n), 4, b):
                C[7, x * n + y] = b

    c = ints(8, 64)
    n = 11
    run(kernel)(c, n)
    want = ints(8, 64)
    want[0, 0] = n * (n - 1) // 2
    for i in range(2, n, 3):
        want[1, i] = i
    for i in range(1, 10, 4):
        want[2, i] = i
    for i in range(3):
        for j in range(n):
            want[3, i * n + j] = i * 100 + j
            want[7, i * n + j] = (i * n + j) % 4
    for i in range(5):
        want[4, i] = i * i
    want[5, 0], want[5, 1] = 128, 7
    want[6, :16] = torch.arange(1, 17)
    assert c.equal(want)


def test_break_and_continue_in_device_loops():
    @T.prim_func
    def kernel(C: T.Tensor((6, 16), "int32"), stop: T.int32):
        with T.Kernel(1):
            for i in T.serial(16):
                if i == stop:
                    break
                if i % 2 == 0:
                    continue
                C[0, i] = i
            k = T.alloc_var("int32")
            while k < 16:
                k += 1
                if k % 3 == 0:
                    continue
                if k > stop:
                    break
                C[1, k] = k
            for i in T.serial(4):  # leaves the inner loop only
                for j in T.serial(4):
                    if j > i:
                        break
                    C[2, i * 4 + j] = 1
                C[3, i] = i
            for i in T.serial(3, 16, 2):
                if i > 9:
                    if i > 11:
                        break
                    C[4, i] = -7
                    continue
                else:
                    C[4, i] = i
                C[5, i] = 2 * i

    c = ints(6, 16)
    run(kernel)(c, 9)
    want = ints(6, 16)
    for i in (1, 3, 5, 7):
        want[0, i] = i
    for i in (1, 2, 4, 5, 7, 8):
        want[1, i] = i
    for i in range(4):
        want[3, i] = i
        for j in range(i + 1):
            want[2, i * 4 + j] = 1
    for i in (3, 5, 7, 9):
        want[4, i], want[5, i] = i, 2 * i
    want[4, 11] = -7
    assert c.equal(want)


def test_break_in_a_persistent_loop_ends_it():
    @T.prim_func
    def kernel(C: T.Tensor((64,), "int32")):
        with T.Kernel(2) as b:
            for x, y in T.Persistent((8, 8), 2, b):
                if x == 4:
                    break
                if y == 3:
                    continue
                C[x * 8 + y] = b

    c = ints(64)
    run(kernel)(c)
    assert c.tolist() == [-1 if i >= 32 or i % 8 == 3 else i % 2 for i in range(64)]


def test_break_continue_return_of_python_values_stay_pythons():
    def first_even(values: list[int]) -> int:
        for v in values:
            if v % 2 == 0:
                return v
        return -1

    @T.macro
    def pick(which: str, x: int) -> int:
        if which == "double":
            return x * 2
        return x

    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32")):
        with T.Kernel(1) as b:
            for k in range(10):
                if k == 1:
                    continue
                if k == 3:
                    break
                C[k] = k
            C[1] = first_even([3, 8, 5])
            C[3] = pick("double", b + 4)

    c = ints(4)
    run(kernel)(c)
    assert c.tolist() == [0, 8, 2, 8]


def test_both_spellings_of_with_scale():
    @T.prim_func
    def kernel(C: T.Tensor((8,), "int32")):
        with T.Kernel(2, threads=64) as b:
            with T.Scale("device") as dev_id, dev_num:
                C[0] = dev_id
                C[1] = dev_num
            with T.Scale("grid") as (g, ng):
                C[2 + g] = ng
            with T.Scale("warp") as w, nw:
                if b == 0:
                    C[4 + w] = nw
            with T.Scale("device") as (rank, n), T.Scale("block") as (me, blocks):
                C[6] = rank + n + blocks
                if me == 1:
                    C[7] = me

    c = ints(8)
    run(kernel)(c)
    assert c.tolist() == [0, 1, 2, 2, 2, 2, 3, 1]


def test_the_variable_to_write_instead_has_the_dtype_of_the_name_around_all_loops():
    @T.prim_func
    def kernel(A: T.Tensor((4, 4), "float16")):
        with T.Kernel(1) as _:
            s = T.cast(0, "float16")
            for i in T.serial(4):
                for j in T.serial(4):
                    s += A[i, j]
            A[0, 0] = s

    with refused(
        TileSyntaxError, "'s' is rebound under the device for", write='s = T.alloc_var("float16") before it'
    ):
        kernel.trace()


def test_names_rebound_under_a_device_construct_are_refused_behind_it():
    def check(kernel: T.PrimFunc, name: str, at: str, what: str):
        with refused(
            TileSyntaxError,
            f"'{name}' is rebound under the device {what}",
            at=at,
            write=f'{name} = T.alloc_var("int32")',
        ):
            kernel.trace()

    @T.prim_func
    def under_if(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            x = 1
            if b > 2:
                x = 2
            C[b] = x + 1

    @T.prim_func
    def only_under_if(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            if b > 2:
                y = b * 2
            C[b] = y

    @T.prim_func
    def in_loop(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            s = 0
            for i in T.serial(4):
                s = s + i
            C[b] = s

    @T.prim_func
    def augmented(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            s = 0
            for i in T.Parallel(4):
                s += i
            C[b] = 0

    @T.prim_func
    def loop_variable(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for i in T.serial(4):
                C[i] = i
            C[0] = i

    @T.prim_func
    def in_while(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            v = T.alloc_var("int32")
            last = 0
            while v < 5:
                last = v * 2
                v += 1
            C[b] = last

    check(under_if, "x", "x + 1", "if")
    check(only_under_if, "y", "C[b] = y", "if")
    check(in_loop, "s", "s + i", "for")
    check(augmented, "s", "s += i", "for")
    check(loop_variable, "i", "C[0] = i", "for")
    check(in_while, "last", "C[b] = last", "while")


def test_names_used_only_inside_or_bound_again_are_fine():
    @T.prim_func
    def kernel(C: T.Tensor((2, 8), "int32")):
        with T.Kernel(8) as b:
            if b > 2:
                x = b * 2
                C[0, b] = x
            else:
                x = b + 100
                C[0, b] = x
            x = b
            C[1, b] = x
            for i in T.serial(2):
                t = i + 1
                if t == 2:
                    t2 = t * b
                    C[1, b] = t2

    c = ints(2, 8)
    run(kernel)(c)
    assert c.tolist() == [[b * 2 if b > 2 else b + 100 for b in range(8)], [2 * b for b in range(8)]]


def test_variables_are_cells():
    @T.prim_func
    def kernel(C: T.Tensor((8,), "float32"), D: T.Tensor((8,), "int32")):
        with T.Kernel(1):
            a = T.alloc_var("int32")
            b = T.alloc_var("float32", 1.5)
            flag = T.alloc_var("bool")
            D[0] = a
            C[0] = b
            a = 5
            before = a + 0  # a value, taken now
            a = 6
            D[1] = before
            D[2] = a
            b = a
            C[1] = b
            b /= 4
            C[2] = b
            for i in T.serial(4):
                if i == 2:
                    flag = True
            D[3] = flag
            if flag:
                a, b = a + 1, b * 2
            D[4] = a
            C[3] = b
            a -= 1
            a <<= 3
            a |= 1
            D[5] = a
            D[6] = -a
            D[7] = a if a > 3 else 0
            c = a
            a = 9
            C[4] = c

    c, d = torch.zeros(8), ints(8)
    run(kernel)(c, d)
    assert d.tolist() == [0, 5, 6, 1, 7, 49, -49, 49]
    assert c.tolist()[:4] == [1.5, 6.0, 1.5, 3.0]


def test_return_break_continue_on_device_conditions_that_python_must_decide():
    @T.macro
    def early(x: int) -> int:
        if x > 2:
            return 1
        return 2

    @T.prim_func
    def returns(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            C[b] = early(b)

    @T.prim_func
    def breaks(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            for k in range(4):
                if b == k:
                    break
                C[b] = k

    @T.prim_func
    def parallel(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for i in T.Parallel(4):
                if i == 2:
                    break
                C[i] = 1

    @T.prim_func
    def pipelined(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for i in T.Pipelined(4, num_stages=2):
                if i == 2:
                    continue
                C[i] = 1

    with refused(TileSyntaxError, "return depends on a device value", at="return 1", write="T.alloc_var"):
        returns.trace()
    with refused(
        TileSyntaxError, "break leaves a Python loop on a device condition", at="break", write="T.serial"
    ):
        breaks.trace()
    with refused(TileSyntaxError, "break has no meaning in T.Parallel", at="break", write="T.serial"):
        parallel.trace()
    with refused(TileSyntaxError, "continue has no meaning in T.Pipelined", at="continue", write="T.serial"):
        pipelined.trace()


def test_tuples_stars_walrus_and_chained_assignment():
    @T.prim_func
    def kernel(C: T.Tensor((12,), "int32")):
        with T.Kernel(1) as b:
            x, y = b + 1, b + 2
            x, y = y, x
            C[0], C[1] = x, y
            first, *rest = [x, y, 7]
            C[2] = first
            C[3] = rest[1]
            (p, q), r = (b + 5, 6), 7
            C[4] = p * q * r
            C[5] = C[6] = b + 11
            m = n = b + 3
            C[7] = m + n
            C[8] = (w := b + 20) + w
            t = (b + 1, b + 2)
            C[9] = t[0] + t[1]
            values = [i * i for i in range(3)]
            C[10] = sum(values) + max(values) + min(b, 3)
            C[11] = abs(b - 9) + len(values) + int(b < 1)

    c = ints(12)
    run(kernel)(c)
    assert c.tolist() == [2, 1, 2, 7, 210, 11, 11, 6, 40, 3, 9, 13]


def test_augmented_assignment_of_elements():
    @T.prim_func
    def kernel(C: T.Tensor((12,), "int32"), D: T.Tensor((4,), "float32")):
        with T.Kernel(1):
            C[0] += 1
            C[1] -= 2
            C[2] *= 3
            C[3] //= 2
            C[4] %= 4
            C[5] <<= 2
            C[6] >>= 1
            C[7] &= 6
            C[8] |= 6
            C[9] ^= 6
            D[0] /= 4
            D[1] **= 2
            D[2] += C[0]

    c, d = torch.full((12,), 11, dtype=torch.int32), torch.full((4,), 3.0)
    run(kernel)(c, d)
    assert c.tolist() == [12, 9, 33, 5, 3, 44, 5, 2, 15, 13, 11, 11]
    assert d.tolist() == [0.75, 9.0, 15.0, 3.0]


def test_negative_numbers_divide_and_shift_as_in_python():
    @T.prim_func
    def kernel(A: T.Tensor((16,), "int32"), C: T.Tensor((6, 16), "int32"), d: T.int32):
        with T.Kernel(1):
            for i in T.Parallel(16):
                C[0, i] = A[i] // d
                C[1, i] = A[i] % d
                C[2, i] = T.truncdiv(A[i], d)
                C[3, i] = T.truncmod(A[i], d)
                C[4, i] = A[i] >> 1
                C[5, i] = -A[i] // 3

    a, c = torch.arange(-8, 8, dtype=torch.int32), ints(6, 16)
    for d in (3, -3):
        run(kernel)(a, c, d)
        assert c[0].tolist() == [v // d for v in a.tolist()]
        assert c[1].tolist() == [v % d for v in a.tolist()]
        assert c[2].tolist() == [int(v / d) for v in a.tolist()]
        assert c[3].tolist() == [v - int(v / d) * d for v in a.tolist()]
        assert c[4].tolist() == [v >> 1 for v in a.tolist()]
        assert c[5].tolist() == [-v // 3 for v in a.tolist()]


def test_constructs_without_a_meaning_are_refused():
    @T.prim_func
    def for_else(C: T.Tensor((4,), "int32")):
        with T.Kernel(1):
            for i in range(3):
                C[i] = 1
            else:
                C[3] = 1

    @T.prim_func
    def loops_over_a_value(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            for i in b:
                C[i] = 1

    @T.prim_func
    def yields(C: T.Tensor((4,), "int32")):
        with T.Kernel(4) as b:
            yield b

    with refused(TileSyntaxError, "for … else"):
        for_else.trace()
    with refused(TileTypeError, "not something to loop over", at="b", write="T.serial(n)"):
        loops_over_a_value.trace()
    with refused(TileSyntaxError, "yield has no meaning"):
        yields.trace()


def test_assert_over_python_and_device_values():
    @T.prim_func
    def kernel(C: T.Tensor((4,), "int32"), n: T.int32):
        with T.Kernel(1) as b:
            assert FACTOR == 3, "a Python assertion"
            assert n > 2, "n is too small"
            C[b] = n

    c = ints(4)
    made = run(kernel)
    made(c, 5)
    assert c[0] == 5
    with refused(LaunchError, "n is too small", at='assert n > 2, "n is too small"'):
        made(c, 1)
