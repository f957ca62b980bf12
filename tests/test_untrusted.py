"""Files that the user did not write: a hostile one is refused in one line that names it, in bounded time and memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import load_file, save_file

from rlkit._util import untrusted
from rlkit.data.chat import render
from rlkit.data.images import _content, _opened
from rlkit.data.load import load_rows
from rlkit.data.messages import row_template_args, row_tools
from rlkit.data.streaming import DiskRows
from rlkit.data.template_files import set_template
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.model.forward import load_model
from rlkit.model.pretrained import load_config, load_tokenizer
from rlkit.rollout.stream import Journal
from rlkit.run.folder import drop_after, hold, read_args, read_metrics
from rlkit.run.report.page import write_report
from rlkit.run.report.plot import plot_run
from rlkit.run.report.serve import server
from rlkit.scripts import cli, sft
from rlkit.scripts.args import Data

ROOT = Path(__file__).parents[1]
DEEP = '{"a":' * 20000 + "1" + "}" * 20000
SECONDS = 10.0  # of a processor, of a file that is refused in this process
MIB = 1 << 20


def gz(*parts: tuple[bytes, int]):
    def write(path):
        with gzip.open(path, "wb") as file:
            for part, times in parts:
                for _ in range(times):
                    file.write(part)

    return write


def text(content):
    return lambda path: path.write_text(content)


def link(target):
    return lambda path: os.symlink(target, path)


def refused(call, *names):
    """The error of a call: one line, with the names, in bounded time."""
    start = time.process_time()
    with pytest.raises((ValueError, OSError)) as error:
        call()
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 1000
    assert all(str(name) in said for name in names), said
    assert time.process_time() - start < SECONDS


def parquet(path):
    import pyarrow
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2_000_000, pyarrow.int8()), ["a"])
    parquet.write_table(pyarrow.table({"prompt": column}), path)


DATA = {  # name: how it is written, and what the line says
    "line.jsonl.gz": (gz((b'{"prompt": "', 1), (b"a" * MIB, 3), (b'"}\n', 1)), "line 1: the line is too long"),
    "second.jsonl": (text('{"prompt": "a"}\n{"prompt": "' + "a" * 3 * MIB + '"}\n'), "line 2: the line is too long"),
    "rows.jsonl.gz": (gz((b"{}\n" * 20000, 10)), "bytes hold 50,001 rows or more"),
    "list.json.gz": (gz((b"[", 1), (b"{}," * 20000, 10), (b"{}]", 1)), "bytes hold 50,001 rows or more"),
    "blank.jsonl.gz": (gz((b"\n" * 20000, 10)), "bytes hold 50,001 rows or more"),
    "bomb.jsonl.gz": (gz((b'{"prompt": "a"}\n' + b" " * (MIB // 2) + b"\n", 20)), "become more than 4,194,304"),
    "bomb.json.gz": (gz((b'[{"prompt": "a"},', 1), (b" " * MIB, 20)), "become more than 4,194,304"),
    "bomb.csv.gz": (gz((b"prompt\n", 1), (b"a" * 1000 + b"\n", 20000)), "become more than"),
    "line.csv": (text("prompt\n" + "a" * 3 * MIB), "line 2: the line is too long"),
    "header.csv": (text("a" * 3 * MIB), "line 1: the line is too long"),
    "cell.csv": (text('prompt\n"' + "a\n" * MIB * 2), "RLKIT_LIMITS=cell_mib"),
    "deep.jsonl": (text(DEEP + "\n"), "nested too deeply"),
    "deep.json": (text(f"[{DEEP}]"), "nested too deeply"),
    "nested.jsonl": (text('{"prompt": "a", "tree": ' + "[" * 500 + "]" * 500 + "}\n"), "line 1: lists or objects are"),
    "values.jsonl": (text('{"prompt": [' + "{}," * 60000 + "1]}\n"), "line 1: the row has too many values"),
    "large.json": (text('[{"prompt": "' + "a" * 5 * MIB + '"}]'), "the list is too large"),
    "rows.parquet": (parquet, "bytes hold 2,000,000 rows or more"),
}


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setenv("RLKIT_LIMITS", "row_mib=2 cell_mib=1 list_mib=4 row_values=100000")
    monkeypatch.setattr(untrusted, "_FREE", 4 * MIB)
    monkeypatch.setattr(untrusted, "_FREE_ROWS", 50_000)
    monkeypatch.setattr(untrusted, "_CHEAP", 1000)


@pytest.mark.slow_cases("rows.jsonl.gz", "cell.csv")
@pytest.mark.parametrize("name", DATA)
@pytest.mark.usefixtures("small_limits")
def test_data(name, tmp_path):
    path = tmp_path / name
    DATA[name][0](path)
    assert path.stat().st_size < 6 * MIB
    refused(lambda: load_rows(path), path, DATA[name][1])
    if name == "nested.jsonl":
        refused(lambda: DiskRows([path]).row(0), path, DATA[name][1])
    if name in ("second.jsonl", "rows.parquet"):
        refused(lambda: DiskRows([path]), path, DATA[name][1])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_dict.json", DEEP), ("dataset_dict.json", '{"splits": 3}'), ("state.json", "3"),
        ("state.json", '{"_data_files": 3}'),
    ],
)  # fmt: skip
def test_a_damaged_folder_of_save_to_disk_is_named(name, content, tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(content)
    refused(lambda: load_rows(tmp_path), f"{tmp_path}: cannot be read as a folder of save_to_disk")


def test_deep_json_in_a_cell_or_a_flag_is_no_value():
    deep = '{"a":' * 500 + "1" + "}" * 500
    refused(lambda: row_tools({"tools": f'[{{"type": "function", "function": {deep}}}]'}, "row 1"), "row 1", "'tools'")
    refused(lambda: row_template_args({"chat_template_kwargs": deep}, "row 1"), "row 1", "'chat_template_kwargs'")
    refused(lambda: Data("a.jsonl", template_args='{"a":' * 90000), "template_args")
    assert untrusted.loads('{"a": [1]}') == {"a": [1]}


@pytest.mark.parametrize("make", [os.mkfifo, link("/dev/zero")], ids=["pipe", "zero"])
def test_no_pipe_or_device_is_read_as_data(make, tmp_path):
    make(tmp_path / "data.jsonl")
    refused(lambda: load_rows(tmp_path / "data.jsonl"), tmp_path / "data.jsonl")


def test_a_limit_is_raised_by_the_variable_that_the_line_names(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a" * 2 * MIB}) + "\n")
    monkeypatch.setenv("RLKIT_LIMITS", "row_mib=1")
    refused(lambda: load_rows(path), "RLKIT_LIMITS=row_mib=NUMBER raises the limit, 1")
    monkeypatch.setenv("RLKIT_LIMITS", "row_mib=3")
    assert len(load_rows(path)[0]["prompt"]) == 2 * MIB
    monkeypatch.setenv("RLKIT_LIMITS", "rows=3")
    refused(lambda: load_rows(path), "RLKIT_LIMITS: 'rows=3'")


def test_a_file_that_changes_while_it_streams_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    rows = DiskRows([path])
    assert rows.row(1)[0]["prompt"] == "two"
    with path.open("r+") as file:
        file.truncate(25)
    refused(lambda: rows.row(1), path, "line 2: the file has changed")


YAML = {
    "keys": (text("\n".join(f"k{i}: 1" for i in range(20000))), "too many keys"),
    "laughs": (
        text("a0: &a0 {x: 1}\n" + "".join(
            f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)
        )), "too many keys",
    ),
    "empty laughs": (
        text("a0: &a0 {}\n" + "".join(
            f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(9))}}}\n" for i in range(1, 12)
        )), "too many keys",
    ),
    "deep": (text("a: " + "{a: " * 20000 + "1" + "}" * 20000), "nested too deeply"),
    "large": (text("model: " + "a" * MIB), "more than 0.25 MiB"),
    "pipe": (os.mkfifo, "it is a pipe"),
    "zero": (link("/dev/zero"), "it is a device"),
    "folder": (Path.mkdir, "it is a folder"),
    "key": (text("{a: 1}: 2"), "a key must be the name of a flag"),
    "bytes": (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
}  # fmt: skip


@pytest.mark.slow_cases("keys")
@pytest.mark.parametrize("name", YAML)
def test_yaml(name, tmp_path):
    path = tmp_path / "run.yaml"
    YAML[name][0](path)
    refused(lambda: cli.with_config(["--config", str(path)], sft.Args), path, YAML[name][1])


def config(**keys):
    return changed("config.json", keys)


def changed(name, keys):
    def write(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | keys))

    return write


def file(name, content):
    def write(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return write


def special(name, make):
    def write(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return write


def added_tokens(folder):
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    one = found["added_tokens"][0]
    found["added_tokens"] += [{**one, "id": 1000 + i, "content": f"<{i}>"} for i in range(30_000)]
    path.write_text(json.dumps(found))


def normalizer(folder):
    found = json.loads((folder / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 5
    found["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (folder / "tokenizer.json").write_text(json.dumps(found))


def integers(folder):
    path = folder / "model.safetensors"
    tensors = {name: x.to(torch.int8) if "up_proj" in name else x for name, x in load_file(path).items()}
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def index_alone(content):
    def write(folder):
        (folder / "model.safetensors").unlink()
        (folder / INDEX).write_text(content)

    return write


def shard_of_a_pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "a.safetensors")
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {"w": "a.safetensors"}}')


INDEX = "model.safetensors.index.json"
MODELS = {  # what is done to a folder, and what the line says
    "activation": (config(hidden_act="boom"), "config.json: hidden_act is 'boom'"),
    "activation of a number": (config(hidden_act=7), "hidden_act"),
    "no heads": (config(num_attention_heads=0), "config.json: num_attention_heads must be"),
    "no key heads": (config(num_key_value_heads=0), "config.json: num_key_value_heads must be"),
    "no dimension": (config(head_dim=0), "config.json: head_dim must be"),
    "no vocabulary": (config(vocab_size=0), "config.json: vocab_size must be"),
    "10**12 tokens": (config(vocab_size=10**12), "config.json: vocab_size must be"),
    "more tokens than weights": (config(vocab_size=30_000_000), "config.json: vocab_size 30,000,000"),
    "text as a size": (config(hidden_size="12"), "config.json: hidden_size must be"),
    "10**9 layers": (config(num_hidden_layers=10**9), "config.json: num_hidden_layers must be"),
    "rope within rope": (config(rope_parameters={"rope_type": {"a": {"b": 1}}}), "config.json"),
    "unknown rope": (config(rope_parameters={"rope_type": "boom"}), "config.json: rope_type is 'boom'"),
    "rope of layers that are not there": (
        config(rope_parameters={"full_attention": {"rope_type": "default"}}),
        "config.json",
    ),
    "rope as a list": (config(rope_parameters=[1]), "rope_parameters"),
    "layer types": (config(layer_types=["boom"]), "layer_type"),
    "type as an object": (config(model_type={"a": 1}), "config"),
    "text config as a list": (config(text_config=[1]), "config.json"),
    "eos as an object": (config(eos_token_id={"a": 1}), "config.json: eos_token_id must be"),
    "deep config": (file("config.json", DEEP), "config.json: lists or objects are nested too deeply"),
    "config as a list": (file("config.json", "[]"), "config.json is damaged, it is no JSON object"),
    "config from a device": (special("config.json", link("/dev/zero")), "a folder without config.json"),
    "eos as text": (changed("generation_config.json", {"eos_token_id": "x"}), "generation_config.json: eos_token_id"),
    "odd key": (changed("generation_config.json", {"self": 1}), "generation_config.json cannot be read"),
    "odd value": (changed("generation_config.json", {"watermarking_config": 3}), "generation_config.json cannot"),
    "generation as a list": (file("generation_config.json", "[1]"), "generation_config.json is damaged"),
    "deep generation": (file("generation_config.json", DEEP), "generation_config.json: lists or objects are nested"),
    "generation from a device": (
        special("generation_config.json", link("/dev/zero")),
        "generation_config.json: it is a",
    ),
    "index of a pickle": (file(INDEX, '{"weight_map": {"w": "x.bin"}}'), f"{INDEX}: weight_map: w is in 'x.bin'"),
    "index outside": (file(INDEX, '{"weight_map": {"w": "../x.safetensors"}}'), f"{INDEX}: weight_map: w is in"),
    "index without metadata": (index_alone('{"weight_map": {}}'), f"{INDEX} has no metadata"),
    "index with a number": (index_alone('{"metadata": 3, "weight_map": {}}'), f"{INDEX} has no metadata"),
    "shard from a pipe": (shard_of_a_pipe, "a.safetensors: it is a pipe"),
    "weights from a pipe": (special("model.safetensors", os.mkfifo), "no file named model.safetensors"),
    "weights of integers": (integers, "mlp.up_proj.weight is I8, quantized"),
    "rope of other lengths": (
        config(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1] * 7,
                "factor": 2.0,
                "long_factor": [1] * 7,
            }
        ),
        "no model can be built from its config.json",
    ),
    "growing text": (normalizer, "its normalizer makes up to 10,000,000,000 characters of one"),
    "index as a list": (file(INDEX, "[1]"), f"{INDEX} has no weight_map"),
    "index of numbers": (file(INDEX, '{"weight_map": {"w": 3}}'), f"{INDEX}: weight_map: w is in 3"),
    "tokens": (added_tokens, "tokenizer.json: it adds about 30,007 tokens"),
    "deep tokenizer": (file("tokenizer.json", DEEP), "tokenizer.json"),
    "deep tokenizer config": (
        file("tokenizer_config.json", DEEP),
        "tokenizer_config.json: lists or objects are nested",
    ),
    "tokenizer config as a list": (file("tokenizer_config.json", "[1]"), "its tokenizer cannot be read"),
    "tokenizer class": (file("tokenizer_config.json", '{"tokenizer_class": 7}'), "its tokenizer cannot be read"),
    "length as text": (file("tokenizer_config.json", '{"model_max_length": "a"}'), "its tokenizer cannot be read"),
    "tokenizer from a pipe": (special("tokenizer.json", os.mkfifo), "tokenizer.json: it is a pipe"),
    "tokenizer from a device": (
        special("tokenizer_config.json", link("/dev/zero")),
        "tokenizer_config.json: it is a d",
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, hidden=32, layers=1, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    load_model(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_models(name, model, tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_LIMITS", "tokens=10000")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        os.link(path, folder / path.name)
    for path in folder.glob("*.json"):  # a file of its own
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    change, said = MODELS[name]
    change(folder)

    def load():
        load_config(folder)
        load_tokenizer(folder)
        load_model(folder)

    refused(load, folder, said)


def test_a_tokenizer_that_panics_in_rust_ends_in_one_line(model, tmp_path, capsys):
    folder = shutil.copytree(model, tmp_path / "model")
    found = json.loads((folder / "tokenizer.json").read_text())
    found["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    (folder / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = load_tokenizer(folder)
    with pytest.raises(SystemExit) as ended:
        cli.on_ranks(lambda: tokenizer("a" * 60 + "!"))
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("error: a library in Rust failed on a text: Onig: Regex search error")


BIG = "more than 256 MiB of memory"
TEMPLATES = {
    "string": ("{{ 'a' * 10**10 }}", BIG),
    "string of a variable": ("{% set n = 10**10 %}{% set a = 'a' %}{{ a * n }}", BIG),
    "width": ("{{ '%9999999999d' % 1 }}", BIG),
    "format": ("{{ '{:>9999999999}'.format('a') }}", BIG),
    "center": ("{{ 'a' | center(10**10) }}", BIG),
    "range": ("{% for i in range(10**10) %}{% endfor %}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    "output": ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "writes more than 4,194,304 characters"),
    "with tools": ("{% if tools %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}", BIG),
    "loop": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not end in 1 s"),
    "power": ("{{ 10 ** (10 ** 9) }}", "does not end in 1 s"),
    "join": ("{{ range(99999) | map('string') | join('a' * 99999) | length }}", BIG),
}


@pytest.mark.slow_cases("loop")
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x == "power")) for x in TEMPLATES])
def test_templates(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_LIMITS", "template_s=1 template_memory_mib=256")
    source, said = TEMPLATES[name]
    path = tmp_path / "chat.jinja"
    path.write_text(source)
    tokenizer = tiny_tokenizer()
    refused(lambda: set_template(tokenizer, path), path, said)
    tokenizer.chat_template = source
    for _ in range(2):
        refused(lambda: render(tokenizer, [{"role": "user", "content": "a"}], add_generation_prompt=True), said)


def test_a_template_is_tried_once_and_a_good_one_is_not_refused():
    from rlkit.data import markup

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# of this test #}"
    before = {*markup._tried}
    first, second = (render(tokenizer, [{"role": "user", "content": x}], add_generation_prompt=True) for x in "ab")
    assert len(first) == len(second) == 9
    assert {*markup._tried} - before == {tokenizer.chat_template}


def large_png(width, height):
    out = io.BytesIO()
    Pillow.new("1", (1, 1)).save(out, "PNG")
    data = out.getvalue()
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def saved(kind, size, mode="L", **options):
    out = io.BytesIO()
    Pillow.new(mode, size).save(out, kind, **options)
    return out.getvalue()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(/tmp/x) (w) file\nshowpage\n"
IMAGES = {
    "8000.png": (lambda: large_png(8000, 8000), "8000 x 8000 pixels"),
    "13000.png": (lambda: large_png(13000, 13000), "13000 x 13000 pixels"),
    "huge.png": (lambda: large_png(2**31 - 1, 2**31 - 1), "exceeds limit"),
    "wide.gif": (lambda: saved("GIF", (60000, 1000)), "60000 x 1000 pixels"),
    "bomb.tiff": (lambda: saved("TIFF", (60000, 1000), "1", compression="tiff_deflate"), "60000 x 1000 pixels"),
    "bomb.jp2": (lambda: saved("JPEG2000", (1600, 1600)), "1600 x 1600 pixels"),
    "icon.ico": (lambda: saved("ICO", (64, 64), "RGB"), "cannot identify image file"),
    "program.eps": (lambda: EPS, "cannot identify image file"),
    "text.png": (lambda: b"no image", "cannot identify image file"),
    "long.png": (lambda: bytes(2 * MIB), "more than 1 MiB"),
}


@pytest.mark.slow_cases("wide.gif")
@pytest.mark.parametrize("name", IMAGES)
def test_images(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RLKIT_LIMITS", "image_mib=1" + " image_mpixels=2" * name.endswith("jp2"))
    (tmp_path / name).write_bytes(IMAGES[name][0]())
    refused(lambda: _opened(_content(name, tmp_path)), IMAGES[name][1])


@pytest.mark.parametrize("make", [os.mkfifo, link("/dev/zero")], ids=["pipe", "zero"])
def test_no_pipe_or_device_is_read_as_an_image(make, tmp_path):
    make(tmp_path / "a.png")
    refused(lambda: _content("a.png", tmp_path), tmp_path / "a.png", "no regular file")


LINES = {
    "deep": DEEP,
    "list": "[1, 2]",
    "number": "7",
    "text": '"a"',
    "null": "null",
    "no JSON": "\x00\x00",
    "no step": '{"loss": 1}',
    "step as text": '{"step": "a", "loss": 1}',
    "step as a list": '{"step": [1], "loss": 1}',
    "endless step": '{"step": Infinity, "loss": 1}',
    "true step": '{"step": true, "loss": 1}',
    "value as a list": '{"step": 2, "loss": [1]}',
    "value as an object": '{"step": 2, "loss": {"a": 1}}',
    "value as text": '{"step": 2, "loss": "a"}',
    "large number": '{"step": 2, "loss": ' + "9" * 400 + "}",
}


@pytest.mark.parametrize("name", LINES)
def test_lines_of_metrics_are_named_and_left_out(name, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    good = [{"step": 1, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    path.write_text(f"{json.dumps(good[0])}\n{LINES[name]}\n{json.dumps(good[1])}\n")
    assert read_metrics(tmp_path) == good
    assert f"{path}, line 2 is left out" in capsys.readouterr().out
    if name in ("deep", "list", "step as text", "step as a list"):
        drop_after(tmp_path, 2)
        assert read_metrics(tmp_path) == good[:1]


def test_a_run_with_odd_lines_is_drawn_and_reported(tmp_path):
    good = [json.dumps({"step": n, "loss": 1 / n, "reward/mean": n}) for n in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*good, *LINES.values()]) + "\n")
    (tmp_path / "starts.jsonl").write_text("\n".join([*LINES.values()]) + "\n")
    (tmp_path / "args.json").write_text('{"format": 1, "script": "sft"}')
    plot_run(tmp_path)
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("content", [DEEP, "[1]", "7", "\x00"])
def test_arguments_of_a_run(content, tmp_path):
    (tmp_path / "args.json").write_text(content)
    refused(lambda: read_args(tmp_path), tmp_path / "args.json")


def test_a_report_leaves_out_starts_and_times_of_other_types(tmp_path, capsys):
    row = '{"step": 1, "loss": 1, "time/step": NaN, "time/tokens_per_s": Infinity}'
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
    odd = [{"machine": [1]}, {"versions": "a"}, {"rows": "a"}, {"process_gib": "a"}, {"args": [1]}, {"ranks": "a"}]
    (tmp_path / "starts.jsonl").write_text("".join(json.dumps({"step": 0, **keys}) + "\n" for keys in odd))
    (tmp_path / "trajectories").mkdir()
    for kind in ("1", "\u00b2"):  # a power of two is a digit, and no number
        (tmp_path / f"trajectories/eval_greedy_{kind}.jsonl").write_text("{}\n")
    write_report(tmp_path)
    said = capsys.readouterr().out
    assert all(f"{tmp_path / 'starts.jsonl'}, line {n} is left out" in said for n in range(1, 7))
    (tmp_path / "starts.jsonl").write_text('{"step": 0, "machine": {"gpus": 3}}\n')
    refused(lambda: write_report(tmp_path), f"{tmp_path}: its args.json, starts.jsonl or trajectories/ is not as a run")


def test_readers_that_go_and_names_that_are_none_leave_no_traceback(tmp_path, capfd):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    serving = server(tmp_path)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        for request in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /da"):
            gone = socket.create_connection(serving.server_address)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            gone.sendall(request)
            gone.close()
        with socket.create_connection(serving.server_address, timeout=20) as reader:
            reader.sendall(b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n")
            assert reader.recv(100).startswith(b"HTTP/1.0 403")
    finally:
        serving.shutdown()
        serving.server_close()
    assert capfd.readouterr().err == ""


def test_no_pipe_of_a_run_folder_is_waited_for(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "completions").mkdir()
    for name in (".lock", "trajectories/train_000001.jsonl", "completions/0.jsonl"):
        os.mkfifo(tmp_path / name)
    refused(lambda: write_report(tmp_path), tmp_path / "trajectories/train_000001.jsonl", "it is a pipe")
    refused(lambda: hold(tmp_path), tmp_path / ".lock", "it is a pipe")
    refused(lambda: Journal(tmp_path / "completions", None), tmp_path / "completions/0.jsonl", "it is a pipe")


SLOW = {  # as they come, with the limits as they are: what `rlkit data` says
    "line.jsonl.gz": (gz((b'{"prompt": "', 1), (b"a" * MIB, 4300)), "line 1: the line is too long"),
    "rows.jsonl.gz": (gz((b"{}\n" * 300_000, 100)), "rows or more"),
    "list.json.gz": (gz((b"[", 1), (b"{}," * 300_000, 200)), "rows or more"),
    "cell.csv.gz": (gz((b'a,b\n"', 1), (b"a" * (MIB - 1) + b"\n", 100)), "field larger than field limit"),
    "spaces.json.gz": (gz((b"[", 1), (b" " * MIB, 2000)), "become more than"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_bombs_on_the_command_line(name, tmp_path):
    SLOW[name][0](tmp_path / name)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    run = subprocess.run(
        [sys.executable, "-m", "rlkit.scripts", "data", name], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )  # fmt: skip
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert (run.returncode, len(errors)) == (2, 1), run.stderr[-2000:]
    assert name in errors[0]
    assert SLOW[name][1] in errors[0]
    assert "Traceback" not in run.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
