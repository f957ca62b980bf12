"""Ways for a solution to influence its own verdict: each earns nothing that it did not earn by right answers."""

from __future__ import annotations

import asyncio
import textwrap
from functools import partial

import pytest

from rlkit.rewards import RewardError, Sample, run_reward
from rlkit.rewards.code import assert_tests, stdin_tests
from rlkit.rewards.sandbox import Limits, _reported

LIMITS = Limits(wall_s=60, cpu_s=60)


def block(source):
    return f"```python\n{textwrap.dedent(source)}\n```"


async def check(solution, tests, *, limits=LIMITS, packages=(), **row):
    return await assert_tests(block(solution), {"tests": tests, **row}, limits=limits, packages=packages)


YES = """
    class Yes:
        def __eq__(self, other): return True
        def __hash__(self): return 0
"""
# a name: (a solution, tests of which it must pass none)
WAYS = {
    "load_tests of unittest": (
        """
        class Suite:
            def __call__(self, result): return result
            def run(self, result): return result
            def countTestCases(self): return 0
            def __iter__(self): return iter(())
        def load_tests(*_): return Suite()
        def f(x): return 0
        """,
        [
            "import unittest\n"
            "class T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 42)\nunittest.main()"
        ],
    ),
    "setUpModule that skips": (
        "import unittest\ndef setUpModule(): raise unittest.SkipTest('no')\ndef f(x): return 0",
        [
            "import unittest\n"
            "class T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 42)\nunittest.main()"
        ],
    ),
    "SkipTest": (
        "import unittest\ndef f(x): raise unittest.SkipTest('no')",
        [
            "import unittest\n"
            "class T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 42)\nunittest.main()"
        ],
    ),
    "StopIteration ends the loop of the tests": (
        "def f(x): raise StopIteration",
        ["assert all(map(lambda case: f(case[0]) == case[1], [(1, 42), (2, 43)]))"],
    ),
    "class derived from StopIteration": (
        "class Stop(StopIteration): pass\ndef f(x): raise Stop",
        ["assert all(map(lambda case: f(case[0]) == case[1], [(1, 42), (2, 43)]))"],
    ),
    "StopIteration from an index": (
        "class Row:\n    def __getitem__(self, i): raise StopIteration\ndef f(x): return Row()",
        ["row = f(1)\nassert all(map(lambda i: row[i] == 42, [0, 1]))"],
    ),
    "method of the tests' object replaced": (
        "def f(node):\n    try: node.same = lambda *_: True\n    except AttributeError: pass\n    return 0",
        [
            "class Node:\n    value = 0\n    def same(self, other): return self.value == other\n"
            "node = Node()\nf(node)\nassert node.same(42)"
        ],
    ),
    "names of the tests": ("want = sum = print = 0\ndef f(x): return want", ["want = 42", "assert f(1) == want"][1:]),
    "tolerance": ("EPS = 1e9\ndef f(x): return 0.0", ["assert abs(f(1) - 42) < EPS"]),
    "check": ("def check(*_): pass\ndef f(x): return 0", ["def check(g): assert g(1) == 42\ncheck(f)"]),
    "module": (
        "class math:\n    isclose = staticmethod(lambda *_: True)\ndef f(x): return 0",
        ["assert math.isclose(f(1), 42)"],
    ),
    "module in sys.modules": (
        """
        import sys, math
        math.isclose = lambda *_, **__: True
        sys.modules["math"].fabs = lambda x: 0
        def f(x): return 0.0
        """,
        ["import math\nassert math.isclose(f(1), 42)", "import math\nassert math.fabs(f(1) - 42) < 1e-6"],
    ),
    "int that lies": (
        YES + "    class I(int, Yes):\n        __eq__ = Yes.__eq__\n    def f(x): return I(0)",
        ["assert f(1) == 42", "assert 42 == f(1)"],
    ),
    "str that lies": (
        YES
        + "    class S(str):\n        __eq__ = Yes.__eq__\n        __hash__ = str.__hash__\n    def f(x): return S()",
        ["assert f(1) == 'right'", "assert f(1) in {'right'}", "assert 'right'.startswith(f(1) + 'r')"],
    ),
    "list that lies": (
        YES + "    class L(list):\n        __eq__ = Yes.__eq__\n    def f(x): return L()",
        ["assert f(1) == [42]", "assert [f(1)] == [[42]]", "assert f(1)[:1] == [42]"],
    ),
    "key that lies": (YES + "    def f(x): return {Yes(): 1}", ["assert f(1)[42] == 1", "assert 42 in f(1)"]),
    "class with a lying metaclass": (
        """
        class Meta(type):
            def __eq__(self, other): return True
            def __hash__(self): return 0
            def __instancecheck__(self, other): return True
        class C(metaclass=Meta): pass
        def f(x): return C
        """,
        ["assert f(1) == 42", "assert isinstance(42, f(1))"],
    ),
    "mock": (
        "from unittest.mock import ANY, MagicMock\ndef f(x): return ANY if x else MagicMock()",
        ["assert f(1) == 42", "assert f(0) == 42", "assert abs(f(0) - 42) < 1e-9"],
    ),
    "sys.exit(0)": ("import sys\ndef f(x): sys.exit(0)", ["assert f(1) == 42"]),
    "atexit": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)",
        ["assert f(1) == 42"],
    ),
    "closed descriptors": ("import os\nos.closerange(0, 64)\ndef f(x): return 42", ["assert f(1) == 42"]),
    "report on every descriptor": (
        r"""
        import os
        def f(x):
            for fd in range(64):
                for line in (b"null\n", b'[0, ""]\n[1, ""]\n[2, ""]\n'):
                    try: os.write(fd, line)
                    except OSError: pass
            return 0
        """,
        ["assert f(1) == 42", "assert f(2) == 43"],
    ),
    "report printed": ("print('[0, \"\"]', flush=True)\ndef f(x): print('null')", ["assert f(1) == 42"]),
    "endless generator": (
        "def f(x):\n    while True: yield 0",
        ["assert list(f(1)) == [42]", "assert sum(f(1)) == 42"],
    ),
    "huge integer": ("def f(x): return 10 ** 400_000", ["assert f(1) == 42", "assert str(f(1)) == '42'"]),
    "recursion": ("def f(x): return f(x)", ["assert f(1) == 42"]),
    "recursion through the tests": ("def f(g): return g(g)", ["def g(h): return f(h)\nassert f(g) == 42"]),
    "mutated argument": (
        "def f(xs): xs[:] = [42]; return xs",
        ["xs = [3, 42]\nwant = (42, 3)\nassert tuple(f(xs)) == want"],
    ),
    "text that is evaluated": (
        """
        def f(x):
            if x == 1: return "__import__('os').write(5, b'[0, \\"\\"]\\\\n' * 9) and 42"
            if x == 2: return "type('Y', (), {'__eq__': lambda *_: True})()"
            return "import sys\\nsys._getframe(1).f_globals['answer'] = 42"
        """,
        [
            "assert eval(f(1)) == 42",
            "assert eval(f(2)) == 42",
            "answer = 0\nexec(f(3))\nassert answer == 42",
            "assert list(map(eval, [f(2)])) == [42]",
            "exec(compile(f(3), 'x', 'exec'))\nassert answer == 42",
            "import unittest\nassert unittest.TestCase().assertTrue(eval(f(2)) == 42) is None",
        ],
    ),
    "bytes that are unpickled": (
        """
        import pickle
        class P:
            def __reduce__(self): return eval, ("type('Y', (), {'__eq__': lambda *_: True})()",)
        def f(x): return pickle.dumps(P())
        """,
        ["import pickle\nassert pickle.loads(f(1)) == 42"],
    ),
    "proxy of an argument": (
        "kept = []\ndef f(x): kept.append(x); return kept[0]",
        ["class N:\n    def __init__(self, v): self.v = v\nassert f(N(1)).v == 1 and f(N(2)).v == 2"],
    ),
    "answer sent before the question": (
        r"""
        import json, os, struct
        def f(x):
            data = json.dumps(["value", ["tuple", [True, ["list", []]]]]).encode()
            os.write(4, (struct.pack("!i", len(data)) + data) * 50)
            return 0
        """,
        ["assert f(1) == 42", "assert f(2) == 43"],
    ),
    "deep message": (
        r"""
        import os, struct
        def f(x):
            data = b"[" * 200_000
            os.write(4, struct.pack("!i", len(data)) + data)
            return 0
        """,
        ["assert f(1) == 42", "assert f(2) == 43"],
    ),
    "difference, rounding and format that lie": (
        """
        class Zero:
            def __sub__(self, other): return 0
            __rsub__ = __sub__
            def __abs__(self): return 0
            def __round__(self, *_): return 0
            def __format__(self, _): return "42"
        def f(x): return Zero()
        """,
        [
            "import unittest\nunittest.TestCase().assertAlmostEqual(f(1), 42)",
            "assert abs(f(1) - 42) < 1",
            "assert round(42 - f(1), 3) == 0",
            "assert f'{f(1)}' == '42'",
        ],
    ),
    "hash of the answer": (
        "class Y:\n    def __hash__(self): return 42\n    def __eq__(self, _): return True\ndef f(x): return Y()",
        [
            "assert f(1) in {42}",
            "assert {f(1): 1} == {42: 1}",
            "assert [42].count(f(1)) == 1",
            "match f(1):\n    case 42: pass\n    case _: assert False",
        ],
    ),
    "descriptors sent along": (
        """
        import array, os, socket
        def f(x):
            end = socket.socket(fileno=os.dup(4))
            end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
            return 42
        """,
        ["assert f(1) == 41"],
    ),
    "lone surrogate in an exception": ("def f(x): raise ValueError('\\ud800')", ["assert f(1) == 42"]),
}


