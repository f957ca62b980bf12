"""Draws docs/img/kernels.png and fills the tables of docs/kernels.md from benchmarks/results/. Run after measuring.

python docs/plot_kernels.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results"
OURS, OTHERS, INK, MUTED = "#2a6fb0", "#9a9a9a", "#222222", "#bbbbbb"
HEADS = [
    "materialised",
    "three products alone",
    "linear_logp",
    "linear_logp, half of the rows without gradient",
    "linear_logp, reference",
]
NOT_MEASURED = "not measured yet"
RATES = {"gb_per_s": "GB/s", "tflops": "TFLOP/s"}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def bars(ax: Any, title: str, rows: list[tuple[str, float]], unit: str) -> None:
    """Horizontal bars with their values, ours in colour."""
    names, values = zip(*rows, strict=True)
    colours = [OURS if n.startswith("linear_") else OTHERS for n in names]
    ax.barh(range(len(rows)), values, color=colours, height=0.62)
    for i, value in enumerate(values):
        ax.text(value, i, f" {value:,.0f} {unit}", va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(rows)), [n.replace(", ", ",\n", 1) for n in names], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.25 * max(values))
    ax.set_title(title, fontsize=9, loc="left", color=INK)
    ax.tick_params(axis="x", labelsize=7, colors=MUTED)
    ax.spines[["top", "right", "left"]].set_visible(False)


def draw(head: dict[str, Any], scan: dict[str, Any], path: Path) -> None:
    by_name = {row["name"]: row for row in head["rows"]}
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.3))
    times = [(n, by_name[n]["median_ms"]) for n in HEADS]
    bars(axes[0], "forward and backward, ms (two CPU cores, fp32,\n4096 rows, 512 wide, 32,768 entries)", times, "ms")
    bars(axes[1], "memory over the inputs, MB", [(n, by_name[n]["peak_mb"]) for n in HEADS], "MB")
    traces = [(row["name"], row["median_ms"]) for row in scan["rows"]]
    bars(axes[2], "segmented scan, 1 M tokens, ms", traces, "ms")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def cpu_table(result: dict[str, Any]) -> str:
    """Every row of a CPU result."""
    memory = any("peak_mb" in row for row in result["rows"])
    lines = ["| | median ms | fastest - slowest | of the baseline |" + (" peak MB |" if memory else "")]
    lines.append("|---|---|---|---|" + ("---|" if memory else ""))
    for row in result["rows"]:
        spread = f"{row['fastest_ms']:,.1f} - {row['slowest_ms']:,.1f}"
        cells = [row["name"], f"{row['median_ms']:,.1f}", spread, f"{row['ratio']:.2f}"]
        cells += [f"{row['peak_mb']:,.0f}" if "peak_mb" in row else ""] if memory else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_tables(found: list[Path]) -> str:
    """Every shape of every device, or the aims."""
    if not found:
        aims = {
            "log-prob and entropy, no gradient": "1.33 x one product",
            "any loss afterwards": "1.20 x four products, 0.84 GB",
            "any loss afterwards, half of the rows left out": "0.60 x the time with all",
            "from logits": "80% of the speed of a copy",
            "scan of 8.4 M tokens": "0.1 ms",
        }
        lines = [f"| {name} | {aim} | {NOT_MEASURED} |" for name, aim in aims.items()]
        return "\n".join(
            ["| 16,384 rows, 4096 wide, 151,936 entries, bf16 | aim on an H100 | measured |", "|---|---|---|", *lines]
        )
    return "\n\n".join(folded(*gpu_table(shape, result)) for path in found for shape, result in shapes(path))


def shapes(path: Path) -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{section}, {name}", r)
        for section, all_of in json.loads(path.read_text()).items()
        for name, r in all_of.items()
    ]


def folded(title: str, table: str) -> str:
    """A table that a reader opens."""
    return f'<details markdown="1"><summary>{title}</summary>\n\n{table}\n\n</details>'


def gpu_table(shape: str, result: dict[str, Any]) -> tuple[str, str]:
    """A title, and the rows of one shape."""
    machine = result["machine"]
    title = f"{shape}: {machine['device']}, torch {machine['torch']}, triton {machine['triton']}, {machine['commit']}"
    lines = ["| | median ms | fastest - slowest | of the floor | of the fp32 floor | extra MB | rate |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in result["results"]:
        if "median_ms" in row:
            spread = f"{row['fastest_ms']:,} - {row['slowest_ms']:,}"
            cells = [
                row["median_ms"],
                spread,
                row.get("ratio_to_floor", ""),
                row.get("ratio_to_fp32_floor", ""),
                row.get("extra_mb", row.get("peak_mb", "")),
                next((f"{row[k]:,} {unit}" for k, unit in RATES.items() if k in row), ""),
            ]
        else:
            cells = [row.get("error", ""), *[""] * 5]
        lines.append(f"| {row['name']} | {' | '.join(str(c) for c in cells)} |")
    return title, "\n".join(lines)


def main() -> None:
    head, scan = load("linear_logp_cpu"), load("linear_scan_cpu")
    draw(head, scan, DOCS / "img/kernels.png")
    page = DOCS / "kernels.md"
    text = page.read_text()
    tables = {
        "cpu head": cpu_table(head),
        "cpu scan": cpu_table(scan),
        "gpu": gpu_tables(sorted((RESULTS / "gpu").glob("nvidia_*.json"))),
    }
    for name, table in tables.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.S
        )
        assert count == 1, name
    page.write_text(text)


if __name__ == "__main__":
    main()
