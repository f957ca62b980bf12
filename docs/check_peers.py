"""Check the names of other projects in the docs: each has a row in docs/peers.tsv and stands in that project's code.

    python docs/check_peers.py                        # names without a row, rows without a name
    python docs/check_peers.py --sources DIR          # also: each name stands in its file, near its line
    python docs/check_peers.py --sources DIR --update # and write the line numbers found there

DIR/PROJECT-VERSION, or else DIR/PROJECT, holds an unpacked source tree: a wheel, or a checkout of the row's commit. A
row is name, project, version (a release or a commit), file, line. A row whose version is `unchecked` is not looked up.

How the docs are written, so that a program can read them. README.md, docs/*.md and the docstrings of rlkit/ and
examples/ put names of code in back-ticks, and a back-ticked name belongs to another project where it

1. stands in a table column whose title names the project, in a cell that names no project; or
2. directly follows the project's name: "verl `gspo`", "TRL's `delta`", "slime (`--use-tis`, `--tis-clip`)", "SkyRL and
   verl `abs`" (of both), "Tinker `dro` and `cispo`"; or
3. stands anywhere else in a sentence that names a project, or in a section of migrating.md whose heading is one, and no
   code of ours has that name.

Each word of `loss_type="grpo"` is a name, and so is a flag, a dotted key, and the path of a file (at line 1). Paths,
flags, snake_case and words in -Trainer, -Loss, -Config are names in the places of 1 and 2 without back-ticks too, as
are the options of the commands in migrating.md. What follows "torch's", "SGLang's", "vLLM's" or "HF" belongs to no
project here. An option that TRL inherits from transformers has "transformers-VERSION" as its version.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "peers.tsv"
NEAR = 3  # lines between a row's line and the name
NAMES = (
    *("TRL", "verl", "OpenRLHF", "slime", "miles", "SkyRL", "AReaL", "ROLL", "NeMo-RL", "NeMo-Aligner", "prime-rl"),
    *("torchtitan", "open-instruct", "RL2", "rl4llm", "ColossalAI", "Liger", "rlax", "verifiers", "NeMo-Gym", "SPIRAL"),
)
SHORT = {"NeMo": "NeMo-RL", "Tinker": "tinker-cookbook", "tinker": "tinker-cookbook", "prime": "prime-rl"}
PROJECTS = {name: name for name in NAMES} | SHORT
_NAME = "|".join(sorted(map(re.escape, PROJECTS), key=len, reverse=True))
PROJECT = re.compile(rf"(?<![\w`/.-])({_NAME})(?![\w`/-]|\.\w)")
TICKED = re.compile(r"`([^`\n]+)`")
LISTED = rf"(?:{_NAME})(?:'s)?(?:(?:,| and| or|, and) (?:{_NAME})(?:'s)?)*"
JOINED = re.compile(
    rf"(?<![\w`/.-])({LISTED})(?: \(|,? )((?:`[^`]+`(?:, and |, or |, | and | or | with | / |/| of )?)+)"
)
CODE = r"(?:[A-Za-z][\w-]*/)+[\w.-]*\w|[\w-]+\.(?:py|md)|--[a-z][\w-]+|[a-z]\w*_\w+|[A-Z]\w+(?:Trainer|Loss|Config)"
BARE = re.compile(rf"(?<![\w`/.-])({_NAME})(?:'s)? \(?({CODE})(?![\w`/])")
LIBRARY = re.compile(r"(?<!\w)(?:torch|SGLang|vLLM|HF)(?:'s)?(?: own)? `[^`]+`", re.IGNORECASE)
WORD = re.compile(r"(?<![\w.])(?:--?[A-Za-z][\w.-]*|[A-Za-z_][\w./-]*\+*)")
NOT_NAMES = {"True", "False", "None", "true", "false", "null"}


class Use(NamedTuple):
    """A name in the docs: the projects it may be of (all of them where `sure`), and where it is written."""

    name: str
    projects: tuple[str, ...]
    sure: bool
    where: str


class Row(NamedTuple):
    """A row of docs/peers.tsv."""

    name: str
    project: str
    version: str
    file: str
    line: int


def words(ticked: str) -> list[str]:
    """The names in a back-ticked text: `loss_type="grpo"` is two; numbers, constants and placeholders are none."""
    found = (word.rstrip(".-/") for word in WORD.findall(re.sub(r"</?\w+>", "", ticked)))
    return [word for word in found if len(word) > 1 and word not in NOT_NAMES and not re.fullmatch(r"[A-Z/_]+", word)]


def ours() -> set[str]:
    """Every name in the code of rlkit, its examples and its pages, with `-` for `_` too (flags)."""
    names = {
        name for page in ROOT.glob("docs/*.md") for name in re.findall(r"^(?:async )?def (\w+)", page.read_text(), re.M)
    }
    for path in [*ROOT.glob("rlkit/**/*.py"), *ROOT.glob("examples/*.py")]:
        names |= {path.stem, path.parent.name}
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME:
                names.add(token.string)
    return names | {name.replace("_", "-") for name in names}


def is_ours(word: str, known: set[str]) -> bool:
    """Whether each part of a dotted name, or of a flag, is a name in our code; or it is a file of ours."""
    parts = re.split(r"[./]", word.lstrip("-").removesuffix(".py"))
    return all(part in known for part in parts if part) or (ROOT / word).exists()


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Each docstring of a module with its first line, those below attributes too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text: it is cut at blank lines, list items, labels as in "Differs:", and full stops."""
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*|]|\d+\.)\s|\n(?=\s*[A-Z]\w+: )", text):
        yield from re.split(r"(?<=[.])\s+(?=[A-Z`*(])", " ".join(block.split()))


