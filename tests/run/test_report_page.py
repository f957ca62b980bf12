"""The report page in a browser: what it shows, that every control works, and that no text of a model runs."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import browser
import pytest

from rlkit.run.report.page import write_report
from rlkit.run.report.serve import server

pytestmark = pytest.mark.skipif(
    bool(browser.MISSING), reason=f"{browser.MISSING}: apt-get install chromium chromium-driver"
)
EVIL = "</script><script>window.ran=1</script><img src=x onerror='window.ran=2'>\u202e\x1b[31mred\u2066 \ud83d end"
SHOWN = "</script><script>window.ran=1</script><img src=x onerror='window.ran=2'>\\u202e\\u001b[31mred\\u2066 "


@pytest.fixture(scope="module")
def chrome():
    with browser.opened() as opened:
        yield opened


def lines(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokens(text: list[str], step: int, **more) -> dict:
    numbers = [float(i) for i in range(len(text))]
    found = {"text": text, "logp": [-x for x in numbers], "entropy": [x / 2 for x in numbers], "ratio": 1.0}
    return found | {"advantage": 0.5, "mask": 1, "version": step - 1, **more}


def sample(step: int, group: int, i: int, **more) -> dict:
    row = {"step": step, "group": group, "gold": f"gold {group}", "prompt": f"<user>question {group}<end>"}
    row |= {"completion": f"answer {step} {group} {i}", "reward": (group + i + step) / 10, "rewards": {"format": 0.25}}
    row |= {"score": None, "length": 3 + i, "versions": [step - 1], "finish_reason": "stop", "info": {}}
    return row | {"advantage": i - 0.5, **more}


def metrics(steps: int) -> list[dict]:
    rows: list[dict] = [{"step": 0, "eval/greedy": 0.1, "eval/greedy_se": 0.01}]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward/mean": step / steps,
            "reward/format": 0.5,
            "entropy": 1 / step,
            "staleness/mean": 0.0,
        }
        row |= {"time/step": 1.5, "time/unix": 1.7e9 + step, "length/mean": 7.0}
        rows.append(row | ({"eval/greedy": 0.9, "eval/greedy_se": 0.02} if step == steps else {}))
    return rows


def write_run(folder: Path, *, steps: int = 6, **args) -> Path:
    lines(folder / "metrics.jsonl", metrics(steps))
    known = {"format": 1, "script": "grpo.py", "model": "models/small", "steps": steps, "success_range": [0.1, 0.9]}
    (folder / "args.json").write_text(json.dumps(known | args))
    lines(folder / "starts.jsonl", [{"step": 0, "command": "rlkit grpo --lr 1", "machine": {"cpu": "C", "cores": 2}}])
    for step in range(1, steps + 1):
        rows = [sample(step, group, i) for group in range(4) for i in range(2)]
        if step == steps:
            rows[0]["completion"] = "one two\nthree"
            rows[0]["tokens"] = tokens(["one", " two", "\n", "three"], step, mask=[1, 1, 0, 1], version=[5, 5, -1, 5])
        lines(folder / f"trajectories/train_{step:06d}.jsonl", rows)
    lines(folder / "trajectories/dropped_000002.jsonl", [sample(2, 9, i, reward=1.0) for i in range(2)])
    lines(folder / "trajectories/eval_greedy_000006.jsonl", [sample(6, 3, 0, finish_reason="length")])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("report") / "sort-6")


@pytest.fixture
def page(chrome, run):
    """The browser with the page of `run` open; its console must be silent at the end."""
    chrome.open(write_report(run))
    yield chrome
    assert chrome.errors() == []


def rows(page) -> list[str]:
    return page.js("return [...document.querySelectorAll('.item .what')].map(x => x.innerText)")


def cards(page) -> int:
    return page.js("return document.querySelectorAll('.sample').length")


def test_the_head_and_the_curves_say_what_the_run_was(page):
    assert page.text("#title") == "sort-6"
    for text in ("GRPO", "small", "6 of 6 steps", "9 s in steps"):
        assert text in page.text("#about")
    assert "0.1 → 0.9 ± 0.039" in page.text("#changes")
    assert "rlkit grpo --lr 1" in page.text("#commands")
    assert "2 cores of C" in page.text("#facts")
    titles = page.js("return [...document.querySelectorAll('#panels h3')].map(x => x.firstChild.data)")
    assert titles == ["Reward", "Parts of the reward", "Policy entropy", "Response length", "Time per step"]
    assert page.text("#quiet") == "0 at every step: staleness."
    entropy = page.text("#panels .card:nth-child(3)")
    assert "Entropy of the policy's next-token distribution" in entropy
    assert "Healthy: falls slowly" in entropy
    assert page.js("return document.querySelectorAll('#panels canvas').length") == 5


@pytest.mark.slow
def test_the_curves_zoom_together_and_show_values_on_hover(page):
    x, y, width, height = page.js(
        "const over = document.querySelector('.u-over'); over.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const r = over.getBoundingClientRect(); return [r.left, r.top, r.width, r.height].map(Math.round)"
    )
    page.mouse(("move", x + width // 6, y + height // 2))
    values = page.js("return [...document.querySelectorAll('#panels .value')].map(x => x.innerText)")
    assert values[0] == "0.1667"  # the reward of step 1 of 6
    assert values[3] == "1"  # the entropy, in another panel
    limits = "return state.charts.map(c => [c.scales.x.min, c.scales.x.max])"
    page.mouse(
        ("move", x + width // 2, y + 40),
        ("down", x + width // 2, y + 40),
        ("move", x + width - 2, y + 40),
        ("up", x + width - 2, y + 40),
    )
    zoomed = page.wait(f"const found = (() => {{ {limits} }})(); return found.every(([low]) => low > 2.5) && found")
    assert len({tuple(found) for found in zoomed}) == 1
    page.click("#unzoom")
    page.wait(f"const found = (() => {{ {limits} }})(); return found[0][0] === 0 && found[0][1] === 6")
    page.js("document.querySelector('.chart').focus()")
    page.keys("Home", "+")
    assert page.js("return state.charts[0].scales.x.max") < 6
    page.keys("Escape", "End", "Enter")
    assert page.js("return document.getElementById('step').value") == "6"
    page.click(".legend button")
    assert page.js("return state.charts[0].series.map(x => x.show)")[1:3] == [False, False]
    page.js("const s = document.getElementById('smoothing'); s.value = 20; s.dispatchEvent(new Event('change'))")
    assert page.js("return document.querySelectorAll('#panels canvas').length") == 5


@pytest.mark.slow
def test_the_controls_choose_and_order_the_groups(page):
    assert page.text("#count") == "24 prompts, 48 samples"
    assert rows(page)[:4] == ["0", "1", "2", "3"], "without what all prompts share"
    page.choose("#sort", "best")
    assert rows(page)[0] == "3"
    page.choose("#sort", "worst")
    assert page.js("return state.shown[0].step") == 1
    page.choose("#sort", "changed")
    assert page.js("return Math.abs(state.shown[0].change)") == pytest.approx(0.1)
    page.choose("#step", "2")
    assert page.text("#count") == "4 prompts, 8 samples"
    page.choose("#kind", "dropped")
    assert "outside --success-range 0.1 0.9" in page.content("#detail")
    page.choose("#kind", "eval_greedy")
    assert "length limit" in page.content("#detail")
    page.choose("#kind", "")
    page.choose("#step", "-1")
    assert page.text("#count") == "26 prompts, 51 samples"
    page.click("#tokens")
    assert page.text("#count") == "1 prompts, 2 samples"
    page.click("#tokens")
    page.type("#search", "ANSWER 4 2 1")
    page.wait("return document.getElementById('count').innerText === '1 prompts, 2 samples'")
    assert page.js("return [...CSS.highlights.get('found')].map(String)") == ["answer 4 2 1"]
    page.js("const s = document.getElementById('search'); s.value = 'nowhere'; s.dispatchEvent(new Event('input'))")
    page.wait("return document.getElementById('detail').textContent === 'Nothing found.'")


@pytest.mark.slow
def test_a_group_is_read_with_the_keyboard(page):
    page.js("document.getElementById('list').focus()")
    page.keys("End")
    assert page.js("return document.querySelector('.item[aria-selected=true]').id") == "row23"
    page.keys("ArrowUp", "Home", "ArrowDown")
    page.wait("return document.getElementById('detail').textContent.includes('question 1')")
    assert "Gold answer gold 1" in page.content("#detail")
    first = page.content(".sample")
    for text in ("reward0.8", "advantage+0.5", "format0.25", "endedby itself", "answer 6 1 1"):
        assert text in first, "the best sample is first"
    page.choose("#order", "sampled")
    page.wait("return document.querySelector('.sample').textContent.includes('answer 6 1 0')")
    page.js("[...document.querySelectorAll('.link')].find(x => x.innerText.startsWith('2 ')).click()")
    page.wait("return document.getElementById('detail').textContent.includes('training, step 2')")
    assert cards(page) == 2


@pytest.mark.slow
def test_tokens_have_colours_and_numbers(page):
    page.js("document.getElementById('samples').scrollIntoView({behavior: 'instant'})")
    assert page.content(".tokens").startswith("one two")
    assert "not sampled, 1 tokens" in page.content(".tokens details")
    names = page.js("return [...document.getElementById('colour').options].map(x => x.value)")
    assert names == ["", "logp", "entropy", "advantage", "ratio", "mask", "version"]
    colours = {}
    for name in names:
        page.choose("#colour", name)
        colours[name] = page.js("return [...document.querySelectorAll('[data-i]')].map(x => x.style.background)")
    assert colours[""] == [""] * 4
    assert len(set(colours["logp"])) == 4, "each token has another log-prob"
    assert len(set(colours["advantage"])) == 1
    assert colours["ratio"] == [""] * 4
    assert [bool(x) for x in colours["mask"]] == [True, True, False, True]
    box = "const r = document.querySelectorAll('[data-i]')[1].getBoundingClientRect();"
    page.mouse(("move", *page.js(f"{box} return [r.left + 9, r.top + 8].map(Math.round)")))
    numbers = "log-prob -1 entropy 0.5 advantage 0.5 ratio to the sampler 1 trained or not 1 weight version 5"
    assert " ".join(page.text("#tip").split()) == f'2: " two" {numbers}'
    page.mouse(("move", 2, 2))
    page.js("document.querySelector('.tokens').focus()")
    page.keys("ArrowRight", "ArrowRight", "ArrowRight")
    assert page.text("#tip").startswith('4: "three"'), "what is folded is passed over"
    page.keys("Escape")
    assert page.js("return document.getElementById('tip').hidden")


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_themes_narrow_windows_and_paper(chrome, run, dark):
    chrome.open(write_report(run), width=390, height=800, dark=dark)
    assert chrome.js("return document.documentElement.scrollWidth") <= 390

    def paper():
        return chrome.js("return getComputedStyle(document.body).backgroundColor")

    assert (sum(map(int, paper()[4:-1].split(","))) < 200) is dark
    for theme in ("light", "dark", "system"):
        chrome.click("#theme")
        assert chrome.text("#theme") == f"Theme: {theme}"
        assert (sum(map(int, paper()[4:-1].split(","))) < 200) is (theme == "dark" or (theme == "system" and dark))
    chrome.click("#commands button")
    chrome.wait("return ['Copied', 'Selected'].includes(document.querySelector('#commands button').innerText)")
    assert chrome.js("return String(getSelection())") == "rlkit grpo --lr 1"
    assert chrome.pdf().startswith(b"%PDF")
    assert chrome.js("return document.documentElement.classList.contains('print')") is False
    assert chrome.errors() == []


@pytest.mark.slow
def test_text_of_a_model_is_shown_and_runs_nothing(chrome, tmp_path):
    folder = write_run(tmp_path / "<img src=x onerror=window.ran=3>", model=EVIL, notes={EVIL: EVIL})
    lines(
        folder / "starts.jsonl",
        [{"step": 0, "command": EVIL, "machine": {"cpu": EVIL, "cores": 1}, "versions": {EVIL: EVIL}}],
    )
    lines(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 1.0, f"reward/{EVIL.replace('/', '')}": 1.0}])
    calls = [{"function": {"name": EVIL, "arguments": EVIL}}]
    messages = [{"role": EVIL, "content": EVIL, "tool_calls": calls}, {"role": "assistant", "content": EVIL}]
    bad = {"prompt": EVIL, "gold": EVIL, "completion": EVIL, "finish_reason": EVIL, "rewards": {EVIL: 1.0}}
    rows = [sample(7, 0, i, **bad, info={"error": EVIL, "messages": messages, EVIL: EVIL}) for i in range(2)]
    rows[1]["info"]["messages"] = [None, EVIL, {"content": [EVIL], "tool_calls": {"name": EVIL}}]
    rows[1] |= {"tokens": {"text": EVIL}, "versions": 3, "rewards": [EVIL]}
    rows += [sample(7, 1, 0, **bad, tokens=tokens([EVIL, "end"], 7)), sample(7, 1, 1, **bad)]
    lines(folder / "trajectories/train_000007.jsonl", rows)
    page = write_report(folder)
    assert "window.ran=1" not in page.read_text()
    chrome.open(page)
    for group in (0, 1):
        chrome.js("document.getElementById('list').focus()")
        chrome.click(f"#row{group}")
        chrome.wait("return document.querySelectorAll('.sample').length === 2")
        chrome.js("document.querySelectorAll('details').forEach(x => (x.open = true))")
        detail = chrome.js("return document.getElementById('detail').textContent")
        assert detail.count(SHOWN) > 6
        assert not set(detail) & set("\u202e\x1b\u2066\ud83d")
    chrome.choose("#colour", "logp")
    assert chrome.js("return document.images.length") == 0
    everything = chrome.js(
        "return [...document.querySelectorAll('body > :not(script)')].map(x => x.textContent).join('')"
    )
    assert not set(everything) & set("\u202e\x1b\u2066\ud83d")
    assert chrome.text("#facts").count("<img src=x") >= 2
    assert SHOWN.strip() in chrome.js("return document.getElementById('commands').textContent")
    assert chrome.js("return window.ran ?? null") is None
    assert chrome.errors() == []


@pytest.mark.slow
def test_ten_thousand_samples_are_drawn_when_they_are_seen(chrome, tmp_path):
    folder = tmp_path / "long"
    lines(folder / "metrics.jsonl", metrics(10))
    for step in range(1, 11):
        rows = [
            sample(step, group, i, completion=f"{group} {i} words of an answer " * 40)
            for group in range(500)
            for i in range(2)
        ]
        lines(folder / f"trajectories/train_{step:06d}.jsonl", rows)
    chrome.open(write_report(folder))
    assert chrome.text("#count") == "5,000 prompts, 10,000 samples"
    chunks = chrome.js("return state.chunks.map(chunk => Boolean(chunk.rows))")
    assert len(chunks) > 10
    assert sum(chunks) == 1, "only the samples of the open group are decompressed"
    found = chrome.js("""
        const list = document.getElementById("list");
        list.scrollTop = 200000;
        return new Promise((done) => setTimeout(() => {
          done([...document.querySelectorAll(".item")].map((item) => +item.id.slice(3)));
        }, 300));
    """)
    assert len(found) < 60, "only what is in view is in the page"
    assert min(found) <= 200_000 / 54 <= max(found)
    chrome.type("#search", "499 1 words")
    chrome.wait("return document.getElementById('count').innerText === '10 prompts, 20 samples'")
    assert chrome.errors() == []


def test_runs_lie_over_each_other(chrome, run, tmp_path):
    other = write_run(tmp_path / "sort-7", model="models/other", steps=8)
    chrome.open(write_report(run, other, out=tmp_path / "both.html"))
    assert chrome.text("#title") == "sort-6, sort-7"
    assert " ".join(chrome.text("#differing").split()) == "sort-6 sort-7 model models/small models/other steps 6 8"
    legend = chrome.text("#panels .legend")
    assert "sort-6, training" in legend
    assert "sort-7, training" in legend
    chrome.choose("#run", "1")
    assert chrome.text("#count") == "32 prompts, 64 samples"
    assert chrome.errors() == []


@pytest.mark.slow
def test_a_resumed_run_shows_what_changed_and_answers_before_and_after(chrome, tmp_path):
    folder, command = write_run(tmp_path / "run", steps=8), "rlkit grpo --lr 0.1 --resume"
    first = {"step": 0, "command": "rlkit grpo", "args": {"lr": 0.01, "beta": 1}}
    starts = [first, {"step": 4, "command": command, "args": {"lr": 0.1, "beta": 1}}]
    lines(folder / "starts.jsonl", starts)
    for step, text in ((0, "<b>no idea</b>"), (8, "seven")):
        rows = [sample(step, group, 0, completion=text, reward=float(step)) for group in range(4)]
        lines(folder / f"trajectories/eval_greedy_{step:06d}.jsonl", rows)
    for width in (1280, 390):
        chrome.open(write_report(folder), width=width)
        pair = " ".join(chrome.text("#answers .pair").split())
        assert pair.endswith("before, step 0: reward 0 <b>no idea</b> after, step 8: reward 8 seven"), pair
        assert "4 prompts better, 0 worse, 0 equal; the first 3" in chrome.text("#answers h3")
        assert chrome.js("return document.documentElement.scrollWidth") <= width
        assert "resumed after step 4: lr 0.01 → 0.1" in " ".join(chrome.text("#commands .resumed").split())
        assert command in chrome.content("#commands .resumed code:not(summary code)")
        assert chrome.text("#marks").strip() == "resumed with other arguments"
    drawn = """
        const calls = [], u = state.charts[0], get = (_, name) => (...x) => calls.push([name, ...x]);
        const ctx = new Proxy({}, { get, set: () => true });
        markChanges({ ctx, bbox: u.bbox, scales: u.scales, valToPos: u.valToPos });
        return [calls.filter(([name]) => name === "moveTo").map(([, x]) => x), Math.round(u.valToPos(4, "x", true))];
    """
    marks, expected = chrome.js(drawn)
    assert marks == [expected]
    assert chrome.errors() == []


@pytest.mark.slow
def test_many_different_arguments_are_folded_above_the_curves(chrome, tmp_path):
    args = [{f"flag{i}": i + run for i in range(40)} for run in (0, 1)]
    runs = [write_run(tmp_path / name, steps=2, **own) for name, own in zip("ab", args, strict=True)]
    (runs[1] / "args.json").write_text(json.dumps({"format": 1, "script": "own.py"} | args[1]))
    chrome.open(write_report(*runs, out=tmp_path / "both.html"))
    assert "40 arguments differ: flag0, flag1" in chrome.text("#differences summary")
    assert not chrome.js("return document.querySelector('#differences details').open")
    assert chrome.js("return document.getElementById('curves').offsetTop") < 900
    assert "steps" not in chrome.content("#differing"), "one of the runs has no such argument"


def test_a_run_on_fixed_data_has_a_page(chrome, tmp_path):
    folder = tmp_path / "dpo"
    lines(
        folder / "metrics.jsonl",
        [{"step": s, "loss": 1 / s, "accuracy": 0.5, "margin": s, "chosen": s, "rejected": -s} for s in (1, 2)],
    )
    (folder / "args.json").write_text('{"format": 1, "script": "dpo.py"}')
    chrome.open(write_report(folder))
    titles = chrome.js("return [...document.querySelectorAll('#panels h3')].map(x => x.firstChild.data)")
    assert titles == ["Loss", "Preferences met", "Margin", "Chosen and rejected"]
    assert "no samples" in chrome.text("#count")
    assert chrome.js("return document.getElementById('list').offsetHeight") == 0
    assert chrome.errors() == []


def test_a_live_run_is_followed(chrome, tmp_path):
    folder = tmp_path / "live"
    folder.mkdir()
    serving = server(folder)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{serving.server_port}/"
    try:
        chrome.open(address)
        assert chrome.text("#quiet") == "No finished step yet."
        write_run(folder)
        chrome.wait("return document.getElementById('count').innerText === '24 prompts, 48 samples'")
        chrome.click("#row5")
        lines(folder / "trajectories/train_000007.jsonl", [sample(7, 0, 0)])
        lines(folder / "metrics.jsonl", metrics(7))
        chrome.wait("return document.getElementById('count').innerText === '25 prompts, 49 samples'")
        assert chrome.js("const g = state.shown[state.at]; return [g.step, g.row]") == [5, 1], "the open group stays"
        assert chrome.errors() == []
        request = urllib.request.Request(address, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)
        with pytest.raises(OSError, match=r"`port` .* cannot be served on .*: give another one"):
            server(folder, port=serving.server_port)
    finally:
        serving.shutdown()
        serving.server_close()
    chrome.wait("return document.getElementById('live').innerText === 'the server does not answer'")
