"""Code rewards: honest solutions pass, and no trick passes a test without the answer."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from functools import partial

import pytest

from rlkit.rewards import RewardError, Sample, run_reward
from rlkit.rewards.code import assert_tests, same_lines, same_tokens, stdin_tests
from rlkit.rewards.sandbox import Limits

SOON = Limits(wall_s=1.0, cpu_s=60)
DOUBLE = {"inputs": ["1\n", "2\n", "30"], "outputs": ["2\n", "4", "60\n\n"]}


def block(source):
    return f"I think:\n```python\n{textwrap.dedent(source)}\n```\nDone."


async def check(solution, tests, *, limits=Limits(wall_s=60, cpu_s=60), **columns):
    return await assert_tests(block(solution), {"tests": tests, **columns}, limits=limits)


async def test_the_reward_is_the_share_of_tests_passed():
    row = {"test_cases": DOUBLE}
    assert await stdin_tests(block("print(2 * int(input()))"), row) == {
        "reward": 1.0, "score": 1.0, "passed": 1.0, "timeout": 0.0
    }  # fmt: skip
    half = await stdin_tests(block("n = int(input())\nprint(2 * n if n < 9 else 1 / 0)"), row)
    assert half["reward"] == pytest.approx(2 / 3)
    assert half["score"] == 0.0
    assert half["reason"] == "test 3 of 3: exit code 1: ZeroDivisionError: division by zero"
    strict = await stdin_tests(block("n = int(input())\nprint(2 * n if n < 9 else 7)"), row, all_or_nothing=True)
    assert strict["reward"] == 0.0
    assert strict["passed"] == pytest.approx(2 / 3)
    assert strict["reason"] == "test 3 of 3: line 1 is '7', expected '60'"
    assert (await stdin_tests(block("print(2)"), row, all_or_nothing=True))["passed"] == pytest.approx(1 / 3)


async def test_right_output_with_a_wrong_end_is_a_failure():
    row = {"test_cases": {"inputs": ["1"], "outputs": ["2"]}}
    for end, reason in [
        ("exit(1)", "exit code 1"),
        ("1/0", "exit code 1: Zero"),
        ("while 1: time.sleep(9)", "timeout: no end"),
    ]:
        verdict = await stdin_tests(block(f"import time\nprint(2, flush=True)\n{end}"), row, limits=SOON)
        assert verdict["reward"] == 0.0
        assert verdict["reason"].startswith(f"test 1 of 1: {reason}")
        assert verdict["timeout"] == ("while" in end)
    assert (await stdin_tests(block("print(2)\nexit(0)"), row))["reward"] == 1.0


async def test_an_answer_without_code_says_so():
    for completion in ("print(2)", "```python\nprint(2)", "```rust\nfn main() {}\n```"):
        verdict = await stdin_tests(completion, {"test_cases": json.dumps(DOUBLE)})
        assert (verdict["reward"], verdict["reason"]) == (0.0, "test 1 of 3: no closed ```python block")
        assert (await assert_tests(completion, {"tests": ["assert 1"]}))["reward"] == 0.0


async def test_bad_tests_are_errors_and_not_failed_answers():
    for row, message in [
        ({}, "the row has no 'test_cases'"),
        ({"test_cases": {"inputs": ["1"]}}, "must be"),
        ({"test_cases": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"test_cases": {"inputs": [1], "outputs": ["1"]}}, "must be texts"),
        ({"test_cases": {**DOUBLE, "fn_name": "f"}}, "use assert_tests"),
        ({"test_cases": [{"input": "1", "output": "2", "testtype": "functional"}]}, "use assert_tests"),
        ({"test_cases": [{"input": "1"}]}, "must be"),
    ]:
        with pytest.raises(RewardError, match=message):
            await run_reward(stdin_tests, [Sample(block("print(1)"), row, 0)], timeout_s=60)
    with pytest.raises(RewardError, match="SyntaxError"):
        await run_reward(assert_tests, [Sample(block("x = 1"), {"tests": ["assert ("]}, 0)], timeout_s=60)


def test_comparisons_of_output():
    assert same_lines("a  b \nc\n\n", "a  b\nc")
    assert not same_lines("a b\nc", "a  b\nc")
    assert not same_lines("a\n\nb", "a\nb")
    assert not same_lines(" a", "a")
    assert same_tokens("1.0000000001  2\n", "1 2.0")
    assert not same_tokens("1.001", "1")
    assert not same_tokens("1 2", "1 2 3")
    assert not same_tokens("nan", "1")


async def test_functions_and_classes_are_called():
    solution = """
        import math
        from collections import Counter, deque, namedtuple
        Pair = namedtuple("Pair", "a b")
        class Stack:
            def __init__(self, items=()): self.items = list(items)
            def push(self, x): self.items.append(x); return self
            def __len__(self): return len(self.items)
            def __iter__(self): return iter(self.items)
            def __getitem__(self, i): return self.items[i]
            def __eq__(self, other): return self.items == other.items
            def __repr__(self): return f"Stack({self.items})"
        class Missing(KeyError): pass
        def add(a, b=1): return a + b
        def fill(x, y): x.append(1); y["k"] = {2}
        def numbers(n):
            for i in range(n): yield i
        def fold(f, xs): return [f(x) for x in xs]
        def lost(kind): raise (Missing if kind else ValueError)("gone")
        def kinds(): return [1, 2.5, float("inf"), None, True, "é\\ud800", b"\\x00", (1, (2,)), {3}, frozenset({4}),
                             {(1, 2): [3]}, 10**400, -2**70, 1j, range(3), Counter("aab"), deque([1]), bytearray(b"z")]
        def pair(): return Pair(1, 2)
        def visit(node): node.value += 1; node.next.value = "set"; return node.next
    """
    tests = [
        "assert add(1, 2) == 3 and add(b=4, a='x' and 1) == 5 and add([1], [2]) == [1, 2]",
        "x, y = [0], {}\nassert fill(x, y) is None\nassert x == [0, 1] and y == {'k': {2}}",
        "assert list(numbers(4)) == [0, 1, 2, 3] and next(numbers(1)) == 0 and sum(numbers(5)) == 10",
        "assert fold(lambda x: x * 10, [1, 2]) == [10, 20] and fold(len, ['ab']) == [2] and fold(str, [1]) == ['1']",
        "s = Stack([1]).push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s[1] == 2 and 2 in s and 3 not in s",
        "assert s == Stack([1, 2]) and s != Stack() and str(s) == 'Stack([1, 2])' and isinstance(s, Stack)",
        "s.items = [7]\nassert s.items == [7] and s[0] == 7 and not isinstance(3, Stack)",
        "try:\n    lost(0)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'gone'",
        "try:\n    lost(1)\n    assert False\nexcept Missing as error:\n    assert 'gone' in str(error)",
        "from collections import Counter, deque\n"
        "assert kinds() == [1, 2.5, float('inf'), None, True, 'é\\ud800', b'\\x00', "
        "(1, (2,)), {3}, frozenset({4}), {(1, 2): [3]}, 10**400, -2**70, "
        "1j, range(3), Counter('aab'), deque([1]), "
        "bytearray(b'z')] and type(kinds()[4]) is bool",
        "assert pair() == (1, 2) and pair().a == 1 and (1, 2) == pair()",
        "assert math.isclose(add(0.1, 0.2), 0.3)",
        "class Node:\n    def __init__(self, value, next): self.value, self.next = value, next\n"
        "node = Node(1, Node(2, None))\nassert visit(node) is node.next\n"
        "assert node.value == 2 and node.next.value == 'set'",
        "import unittest\nclass T(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(1), 2)\n"
        "unittest.main()",
    ]
    verdict = await check(solution, tests)
    assert verdict["reward"] == 1.0, verdict
    failing = await check("def add(a): return a", [tests[-1]])
    code = 1 if sys.version_info >= (3, 12) else True
    assert failing["reason"] == f"test 1 of 1: SystemExit: {code} at unittest.main()"
    broken = await check(
        "def add(a, b): return a - b", ["assert add(1, 1) == 0", "assert add(1, 2) == 3", "assert add"]
    )
    assert broken["reward"] == pytest.approx(2 / 3)
    assert broken["reason"] == "test 2 of 3: AssertionError:  at assert add(1, 2) == 3"


async def test_humaneval_style_and_setup_in_the_first_test():
    test = "METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0], 0.5) is False\n"
    solution = "from typing import List\ndef near(xs: List[float], t: float) -> bool: return abs(xs[0] - xs[1]) < t"
    assert (await check(solution, test, entry_point="near"))["reward"] == 1.0
    assert (await check(solution.replace("<", ">"), test, entry_point="near"))["reward"] == 0.0
    plain = ["assert near([1, 2], 2)", "assert not near([1, 9], 2)"]
    assert (await check(solution, plain, entry_point="near"))["reward"] == 1.0
    assert (await check(solution.replace("<", ">"), plain, entry_point="near"))["reward"] == 0.0
    with pytest.raises(Exception, match=r"entry_point, far, and row.* neither defines `check` nor calls it"):
        await check(solution, plain, entry_point="far")
    row_of = {"entry_point": "check_near"}
    own = solution.replace("near", "check_near")
    assert (await check(own, ["assert check_near([1, 2], 2)  # check it"], **row_of))["reward"] == 1.0
    assert (await check(own, test, **row_of))["reward"] == 1.0
    assert (await check(solution, ["import math as m\nK = 3", "assert m.pi > K and near([0, 0], 1)"]))["reward"] == 1.0


TRICKS = {
    "exit": "import os\ndef f(x): os._exit(0)",
    "sys exit": "import sys\ndef f(x): sys.exit(0)",
    "exit while loading": "raise SystemExit(0)",
    "kill": "import os, signal\nos.kill(os.getpid(), 15)\nos.kill(0, 9)\nos.kill(-1, 9)\ndef f(x): os.kill(1, 9)",
    "equal to all": """
        class Yes:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0.0
            __rsub__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
            def __hash__(self): return 1
            def __abs__(self): return 0
            def __bool__(self): return True
        def f(x): return Yes()
    """,
    "kind of int": """
        class I(int):
            def __eq__(self, other): return True
            __hash__ = None
        def f(x): return I(5)
    """,
    "kind of str": """
        class S(str):
            def __eq__(self, other): return True
            __hash__ = None
        def f(x): return S("a")
    """,
    "frames": """
        import sys
        def f(x):
            frame = sys._getframe()
            while frame.f_back: frame = frame.f_back
            return frame.f_globals.get("want")
    """,
    "objects": """
        import gc
        def f(x): return [o for o in gc.get_objects() if isinstance(o, dict) and "want" in o][0]["want"]
    """,
    "files": """
        import os
        def f(x):
            for folder, _, names in os.walk("/scratch"):
                for name in names: return int(open(name).read())
    """,
    "descriptors": """
        import os
        def f(x):
            for fd in range(64):
                try: return int(os.pread(fd, 99, 0))
                except OSError: pass
    """,
    "builtins": """
        import builtins
        builtins.abs = builtins.isinstance = lambda *a: 0
        abs = sorted = set = lambda *a: 0
        def f(x): return -1
    """,
    "modules": """
        class math:
            @staticmethod
            def isclose(*a, **k): return True
        def f(x): return 9.0
    """,
    "check": "def check(*a): pass\nwant = 7\ndef f(x): return 7",
    "assert": "AssertionError = KeyError\ndef f(x): raise SystemExit",
    "report": """
        import os
        for fd in range(3, 9):
            try: os.write(fd, b"null\\nnull\\nnull\\nnull\\n")
            except OSError: pass
        def f(x): pass
    """,
    "protocol": """
        import socket, struct, json
        s = socket.socket(fileno=4)
        def send(m): d = json.dumps(m).encode(); s.sendall(struct.pack("!i", len(d)) + d)
        send(["", {"f": ["ref", "mine", 1, None]}])
        for _ in range(9): send(["value", True]); send(["raised", None, "SystemExit", [0]])
        def f(x): pass
    """,
    "module of the tests": """
        import sys
        sys.modules["tests"] = sys.modules["__main__"] = sys.modules["solution"]
        def f(x): return sys.modules["tests"].want
    """,
    "callback frames": """
        def f(x): return None
        def g(h):
            for name in ("__globals__", "__code__", "__closure__", "__self__", "func_globals", "__class__", "gi_frame"):
                try: print(getattr(h, name)["want"]); return getattr(h, name)["want"]
                except Exception: pass
    """,
    "silence": "import os, time\nos.close(4)\ndef f(x): time.sleep(1)",
    "flood": "def f(x): return 'a' * 10**8",
    "huge": "def f(x): return [[]] * 2 * 10**4",
    "deep": "def f(x):\n    y = []\n    for _ in range(10**5): y = [y]\n    return y",
    "loop": "def f(x):\n    y = []\n    y.append(y)\n    return y",
    "hang": "def f(x):\n    while True: pass",
    "fork": "import os\nif os.fork() == 0: os._exit(0)\ndef f(x): return os.fork()",
}
CHEATED = [
    "import math\nwant = 41 + 1",
    "assert f(1) == want",
    "assert want == f(1)",
    "assert abs(f(1) - want) < 1e-9",
    "assert want in [f(1)] and want in f(1)",
    "assert math.isclose(f(1), want)",
    "assert set([f(1)]) == {want} and sorted([f(1)]) == [want]",
    "assert f(1) > want - 1 and f(1) < want + 1",
    "assert isinstance(f(1), int) and not f(1) != want",
    "def check(c): assert c(1) == want\ncheck(f)",
    "assert g(lambda: want) == want",
]


@pytest.mark.slow_cases("hang", "huge", "flood")
@pytest.mark.parametrize("trick", TRICKS)
async def test_no_trick_passes_a_test(trick):
    limits = Limits(wall_s=1.5, cpu_s=1.0) if trick in ("hang", "silence") else Limits(wall_s=60, cpu_s=60)
    verdict = await check(TRICKS[trick], CHEATED, limits=limits)
    assert verdict["passed"] <= 1 / len(CHEATED)  # the first only sets up
    assert verdict["reason"].startswith("test "), verdict
    alive = await check(
        "def f(x): return 42\ndef g(h): return h()", [c.replace("and want in f(1)", "") for c in CHEATED]
    )
    assert alive["reward"] == 1.0, alive


async def test_the_tests_that_no_trick_passes_can_be_passed():
    verdict = await check(
        "def f(x): return 42\ndef g(h): return h()", [c.replace(" and want in f(1)", "") for c in CHEATED]
    )
    assert verdict["reward"] == 1.0, verdict


async def test_a_hanging_solution_keeps_the_tests_passed_before_it_hung():
    solution = "import time\ndef f(x):\n    while x > 1: time.sleep(9)\n    return x"
    verdict = await check(solution, [f"assert f({i}) == {i}" for i in range(4)], limits=SOON)
    assert verdict["reward"] == 0.5
    assert verdict["reason"] == "test 3 of 4: timeout: no end after 1 s"
    assert verdict["timeout"] == 1.0


async def test_reasons_beyond_the_limit_of_output_are_left_out():
    limits = Limits(wall_s=60, cpu_s=60, output_bytes=1000)
    verdict = await check(
        "def f(x): return x", ["assert f(1) == 1"] + ["assert f(1) == 2, 'x' * 150"] * 9, limits=limits
    )
    assert verdict["passed"] == 0.1
    assert verdict["reason"].startswith("test 2 of 10: AssertionError: xxx")


async def test_tests_cannot_harm_either():
    tests = ["import os\nassert os.listdir('/root') == [] or '.ssh' not in os.listdir('/root')", "open('/etc/x', 'w')"]
    verdict = await check("x = 1", tests)
    assert verdict["score"] == 0.0
    assert not os.path.exists("/etc/x")


async def test_as_a_reward_function_of_a_rollout():
    samples = [Sample(block(f"print({k} * int(input()))"), {"test_cases": DOUBLE}, k) for k in (1, 2)]
    wrong, right = await run_reward(stdin_tests, samples, timeout_s=60)
    assert (wrong.reward, right.reward) == (0.0, 1.0)
    assert wrong.notes == {"reason": "test 1 of 3: line 1 is '1', expected '2'"}
    assert right.metrics == {"passed": 1.0, "timeout": 0.0}
    assert right.notes == {}


KILLS = "import os\nfor pid in (os.getppid(), 1):\n try: os.kill(pid, 9)\n except OSError: pass\nprint(3)"
SEARCH = """
import gc
def has(o):
    try: return "outputs" in str(o)[:99]
    except Exception: return False