def uses_in_sentence(text: str, default: tuple[str, ...], owned: tuple[str, ...], where: str) -> Iterator[Use]:
    """The names in a sentence: of `owned` (a column's projects) if it names no project, and maybe of `default`."""
    text = LIBRARY.sub("", text)
    named = tuple(dict.fromkeys(PROJECTS[name] for name in PROJECT.findall(TICKED.sub("``", text))))
    sure = bool(owned) and not named
    projects = owned if sure else (*named, *default)
    bare = re.findall(rf"(?<![\w`/.-])(?:{CODE})(?![\w`/])", TICKED.sub("``", text)) if sure else []
    yield from (Use(word, owned, True, where) for word in bare)
    joined: set[int] = set()
    for match in JOINED.finditer(text):
        both = tuple(dict.fromkeys(PROJECTS[name] for name in PROJECT.findall(match[1])))
        for ticked in TICKED.finditer(text, match.start(2), match.end(2)):
            joined.add(ticked.start())
            yield from (Use(word, both, True, where) for word in words(ticked[1]))
    for match in BARE.finditer(text):
        yield Use(match[2], (PROJECTS[match[1]],), True, where)
    for ticked in TICKED.finditer(text):
        if projects and ticked.start() not in joined:
            yield from (Use(word, projects, sure, where) for word in words(ticked[1]))


def cells(line: str) -> list[str]:
    """The cells of a table's row; a bar in back-ticks does not part them."""
    hidden = TICKED.sub(lambda match: match[0].replace("|", "\0"), line.strip().strip("|"))
    return [cell.strip().replace("\0", "|") for cell in hidden.split("|")]


def uses_in_page(path: Path) -> Iterator[Use]:
    """The names on a Markdown page: in its tables, its sentences, and the commands of migrating.md."""
    section: tuple[str, ...] = ()
    titles: list[tuple[str, ...]] = []
    prose: list[str] = []
    fence, start, previous = "", 1, ""
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence:
            previous = previous.removesuffix("\\") + line if previous.endswith("\\") else line
            if "bash" in fence and section and not previous.endswith("\\"):
                yield from (Use(word, section, True, where) for word in options(previous))
        elif line.startswith("|"):
            row = cells(line)
            if not titles:
                titles = [tuple(PROJECTS[m[1]] for m in PROJECT.finditer(TICKED.sub("``", title))) for title in row]
                yield from (use for title in row for use in uses_in_sentence(title, (), (), where))
            elif not set(line) <= set("|-: "):
                for cell, owned in zip(row, titles, strict=True):
                    yield from uses_in_sentence(cell, section, owned, where)
        else:
            titles = []
            if line.strip() and not line.startswith("#"):
                start = number if not prose else start
                prose.append(line)
                continue
            for sentence in sentences("\n".join(prose)):
                yield from uses_in_sentence(sentence, section, (), f"{path.relative_to(ROOT)}:{start}")
            prose = []
            if line.startswith("## "):
                section = (line[3:],) if line[3:] in PROJECTS.values() and path.name == "migrating.md" else ()


