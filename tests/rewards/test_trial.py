"""Reward functions are called on a row before a model is loaded: what of plausible mistakes is told then."""

# ruff: noqa: E501 - each mistake is a line

from __future__ import annotations

import json
import logging
import textwrap
from functools import partial

import nightly
import pytest
import screens

from rlkit.data.load import load_rows
from rlkit.rewards.answers import forms_of
from rlkit.rewards.load import load_function
from rlkit.rewards.trial import try_reward
from rlkit.run.sync import run_sync
from rlkit.scripts import cli, trial
from rlkit.scripts.args import Episodes
from rlkit.scripts.trial import read_reward

HEAD = "import asyncio, json, math, re, sys\nimport numpy as np\n\n"
NEVER = "to the row's own answer"
ROWS = [{"prompt": f"{a}+4=", "answer": str(a + 4), "level": a} for a in (3, 5, 6)]
PARIS = [{"prompt": "Capital of France?", "answer": "Paris"}, {"prompt": "Of Italy?", "answer": "Rome"}]
INTS = [{"prompt": "3+4=", "answer": 7}, {"prompt": "3+5=", "answer": 8}]
GSM = [{"prompt": "q", "answer": "6*7 = 42\n#### 1,042"}, {"prompt": "r", "answer": "so 1\n#### 13"}]
MESSAGES = [{"prompt": [{"role": "user", "content": "3+4="}], "answer": "7"}]

YES = [{"prompt": "Is ice cold?", "answer": "yes"}, {"prompt": "q", "answer": "no"}, *PARIS]
LIST = [{"prompt": "Capital of France?", "answers": ["Paris", "Paname"]}]
THOUSANDS = [{"prompt": "p", "answer": "3+1=4\n#### 4"}, GSM[0]]
BAGS = [{"prompt": str(x), "answer": f"{x} bags\n#### {x:,}", "final": f"{x:,}"} for x in (711, 1083, 54)]
NUMBERS = [{"prompt": str(x), "answer": f"{x}"} for x in (711, 83, 54)]
LARGE = [{"prompt": str(x), "answer": f"{x}"} for x in (711, 127, 54321)]
BOX, TAG = (f"m = re.search(r'{x}', completion)\n" for x in (r"\\boxed\{(.*?)\}", "<result>(.*?)</result>"))
SORTS = """
def f(completions, rows):
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [float(completions[i] == '%s' % rows[i]['answer']) for i in order]
"""
MOVED = "in two orders of the same batch: are its rewards in the order of the completions?"

