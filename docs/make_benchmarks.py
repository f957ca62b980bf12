"""Write the tables of docs/benchmarks.md and the chart docs/img/benchmarks.png from benchmarks/results.

Run `python docs/make_benchmarks.py` after measuring; a test fails if the page is out of date. A file of results names
its commit. Where code that it measured (`MEASURES`) has changed since, its rows say so.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGE = DOCS / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
SMOLLM = "trl_cpu_SmolLM2-135M-Instruct"
STEP = tuple(
    f"rlkit/{name}"
    for name in (
        *("loops/updates.py", "losses/policy.py", "packing", "model/forward.py", "model/heads.py", "model/optim.py"),
        *("parallel/attention.py", "parallel/forest.py", "kernels/linear_logp"),
    )
)
SAMPLED = ("rlkit/loops/rl.py", "rlkit/loops/grpo.py", "rlkit/rollout/groups.py", "rlkit/rollout/engines/local")
MEASURES = {  # the beginning of a file's name: the code that it measures, files and folders
    "trl_cpu": (*STEP, *SAMPLED),
    "training_step_cpu": STEP,
    "generation_cpu": ("rlkit/rollout/engines/local",),
    "advantages_cpu": ("rlkit/advantages", "rlkit/kernels/linear_scan", "rlkit/segments.py"),
    "linear_logp_cpu": ("rlkit/kernels/linear_logp",),
    "linear_scan_cpu": ("rlkit/kernels/linear_scan",),
    "packing_cpu": ("rlkit/packing/balancing.py", *STEP[2:]),
    "rewards": ("rlkit/rewards/code.py", "rlkit/rewards/math.py", "rlkit/rewards/sandbox"),
    "async_loop_cpu": (*STEP, *SAMPLED, "rlkit/rollout/stream.py", "rlkit/rollout/engines/process.py"),
    "fsdp_overhead_cpu": ("rlkit/model/parallelize.py", "rlkit/parallel", *STEP[3:]),
    "contention_cpu": (*STEP, *SAMPLED, "rlkit/run/cores.py"),
    "long_run_cpu": (*SAMPLED, "rlkit/run", "rlkit/agents", "rlkit/rollout/engines/process.py", "rlkit/data/images.py"),
    "sglang_client_cpu": tuple(f"rlkit/rollout/engines/{name}" for name in ("http.py", "servers", "sglang")),
}
TRL = {  # file: its setting
    f"{SMOLLM}_4x8x32": "SmolLM2-135M, fp32: 4 prompts of about 45 tokens, 8 answers of 32",
    f"{SMOLLM}_4x8x128": "the same, answers of at most 128 tokens",
    f"{SMOLLM}_2x8x32_prefix": "SmolLM2-135M, fp32: 2 prompts of 311 tokens, 8 answers of 32",
    f"{SMOLLM}_4x8x32_defaults": "the first with TRL's defaults, bf16 and checkpointing, against `--dtype bf16`",
    "trl_cpu_gemma-3-270m_2x8x32_prefix": "Gemma 3 270M, fp32, 262,144 tokens: 2 prompts of 43 tokens, 8 answers of 32",
    "trl_cpu": "1 M parameters, fp32, prompts of 14 tokens",
    "trl_cpu_defaults": "the same with TRL's defaults against `--dtype bf16`",
    "trl_cpu_prefix": "1 M parameters, fp32, prompts of 270 tokens",
}
CHART = (
    "4 prompts of 45 tokens, 8 answers of 32",
    "4 prompts of 45 tokens, 8 answers up to 128",
    "2 prompts of 311 tokens, 8 answers of 32",
    "4 prompts of 45 tokens, 8 answers of 32, bf16",
)
MODELS = {"nano": "1 M", "micro": "9.5 M", "mid": "44 M", "smollm": "SmolLM2-135M"}
LOOP = ("async_loop_cpu", "fsdp_overhead_cpu", "contention_cpu", "sglang_client_cpu")
INK, OURS, MUTED = "#222222", "#2a6fb0", "#9a9a9a"


def load(name: str) -> dict[str, Any]:
    """A file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def there(names: Iterable[str]) -> list[str]:
    """Those of which there are results."""
    return [name for name in names if (RESULTS / f"{name}.json").exists()]


def source(name: str) -> str:
    """The last cell of a row: the file, its processor and commit, and whether what it measures has changed since."""
    about = load(name)["machine"]
    cpu = about["cpu"].replace("(R)", "").removesuffix(" Processor")
    stale = ", **changed since**" if changed(name) else ""
    return f"[json](../benchmarks/results/{name}.json), {cpu}, {about['commit']}{stale}"