def options(command: str) -> Iterator[str]:
    """The flags and keys of another project's command; none of our own."""
    if not re.search(r"\brlkit |rlkit\.scripts|examples/", command):
        arguments = re.split(r" (?:-m|--module) \S+|\.py |^trl \w+", command.split("#")[0])[-1]
        yield from re.findall(r"(?<!\S)--[\w.-]+|(?<!\S)[a-z_]+(?:\.\w+)+(?==)", arguments)


def uses() -> list[Use]:
    """Every name of another project in the docs, and each name that may be one."""
    found = [use for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))] for use in uses_in_page(path)]
    for path in [*sorted(ROOT.glob("rlkit/**/*.py")), *sorted(ROOT.glob("examples/*.py"))]:
        for line, text in docstrings(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            found += [use for sentence in sentences(text) for use in uses_in_sentence(sentence, (), (), where)]
    return found


def read() -> list[Row]:
    """The rows of docs/peers.tsv."""
    with TABLE.open(newline="") as file:
        return [Row(*row[:4], int(row[4])) for row in list(csv.reader(file, delimiter="\t"))[1:]]


def write(rows: list[Row]) -> None:
    """Write docs/peers.tsv, sorted by project and name."""
    lines = [
        "\t".join(map(str, row)) for row in sorted(set(rows), key=lambda row: (row.project, row.name, row.version))
    ]
    TABLE.write_text("\n".join(["\t".join(Row._fields), *lines]) + "\n")


def unmatched(found: list[Use], rows: list[Row]) -> tuple[list[str], list[str]]:
    """The names without a row, and the rows that no page and no docstring uses."""
    known, of_rows = ours(), {(row.name, row.project) for row in rows}
    missing: list[str] = []
    used: set[tuple[str, str]] = set()
    for use in found:
        has = {(use.name, project) for project in use.projects} & of_rows
        used |= has
        if use.sure:
            missing += [f"{use.where}: {p} `{use.name}`" for p in use.projects if (use.name, p) not in has]
        elif not has and not is_ours(use.name, known):
            missing.append(f"{use.where}: `{use.name}` is no name of ours; of {' or '.join(use.projects)}?")
    return missing, [f"{name} ({project})" for name, project in sorted(of_rows - used)]


def pattern(name: str) -> re.Pattern[str]:
    """What to look for: a flag or a dotted key also by its last part, `-` also as `_`."""
    last = name.lstrip("-").split(".")[-1]
    either = {name, name.lstrip("-"), last, last.replace("-", "_")}
    ends = [
        re.escape(word) + (r"(?!\w)" if word[-1].isalnum() else "") for word in sorted(either, key=len, reverse=True)
    ]
    return re.compile(r"(?<!\w)(?:" + "|".join(ends) + ")")


def tree(sources: Path, row: Row) -> Path:
    """The unpacked source of a row's project."""
    versioned = sources / f"{row.project}-{row.version}"
    return versioned if versioned.is_dir() else sources / row.project


def place(sources: Path, row: Row) -> int:
    """The line of the row's file on which its name stands, the nearest to the row's; 0 if there is none."""
    path = tree(sources, row) / row.file
    if not path.is_file():
        return 0
    if row.name in row.file and ("/" in row.name or row.name.endswith((".py", ".md"))):
        return 1
    lines = path.read_text(errors="replace").splitlines()
    places = [number for number, line in enumerate(lines, 1) if pattern(row.name).search(line)]
    return min(places, key=lambda number: abs(number - row.line), default=0)


def main() -> int:
    """Print what is wrong; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=Path, help="a folder with an unpacked source tree per project")
    parser.add_argument("--update", action="store_true", help="write the line numbers found in --sources")
    args = parser.parse_args()
    rows = read()
    missing, unused = unmatched(uses(), rows)
    wrong = [f"no row: {line}" for line in missing] + [f"unused row: {line}" for line in unused]
    checked = 0
    for i, row in enumerate(rows if args.sources else []):
        if row.version == "unchecked":
            continue
        checked += 1
        line = place(args.sources, row)
        if line == 0 or (abs(line - row.line) > NEAR and not args.update):
            at = f"{row.file}:{row.line}"
            wrong.append(
                f"not there: {row.project} {row.version} `{row.name}` at {at}" + f" but at {line}" * bool(line)
            )
        elif args.update:
            rows[i] = row._replace(line=line)
    if args.update:
        write(rows)
    print(*wrong, f"{len(rows)} rows, {checked} looked up, {len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