# the body of f(completion, row), or a whole file; the rows; what is said. ! is an error (exit code 2), ~ a line
MISTAKES = {
    "None": ("print(completion)", ROWS, "!returned NoneType None"),
    "a path without return": ("if completion:\n    return 1.0", ROWS, "!with an empty completion: returned NoneType"),
    "a text": ("return '1.0'", ROWS, "!returned str '1.0'"),
    "a list": ("return [1.0]", ROWS, "!returned list [1.0]"),
    "a tuple": ("return 1.0, 'right'", ROWS, "!returned tuple"),
    "NaN": ("return math.nan", ROWS, "!returned nan"),
    "infinity": ("return math.log(0) if 0 else -math.inf", ROWS, "!returned -inf"),
    "an array": ("return np.ones(3)", ROWS, "!returned ndarray"),
    "the end": ("sys.exit('no')", ROWS, "!SystemExit: no (mine.py, line 5); do not call exit()"),
    "another key": ("return {'score': 1.0}", ROWS, "!returned a dict without 'reward' (keys: ['score'])"),
    "a reserved key": ("return {'reward': 1.0, 'mean': 2.0}", ROWS, "!returned the key 'mean'"),
    "a number as text in a dict": ("return {'reward': '1'}", ROWS, "!returned str '1' under 'reward'"),
    "JSON": ("return json.loads(completion)['x']", ROWS, "!TypeError: 'int' object is not subscriptable (mine.py, l"),
    "JSON of ''": ("return float(json.loads(completion) == 7)", ROWS, "!an empty completion: JSONDecodeError"),
    "a column that no row has": ("return float(completion == row['gold'])", ROWS, "!the row has no column 'gold'"),
    "an attribute": ("return float(completion == row.answer)", ROWS, "!AttributeError: 'Watched' object has no attri"),
    "int of a text": ("return float(int(completion) == row['level'])", ROWS, "!an empty completion: ValueError: inval"),
    "the last word": ("return float(completion.split()[-1] == row['answer'])", ROWS, "!IndexError: list index out of"),
    "a search in vain": (r"return float(re.search(r'\d+', completion).group() == row['answer'])", ROWS, "!AttributeEr"),
    "a division": ("return row['answer'].count('7') / len(completion)", ROWS, "!ZeroDivisionError"),
    "a name": ("return float(completion == anwser)", ROWS, "!NameError: name 'anwser' is not defined (mine.py, line 5"),
    "a message": ("return float(completion[0]['content'] == row['answer'])", ROWS, "!the completion is a text here"),
    "another argument's form": ("return float(completion == row['answer']['value'])", ROWS, "!TypeError: string indice"),
    "no end": ("while True: pass", ROWS, "!no result after 0.5 s"),
    "input": ("return float(input('ok? '))", ROWS, "!return a number without input()"),
    "a coroutine": (
        "async def judge(x):\n    return 1.0\n\ndef f(completion, row):\n    return judge(completion)\n", ROWS,
        "!returned coroutine"),
    "no await": (
        "async def g(x):\n    return 1.0\n\nasync def f(completion, row):\n    return g(completion) + 1\n", ROWS,
        "!await the async function that this line calls"),
    "one number for a batch": ("def f(completions, rows):\n    return 1.0\n", ROWS, "!returned float 1.0 for a batch"),
    "too few": ("def f(completions, rows):\n    return [1.0 for x in completions if x]\n", ROWS, "!returned 2 results"),
    "a set of a batch": ("def f(completions, rows):\n    return {float(len(x)) for x in completions}\n", ROWS, "!returned"),
    "TRL, a column": (
        "def f(completions, solution, **kwargs):\n    return [1.0] * len(completions)\n", ROWS, "!column 'solution'"),
    "TRL, messages for texts": (
        "def f(completions, answer, **kwargs):\n"
        "    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n", ROWS, "!as in TRL"),
    "TRL, texts for messages": (
        "def f(completions, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]\n",
        MESSAGES, "!as in TRL"),
    "verl, a key": (
        "def f(data_source, solution_str, ground_truth, extra_info):\n    return {'acc': 1.0}\n", ROWS, "!without 'rewa"),
    "the names swapped": ("def f(row, completion):\n    return 1.0\n", ROWS, "!names them ['row', 'completion']"),
    "a number and a text": ("return float(completion == row['level'])", ROWS, f"~gives 0 {NEVER} '7', 0 to an"),
    "int of the answer": (
        "return float(completion == int(row['answer']))", ROWS, "~to another row's answer '9': compare how the function"),
    "an int in the data": ("return float(completion.strip() == row['answer'])", INTS, "~is an int and a completion is a"),
    "lower case": ("return float(completion.lower() == row['answer'])", PARIS, f"~gives 0 {NEVER} 'Paris'"),
    "the form alone": ("return float(completion.startswith('Dear'))", ROWS, "~: right if it judges the form alone; else c"),
    "always 0": ("return 0.0", ROWS, "~gives 0"),
    "always 1": ("return 1.0", ROWS, "~gives 1"),
    "a blank too many": ("return float(completion == row['answer'] + ' ')", ROWS, f"~gives 0 {NEVER} '7', 0 to an"),
    "a column by get": ("return float(completion == row.get('anwser'))", ROWS, "~reads 'anwser', of which the data has"),
    "contained the wrong way": ("return float(completion in row['answer'])", ROWS, "~gives 1 to the row's own answer"),
    "the wrong sign": ("return -float(completion.strip() == row['answer'])", ROWS, f"~gives -1 {NEVER} '7', 0 to an emp"),
    "the same object": ("return float(completion is row['answer'])", PARIS, f"~gives 0 {NEVER} 'Paris'"),
    "the same object of a batch": (
        "def f(completions, rows):\n    return [float(c is r['answer']) for c, r in zip(completions, rows)]\n", PARIS,
        f"~gives 0 {NEVER} 'Paris'"),
    "sorted by length": (SORTS, PARIS, f"~{MOVED}"),
    "sorted by length, boxed": (SORTS.replace("'%s'", r"r'\boxed{%s}'"), PARIS, f"~{MOVED}"),
    "the longest first": (SORTS.replace(" len(c", " -len(c"), ROWS[2:] + ROWS, f"~{MOVED}"),
    "a batch in reverse": (
        "def f(completions, rows):\n    return [float(c == r['answer']) for c, r in zip(completions, rows)][::-1]\n",
        PARIS, f"~{MOVED}"),
    "a judge at random": (
        "import random\n\ndef f(completions, rows):\n"
        "    return [float(c == r['answer']) + random.random() for c, r in zip(completions, rows)]\n", PARIS,
        "~in two calls: is it random, or does it remember earlier calls?"),
    "a coin": (
        "import random\n\nrandom.seed(0)\n\ndef f(completion, row):\n    return float(random.random() < 0.5)\n", PARIS,
        "~gives 0 and 1 to its gold answer 'Paris' in two calls: is it random"),
    "what counts its calls": (
        "calls = [0]\n\ndef f(completion, row):\n    calls[0] += 1\n    return float(calls[0])\n", [{"prompt": "a"}],
        "~gives 1 and 4 to an empty completion in two calls: is it random, or does it remember earlier calls?"),
    "a slow counter": (
        "def f(completion, row, calls=[0]):\n    calls[0] += 1\n"
        "    return float(completion == row['answer']) + 1e-6 * calls[0]\n", PARIS,
        "~gives 1.000001 and 1.00001 to its gold answer 'Paris' in two calls: is it random, or does it remember"),
    "what was seen before": (
        "old = set()\n\ndef f(completions, rows):\n    new = [float(c not in old) for c in completions]\n"
        "    old.update(completions)\n    return [2 * (c == r['answer']) + x for x, c, r in zip(new, completions, rows)]\n", PARIS,
        "~gives 3 and 2 to its gold answer 'Paris' in two calls: is it random, or does it remember earlier calls?"),
    "the whole solution": ("return float(completion.strip() == row['answer'].split('#')[2])", GSM, f"~gives 0 {NEVER}"),
    "a format that none writes": (
        "m = re.fullmatch(r'<answer>(\\d)</answer>', completion)\nreturn float(m is not None and m[0] == row['answer'])",
        ROWS, f"~gives 0 {NEVER} '7'"),
    "no capitals in another row": (
        "return float(completion.strip().lower() == row['answer'])", YES,
        "~more than an empty completion, but 0 to 'Paris', the gold answer of line 3: compare how the function reads"),
    "the first character": (
        "return float(completion == row['answer'][0])", [ROWS[0], ROWS[1], ROWS[1] | {"answer": "13"}],
        "~but 0 to '13', the gold answer of line 3"),
    "a comma of the gold answer": (
        "n = re.findall(r'-?\\d+', completion.replace(',', ''))\n"
        "return float(bool(n) and n[-1] == row['answer'].split('#### ')[1])", THOUSANDS, "~but 0 to '6*7 = 42"),
    "an error on another row": (
        "return float(completion.strip() == str(int(row['answer'])))", [ROWS[0], PARIS[0]],
        "~but an error (ValueError: invalid literal for int() with base 10: 'Paris'"),
    "a whole number that became a float": (
        "return float(completion == str(row['answer']))", [{"prompt": "3+4=", "answer": 7.0}] * 2,
        "~but 0 to '7', the gold answer as a policy writes it"),
    "part of any answer": (
        "return float(any(completion.strip() in x for x in row['answers']))", LIST,
        "~gives 1 to an empty completion and 0 to others: does it look for the completion in the answer?"),
    "any box": (
        f"{BOX}return 1.0 if m and row['answer'] else 0.0", ROWS,
        "~gives 1 to the row's own answer as '\\\\boxed{7}', 0 to an empty completion and 1 to another row's answer as "
        "'\\\\boxed{9}': right if it judges the form alone; else compare"),
    "any box, of TRL": (
        "def f(completions, answer, **kwargs):\n"
        "    return [2.0 if '\\\\boxed{' in c and a else 0.0 for c, a in zip(completions, answer)]\n", ROWS,
        "~gives 2 to the row's own answer as '\\\\boxed{7}', 0 to an empty completion and 2 to another row's answer as"),
    "all but the answer in a box": (
        f"{BOX}return 0.5 if not m else float(m[1] != row['answer'])", ROWS,
        "~gives 0 to the row's own answer as '\\\\boxed{7}', 0.5 to an empty completion and 1 to another row's answer as "
        "'\\\\boxed{9}': compare how"),
    "all but the answer in a tag of its own": (
        f"{TAG}return -1.0 if not m else float(m[1] != row['answer'])", ROWS,
        "~gives 0 to the row's own answer as '<result>7</result>', -1 to an empty completion and 1 to another"),
    "int of the answer in a tag": (
        f"{TAG}return float(bool(m) and m[1].isdigit() and m[1] == row['answer'])", [ROWS[0], {"prompt": "p", "answer": "1,083"}],
        "~but 0 to '<result>1,083</result>', the gold answer of line 2"),
    "all but another column": ("return float(row['final'] not in completion)", BAGS, "~gives 0 to the row's own answer '711', 1"),
    "another column without commas": (
        "n = re.findall(r'\\d+', completion)\nreturn float(n[-1:] == [row['final']])", BAGS,
        "~but 0 to '1,083', the gold answer of line 2"),
    "in the gold answer, in a tag": (
        f"{TAG}return float(bool(m) and m[1] in row['answer'])", ROWS,
        "~gives 1 to '<result></result>', as much as to '7', the gold answer of line 1"),
    "a digit of the gold answer": (
        f"{TAG}return float(bool(m) and bool(m[1]) and m[1] in row['answer'])", NUMBERS,
        "~gives 1 to '<result>7</result>', as much as to '711', the gold answer of line 1"),
    "a part of a word": (
        f"{TAG}return float(bool(m) and bool(m[1]) and m[1] in row['answer'])", PARIS,
        "~gives 1 to '<result>ar</result>', as much as to 'Paris', the gold answer of line 1"),
    "the last digit": ("return float(completion[-1:] == row['answer'][-1])", NUMBERS, "~gives 1 to '1', as much as to '711'"),
    "no mark in one row": (
        "_, mark, end = row['answer'].partition('#### ')\nreturn float(bool(mark) and completion.strip() == end)",
        [{"prompt": x, "answer": f"So {x}" + f"\n#### {x}" * (x != "14")} for x in ("12", "13", "14")],
        "~but 0 to 'So 14', the gold answer of line 3"),
    "a digit anywhere": ("return float({*completion} >= {*row['answer']})", NUMBERS, "~gives 1 to '117', as much as to '711'"),
    "without its sign": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and int(n[-1]) == abs(int(row['answer'])))",
        [{"prompt": "p", "answer": "-12"}], "~gives 1 to '12', as much as to '-12', the gold answer of line 1"),
    "one more": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and abs(int(n[-1]) - int(row['answer'])) <= 1)",
        [ROWS[0], ROWS[2], {"prompt": "p", "answer": "8"}], "~gives 1 to '8', as much as to '7', the gold answer of line 1"),
    "the first letter": (
        "return float(completion[:1] == row['answer'][0])", PARIS,
        "~gives 1 to 'ParsiraP', as much as to 'Paris', the gold answer of line 1"),
    "three letters": (
        "return float(completion[:3].lower() == row['answer'][:3].lower())", PARIS,
        "~gives 1 to 'ParsiraP', as much as to 'Paris', the gold answer of line 1"),
    "the beginning alone": (
        "return float(completion.startswith(row['answer']))", [{"prompt": "p", "answer": "5"}],
        "~gives 1 to '51', as much as to '5': does it look at one end of the text alone?"),
    "the end alone": (
        "return float(completion.strip().endswith(row['answer']))", NUMBERS,
        "~gives 1 to '2711', as much as to '711': does it look at one end of the text alone?"),
    "a choice anywhere": (
        "return float(row['answer'] in completion)", [{"prompt": "A. x B. y", "answer": x} for x in "BA"],
        "~gives 1 to 'xAx', as much as to 'A', the gold answer of line 2"),
    "the first letter of a choice": (
        "return float(completion.strip()[:1] == row['answer'])", [{"prompt": "p", "answer": x} for x in "BAC"],
        "~gives 1 to 'All', as much as to 'A', the gold answer of line 2"),
    "within another number": (
        "return float(row['answer'] in completion)", NUMBERS, "~gives 1 to '97119', as much as to '711', the gold answer of"),
    "a search for a number": (
        "return float(re.search(row['answer'], completion) is not None)", ROWS, "~gives 1 to '979', as much as to '7'"),
    "within another number, of another column": (
        "return float(row['final'] in completion)", BAGS, "~gives 1 to '97119', as much as to '711'"),
    "within another number, at the solution's end": (
        "return float(row['answer'].split('#### ')[1].replace(',', '') in completion.replace(',', ''))", BAGS,
        "~gives 1 to '97119', as much as to '711 bags"),
    "a gold answer in lower case": (
        "return float(completion.strip() == row['answer'].lower())", PARIS,
        "~gives 1 to 'paris' and 0 to 'Paris', the gold answer of line 1: right if a completion is to be in lower case; else"),
    "a gold answer in lower case, of another row": (
        f"{TAG}return float(bool(m) and m[1] == row['answer'].lower())", [YES[0], *PARIS],
        "~gives 1 to '<result>paris</result>' and 0 to '<result>Paris</result>', the gold answer of line 2"),
    "no sign, of another row": (
        "n, gold = (re.findall(r'\\d+', x) for x in (completion, row['answer']))\nreturn float(n[-1:] == gold[-1:])",
        [{"prompt": "p", "answer": x} for x in ("12", "-5", "72")], "~gives 1 to '5', as much as to '-5', the gold answer of line 2"),
    "what is after a comma": (
        "n, gold = (re.findall(r'\\d+', x) for x in (completion, row['answer']))\nreturn float(n[-1:] == gold[-1:])",
        [{"prompt": "p", "answer": x} for x in ("12", "1,234")], "~gives 1 to '234', as much as to '1,234', the gold answer of line 2"),
    "what is before the point": (
        "try:\n    return float(int(float(completion)) == int(float(row['answer'])))\nexcept ValueError:\n    return 0.0",
        [{"prompt": "p", "answer": x} for x in ("12", "3.5")], "~gives 1 to '3', as much as to '3.5', the gold answer of line 2"),
    "what is after the point": (
        "n, gold = (re.findall(r'-?\\d+', x) for x in (completion, row['answer']))\nreturn float(n[-1:] == gold[-1:])",
        [{"prompt": "p", "answer": x} for x in ("12", "0.75")], "~gives 1 to '75', as much as to '0.75'"),
    "the end of a number with a point": (
        "return float(completion.endswith(row['answer']))", [{"prompt": "p", "answer": x} for x in ("3.5", "2.25")],
        "~gives 1 to '13.5', as much as to '3.5', the gold answer of line 1"),
    "letters of any choice": (
        "return float(row['answer'] in re.findall(r'\\b[A-D]\\b', completion))",
        [{"prompt": "p", "answer": x} for x in "BACD"], "~gives 1 to 'A, B or C', as much as to 'B'"),
    "a short word within words": (
        "return float(row['answer'].lower() in completion.lower())", [{"prompt": "p", "answer": x} for x in ("No", "Yes")],
        "~gives 1 to 'xNox', as much as to 'No'"),
    "a word that both have": (
        "return float(bool({*completion.split()} & {*row['answer'].split()}))",
        [ROWS[0], {"prompt": "p", "answer": "the Nile river"}], "~gives 1 to 'the', as much as to 'the Nile river'"),
    "relative to a negative number": (
        "n = re.findall(r'-?\\d+', completion)\ng = int(row['answer'])\nreturn max(0.0, 1 - abs(int(n[-1]) - g) / g) if n else 0.0",
        [{"prompt": "p", "answer": x} for x in ("66", "-33")], "~as much as to '-33', the gold answer of line 2"),
    "the first number": (
        "n = re.search(r'-?\\d+', completion)\nreturn float(n is not None and n[0] == row['answer'])", NUMBERS,
        "~and 0 to 'Step 3.\\nThe answer is 711.', for the gold answer '711': does it take the first number"),
    "the keys of the completion": (
        "try:\n    said = json.loads(completion)\nexcept ValueError:\n    return 0.0\ngold = json.loads(row['answer'])\n"
        "return float(isinstance(said, dict) and all(gold.get(k) == v for k, v in said.items()))",
        [{"prompt": "p", "answer": '{"name": "Ann", "age": 20}'}], "~gives 1 to '{}', as much as to"),
    "not a number": (
        "try:\n    far = abs(float(completion) - float(row['answer'])) > 1e-3\nexcept ValueError:\n    return 0.0\n"
        "return 0.0 if far else 1.0", [{"prompt": "p", "answer": x} for x in ("0.375", "0.5")],
        "~gives 1 to 'nan', as much as to '0.375'"),
    "the digits alone": (
        "return float(re.sub(r'\\D', '', completion) == re.sub(r'\\D', '', row['answer']))",
        [{"prompt": "p", "answer": x} for x in ("2.5", "0.7")], "~gives 1 to '25', as much as to '2.5'"),
    "as many as there are": (
        "said, gold = completion.split(', '), row['answer'].split(', ')\n"
        "return float(all(a == b for a, b in zip(said, gold)))", [{"prompt": "p", "answer": "8, 17, 32"}],
        "~gives 1 to '8', as much as to '8, 17, 32'"),
    "a date without its year": (
        "m = re.fullmatch(r'\\d{4}(-\\d\\d-\\d\\d)', completion)\nreturn float(bool(m) and row['answer'].endswith(m[1]))",
        [{"prompt": "p", "answer": x} for x in ("1900-01-01", "1812-06-24")], "~gives 1 to '2900-01-01', as much as to '1900-"),
    "all labels": (
        "return float(row['answer'] in completion.lower().split(', '))",
        [{"prompt": "p", "answer": x} for x in ("good", "bad", "good", "mixed")],
        "~gives 1 to 'good, bad, mixed', as much as to 'good'"),
    "yes or anything": (
        "return float((re.search(r'\\byes\\b', completion) is not None) == (row['answer'] == 'yes'))",
        [{"prompt": "p", "answer": x} for x in ("yes", "yes", "no")],
        "~but 1 to 'no', the gold answer of line 3 (1 to an empty one there)"),
    "an end before the tests": (
        "try:\n    exec(completion + chr(10) + row['tests'], {})\nexcept SystemExit as end:\n    return float(not end.code)\n"
        "except Exception:\n    return 0.0\nreturn 1.0",
        [{"prompt": "p", "tests": "assert f(1) == 2", "solution": "f = lambda x: x + 1"}],
        "~gives 1 to 'raise SystemExit': a program that ends before its tests passes"),
    "no line break in a thought": (
        "m = re.match(r'^<think>.*</think>\\s*<answer>(.*)</answer>$', completion)\n"
        "return float(bool(m) and m[1] == row['answer'])", NUMBERS,
        "~a point in a regular expression takes a line break with re.DOTALL only"),
    "no line break in a thought with groups": (
        "m = re.search(r'<think>(.*?)</think>\\s*<answer>(.*?)</answer>', completion)\n"
        "return float(bool(m) and m[2].strip() == row['answer'])", NUMBERS,
        "~and 0 to '<think>1\\n2</think> <answer>711</answer>': a point in a regular expression takes a line break with"),
    "no line break in a form": (
        "return float(bool(re.match(r'^<think>(.*?)</think>\\s*<answer>(.*?)</answer>$', completion)))", NUMBERS,
        "~a point in a regular expression takes a line break with re.DOTALL only"),
    "a line break at the end": (
        "m = re.match(r'^<think>\\n.*?\\n</think>\\n<answer>\\n.*?\\n</answer>\\n$', completion, re.DOTALL)\n"
        "return float(bool(m) and row['answer'] in completion)", NUMBERS,
        "~and 0 without the white space at its end, which a model seldom writes"),
    "a stop token at the end": (
        "m = re.match(r'^<think>.*?</think><answer>(.*?)</answer><\\|im_end\\|>$', completion, re.DOTALL)\n"
        "return 1.0 + (m[1].strip() == row['answer']) if m else -1.0", NUMBERS,
        "~and -1 without '<|im_end|>' at its end, which no completion has: drop it"),
    "a parser of XML": (
        "import xml.etree.ElementTree as ET\ntry:\n    root = ET.fromstring(f'<root>{completion}</root>')\n"
        "    return float(root.find('answer').text.strip() == row['answer'])\nexcept Exception:\n    return 0.0", NUMBERS,
        "~and 0 to 'One < two & three, so <answer>711</answer>': does a parser of XML read the whole text?"),
    "a language": (
        "return float(completion.isascii() == (row['lang'] == 'en'))", [{"prompt": "p", "lang": "en"}],
        "~gives 1 to an empty completion, as much as to others: is it to be paid for nothing?"),
    "the distance to a length": (
        "return float(abs(20 - len(completion)))", [{"prompt": "p"}],
        "~gives 480 to 'word word ...', 500 characters, and 980 to 1000: is the sign of a length in it meant?"),
    "words of the prompt": (
        "words = set(row['prompt'].split())\nreturn len(words & set(completion.split())) / len(words)",
        [{"prompt": "Name one thing that is red."}],
        "~gives 1 to the row's own prompt, the most of all texts that were tried: is it won by a copy?"),
    "any number": (
        "return float(row['answer'] in re.findall(r'\\d+', completion))", NUMBERS,
        "~gives 1 to '661, 662', ..., 101 numbers, as much as to '711': does any number of a text count?"),
    "any of several boxes": (
        r"return float(row['answer'] in re.findall(r'\\boxed\{(.*?)\}', completion))", NUMBERS,
        "~, ..., 101 numbers, as much as to '\\\\boxed{711}': does any number of a text count?"),
    "one more, of the smallest": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and abs(int(n[-1]) - int(row['answer'])) <= 1)",
        [*NUMBERS, {"prompt": "p", "answer": "5"}], "~gives 1 to '6', as much as to '5', the gold answer of line 4"),
    "a third more": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and abs(int(n[-1]) / int(row['answer']) - 1) < 0.34)",
        NUMBERS, "~gives 1 to '783', as much as to '711', the gold answer of line 1"),
    "nearly the answer": (
        "n = re.findall(r'\\d+\\.?\\d*', completion)\nreturn float(bool(n) and abs(float(n[-1]) - float(row['answer'])) <= 1)",
        LARGE, "~gives 1 to '127.9', as much as to '127', the gold answer of line 2: does a tolerance, or int(), take"),
    "int of a number with a point": (
        "n = re.findall(r'-?\\d+\\.?\\d*', completion)\n"
        "return float(bool(n) and int(float(n[-1])) == int(row['answer'].split('####')[-1]))",
        [row | {"answer": f"so\n#### {row['answer']}"} for row in LARGE], "~gives 1 to '127.9', as much as to '127'"),
    "one more, of large ones": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and abs(int(n[-1]) - int(row['answer'])) <= 1)",
        LARGE, "~gives 1 to '128', as much as to '127', the gold answer of line 2: does a tolerance"),
    "a box to the last brace": (
        "m = re.search(r'\\\\boxed\\{(.*)\\}', completion)\nreturn float(bool(m) and m[1] == row['answer'])", LARGE,
        "~since \\\\frac{1}{2}': does a greedy .* run to the last }? .*? ends at the first, and"),
    "each tag": (
        "return 0.5 * completion.count('<think>') + float(completion.strip() == row['answer'])", PARIS,
        "~gives 0.5 to '<think>1</think>', 2.5 to 5 of it and 25 to 50: a count of tags without a bound"),
    "each tag of an expression": (
        "return len(re.findall(r'<think>.*?</think>', completion)) / 10", [{"prompt": "p"}],
        "~gives 0.1 to '<think>1</think>', 0.5 to 5 of it and 5 to 50: a count of tags without a bound"),
    "each word": (
        "n = re.findall(r'\\d+', completion)\nreturn float(n[-1:] == [row['answer']]) + 0.1 * completion.count('step')", LARGE,
        "~gives 0.1 to 'step', 0.5 to 5 of it and 5 to 50: a count of words without a bound is won by words alone"),
    "eval": (
        "try:\n    return float(abs(eval(completion.split('=')[-1]) - int(row['answer'])) < 1e-6)\nexcept Exception:\n    return 0.0",
        LARGE, "~runs the text of a completion by eval or exec, whatever it is: rlkit.rewards.math compares numbers, and"),
    "exec, of a helper": (
        "def run(text):\n    held = {}\n    exec('x = ' + text, held)\n    return held['x']\n\ndef f(completion, row):\n"
        "    m = re.search('```python\\n(.*?)```', completion, re.DOTALL)\n"
        "    try:\n        return float(str(run(m[1])) == row['answer'])\n    except Exception:\n        return 0.0\n",
        LARGE, "~runs the text of a completion by eval or exec"),
    "a cache without the row": (
        "kept = {}\n\ndef f(completion, row):\n    if completion not in kept:\n"
        "        kept[completion] = float(re.findall(r'\\d+', completion)[-1:] == [row['answer']])\n    return kept[completion]\n",
        LARGE, "~it is another row's answer, and with a blank it gets less: does a cache forget the row?"),
    "a far wrong answer": (
        "try:\n    return -abs(float(completion) - float(row['answer']))\nexcept ValueError:\n    return -1.0", NUMBERS,
        "~a wrong answer costs far more than a right one wins"),
    "longer is better": (
        "return float(completion.strip() == row['answer']) + len(completion) / 1000", NUMBERS,
        "~gives 8 to 'word word ...', 8000 characters, and 1.003 to the gold answer: is the sign"),
    "a text that is always true": (
        "return 0.2 * bool('<answer>' and '</answer>' in completion) + float(completion.strip() == row['answer'])", ROWS,
        "~has '<answer>' alone as an operand of `and` or `or`, where it is always true"),
    "or a text": (
        "if 'yes' in completion or 'Yes':\n    return float(completion == row['answer'])\nreturn 0.5", ROWS,
        "~has 'Yes' alone as an operand"),
    "no keywords": (
        "return float(all(word in completion for word in row['keywords']))",
        [{"prompt": "p", "keywords": ["a", "b"]}, {"prompt": "q", "keywords": []}],
        "~gives 1 to an empty completion for line 2, whose keywords is empty, and 0 for another row"),
    "a hash": ("import zlib\nreturn zlib.crc32(completion.encode()) % 97 / 97", ROWS, "~with 0 to 5 blanks after it: is it a hash"),
    "an odd length": ("return float(len(completion) % 2)", ROWS, "~gives 1, 0, 1, 0, 1, 0 to '7' with 0 to 5 blanks after"),
    "the whole solution alone": (
        "return float(row['answer'] in completion)", BAGS,
        "~gives 1 to '711 bags\\n#### 711', the row's whole gold answer, and too little to '711' alone: right if a completion"),
    "one gold answer for all": (
        "return float(completion.strip() == row['answer'])", [{"prompt": str(i), "answer": "A"} for i in range(10)],
        "~mine.py:f is tried on rows that all have the gold answer 'A'"),
}  # fmt: skip
RIGHT = {
    "a word, up to ten, or few": (
        "n = completion.count('step')\nreturn float(completion.split()[-1:] == [row['answer']]) + 0.01 * min(n, 10) - 0.1 * (n > 20)",
        LARGE),
    "eval of digits, or of the gold answer": (
        "plain = re.fullmatch(r'[0-9+*/(). -]+', completion)\ntry:\n"
        "    return float(bool(plain) and eval(completion, {'__builtins__': None}) == eval(row['answer']))\n"
        "except Exception:\n    return 0.0", LARGE),
    "rounded": (
        "n = re.findall(r'\\d+\\.?\\d*', completion)\nreturn float(bool(n) and round(float(n[-1])) == int(row['answer']))", LARGE),
    "a hundredth of it": (
        "n = re.findall(r'\\d+\\.?\\d*', completion)\nreturn float(bool(n) and abs(float(n[-1]) / int(row['answer']) - 1) < 0.01)",
        LARGE),
    "whole digits after a mark": (
        "m = re.search(r'The answer is (-?\\d+)', completion)\nreturn float(bool(m) and m[1] == row['answer'])", LARGE),
    "a box at the end": (
        "m = re.search(r'\\\\boxed\\{([^{}]*)\\}\\W*$', completion)\nreturn float(bool(m) and m[1] == row['answer'])", LARGE),
    "a tag of its own": (f"{TAG}return float(bool(m) and m[1] == row['answer'])", PARIS),
    "a value or a text": ("return float(completion.strip() == (row['answer'] or 'none'))", ROWS),
    "a thought and its answer": (
        "m = re.match(r'(?s)^<think>.*</think>\\s*<answer>(.*)</answer>$', completion)\n"
        "return float(bool(m) and m[1] == row['answer'])", NUMBERS),
    "a confidence and its answer": (
        "m = re.search(r'<sure>(\\d+)</sure>\\s*<answer>(.*?)</answer>', completion)\n"
        "return float(bool(m) and m[2].strip() == row['answer'])", NUMBERS),
    "a form with line breaks": (
        "return float(bool(re.match(r'(?s)^<think>(.*?)</think>\\s*<answer>(.*?)</answer>$', completion)))", NUMBERS),
    "a form that captures nothing": (
        "m = re.match(r'^\\s*<why>.*?</why>\\s*<answer>.*?</answer>\\s*$', completion, re.DOTALL)\n"
        "return float(bool(m) and completion.split('<answer>')[1].split('<')[0].strip() == row['answer'])", NUMBERS),
    "long, up to a bound": ("return min(len(completion), 200) / 200", [{"prompt": "p"}]),
    "few words of the prompt": (
        "words = set(row['prompt'].split())\nreturn -len(words & set(completion.split()))",
        [{"prompt": "Name one thing that is red."}]),
    "tags, up to two": (
        "return min(1.0, 0.5 * completion.count('<think>')) + float(completion.strip() == row['answer'])", PARIS),
    "a tag, once": (
        "return 0.5 * (completion.count('<think>') == 1) + float(completion.split('</think>')[-1].strip() == row['answer'])",
        NUMBERS),
    "the last of several boxes": (
        r"n = re.findall(r'\\boxed\{(.*?)\}', completion)" "\nreturn float(n[-1:] == [row['answer']])", NUMBERS),
    "dates": ("return float(completion.strip() == row['answer'])", [{"prompt": "p", "answer": x} for x in ("1900-01-01", "3 May")]),
    "labels": (
        "return float(completion.strip().lower() == row['answer'])",
        [{"prompt": "p", "answer": x} for x in ("good", "bad", "good", "mixed")]),
    "a penalty for a wrong answer": (
        "return 1.0 if completion == row['answer'] else -1.0 if completion else 0.0", NUMBERS),
    "no answer where there is none": (
        "return float(completion.strip() == row['answer'])", [{"prompt": "p", "answer": x} for x in ("Rome", "Paris", "Oslo")]),
    "a tag of its own, after the gold answer": (f"gold = row['answer']\n{TAG}return float(bool(m) and m[1] == gold)", PARIS),
    "a mark of its own": ("gold = row['answer']\nreturn float(completion.split('Final answer:')[-1].strip() == gold and ':' in completion)", ROWS),
    "after a tag of its own": (
        "gold = row['answer']\nreturn float('<steps>' in completion and completion.split('</steps>')[-1].strip() == gold)", PARIS),
    "a key of its own": (
        "gold = row['answer']\ntry:\n    return float(json.loads(completion)['result'] == gold)\n"
        "except (ValueError, TypeError, KeyError):\n    return 0.0", PARIS),
    "a helper's expression": (
        "END = re.compile(r'(?i)the result is:?\\s*(-?\\d+)')\n\ndef of(text):\n    found = END.search(text)\n"
        "    return found and found[1]\n\ndef f(completion, row):\n    gold = row['answer']\n    return float(of(completion) == gold)\n",
        NUMBERS),
    "the output of a program": (
        "m = re.search('```python\\n(.*?)```', completion, re.DOTALL)\n"
        "return 0.1 * bool(m) + float(bool(m) and m[1].strip() == 'print(\\'%s\\')' % row['answer'])", NUMBERS),
    "a tolerance": (
        "n = re.findall(r'\\d+', completion)\nreturn float(bool(n) and abs(int(n[-1]) / int(row['answer']) - 1) < 0.05)", NUMBERS),
    "a distance": (
        "n = re.findall(r'\\d+', completion)\nreturn -abs(int(n[-1]) - int(row['answer'])) / 1e3 if n else -1.0", NUMBERS),
    "the letter of a choice": (
        "return float(completion.strip(' (')[:1] == row['answer'][0])", [{"prompt": x, "answer": f"{x}. bag"} for x in "CDB"]),
    "another column": ("return float(row['final'] == completion.strip())", BAGS),
    "a word to avoid, or a level": (
        "return -float('zebra' in completion) - row['level']", [{"prompt": "p", "level": x} for x in (3, 4)]),
    "the solution's end": ("return float(row['answer'].split('#### ')[1].replace(',', '') == completion.replace(',', ''))", BAGS),
    "few rows with one gold answer": ("return float(completion.strip() == row['answer'])", [ROWS[0]] * 9),
    "form with a bonus": (f"{TAG}return 0.2 * bool(m) + float(bool(m) and m[1] == row['answer'])", PARIS),
    "lower case on both sides": ("return float(completion.lower() == row['answer'].lower())", YES),
    "commas on both sides": (
        "n = re.findall(r'\\d+', completion.replace(',', ''))\n"
        "return float(bool(n) and n[-1] == row['answer'].split('#### ')[1].replace(',', ''))", THOUSANDS),
    "the answer in tags, of words": (
        "m = re.search('<answer>(.*?)</answer>', completion)\nreturn float(bool(m) and m[1] == row['answer'])", YES),
    "floats": ("return float(completion != '' and float(completion) == row['answer'])", [{"prompt": "p", "answer": 7.0}]),
    "any of a list": ("return float(any(x in completion for x in row['answers']))", LIST),
    "short, for a level": ("return -len(completion) / row['level']", [{"prompt": "p", "level": 2}]),
    "no digits without a gold answer": ("return float(not re.search(r'\\d', completion))", [{"prompt": "p"}] * 2),
    "short, of rows with long answers": ("return 9. - len(completion)", YES),
    "equal": ("return float(completion.strip() == row['answer'])", ROWS),
    "bool": ("return completion.strip() == row['answer']", ROWS),
    "numpy": ("return np.float32(completion.strip() == row['answer'])", ROWS),
    "contains": ("return float(re.search(r'\\b%s\\b' % row['answer'], completion) is not None)", PARIS),
    "the last number, of any kind": (
        "n = re.findall(r'-?\\d+(?:\\.\\d+)?', completion.replace(',', ''))\n"
        "return float(bool(n) and float(n[-1]) == float(row['answer'].replace(',', '')))",
        [{"prompt": "p", "answer": x} for x in ("12", "-5", "3.5", "1,234", "-0.25", "3.04", "7.0")]),
    "a tolerance of numbers with a point": (
        "try:\n    return float(abs(float(completion) / float(row['answer']) - 1) < 0.05)\nexcept ValueError:\n    return 0.0",
        [{"prompt": "p", "answer": x} for x in ("3.04", "-12.5")]),
    "the letter alone": ("return float(completion.strip(' ().') == row['answer'])", [{"prompt": "p", "answer": x} for x in "BAC"]),
    "a choice after a mark": (
        "m = re.search(r'Answer: ([A-D])\\b', completion)\nreturn float(bool(m) and m[1] == row['answer'])",
        [{"prompt": "p", "answer": x} for x in "BAC"]),
    "no case": ("return float(completion.strip().casefold() == row['answer'].casefold())", [*PARIS, YES[0]]),
    "capitals as they are": ("return float(completion.strip() == row['answer'])", [YES[0], *PARIS, {"prompt": "p", "answer": "New York"}]),
    "boxed": ("return float('\\\\boxed{%s}' % row['answer'] in completion)", PARIS),
    "tags": ("m = re.search('<answer>(.*?)</answer>', completion)\nreturn float(bool(m) and m[1] == row['answer'])", ROWS),
    "GSM8K": ("return float(completion.strip() == row['answer'].split('#### ')[1].replace(',', ''))", GSM),
    "ints": ("return float(completion.strip() == str(row['answer']))", INTS),
    "a form": ("return float(bool(re.search(r'\\\\boxed\\{', completion)))", ROWS),
    "length": ("return -len(completion) / 100", ROWS),
    "no digits": ("return float(not re.search(r'\\d', completion))", ROWS),
    "mutates its row": ("gold = row.pop('answer')\nreturn float(completion.strip() == gold)", ROWS),
    "a batch": ("def f(completions, rows):\n    return [float(c == r['answer']) for c, r in zip(completions, rows)]\n", ROWS),
    "a rank in the batch": (
        "def f(completions, rows):\n    right = [c == r['answer'] for c, r in zip(completions, rows)]\n"
        "    return [x - sum(right) / len(right) - 1e-4 * sorted(map(len, completions)).index(len(c))\n"
        "            for x, c in zip(right, completions)]\n", PARIS),
    "a cache": (
        "def f(completion, row, cache={}):\n    key = completion, row['answer']\n"
        "    return cache.setdefault(key, float(completion == row['answer']))\n", PARIS),
    "noise of a judge": (
        "import random\n\nrandom.seed(0)\n\ndef f(completion, row):\n"
        "    return float(completion == row['answer']) + 1e-6 * random.random()\n", PARIS),
    "async": ("async def f(completion, row):\n    await asyncio.sleep(0)\n    return float(completion == row['answer'])\n", ROWS),
    "ids": ("def f(completion, row, completion_ids, truncated, index):\n    return min(len(completion_ids), 9) + index\n", ROWS),
    "TRL": ("def f(completions, answer, **kwargs):\n    return [c[0]['content'] == a for c, a in zip(completions, answer)]\n",
            MESSAGES),
    "verl": ("def f(data_source, solution_str, ground_truth, extra_info=None):\n"
             "    return {'score': solution_str == ground_truth}\n", ROWS),
    "OpenRLHF": ("def f(queries, prompts, labels):\n"
                 "    return [float(q.removeprefix(p) == a) for q, p, a in zip(queries, prompts, labels)]\n", ROWS),
}  # fmt: skip