@pytest.mark.slow_cases("endless generator")
@pytest.mark.parametrize("way", WAYS)
async def test_no_way_but_the_answer_passes_a_test(way):
    solution, tests = WAYS[way]
    limits = Limits(wall_s=5, cpu_s=1) if way == "endless generator" else LIMITS
    (result,) = await run_reward(
        partial(assert_tests, limits=limits), [Sample(block(solution), {"tests": tests}, 0)], timeout_s=60
    )
    assert result.reward == 0.0, result
    assert result.notes["reason"].encode().startswith(b"test 1 of ")  # a text that a file can hold


async def test_tests_may_evaluate_their_own_text_and_arithmetic():
    solution = "def expression(n): return f'({n} + 2) * 3'\ndef value(text): return 9"
    tests = [
        "assert eval(expression(1)) == 9",
        "assert [eval(text) for text in ['sum([4, 5])']] == [value('')]",
        "exec('import math')\nassert math.sqrt(value('')) == 3",
        "from collections import namedtuple\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass D:\n    x: int\nassert namedtuple('P', 'x y')(1, 2).x == D(1).x",
        "import copy, pickle\nfrom collections import Counter\n"
        "assert pickle.loads(pickle.dumps([Counter('a')])) == copy.deepcopy([Counter('a')])",
    ]
    verdict = await check(solution, tests)
    assert verdict["reward"] == 1.0, verdict