print([o for o in gc.get_objects() if has(o)][:1])
"""
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "10 GB": ("x = bytearray(10 * 2**30)\nprint(2)", "memory: more than"),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)", "exit code 1: "),
    "home": ("import os\nprint(os.listdir(os.path.expanduser('~root') + '/.ssh'))", "FileNotFoundError"),
    "endless output": ("while True: print('2' * 999)", "more than 1048576 bytes of output"),
    "kill the parent": (KILLS, "line 1 is '3'"),
    "symlink": ("import os\nos.symlink('/etc/passwd', 'a')\nprint(open('a').read())", "FileNotFoundError"),
    "write outside": ("open('/tmp/x', 'w')", "FileNotFoundError"),
    "write into the library": ("import os\nopen(os.__file__, 'a')", "Error"),
    "exit": ("import sys\nsys.exit(0)", "0 lines of output, expected 1"),
    "hard exit": ("import os\nos._exit(0)", "0 lines of output, expected 1"),
    "read the tests": (SEARCH, "line 1 is"),
    "daemon": ("import os\nif os.fork() == 0: os.setsid()", "PermissionError"),
    "program": ("import subprocess\nprint(subprocess.run(['/bin/echo', '2']))", "PermissionError"),
}
STAYS = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
ENDLESS = {name: (source, "no end after 1 s") for name, source in {"loop": "while True: pass", "thread": STAYS}.items()}


async def test_hostile_programs_get_nothing_and_the_reason_is_recorded():
    row = {"test_cases": {"inputs": [""], "outputs": ["2"]}}
    ask = partial(stdin_tests, limits=Limits(wall_s=60, cpu_s=60))
    rewards = await run_reward(ask, [Sample(block(source), row, 0) for source, _ in HOSTILE.values()], timeout_s=120)
    ask = partial(stdin_tests, limits=SOON)
    rewards += await run_reward(ask, [Sample(block(source), row, 0) for source, _ in ENDLESS.values()], timeout_s=60)
    for reward, (name, (_, reason)) in zip(rewards, {**HOSTILE, **ENDLESS}.items(), strict=True):
        assert reward.reward == 0.0, name
        assert reason in reward.notes["reason"], (name, reward.notes)


async def test_packages_may_be_used_by_the_solution_and_by_its_tests():
    solution = "import numpy as np\ndef mean(xs): return float(np.mean(xs))"
    tests = ["import numpy as np\nassert np.isclose(mean([1, 2]), 1.5)", "import unittest\nassert mean([3]) == 3"]
    tests += ["class T(unittest.TestCase):\n    def test(self): self.assertEqual(mean([1]), 1)\nunittest.main()"]
    limits = Limits(wall_s=60, cpu_s=60)
    verdict = await assert_tests(block(solution), {"tests": tests}, limits=limits, packages=["numpy"])
    assert verdict["reward"] == 1.0, verdict
    row = {"test_cases": {"inputs": ["3"], "outputs": ["[0 1 2]"]}}
    program = block("import numpy\nprint(numpy.arange(int(input())))")
    assert (await stdin_tests(program, row, limits=limits, packages=["numpy"]))["reward"] == 1.0
    assert (await stdin_tests(program, row, limits=limits))["reward"] == 0.0


async def test_numbers_and_arrays_of_numpy_are_values_on_both_sides():
    solution = """
        import numpy as np
        def mean(xs): return np.mean(xs)
        def count(xs): return np.sum(np.asarray(xs) > 1)
        def squares(n, kind): return (np.arange(n).reshape(1, -1) ** 2).astype(kind)
        def twice(xs): return list(xs * 2)
        def words(): return np.array(["a", "bc"])
        def objects(): return np.array([None, {}], dtype=object)
    """
    tests = [
        "assert count([2, 2]) == 2",  # before the tests import it
        "import numpy as np",
        "assert abs(mean([1, 2]) - 1.5) < 1e-9 and f'{mean([1]):.1f}' == '1.0' and isinstance(mean([1]), float)",
        "assert count([1, 2, 3]) == 2 and count([2]) + 1 == 2 and type(count([2])) is np.int64 and count([0]) < 1",
        "for kind in ('float32', '>i2', 'complex64', 'uint8'):\n"
        "    x = squares(3, kind)\n"
        "    assert x.dtype == kind and x.tolist() == [[0, 1, 4]] and np.array_equal(x, np.array([[0, 1, 4]]))",
        "x = np.arange(4.0)[::2]\nassert twice(x) == [0, 4] and sorted(twice(-x)) == [-4, 0]",
        "x = squares(2, 'f8')\nx[0, 0] = 7\nassert np.testing.assert_allclose(x, [[7, 1]]) is None",
        "assert words().tolist() == ['a', 'bc'] and len(objects()) == 2",
    ]
    verdict = await assert_tests(
        block(solution), {"tests": tests}, limits=Limits(wall_s=60, cpu_s=60), packages=["numpy"]
    )
    assert verdict["reward"] == 1.0, verdict
    cheat = "import socket, struct, json\ns = socket.socket(fileno=4)\n"
    cheat += "d = json.dumps(['', {'f': ['numpy', 'O', [1], '00' * 8, True]}]).encode()\n"
    cheat += "s.sendall(struct.pack('!i', len(d)) + d)"
    verdict = await assert_tests(block(cheat), {"tests": ["assert f is None"]}, packages=["numpy"])
    assert "does not answer as it should (ValueError)" in verdict["reason"]


@pytest.mark.parametrize(
    "tests",
    [
        '["assert add(1, 2) == 3"]', '"assert add(1, 2) == 3"', '{"functional": "assert add(1, 2) == 3"}',
        "assert add(1, 2) == 3", ["x = add(1, 2)", "assert x == 3"],
    ],
)  # fmt: skip
async def test_tests_in_json_text_are_run(tests):
    for body, reward in (("a + b", 1.0), ("a - b", 0.0)):
        completion, row = block(f"def add(a, b):\n    return {body}"), {"tests": tests}
        assert (await assert_tests(completion, row, all_or_nothing=True))["reward"] == reward


@pytest.mark.parametrize("tests", ["# see the file", "['not json', 1]", '"""assert add(1, 2) == 3"""'])
async def test_sources_that_test_nothing_are_errors(tests):
    with pytest.raises(RewardError, match="tests nothing"):
        await run_reward(assert_tests, [Sample(block("x = 1"), {"tests": tests}, 0)], timeout_s=60)


async def test_a_text_in_place_of_a_list_of_inputs_is_an_error():
    row = {"test_cases": {"inputs": "5\n", "outputs": "8\n"}}
    with pytest.raises(RewardError, match="must be lists of texts"):
        await run_reward(stdin_tests, [Sample(block("print(8)"), row, 0)], timeout_s=60)
