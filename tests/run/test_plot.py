"""Plots: drawn from what a run left, readable on their own, and never a reason for a run to fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import screens
from hypothesis import given
from hypothesis import strategies as st

from rlkit.loops import pareto
from rlkit.run.folder import open_run, read_metrics
from rlkit.run.report.plot import draw, plot_run, smooth
from rlkit.scripts import cli

ROOT = Path(__file__).parents[1]


def write_run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def grpo_rows() -> list[dict]:
    rows: list[dict] = [{"step": 0, "eval/sampled": 0.4, "eval/greedy": 0.6, "eval/kl": 0.0}]
    for step in range(1, 31):
        row = {"step": step, "reward/mean": step / 30, "entropy": 1 / step, "length/mean": 7, "length/max": 9}
        rows.append(row | ({"eval/sampled": 0.5, "eval/greedy": 0.7, "eval/kl": 0.1} if step % 10 == 0 else {}))
    return rows


SMALL = [{"step": 1, "reward/mean": 1.0}]  # one panel: drawn in a fifth of the time


@pytest.fixture
def figures(monkeypatch):
    """The figures written during a test, so that it can look at their axes."""
    from matplotlib.figure import Figure

    kept, savefig = [], Figure.savefig

    def keep(figure, *args, **kwargs):
        kept.append(figure)
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def panels(figure) -> dict[str, list[str]]:
    """Title -> labels in the legend, of the visible axes."""
    shown = [a for a in figure.axes if a.get_visible()]
    return {a.get_title(loc="left"): [t.get_text() for t in a.get_legend().get_texts()] for a in shown}


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=40), st.integers(0, 9))
def test_smooth_is_the_mean_of_the_neighbours(values, window):
    got = smooth(np.array(values), window=window)
    for i in range(len(values)):
        near = [x for x in values[max(0, i - window // 2) : i + window // 2 + 1] if not math.isnan(x)]
        assert got[i] == pytest.approx(sum(near) / len(near), abs=1e-9) if near else math.isnan(got[i])


def test_a_run_is_drawn_into_its_folder(tmp_path, figures):
    folder = write_run(tmp_path / "sort-6", grpo_rows())
    path = plot_run(folder)
    assert path == folder / "metrics.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert panels(figures[0]) == {
        "Reward": ["training, sampled", "evaluation, sampled", "evaluation, greedy"],
        "Policy entropy": ["training"],
        "Response length": ["mean", "max"],
        "KL to the reference": ["evaluation prompts"],
    }
    reward = figures[0].axes[0]
    raw, _, sampled, greedy = reward.get_lines()
    assert np.allclose(raw.get_xydata(), [(s, s / 30) for s in range(1, 31)])
    assert np.allclose(sampled.get_xydata(), [(0, 0.4), (10, 0.5), (20, 0.5), (30, 0.5)])
    assert np.allclose(greedy.get_ydata(), [0.6, 0.7, 0.7, 0.7])
    for axis in figures[0].axes:
        assert axis.get_xlabel() == "step"
        assert axis.get_ylabel()
    assert figures[0].get_suptitle() == "sort-6"
    small = write_run(tmp_path / "small", SMALL)
    plot_run(small, title="40% -> 70%")
    cli.main(["plot", str(small), "--title", "better"])
    assert [figure.get_suptitle() for figure in figures[1:]] == ["40% -> 70%", "better"]
    bottom, top = figures[0].axes[2].get_ylim()
    assert bottom == 0
    assert top > 9.5, "a constant maximum is not hidden by the frame"


@pytest.mark.slow
def test_numbers_at_the_end_of_fp64_are_drawn(tmp_path, figures):
    values = (1e308, -1e308, 1.0, math.inf)
    rows = [{"step": i, "entropy": abs(x), "reward/mean": x} for i, x in enumerate(values)]
    plot_run(write_run(tmp_path / "run", rows))
    reward = figures[0].axes[0].get_lines()[0].get_ydata()
    assert reward[0] == -reward[1] > 1e200
    assert reward[2:].tolist() == [1.0, math.inf]


@pytest.mark.slow
def test_a_held_out_score_has_its_confidence_interval(tmp_path, figures):
    rows = [
        {"step": 0, "eval/greedy": 0.4, "eval/greedy_se": 0.1},
        {"step": 5, "eval/greedy": 0.6, "eval/greedy_se": 0.05},
    ]
    plot_run(write_run(tmp_path / "run", rows))
    ((band,),) = [axis.collections for axis in figures[0].axes]
    corners = {tuple(x) for x in np.round(band.get_paths()[0].vertices, 6).tolist()}
    assert {(0, 0.204), (0, 0.596), (5, 0.502), (5, 0.698)} <= corners


@pytest.mark.slow_cases("accuracy-loss", "greedy-sampled")
@pytest.mark.parametrize(("score", "also"), [("greedy", "sampled"), ("sampled", "pass@8"), ("accuracy", "loss")])
def test_each_named_held_out_set_has_a_curve(tmp_path, figures, score, also):
    more = {"eval/reward/exact": 0.5, f"eval/{score}": 0.3, f"eval/hard/{also}": 0.9}
    rows = [{"step": s, f"eval/hard/{score}": s / 9, f"eval/easy/{score}": s / 4} | more for s in (0, 4)]
    plot_run(write_run(tmp_path / "run", rows))
    (axis,) = [axis for axis in figures[0].axes if axis.get_title(loc="left") == "Held-out sets"]
    assert {line.get_label(): line.get_ydata().tolist() for line in axis.lines} == {"easy": [0, 1], "hard": [0, 4 / 9]}
    assert axis.get_ylabel() == score


def with_front(folder, names, points):
    """A run whose evaluations at steps 0, 1, ... are `points`, with the front that the loop keeps of them."""
    rows = [{"step": i} | {f"eval/reward/{n}": x for n, x in zip(names, p)} for i, p in enumerate(points)]
    write_run(folder, [row | {"reward/mean": 1.0} for row in rows])
    return pareto.logged(names, rows[-1], folder, step=rows[-1]["step"])


POINTS = [(1.0, 1.0), (3.0, 2.0), (2.0, 4.0), (2.0, 3.0), (0.0, 9.0), (4.0, 0.5)]


@pytest.mark.slow
def test_the_front_is_drawn_and_its_shaded_area_is_the_hypervolume(tmp_path, figures):
    logged = with_front(tmp_path / "run", ["right", "short"], POINTS)
    plot_run(tmp_path / "run")
    axis = figures[0].axes[1]
    assert (axis.get_title(loc="left"), axis.get_xlabel()) == ("Pareto front", "eval/reward/right")
    every, first, *front = axis.get_lines()
    assert [tuple(x) for x in every.get_xydata().tolist()] == POINTS
    assert first.get_xydata().tolist() == [[1.0, 1.0]]
    assert [point.get_xydata().tolist() for point in front] == [[[0, 9]], [[2, 4]], [[3, 2]], [[4, 0.5]]]
    assert [text.get_text() for text in axis.texts] == ["4", "2", "1", "5"], "the steps"
    x, y = axis.collections[0].get_paths()[0].vertices.T
    area = abs(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))) / 2
    assert area == pytest.approx(logged["pareto/hypervolume"]) == pytest.approx(2 * 1 + 1 * 3 - 1)


@pytest.mark.slow
def test_fronts_of_three_objectives_and_of_several_runs_are_drawn_by_pairs(tmp_path, figures):
    with_front(tmp_path / "a", ["x", "y", "z"], [(0, 0, 0), (1, 2, 3), (2, 1, 3)])
    with_front(tmp_path / "b", ["x", "y"], [(5.0, 5.0)])
    plot_run(tmp_path / "a", tmp_path / "b", out=tmp_path / "both.png")
    xy, xz = figures[0].axes[1:3]
    assert panels(figures[0])["Pareto front"] == ["a, first evaluation", "a, front"], "of x and z"
    assert (xz.get_xlabel(), xz.get_ylabel()) == ("eval/reward/x", "eval/reward/z")
    assert [t.get_text() for t in xy.get_legend().get_texts()][2:] == ["b, first evaluation", "b, front"]
    assert not xy.collections, "of three objectives no area is the hypervolume"
    (tmp_path / "a" / "pareto.json").write_text('{"objectives": ["x"')
    said = screens.refused(cli.main, ["plot", str(tmp_path / "a")])
    assert said.startswith(f"error: {tmp_path}/a/pareto.json is damaged (JSONDecodeError")


def test_runs_are_compared_by_name(tmp_path, figures):
    rows = [{"step": step, "reward/mean": 0.1 * step, "entropy": 1 / step} for step in range(1, 4)]
    a, b = write_run(tmp_path / "x" / "run", rows), write_run(tmp_path / "y" / "run", rows)
    path = plot_run(a, b, out=tmp_path / "both.png")
    assert path == tmp_path / "both.png"
    assert not (a / "metrics.png").exists()
    assert panels(figures[0])["Policy entropy"] == ["x/run, training", "y/run, training"]
    first, second = (line for line in figures[0].axes[1].get_lines() if line.get_label().endswith("training"))
    assert first.get_color() != second.get_color()


def test_sft_shows_its_loss_only(tmp_path, figures):
    rows = [{"step": s, "loss": 1 / s, "time/step": 0.1} for s in range(1, 9)]
    plot_run(write_run(tmp_path / "sft", [*rows, {"step": 9, "loss": math.nan}]))
    assert panels(figures[0]) == {"Loss": ["training"]}


@pytest.mark.slow
def test_nothing_to_draw_and_no_run_are_errors(tmp_path, capsys):
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(ValueError, match=r"no metric to draw in .*empty"):
        plot_run(empty)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/args.json").write_text("{}")
    for arguments, message in (
        ([tmp_path / "absent"], "holds no metrics.jsonl"),
        ([tmp_path / "begun"], "begun holds no finished step yet"),
        ([], "missing FOLDERS"),
    ):
        assert message in screens.refused(cli.main, ["plot", *map(str, arguments)])
    run = write_run(tmp_path / "run", SMALL)
    cli.main(["plot", str(run), "--out", str(tmp_path / "a.png")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.png")
    for place in (tmp_path, tmp_path / "nowhere" / "a.png", tmp_path / "a.png" / "b.png"):
        screens.refused(cli.main, ["plot", str(run), "-o", str(place)])
    wrong = screens.refused(cli.main, ["plot", str(run), "-o", str(tmp_path / "nowhere" / "a.png")])
    assert wrong == f"error: --out {tmp_path}/nowhere/a.png: there is no folder {tmp_path}/nowhere"
    wrong = screens.refused(cli.main, ["plot", str(run / "metrics.jsonl")])
    assert wrong == f"error: {run}/metrics.jsonl is a file: give its folder, {run}"
    assert (tmp_path / "a.png").stat().st_size > 10_000


PLOT = """
import sys
from rlkit.run.folder import open_run
from rlkit.run.report.plot import draw
with open_run(sys.argv[1], steps=1, active=True) as run:  # told so, it needs no torch
    run.log(1, {"reward/mean": 1.0})
    print(draw(run))
    run.log(2, {"reward/mean": 1.0})