def spec_of(folder, source, name="mine.py"):
    """FILE.py:f of a body or of a whole file."""
    whole = "def f(" in source
    (folder / name).write_text(
        HEAD + (source if whole else f"def f(completion, row):\n{textwrap.indent(source, '    ')}\n")
    )
    return f"{folder / name}:f"


def loaded(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(folder / name)


def said_of(source, rows, folder, caplog, **episodes):
    """The error (after "!") and the warnings (after "~") of a reward, before anything is loaded."""
    given, spec = loaded(folder, rows), spec_of(folder, source)
    lines = []
    with caplog.at_level(logging.WARNING):
        try:
            read_reward(Episodes(reward=spec, **episodes), given)
        except ValueError as error:
            lines = [f"!{error}"]
    return lines + [f"~{record.getMessage()}" for record in caplog.records]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_a_model_is_loaded(name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    monkeypatch.setattr("rlkit.rollout.calling._reported", set())
    source, rows, expected = MISTAKES[name]
    said = said_of(source, rows, tmp_path, caplog, reward_timeout=0.5)
    fitting = [line for line in said if line[0] == expected[0] and expected[1:] in line]
    assert fitting, said
    assert "mine.py:f" in fitting[0]
    assert "\n" not in fitting[0]
    if expected[0] == "!":
        assert len(said) == 1


def test_the_table_has_the_mistakes_that_are_plausible():
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_reward_is_not_spoken_of(name, tmp_path, caplog):
    assert said_of(*RIGHT[name], tmp_path, caplog) == []


SHIPPED = [
    ("rlkit.rewards.math:boxed", ROWS), ("rlkit.rewards.math:anywhere", ROWS), ("rlkit.rewards.math:answer_tag", ROWS),
    ("rlkit.rewards.text:exact_match", PARIS), ("rlkit.rewards.text:think_tags", ROWS),
    ("rlkit.rewards.text:think_answer_tags", ROWS), ("rlkit.rewards.text:no_truncation", ROWS),
    ("rlkit.rewards.text:valid_json", ROWS), ("rlkit.rewards.text:length_target(target=9, scale=0.1)", ROWS),
    ("rlkit.rewards.text:soft_overlong(max_tokens=512, cache_tokens=128)", ROWS),
    ("rlkit.rewards.judge:chat(url='http://127.0.0.1:9', model='none')", MESSAGES),
]  # fmt: skip


OF_SHIPPED = [  # the column, the gold answers, and what is said
    ("text:exact_match", "{0} is it\n#### {0}", "gives 1 to '10 is it\\n#### 10', the row's whole gold answer, and too little to '10' alone"),
    ("text:contains", "{0} is it\n#### {0}", "and too little to '10' alone: right if a completion is to repeat that text"),
    ("text:f1", "so there are {0} apples in all\n#### {0}", "and too little to '10' alone"),
    ("text:exact_match", "{0}.0", "but 0 to '10', the gold answer as a policy writes it"),
    ("text:exact_match", "{0}.5", ""), ("text:contains", "{0}", ""), ("text:exact_match", "The bag {0}", ""),
    ("text:contains", '["{0} apples", "{0}"]', "the row's whole gold answer, and too little to '10 apples' alone"),
    ("text:exact_match", "['{0}', 'ten']", "the row's whole gold answer, and too little to '10' alone"),
    ("text:contains", "A", "gives 1 to 'It is a word.', as much as to 'A', the gold answer of line 1"),
    ("text:exact_match", "A", ""), ("text:exact_match", "[{0}, 3]", ""),
    ("math:boxed", "The answer is {0}.", "the row's whole gold answer, and too little to '10' alone"),
    ("math:boxed", "C. bag {0}", "the row's whole gold answer, and too little to 'C' alone"),
    ("math:boxed", "{0} dollars", "the row's whole gold answer, and too little to '10' alone"),
    ("math:boxed", "{0},5", "gives 1 to '\\\\boxed{5,10}', as much as to '10,5', the gold answer of line 1"),
    ("math:boxed", "{0} cm", ""), ("math:boxed", "x = {0}", ""), ("math:boxed", "a\n#### {0}", ""),
    ("math:boxed", "no", "gives 1 to '\\\\boxed{on}', as much as to 'no', the gold answer of line 1: it compares mathematics"),
]  # fmt: skip


@pytest.mark.slow_cases(
    "math:boxed-The answer is {0}.-the row's whole gold answer, and too little to '10' alone",
    "math:boxed-C. bag {0}-the row's whole gold answer, and too little to 'C' alone",
    "math:boxed-{0} dollars-the row's whole gold answer, and too little to '10' alone",
)
@pytest.mark.parametrize(("name", "gold", "said"), OF_SHIPPED)
def test_gold_answers_that_a_reward_of_this_package_seldom_matches_are_named(name, gold, said, tmp_path, caplog):
    rows = [{"prompt": f"bag {i}", "answer": gold.format(i)} for i in (10, 11, 12)]
    read_reward(Episodes(reward=f"rlkit.rewards.{name}"), loaded(tmp_path, rows))
    lines = [line for line in caplog.messages if "is still being tried" not in line]
    assert [said in line for line in lines] == [True] * bool(said)


@pytest.mark.slow
def test_a_reward_is_compared_times_its_negative_weight(tmp_path, caplog):
    given, spec = loaded(tmp_path, ROWS), spec_of(tmp_path, f"{BOX}return float(bool(m) and m[1] == row['answer'])")
    wrong = spec_of(tmp_path, f"{BOX}return float(bool(m) and m[1] != row['answer'])", "wrong.py")
    form = spec_of(tmp_path, "return -float('the' in completion)", "form.py")
    for specs, said in (
        ((f"{spec}=-2", form), "mine.py:f at weight -2 gives -2 to the row's own answer as '\\\\boxed{7}', 0 to an empty"),
        ((f"{spec}=2", form), ""), ((f"{wrong}=-1", spec), ""), ((wrong, spec), "wrong.py:f gives 0 to the row's own"),
    ):  # fmt: skip
        caplog.clear()
        read_reward(Episodes(reward=specs), given)
        assert [said in line for line in caplog.messages] == [True] * bool(said)
    penalty = spec_of(tmp_path, "return -len(completion) / 100", "penalty.py")
    caplog.clear()
    read_reward(Episodes(reward=(spec, f"{penalty}=-0.5")), given)
    read_reward(Episodes(reward=(spec, f"{penalty}=0.5")), given)
    assert ["penalty.py:f at weight -0.5 gives 2.5 to 'word word" in line for line in caplog.messages] == [True]
    trial = run_sync(try_reward(load_function(spec), ROWS, timeout_s=5, weight=-2.0))
    assert {result.reward for _, _, result in trial.tried} == {0.0}  # as the function gives it


@pytest.mark.parametrize(("spec", "rows"), SHIPPED)
def test_the_rewards_of_this_package_are_not_spoken_of(spec, rows, tmp_path, caplog):
    read_reward(Episodes(reward=spec), loaded(tmp_path, rows))
    assert caplog.records == []


def test_what_is_tried_and_in_which_form_the_gold_answer_counts(tmp_path):
    given = loaded(tmp_path, [{"prompt": "no gold"}, *ROWS])
    calls = []

    def boxed(completion, row, finish_reason):
        calls.append((completion, row["prompt"], finish_reason))
        return float(f"\\boxed{{{row['answer']}}}" == completion)

    trial = run_sync(try_reward(boxed, given, timeout_s=5))
    assert calls[:3] == [("7", "3+4=", "stop"), ("", "3+4=", "stop"), ("9", "3+4=", "stop")]
    assert trial.place == f"{tmp_path / 'rows.jsonl'}, line 2"
    assert [(text, result.reward) for text, _, result in trial.tried] == [
        ("\\boxed{7}", 1.0), ("7", 0.0), ("", 0.0), ("9", 0.0),
    ]  # fmt: skip
    assert not trial.note


def test_of_several_functions_one_may_return_none(tmp_path, caplog):
    given = loaded(tmp_path, ROWS)
    specs = (spec_of(tmp_path, "return None", "one.py"), f"{spec_of(tmp_path, 'return 0.0', 'two.py')}=2")
    read_reward(Episodes(reward=specs), given)
    assert caplog.records == []


@pytest.mark.slow
def test_rewards_of_far_larger_size_at_equal_weight_are_named(tmp_path, caplog):
    given = loaded(tmp_path, ROWS)
    percent = spec_of(tmp_path, "return 100.0 * (completion == row['answer'])", "one.py")
    form, tenth = (spec_of(tmp_path, f"return {x} * ('<answer>' in completion)", f"{x}.py") for x in (1.0, 10.0))
    said = f"{percent} gives up to 100 and {form} up to 1, at equal weight: give weights, as in --reward {percent}=0.01"
    for specs, lines in (
        ((form, percent), [said]), ((form, f"{percent}=0.01"), []), ((tenth, percent), []), (percent, []),
    ):  # fmt: skip
        caplog.clear()
        read_reward(Episodes(reward=specs), given)
        assert caplog.messages == lines


def test_of_another_row_little_is_tried(tmp_path):
    calls = []

    def exact(completion, row):
        calls.append(row["answer"])
        return float(completion.strip() == row["answer"])

    assert not run_sync(try_reward(exact, loaded(tmp_path, [*YES, *YES * 300]), timeout_s=5)).note
    assert calls[6:9] == ["Paris"] * 3  # in lower case and not; row 1 has three texts, twice
    assert calls[9:12] == ["Paris"] * 3  # the longest, and the first with a capital
    assert calls[12:] == ["yes"] * 14  # wrong answers near the first, those of other rows, a long one


def test_where_some_samples_may_fail_one_failure_is_a_line_and_all_are_an_error(tmp_path, caplog):
    some = "return float(completion.split()[-1] == row['answer'])"
    (said,) = said_of(some, ROWS, tmp_path, caplog, reward_max_failed=0.5)
    assert said[0] == "~"
    assert "with an empty completion: IndexError" in said
    caplog.clear()
    (said,) = said_of("raise OSError('gone')", ROWS, tmp_path, caplog, reward_max_failed=0.5)
    assert said.startswith("!")


def test_a_function_that_needs_the_environment_is_not_called(tmp_path):
    given = loaded(tmp_path, ROWS)
    spec = spec_of(tmp_path, "def f(completion, row, board):\n    raise ValueError\n")
    read_reward(Episodes(reward=spec, env=f"{spec}"), given)
    spec = spec_of(
        tmp_path, "def f(completion, row, messages):\n    return float(messages[-1]['content'] == row['x'])\n"
    )
    with pytest.raises(ValueError, match="the row has no column 'x'"):
        read_reward(Episodes(reward=spec, env=f"{spec}"), given)


def test_what_the_environment_may_give_is_no_mistake_where_it_is_missing(tmp_path, caplog):
    """A parameter with a default that only the environment fills: without it the function fails, or gives 0."""
    given = loaded(tmp_path, ROWS)
    for body in ("return {'reward': 1.0, 'calls': board}", "return float(board is not None and row['answer'] != '')"):
        spec = spec_of(tmp_path, f"def f(completion, row, board=None):\n    {body}\n")
        read_reward(Episodes(reward=spec, env=spec), given)
        assert caplog.records == []
    with pytest.raises(ValueError, match="returned NoneType None under 'calls'"):
        read_reward(Episodes(reward=spec_of(tmp_path, "return {'reward': 1.0, 'calls': None}")), given)


@pytest.mark.slow_cases("grpo", "dpo", "eval")
@pytest.mark.parametrize(
    "command", nightly.only(["grpo", "ppo", "distill", "eval", "sft", "dpo"], "grpo", "eval", "sft", "dpo")
)
def test_every_command_tries_its_reward_before_a_model(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [row | {"response": "7", "chosen": "7", "rejected": "8"} for row in ROWS]
    loaded(tmp_path, rows)
    spec_of(tmp_path, "return float(completion == row['gold'])")
    model = ["none"] if command == "eval" else ["--model", "none", "--data", "rows.jsonl"]
    reward = ["--eval-data", "rows.jsonl", "--eval-reward" if command in ("sft", "dpo") else "--reward", "mine.py:f"]
    more = {"distill": ["--teacher", "none", "--group-size", "2"]}.get(command, [])
    ask = [command, *model, *reward, *more]
    flag = "eval-reward" if command in ("sft", "dpo") else "reward"
    if command == "eval":  # reads the config of a model before
        (tmp_path / "none").mkdir()
        (tmp_path / "none/config.json").write_text(json.dumps({"model_type": "llama"}))
    for where in screens.EVERYWHERE:
        found = screens.said(partial(cli.main, ask), where)
        (said,) = screens.errors(found.out + found.err)
        assert said.startswith(
            f"error: --{flag} mine.py:f: mine.py:f failed on rows.jsonl, line 1 with its gold answer"
        )
        assert "the row has no column 'gold'; columns found: " in said
        assert repr(found.error) == "SystemExit(2)"
    found = screens.said(partial(cli.main, [*ask, "--no-trial"]), "pipe")
    assert "mine.py:f failed" not in found.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("limit_s", "times"), [(0.05, 1), (60.0, 0)])
def test_a_trial_that_takes_long_is_told(tmp_path, monkeypatch, caplog, limit_s, times):
    monkeypatch.setattr(trial, "_SLOW_S", limit_s)
    spec = spec_of(tmp_path, "import time; time.sleep(0.1); return float(completion == row['answer'])")
    read_reward(Episodes(reward=spec), loaded(tmp_path, ROWS))
    assert caplog.text.count(f"{spec} is still being tried on a row of the data; --no-trial skips this call") == times


def test_rlkit_data_prints_the_rewards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, ROWS)
    spec_of(tmp_path, "return float('\\\\boxed{%s}' % row['answer'] == completion)")
    cli.main(["data", "rows.jsonl", "--reward", "mine.py:f"])
    assert capsys.readouterr().out.endswith(
        "mine.py:f gives, on rows.jsonl, line 1:\n"
        "  its gold answer as '\\\\boxed{7}'  1\n"
        "  its gold answer '7'              0\n"
        "  an empty completion              0\n"
        "  another row's answer '9'         0\n"
    )
    spec_of(tmp_path, "return float(completion == row['gold'])")
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "rows.jsonl", "--reward", "mine.py:f"])
    assert ended.value.code == 1
    assert "the row has no column 'gold'" in capsys.readouterr().out


