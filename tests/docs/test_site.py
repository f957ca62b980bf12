"""The documentation site: docstrings lose nothing on it, its links lead somewhere, its pages and its chart work."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import browser
import pytest
import torch

from rlkit import losses

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
PYTHON = ROOT / ".venv-docs" / "bin" / "python"  # `make docs` makes it
COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "th", "td", "pre", "code", "img", "em", "strong")


def markdown(text: str) -> str:
    """A docstring as the site has it."""
    spec = importlib.util.spec_from_file_location("site_docstrings", SITE / "docstrings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.markdown(text)


def docstrings(pattern: str) -> Iterator[tuple[str, str]]:
    """Of every module, class and function of the files."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(ROOT.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)} {getattr(node, 'name', '')}", text


def bare(text: str) -> str:
    """The text without white space and without what Markdown marks with: stars, back-ticks, lists, tables."""
    return re.sub(r"^\d+\. |[\s*`|-]", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "pattern", ["rlkit/losses/*.py", "rlkit/advantages/*.py", pytest.param("rlkit/**/*.py", marks=pytest.mark.slow)]
)
def test_a_docstring_keeps_its_text_and_the_lines_of_its_equations(pattern: str) -> None:
    """By CommonMark's own rendering of what the site is given."""
    render = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").render
    found = list(docstrings(pattern))
    assert len(found) > 20
    for name, text in found:
        html = render(markdown(text))
        assert bare(unescape(re.sub(r"<[^>]+>", "", html))) == bare(text), name
        blocks = "\n".join(
            unescape(block) for block in re.findall(r"<pre><code[^>]*>(.*?)</code></pre>", html, re.DOTALL)
        )
        for equation in re.findall(r"(?<=\n\n)(?: {4}.*\n?)+", text):
            assert re.sub(r"^ {4}", "", equation.rstrip(), flags=re.MULTILINE) in blocks, name


def test_labels_start_lines_and_names_become_links() -> None:
    shown = markdown(
        "Sum.\n\n    x = a_t * b\n\nLimits:  0 is `zeros`;\n         more.\nErrors: ValueError, see arXiv:1707.06347"
    )
    assert shown.split("\n\n") == [
        "Sum.",
        "```text\nx = a_t * b\n```",
        "**Limits:** 0 is `zeros`;\nmore.",
        "**Errors:** ValueError, see [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)",
    ]