ARRAYS = """
    import ctypes, numpy as np
    address = ctypes.addressof(ctypes.create_string_buffer(b"x" * 4096))
    class Memory:
        def __init__(self): self.asked = []
        def __getattribute__(self, name):
            if name in ("asked", "touched"): return object.__getattribute__(self, name)
            self.asked.append(name)
            if name == "__array_interface__":
                return dict(version=3, shape=(1,), typestr="<f8", data=(address, True))
            raise AttributeError(name)
        def touched(self): return [name for name in self.asked if "array" in name]
    memory = Memory()
    def f(x): return memory
    def names(): return memory.touched()
    class np:
        allclose = array_equal = staticmethod(lambda *_, **__: True)
"""


async def test_numpy_reads_no_memory_that_a_solution_names_and_is_the_tests_own():
    tests = [
        "assert np.allclose(f(1), 42.0)",  # not imported
        "import numpy\nassert numpy.array_equal(f(1), numpy.array([42.0]))",
        "numpy.testing.assert_allclose(f(1), [42.0])",
        "assert numpy.asarray(f(1)).dtype == float",
        "assert f(1).__class__.__name__ == 'Memory' or f(1).__array_interface__",
    ]
    verdict = await check(ARRAYS, tests, packages=["numpy"])
    assert verdict["passed"] == 0.0, verdict
    assert (await check(ARRAYS, [*tests, "assert names() == []"], packages=["numpy"]))["passed"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    "array",
    [
        ["O", [1], "00" * 8, False],
        [["a", "O"], [1], "00" * 8, False],
        ["<f8", [2], "00" * 8, False],
        ["<f8", [-1], "00" * 8, False],
        ["<f8", [True], "00" * 8, False],
        ["<f8", [1], "00" * 8, True],
        ["M8[s]", [1], "00" * 8, False],
    ],
)
async def test_an_array_is_its_numbers_and_nothing_else(array):
    forged = "import json, os, struct\ndata = json.dumps(['value', ['tuple', [ARRAY, ['list', []]]]]).encode()\n"
    forged += "def f(x): os.write(4, struct.pack('!i', len(data)) + data); os._exit(0)"
    solution = forged.replace("ARRAY", repr(["numpy", *array]))
    verdict = await check(solution, ["assert f(1) is not None"], packages=["numpy"])
    assert verdict["passed"] == 0.0
    assert "ValueError: cannot decode an array" in verdict["reason"]
    honest = forged.replace("ARRAY", repr(["numpy", "|b1", [2], "0200", False]))
    tests = ["import numpy as np\nx = f(1)\nassert x.tolist() == [True, False] and x.view(np.uint8).tolist() == [1, 0]"]
    assert (await check(honest, tests, packages=["numpy"]))["passed"] == 1.0