@cache
def changed(name: str) -> tuple[str, ...]:
    """The measured files whose code is not that of the commit which the results name.

    Errors: LookupError where the repository lacks the commit (a shallow clone).
    """
    commit = load(name)["machine"]["commit"].removesuffix("-dirty")
    paths = next(paths for key, paths in MEASURES.items() if name.startswith(key))
    lines = git("diff", "--no-renames", "--name-status", commit, "--", *paths).splitlines()
    return tuple(
        path
        for status, path in (line.split("\t") for line in lines)
        if path.endswith(".py")
        and not path.endswith("/triton.py")  # no CPU runs it
        and (status != "M" or code(git("show", f"{commit}:{path}")) != code((ROOT / path).read_text()))
    )


@cache
def git(*command: str) -> str:
    """What git prints; LookupError where it fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LookupError(done.stderr.strip())
    return done.stdout


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def code(text: str) -> str:
    """A file without comments, docstrings and imports, on which no figure depends."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [x for x in body if not (isinstance(x, ast.Import | ast.ImportFrom) or is_docstring(x))]
    return ast.dump(tree)


def number(x: float) -> str:
    """Three digits: 0.154, 7.61, 75.3, 16,046."""
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3
    return f"{x:,.{digits}f}"


def times(x: float, low: float | None = None, high: float | None = None) -> str:
    """A ratio and its range."""
    return f"{x:.2f}x" + (f" ({low:.2f}-{high:.2f})" if low is not None else "")


def trl() -> list[list[str]]:
    """The figures that matter of each comparison with TRL."""
    head = ["setting", "step: TRL, s", "rlkit, s", "faster", "first update earlier", "peak memory, of TRL's"]
    rows = [[*head, "to the same reward, faster", "file"]]
    for name in there(TRL):
        setting = TRL[name]
        found = {row["figure"].strip(): row for row in load(name)["table"]}
        step, first, peak = (found[figure] for figure in ("step, s", "first update, s", "peak RSS, MB"))
        goal = next((times(*row["better by"]) for key, row in found.items() if re.match(r"to reward .*, s$", key)), "")
        share = f"{1 / peak['better by'][0]:.2f}x: {peak['rlkit'][0]:,.0f} of {peak['trl'][0]:,.0f} MB"
        seconds = [number(step[side][0]) for side in ("trl", "rlkit")]
        better = [times(*row["better by"]) for row in (step, first)]
        rows.append([setting, *seconds, *better, share, goal, source(name)])
    reached = any(goal for *_, goal, _ in rows[1:])
    return rows if reached else [[*row[:-2], row[-1]] for row in rows]


def training() -> list[list[str]]:
    """The packed step against the padded one."""
    rows = [["parameters", "prompt", "dtype", "padded, s", "packed, s", "faster", "file"]]
    for row in load("training_step_cpu")["rows"]:
        seconds = [number(row[side]["seconds"]) for side in ("padded", "packed")]
        what = [MODELS[row["model"]], str(row["prompt"]), row["dtype"]]
        rows.append([*what, *seconds, times(*row["packed"]["ratio"]), source("training_step_cpu")])
    return rows


def generation() -> list[list[str]]:
    """Tokens per second of each pair of sides."""
    rows = [["parameters", "prompt", "lengths", "sides", "tokens/s", "faster", "file"]]
    for name in there(("generation_cpu_smollm", "generation_cpu")):
        for row in load(name)["rows"]:
            what = [MODELS[row["model"]], str(row["prompt_tokens"]), row["lengths"]]
            for sides, pair in row["pairs"].items():
                rates = " / ".join(f"{rate:,}" for rate in pair["tokens_per_s"])
                faster = times(pair["ratio"], pair["low"], pair["high"])
                rows.append([*what, sides, rates, faster, source(name)])
    return rows


def parts() -> list[list[str]]:
    """Each timed part as a multiple of its baseline, and beside a peer."""
    rows = [["part", "ms", "against", "ratio of the times", "file"]]
    for row in load("advantages_cpu")["rows"]:
        peer = f"a loop as in TRL, verl and OpenRLHF, {number(row['peer_ms'])} ms"
        rows.append([f"`{row['name']}`", number(row["ours_ms"]), peer, times(row["ratio"]), source("advantages_cpu")])
    for name in ("linear_logp_cpu", "linear_logp_cpu_small", "linear_scan_cpu", "packing_cpu", "rewards"):
        found = load(name)
        for row in found["rows"]:
            took = number(row["median_ms"]) + (f"; {row['peak_mb']:,.0f} MB" if "peak_mb" in row else "")
            rows.append([row["name"], took, found["baseline"], times(row["ratio"]), source(name)])
    return rows


def balance() -> list[list[str]]:
    """How far ranks are from an even share."""
    found = load("packing_cpu")["balance"]
    shown = [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()] for row in found]
    return [[*found[0], "file"], *([*row, source("packing_cpu")] for row in shown)]


