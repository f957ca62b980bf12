"""Generate docs/laws.md from the table of laws and the mutants, and the outputs in docs/tutorial-new-loss.md.

Run `python docs/make_laws.py` after changing a row, a law or a mutant; a test fails if the pages are out of date.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests" / "laws"))

import mutants_losses  # noqa: E402
import mutants_other  # noqa: E402
from table import ROWS, SECTIONS, TRANSFORMS  # noqa: E402

from rlkit.testing import Result  # noqa: E402
from rlkit.testing.check import ESTIMATOR, GROUP_BASELINE, LOSS, PACKED, SURROGATE, WEIGHT  # noqa: E402

MUTANTS = [*mutants_losses.MUTANTS, *mutants_other.MUTANTS]
FAMILIES = {
    "every function of a packed batch": PACKED,
    "losses": LOSS,
    "policy surrogates": SURROGATE,
    "weights, corrections, measurements": WEIGHT,
    "estimators": ESTIMATOR,
    "group baselines": GROUP_BASELINE,
}
PAGE = """# Laws

`rlkit.testing` contains the laws (property tests) that check rlkit's own functions, and runs them on yours:

```python
from rlkit.testing import check_loss

check_loss(my_loss)                    # prints which laws hold, and the smallest counterexample of each that fails
```

`check_estimator` and `check_kl` do the same for advantage estimators and KL estimators, `check_weights` for loss
weights (a correction, an aggregation, a filter). [The tutorial](tutorial-new-loss.md) starts from a wrong loss and
fixes it. `print(report)` shows a report again, `failures(report)` contains the failing laws. A single law raises with
its smallest counterexample, or returns: `laws.additive(my_loss)`, `laws.coefficient(lambda case: case.ratio)(my_loss)`.
Cases are packed batches drawn by Hypothesis (`rlkit.testing.strategies`): sequences of any length, also empty, masks
with gaps, singleton groups, values on a grid that is exact in bf16, and for some laws huge and tiny values. The draws
are deterministic.

`docs/make_laws.py` generates this page from `tests/laws`, where every public loss, estimator, controller and
objective is a row ({num_rows} rows, {num_checks} checks). If a law does not hold for a row, the row states the reason,
and a test checks that the law indeed fails. {num_mutants} wrong variants show that the laws detect mistakes.

## Arguments

A check passes tensors by name. It recognises `log_ratio`, `logp`, `old_logp`, `ref_logp`, `advantages`, `rewards`,
`values`, `returns`, `gamma`, `lam` and other common names, also at the end of a longer name (`greedy_rewards`), and
reads shapes from jaxtyping annotations. `mask`, `cu_seqlens` and `group_ids` come from the batch. The caller describes
every other argument:

- a number, a string or a fixed tensor: `check_loss(my_loss, options={{"beta": 0.1}})`
- a tensor, one value per token: `streams={{"rate": Stream(low=0.0, high=1.0)}}`; `Stream(axis="N")` is one per sequence
- a statistic of the whole batch: `statistics={{"mean": lambda case: case.rewards.mean()}}`

A `case` has each stream as an attribute (`case.advantages`), besides `case.mask`, `case.cu_seqlens`, `case.group_ids`
and `case.ratio` (the exponential of the log-ratio).

## The laws

{statements}

A row must obey the laws of its family, plus those named in its line below. A law that needs an argument which the
function does not take (`mask`, `cu_seqlens`, `group_ids`) does not apply.

{families}

## The table

{table}

## What does not apply, and why

{exceptions}

## torch.compile, torch.func and torch.export

The last four laws hold for every row, in values and gradients, except for these. Tests check all rows (`vmaps` in each
run, the others nightly), and that each exception indeed fails.

{transforms}

Checks of values (log-probs above 0, a count that is too small, decreasing bounds) run on CPU tensors outside of these
transforms. `vmap` is over the streams and the mask of batches that share `cu_seqlens` and `group_ids` (`in_dims=None`):
batches of other layouts are packed into one. Inside `torch.func` the traces take log2(T) passes over the stream, and
nothing is checkpointed: `linear_logp` and the divergences store all logits. An exported program calls operators of
rlkit: import `rlkit.kernels.linear_scan` and `rlkit.kernels.linear_logp` where it is loaded.