async def test_names_that_the_tests_forget_to_import():
    solution = """
        class math: isclose = staticmethod(lambda *_: True)
        def isclose(*_): return True
        def sum(a, b): return a + b
        def queue(x): return 42
    """
    assert (await check(solution, ["assert math.isclose(1, 1.0)", "assert math.isclose(1, 2)"]))["passed"] == 0.5
    assert (await check(solution, ["assert queue(1) == 42"]))["passed"] == 1.0
    row = {"entry_point": "sum", "tests": "def check(add):\n    assert add(1, 2) == 3 and sum([1, 2]) == 3"}
    assert (await assert_tests(block(solution), row))["passed"] == 1.0
    for row, message in [
        (
            {"tests": ["assert queue(1) == approx(42)"]},
            r"row\['tests'\] uses approx: import it in the tests, and add 'pyt",
        ),
        ({"tests": ["assert np.allclose(queue(1), 42)"]}, r"uses np: import it in the tests, and add 'numpy' to `pack"),
        ({"tests": ["def test(f): pass"], "entry_point": "queue"}, "neither defines `check` nor calls it"),
        ({"tests": ["x = " + "(" * 150 + ")" * 150 + "-" * 100_000 + "1"]}, "nested too deeply|too many nested"),
    ]:
        with pytest.raises(RewardError, match=message):
            await run_reward(assert_tests, [Sample(block(solution), row, 0)], timeout_s=60)
    own = ["assert isclose(queue(1), 41)", "assert Counter([queue(1)]) == Counter([41])", "assert queue(1) == 42"]
    yes = textwrap.dedent(solution) + textwrap.dedent(YES) + "class Counter(Yes):\n    def __init__(*_): pass"
    assert (await check(yes, own))["passed"] == pytest.approx(1 / 3)
    assert (await check(yes, ["assert Counter([1]) == Counter([2])"]))["passed"] == 1.0  # it is what is tested
    ours = ["from math import *\nassert isclose(sqrt(4), 2) and queue(1) == 42"]
    assert (await check(solution, ours))["passed"] == 1.0