def loop() -> list[list[str]]:
    """What overlaps, wraps or disturbs a step."""
    step, wrapper, beside, client = map(load, LOOP)
    both = f"GRPO while sampling over sampling first, engine and trainer on a core each (at most {step['limit']:.2f}x)"
    rows = [[both, times(step["median"], *step["interval"]), source(LOOP[0])]]
    text = f"time of the parallel wrapper over bare transformers + FSDP2, {wrapper['ranks']} ranks"
    rows.append([text, times(wrapper["ratio"], *wrapper["interval"]), source(LOOP[1])])
    alone, *others = beside["rows"]
    for row in others:
        text = f"time of a GRPO step of 1 M parameters over its time alone, busy processes beside it: {row['loops']}"
        low, high = row["lowest_s"] / alone["highest_s"], row["highest_s"] / alone["lowest_s"]
        rows.append([text, times(row["ratio"], low, high), source(LOOP[2])])
    for requests, row in client["sampling"].items():
        text = f"SGLang, {requests} requests: tokens/s through the client over SGLang's own"
        rows.append([text, times(*row["ratio"].values()), source(LOOP[3])])
    for key, text in (("ratio", ""), ("floor", ", without any client")):
        text = f"SGLang: time of weights to the server over a raw gloo broadcast{text}"
        rows.append([text, times(*client["weights"][key].values()), source(LOOP[3])])
    return [["what", "ratio", "file"], *rows]


def long_runs() -> list[list[str]]:
    """What 2,000 steps leave behind: each figure early in the run, and what it is more by at its end."""
    found, kinds = load("long_run_cpu"), ("memory MB", "files", "processes", "shm")
    rows = [["2,000 steps with", *(kind.replace("shm", "entries of /dev/shm") for kind in kinds), "file"]]
    for row in found["rows"]:
        cells = [f"{row[kind]['early']:.0f}, {row[kind]['late'] - row[kind]['early']:+.0f}" for kind in kinds]
        rows.append([row["kind"], *cells, source("long_run_cpu")])
    return rows


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "trl": trl,
    "training": training,
    "generation": generation,
    "parts": parts,
    "balance": balance,
    "loop": loop,
    "long": long_runs,
}


def page(text: str) -> str:
    """The page with each table between its marks written again."""
    for name, table in TABLES.items():
        head, *rows = table()
        lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
        new = f"<!-- {name} -->\n" + "\n".join(lines) + "\n<!-- end -->"
        text, count = re.subn(rf"<!-- {name} -->\n.*?<!-- end -->", lambda _, new=new: new, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE.name} has {count} tables marked {name!r}, not one")
    return text


def bars() -> list[tuple[str, float, float, float]]:
    """The chart's rows: what, and how many times as fast, with its range."""
    rows = []
    for name, text in zip(list(TRL)[:4], CHART):
        step = next(row for row in load(name)["table"] if row["figure"] == "step, s")
        rows.append((text, *step["better by"]))
    for row in load("generation_cpu_smollm")["rows"]:
        pair = row["pairs"]["engine / generate"]
        rows.append((f"answers of {row['lengths']} lengths", pair["ratio"], pair["low"], pair["high"]))
    return rows


def draw(path: Path) -> None:
    """Horizontal bars: a GRPO step against TRL, then generation against transformers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = bars()
    places = [i + (0.9 if i >= len(CHART) else 0) for i in range(len(rows))]
    figure, ax = plt.subplots(figsize=(9.0, 3.3))
    spread = [[x - low for _, x, low, _ in rows], [high - x for _, x, _, high in rows]]
    ax.barh(places, [x for _, x, _, _ in rows], xerr=spread, color=OURS, ecolor=INK, height=0.6, error_kw={"lw": 1})
    for place, (_, x, _, high) in zip(places, rows):
        ax.text(high, place, f"  {x:.2f}x", va="center", fontsize=9, color=INK)
    ax.set_yticks(places, [text for text, *_ in rows], fontsize=8.5)
    title = {"fontsize": 9, "weight": "bold", "color": INK}
    ax.text(0, -0.65, "SmolLM2-135M, a GRPO step: times as fast as TRL 1.16", **title)
    second = "SmolLM2-135M, generation: times as fast as transformers' generate"
    ax.text(0, places[len(CHART)] - 0.6, second, **title)
    ax.set_ylim(places[-1] + 0.5, -1.0)
    ax.set_xlim(0, 1.1 * max(high for *_, high in rows))
    ax.tick_params(axis="x", labelsize=8, colors=MUTED)
    ax.spines[["top", "right", "left"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    draw(DOCS / "img" / "benchmarks.png")