## Mutants

Each wrong variant fails the law in its row, which holds for the original.

{mutants}
"""


def statements() -> Iterator[str]:
    """One line per law, in the order in which rows name them."""
    seen: dict[str, str] = {}
    for law in [*(x for row in ROWS for x in row.laws), *TRANSFORMS]:
        name = "limit" if law.name.startswith("limit: ") else law.name
        seen.setdefault(name, law.statement if name == law.name else "In a stated limit, it equals another function.")
    for name, statement in seen.items():
        yield f"- `{name}`: {statement}"


def families() -> Iterator[str]:
    """The laws of each family; those of the base family by its name."""
    named = {id(laws): name for name, laws in FAMILIES.items()}
    for name, members in FAMILIES.items():
        base = PACKED if members is not PACKED else ()
        further = ", ".join(f"`{x.name}`" for x in members if x not in base)
        yield f"- {name}: {f'those of {named[id(PACKED)]}, ' if base else ''}{further}"


def table() -> Iterator[str]:
    """A table per section: each row's laws beyond the family, and the names of those that do not apply."""
    for section, rows in SECTIONS.items():
        yield f"### {section}\n"
        yield "| function | laws | beyond its family | does not apply |\n|---|---|---|---|"
        for row in rows:
            checked = [x for x in row.laws if x.name not in row.skip and x.why_not(row.subject) is None]
            common = {x.name for members in FAMILIES.values() for x in members}
            further = [x.name for x in checked if x.name not in common]
            cells = [f"`{row.name}`", str(len(checked)), ", ".join(further), ", ".join(row.skip)]
            yield f"| {' | '.join(cells)} |"
        yield ""


def exceptions() -> Iterator[str]:
    """Every listed exception with its reason, functions of one reason together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in ROWS:
        for law, reason in row.skip.items():
            by_reason.setdefault((law, reason), []).append(row.name)
    yield "| law | functions | reason |\n|---|---|---|"
    for (law, reason), names in sorted(by_reason.items()):
        yield f"| {law} | {', '.join(f'`{n}`' for n in names)} | {reason} |"


def transforms() -> Iterator[str]:
    """The rows that a transform of torch does not take, with the reasons."""
    yield f"| function | {' | '.join(law.name for law in TRANSFORMS)} |\n|---{'|---' * len(TRANSFORMS)}|"
    for name in dict.fromkeys(name for exceptions in TRANSFORMS.values() for name in exceptions):
        yield f"| `{name}` | {' | '.join(exceptions.get(name, 'holds') for exceptions in TRANSFORMS.values())} |"


def mutants() -> Iterator[str]:
    """One line per wrong variant."""
    yield "| function | mistake | caught by |\n|---|---|---|"
    for m in MUTANTS:
        yield f"| `{m.original}` | {m.mistake} | {m.law} |"


def page() -> str:
    """docs/laws.md."""
    checked = [x for row in ROWS for x in row.laws if x.name not in row.skip and x.why_not(row.subject) is None]
    return PAGE.format(
        num_rows=len(ROWS),
        num_checks=len(checked),
        num_mutants=len(MUTANTS),
        statements="\n".join(statements()),
        families="\n".join(families()),
        table="\n".join(table()).rstrip(),
        exceptions="\n".join(exceptions()),
        transforms="\n".join(transforms()),
        mutants="\n".join(mutants()),
    )


def tutorial(text: str) -> tuple[str, list[list[Result]]]:
    """The tutorial with the output of each code block in the `text` block after it, and the reports of the blocks."""
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    reports = []

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(match["code"], namespace)
        if "report" in namespace:
            reports.append(namespace.pop("report"))
        shown = f"\n```text\n{printed.getvalue()}```\n" if match["shown"] else ""
        return f"```python\n{match['code']}```\n{shown}"

    return re.sub(r"```python\n(?P<code>.*?)```\n(?P<shown>\n```text\n.*?```\n)?", run, text, flags=re.S), reports


def main() -> None:
    """Write both pages."""
    (DOCS / "laws.md").write_text(page())
    path = DOCS / "tutorial-new-loss.md"
    path.write_text(tutorial(path.read_text())[0])


if __name__ == "__main__":
    main()