@pytest.mark.parametrize(
    ("report", "reasons"),
    [
        ('[0, ""]\n[1, "wrong"]\n', ["", "wrong"]),
        ('[0, ""]\n[0, ""]\n[1, ""]\n', [""]),
        ('[1, ""]\n', []),
        ('[0, ""]\nnull\n[1, ""]\n', [""]),
        ('[0, ""]\n[1, ""]\n[2, ""]\n[3, ""]\n', ["", ""]),
        ("[0, null]\n", []),
        ('[0, "cut', []),
        ("[" * 100_000 + "\n", []),
        ('[0, "\\ud800"]\n', ["?"]),
    ],
)
def test_a_test_counts_once_and_only_under_its_number(report, reasons):
    assert _reported(report, 2) == reasons


async def test_no_report_gives_more_than_there_are_tests():
    """The tests themselves write it here, on whatever descriptor it is."""
    forge = (
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'null\\n[1, \"\"]\\n' * 9)\n    except OSError: pass"
    )
    verdict = await check("def f(x): return 0", [forge, "assert f(1) == 42"])
    assert 0.0 <= verdict["reward"] <= 0.5


@pytest.mark.slow
async def test_lone_surrogates_and_other_unusual_texts_are_failed_samples():
    sources = [
        "print('\ud800')",
        "print('\udc80')",
        "print(1)\0",
        "(" * 200_000,
        "-" * 200_000 + "1",
        f"x = '{'a' * 10**7}'",
    ]
    cases = {"inputs": ["\ud800", "\udcff"], "outputs": ["\ud800", "2"]}
    samples = [Sample(block(source), {"test_cases": cases, "tests": ["assert f(1) == 2"]}, 0) for source in sources]
    for function in (stdin_tests, assert_tests):
        results = await run_reward(partial(function, limits=LIMITS), samples, timeout_s=120)
        assert [result.reward for result in results] == [0.0] * len(sources)
        assert all(result.notes["reason"].encode() for result in results)


@pytest.mark.slow
async def test_all_tests_of_a_completion_share_the_time_of_its_reward():
    """Neither a timeout of the reward, which is an error, nor the sum of what each test may take."""
    forever = "import time\nprint(2, flush=True)\nwhile True: time.sleep(0.01)"
    hang = "import time\ndef f(x):\n    while x: time.sleep(9)\n    return x"
    programs = {"test_cases": {"inputs": [""] * 12, "outputs": ["2"] * 12}}
    theirs, ours = (
        {"tests": ["assert f(0) == 0", last]} for last in ("assert f(1) == 1", "import time\nwhile True: time.sleep(9)")
    )
    long = Limits(wall_s=50.0, cpu_s=60)
    ended = await asyncio.gather(
        run_reward(
            partial(stdin_tests, limits=Limits(wall_s=0.5)), [Sample(block(forever), programs, 0)], timeout_s=60
        ),
        run_reward(partial(stdin_tests, total_s=0.4), [Sample(block(forever), programs, 0)], timeout_s=60),
        run_reward(partial(stdin_tests, limits=long), [Sample(block(forever), programs, 0)], timeout_s=1.5),
        run_reward(partial(assert_tests, limits=long), [Sample(block(hang), theirs, 0)], timeout_s=1.5),
        run_reward(partial(assert_tests, limits=long), [Sample(block(hang), ours, 0)], timeout_s=1.5),
    )
    results = [result for (result,) in ended]
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert [result.metrics["timeout"] for result in results] == [1.0] * 5
    assert results[0].notes["reason"] == "test 1 of 12: timeout: no end after 0.5 s"
    assert results[1].notes["reason"] == "test 1 of 12: timeout: no end after 0.4 s"


@pytest.mark.slow
async def test_tests_after_the_deadline_are_not_run():
    ran = []
    row = {"test_cases": {"inputs": ["1", "2", "3", "4"], "outputs": ["1"] * 4}}
    solution = "n = int(input())\nprint(n, flush=True)\nimport time\nwhile n == 2: time.sleep(9)"

    def same(actual, expected):
        ran.append(actual)
        return True

    verdict = await stdin_tests(block(solution), row, limits=LIMITS, total_s=1.5, same=same)
    assert ran == ["1\n"]
    assert verdict["passed"] == 0.25
    assert verdict["reason"].startswith("test 2 of 4: timeout: no end after ")