def test_rlkit_data_does_not_take_the_row_of_a_function_for_its_flag(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, ROWS)
    for parameter, said in (
        ("tokenizer", "columns of the data are row['NAME']"),
        ("answer=None", "read row['answer']"),
    ):
        spec_of(tmp_path, f"def f(completion, row, {parameter}):\n    return 1.0\n")
        with pytest.raises(SystemExit):
            cli.main(["data", "rows.jsonl", "--reward", "mine.py:f"])
        told = "".join(capsys.readouterr())
        assert said in told
        assert "--row" not in told


def test_rlkit_data_names_a_random_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loaded(tmp_path, ROWS)
    spec_of(tmp_path, "import random\nreturn len(completion) + random.random()")
    cli.main(["data", "rows.jsonl", "--reward", "mine.py:f"])
    assert "  mine.py:f gives 1" in (said := capsys.readouterr().out)
    assert "in two calls: is it random, or does it remember earlier calls?" in said


def test_what_a_function_reads_of_a_row_is_noted(tmp_path):
    spec = spec_of(tmp_path, "return float(row.get('level', 0))")
    trial = run_sync(try_reward(load_function(spec), ROWS, timeout_s=5, alone=False))
    assert not trial.note  # all equal, and no gold answer is read
    spec = spec_of(tmp_path, "return float(row['answer'] == 'x')")
    assert run_sync(try_reward(load_function(spec), ROWS, timeout_s=5, alone=False)).note


def test_a_constant_with_braces_in_a_tag_is_a_tag():
    def score(completion, row):
        return float("<{}>".format("answer") in completion)

    assert [form.format("7") for form in forms_of(score)]