print("matplotlib.pyplot" in sys.modules)
"""


def plot_in_a_run(code: str, folder: Path, **env: str) -> list[str]:
    """What a process prints that logs a step, draws the plot and logs another one."""
    command = [sys.executable, "-c", code, str(folder / "run")]
    done = subprocess.run(command, env={**os.environ, **env}, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(folder / "run")) == 2
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_draws_in_its_own_process_and_leaves_pyplot_alone(tmp_path, monkeypatch):
    picture = tmp_path / "run" / "metrics.png"
    lines = plot_in_a_run(PLOT, tmp_path, MPLBACKEND="module://no_such_back_end")
    assert (lines[2], lines[-1]) == (str(picture), "False")
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    monkeypatch.setattr(sys, "executable", "/no/python")  # no other process can start
    with open_run(tmp_path / "run", steps=3, start=2, resume=True) as run:
        assert draw(run) == picture
    assert picture.exists()


BESIDE = PLOT.replace("    print(draw(run))", "    run.start_plot()\n    print(draw(run))").replace(".pyplot", "")


@pytest.mark.slow
def test_a_plot_is_drawn_beside_other_work_where_a_process_can_start(tmp_path, monkeypatch):
    lines = plot_in_a_run(BESIDE, tmp_path)
    picture = tmp_path / "run" / "metrics.png"
    assert (lines[2], lines[-1]) == (str(picture), "False")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for code in ("raise SystemExit(1)", "import time; time.sleep(60)"):  # a process that fails, or takes too long
        picture.unlink()
        monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
        monkeypatch.setattr("rlkit.run.folder._DRAW", code)
        monkeypatch.setattr("rlkit.run.folder._DRAW_S", 0.5)
        with open_run(tmp_path / "run", steps=3, start=2, resume=True) as run:
            run.start_plot()
            assert draw(run) == picture
        assert picture.exists()


def test_a_run_that_ends_early_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setattr("rlkit.run.folder._DRAW", "import time; time.sleep(60)")
    with open_run(tmp_path / "run", steps=1, active=True) as run:
        run.log(1, {"reward/mean": 1.0})
        run.start_plot()
        child = run._drawing
    assert child.returncode < 0


def test_no_process_draws_where_matplotlib_is_imported(tmp_path):
    import matplotlib.figure  # noqa: F401

    with open_run(tmp_path / "run", steps=1, active=True) as run:
        run.log(1, {"reward/mean": 1.0})
        run.start_plot()
        assert run._drawing is None
        assert draw(run) == tmp_path / "run" / "metrics.png"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ModuleNotFoundError('none', name='matplotlib')",
            "plots need matplotlib: pip install 'matplotlib>=3.8'",
        ),
        (
            "raise ModuleNotFoundError('No module named kiwi', name='kiwi')",
            "plots need matplotlib: pip install 'matplotlib>=3.8' (No module named kiwi)",
        ),
        ("raise RuntimeError('broken:\\nread more')", "RuntimeError: broken:"),
        ("raise OSError('no cache folder')", "no cache folder"),
        ("raise AttributeError", "AttributeError: AttributeError()"),
    ],
)
def test_a_failed_plot_is_reported_in_one_line_and_the_run_continues(tmp_path, monkeypatch, capsys, code, said):
    (tmp_path / "matplotlib.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "matplotlib")
    with open_run(tmp_path / "run", steps=2, active=True) as run:
        run.log(1, {"reward/mean": 1.0})
        assert draw(run) is None
        run.log(2, {"reward/mean": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"no plot: {said}"
    assert lines[3].split() == ["2", "1.000"]
    assert len(read_metrics(tmp_path / "run")) == 2


def test_without_matplotlib_the_function_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'matplotlib>="):
        plot_run(write_run(tmp_path / "run", SMALL))


@pytest.mark.slow
def test_the_suffix_selects_the_picture_format(tmp_path):
    run = write_run(tmp_path / "run", SMALL)
    for name, start in (("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a", b"\x89PNG")):
        assert plot_run(run, out=tmp_path / name).read_bytes().startswith(start)
    wrong = screens.refused(cli.main, ["plot", str(run), "-o", str(tmp_path / "a.xyz")])
    assert wrong == f"error: --out {tmp_path}/a.xyz: .xyz is no format of a picture: take .png, .pdf or .svg"