class Page(HTMLParser):
    """What a page of the site holds: the counts of its elements, its ids, its links and what it loads."""

    def __init__(self, text: str, article: bool = True) -> None:
        super().__init__()
        self.inside, self.counts, self.ids = not article, Counter[str](), set[str]()
        self.links, self.loads, self.codes, self.code = set[str](), set[str](), Counter[str](), ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.inside |= tag == "article"
        self.ids.add(values.get("id") or "")
        if tag == "a" and values.get("href"):
            self.links.add(values["href"])
        if tag in ("script", "img", "link", "iframe") and values.get("rel") != "canonical":
            self.loads |= {values[key] for key in ("src", "href") if values.get(key)}
        self.counts[tag] += self.inside and tag in COUNTED
        if tag == "code":
            self.code = ""

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "article"
        if tag == "code" and self.inside:
            self.codes[" ".join(self.code.split())] += 1

    def handle_data(self, data: str) -> None:
        self.code += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from this checkout."""
    if not PYTHON.exists():
        pytest.skip("make docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run([PYTHON, SITE / "make_site.py", folder], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_and_a_place_in_it(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 150
    wrong = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            address, _, place = link.partition("#")
            if re.match(r"(https?|mailto):", address):
                assert link not in page.loads, f"{path} loads {link} from the network"
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            known = target in pages and (not place or place.startswith("__") or unquote(place) in pages[target].ids)
            if not known and (target in pages or not target.is_file()):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert wrong == []


@pytest.mark.slow
def test_a_page_has_the_headings_lists_tables_and_code_that_commonmark_gives_it(site: Path) -> None:
    """The site's Markdown is another dialect than that of code hosts; the pages read alike in both."""
    render = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table").render
    sources = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    sources += [*ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/README.md")]
    for source in sources:
        shown = site / source.relative_to(ROOT).with_suffix(".html")
        shown = shown.with_name("index.html") if source.name == "README.md" else shown
        text = source.read_text() + "\n\n## Files\n\nnames\n" * ("recipes" in source.parts)  # what the site adds
        here, there = Page(shown.read_text()), Page(render(text), article=False)
        assert (here.counts, here.codes) == (there.counts, there.codes), source.name


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_pages_fit_and_the_search_finds_a_function(site: Path, width: int, dark: bool) -> None:
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", site],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with server, browser.opened() as page:
        try:
            assert server.stdout is not None
            (port,) = re.findall(r"port (\d+)", server.stdout.readline())
            address = f"http://127.0.0.1:{port}"
            for name in ("index", "docs/gallery", "docs/start", "docs/benchmarks", "api/rlkit/losses/policy"):
                page.open(f"{address}/{name}.html", width=width, dark=dark, ready=browser.LOADED)
                assert page.js("return document.documentElement.scrollWidth") <= width, name
                scheme = page.js("return document.body.dataset.mdColorScheme")
                assert scheme == ("slate" if dark else "default")
            if width < 1000:
                page.click("label[for=__search]")
            page.type(".md-search__input", "dual_clip")
            page.wait("return document.querySelector('.md-search-result__link[href*=dual_clip]') !== null")
            assert page.errors() == []
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_search_works_on_a_site_opened_from_the_disk(site: Path, width: int) -> None:
    with browser.opened() as page:
        page.open(site / "docs/index.html", width=width, ready=browser.LOADED)
        if width < 1000:
            page.click("label[for=__search]")
        page.type(".md-search__input", "dual_clip")
        page.wait("return document.querySelector('.md-search-result__link[href*=dual_clip]') !== null")
        assert page.errors() == []


def test_a_link_that_is_named_by_its_file_has_the_title_of_the_page(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", SITE / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/losses.md").write_text("# Losses of `rlkit`\n\n## Other\n")
    for text, shown in {
        "[losses.md](docs/losses.md): x": "[Losses of rlkit](docs/losses.md): x",
        "([docs/losses.md](docs/losses.md#other))": "([Losses of rlkit](docs/losses.md#other))",
        "[the losses](docs/losses.md)": "[the losses](docs/losses.md)",
        "[none.md](docs/none.md)": "[none.md](docs/none.md)",
        "`[losses.md](docs/losses.md)`": "`[losses.md](docs/losses.md)`",
        "```\n[losses.md](docs/losses.md)\n```": "```\n[losses.md](docs/losses.md)\n```",
    }.items():
        assert hooks.titled(text, tmp_path) == shown


def one_token(f: Any) -> Any:
    """A surrogate of sequences, on sequences of one token."""
    return lambda x, a, **args: f(x, a, mask=None, cu_seqlens=torch.arange(len(x) + 1), **args)


def with_old(f: Any) -> Any:
    return lambda x, a, old_prob, **args: f(x, a, old_logp=torch.full_like(x, math.log(old_prob)), **args)


SURROGATES = {
    "icepop": lambda x, a, **args: losses.icepop(x, **args) * losses.reinforce(x, a),
    "gmpo": one_token(losses.gmpo),
    "vespo": one_token(losses.vespo),
    "dppo": with_old(losses.dppo),
    "dppo_kl": with_old(losses.dppo_kl),
}


@pytest.mark.filterwarnings("ignore:clip_low")  # the ends of the sliders
@pytest.mark.slow
@pytest.mark.skipif(bool(browser.MISSING), reason=browser.MISSING)
def test_the_chart_has_the_coefficients_that_autograd_gives(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        f'<div id="coefficients"></div><script>{(SITE / "assets/gallery.js").read_text()}</script>'
    )
    ratios = torch.logspace(-1, 1, 301, dtype=torch.float64)
    with browser.opened() as page:
        page.open(tmp_path / "page.html", ready=browser.LOADED)
        formulas = page.js("return Object.fromEntries(Object.entries(FORMULAS).map(([k, v]) => [k, v[2]]))")
        assert len(formulas) >= 14
        for name, ranges in formulas.items():
            f = SURROGATES.get(name) or getattr(losses, name)
            for share in (None, 0.3, 0.62):  # of the way from the lowest to the highest value of each slider
                args = {
                    k: x if share is None else low + share * (high - low) for k, (x, low, high, _) in ranges.items()
                }
                r = ratios[ratios * args.get("old_prob", 0) < 1]
                for up in (True, False):
                    x = r.log().requires_grad_()
                    a = torch.full_like(x, 1.0 if up else -1.0)
                    (gradient,) = torch.autograd.grad(f(x, a, **args).sum(), x)
                    call = "const [name, up, args, r] = arguments; return r.map((x) => coefficient(name, x, up, args))"
                    shown = torch.tensor(page.js(call, name, up, args, r.tolist()), dtype=torch.float64)
                    assert torch.allclose(shown, -gradient / a, atol=1e-6, rtol=1e-6), (name, args)
        before = page.js("return document.querySelector('path.up').getAttribute('d')")
        page.keys("Tab", "Tab", "Tab", "ArrowRight", "ArrowRight")
        assert page.js("return document.activeElement.name") == "clip_low"
        page.keys("Tab", "ArrowRight")
        assert page.js("return document.querySelector('path.up').getAttribute('d')") != before
        assert page.errors() == []
