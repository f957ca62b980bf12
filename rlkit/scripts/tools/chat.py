"""Talk to the model of a run, or to any model, in the terminal.

    rlkit chat runs/grpo
    rlkit chat Qwen/Qwen3-0.6B --system-prompt "Answer in one sentence."
    rlkit chat runs/grpo --prompt "What is 2+2?"    print one answer
    rlkit chat runs/grpo < questions.txt            one to each line, no history

Ctrl-C stops an answer; Ctrl-D or an empty line ends the conversation.

The args.json of a run gives the system prompt, the chat template and the sampling, unless a flag does.
Where a conversation exceeds the model's positions, its oldest turns are dropped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from rlkit._util.files import check_model_path
from rlkit._util.text import printable
from rlkit.run.folder import read_args
from rlkit.scripts.args import Data, Model
from rlkit.scripts.cli import run
from rlkit.scripts.flags import ChatTemplate
from rlkit.scripts.start import check_device
from rlkit.scripts.unusual import warn_of_unusual
from rlkit.settings import Count, Needs, NotNegative, ParallelArgs, SamplingParams, check, refuse_if

SAMPLING = ("temperature", "max_new_tokens", "top_p", "top_k", "min_p")  # flags of a run that hold where none is given
TYPES: dict[str, Any] = {  # the flags of a run that are used here, and their types
    "model": str, "system_prompt": str | None, "template_args": str, "chat_template": bool | str,
    "temperature": int | float, "max_new_tokens": int, "top_p": int | float, "top_k": int, "min_p": int | float,
    "stop": list, "stop_token_ids": list, "lora_rank": int | None, "ref_sync_steps": int, "adapter": str | None,
    "resize_embeddings": bool, "yarn": int | float | None,
}  # fmt: skip


@dataclass(frozen=True)
class Args:
    """Flags."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """run folder (its model/, else its newest checkpoint), folder written by save_pretrained, adapter, or hub id"""
    prompt: str | None = None
    """print the answer to this prompt and end; None: read prompts from the terminal, or lines from a pipe"""
    system_prompt: Annotated[str | None, Needs("chat_template", why="drop it, or --no-chat-template")] = None
    """system message; None: the run's"""
    temperature: NotNegative | None = None
    """sampling temperature (0: greedy); None: the run's, else 1"""
    max_new_tokens: Count | None = None
    """maximum tokens of an answer; None: the run's, else 1024"""
    chat_template: ChatTemplate = True
    """file of a chat template; True: the run's; False: each prompt is continued as plain text (base models)"""
    template_args: str | None = None
    """JSON object of further arguments of the chat template; None: the run's"""
    device: str | None = None
    """cpu, cuda or mps (untested). None: cuda if there is a GPU, else cpu"""

    def __post_init__(self) -> None:
        check(self, may_be_empty=("system_prompt",))
        for name in ("prompt", "system_prompt"):
            text = getattr(self, name) or ""
            locale = sys.getfilesystemencoding()
            why = "" if locale == "utf-8" else f"; the locale is {locale}: set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
            refuse_if(not is_text(text), f"`{name}` is not UTF-8 text: {text[:60]!a}{why}")


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: a pipe or a file may hold halves of surrogate pairs."""
    return text == text.encode(errors="replace").decode()


@dataclass
class Chat:
    """A conversation with a model. `live` prints tokens as they are sampled, and keeps the history.

    It is also the tokenizer of its engine, which decodes after each token to look for stop strings.
    """

    tokenizer: Any
    data: Data
    params: SamplingParams
    live: bool
    engine: Any = None
    turns: list[dict[str, str]] = field(default_factory=list)
    printed: str = ""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        """Show the new text; "" without a stop string, so that the engine passes all tokens the next time too."""
        self.show(ids)
        text = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text if any(stop in text for stop in self.params.stop) else ""

    def show(self, ids: list[int], *, end: bool = False) -> None:
        """Print what `ids` add to the answer, except an incomplete character; at the end print everything."""
        from rlkit.data.markup import markup_of

        markup = markup_of(self.tokenizer)
        body = markup.without_end(ids)
        text = self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = markup.without_opener(text)
        if end or (self.live and not text.endswith("\ufffd")):
            write(text[len(self.printed) :] + "\n" * end)
            self.printed = text

    def ask(self, prompt: str) -> None:
        """Print the answer and add both to the conversation; ValueError for a prompt that is too long."""
        from rlkit.data.markup import markup_of

        self.turns.append({"role": "user", "content": prompt})
        self.printed = opened = ""
        if not is_text(prompt):
            raise ValueError(f"the prompt is not UTF-8 text: {prompt[:60]!a}")
        try:
            ids = self.tokens()
            opened = markup_of(self.tokenizer).opened_by(ids)
            done = asyncio.run(self.engine.generate(ids, params=self.params))
            self.show(done.ids, end=True)
            if self.live and done.finish_reason == "length":
                write(f"(stopped after {len(done.ids)} tokens)\n")
        except KeyboardInterrupt:
            if not self.live:
                raise
            write("\n")
        self.turns.append({"role": "assistant", "content": opened + self.printed})
        if not (self.live and self.data.chat_template):
            self.turns.clear()

    def tokens(self) -> list[int]:
        """The tokens of the conversation; the oldest turns are dropped until there is room for an answer."""
        longest, dropped = self.engine.max_len, 0
        room = min(self.params.max_new_tokens, longest // 2)
        while len(ids := self.rendered()) + room > longest and len(self.turns) > 1:
            del self.turns[:2]
            dropped += 1
        if len(ids) >= longest:
            raise ValueError(f"the prompt has {len(ids)} tokens, and the model {longest} positions: shorten it")
        if dropped:
            write(f"(dropped {dropped} of the oldest turns: the model has {longest} positions)\n")
        return ids

    def rendered(self) -> list[int]:
        """The tokens of all turns; without a chat template those of the prompt."""
        from rlkit.data.chat import encode_all, render

        if not self.data.chat_template:
            return encode_all(self.tokenizer, [self.turns[-1]["content"]], ready_made=True)[0]
        system = [{"role": "system", "content": self.data.system_prompt}] if self.data.system_prompt is not None else []
        args = self.data.template()
        with template_errors():
            return render(self.tokenizer, [*system, *self.turns], add_generation_prompt=True, template_args=args)


def main(args: Args) -> None:
    """Answer `--prompt`, the lines of a pipe, or what is typed in the terminal."""
    folder, live = Path(args.run), args.prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    saved = kept_flags(folder)
    template = saved.get("chat_template", True) if args.chat_template is True else args.chat_template
    flags = {name: value for name, value in vars(args).items() if value is not None}
    of_template = ("system_prompt", "template_args") if template is False else ()  # the run's have no place then
    options = {name: value for name, value in saved.items() if name not in of_template}
    options |= {**flags, "chat_template": template}
    warn_of_unusual(flags)
    rendering = {n: options[n] for n in ("system_prompt", "template_args", "chat_template") if n in options}
    data = Data("-", **rendering)
    if not saved and not (folder / "model" / "config.json").is_file():
        check_model_path(args.run)  # before torch is loaded
    model, tokenizer = load(folder, saved, device=args.device)
    from rlkit.data.chat import stop_token_ids
    from rlkit.data.template_files import set_template
    from rlkit.rollout.engines.local import LocalEngine

    if isinstance(args.chat_template, str):
        set_template(tokenizer, args.chat_template)
    with template_errors():
        ends = stop_token_ids(tokenizer, model.config, model.generation_config) if data.chat_template else ()
    ends = (*ends, *saved.get("stop_token_ids", ()))
    sampling = {n: options[n] for n in SAMPLING if n in options}
    stop = tuple(saved.get("stop", ())) or ("\0",)  # the engine decodes only where there is a stop string
    chat = Chat(tokenizer, data, SamplingParams(**sampling, stop=stop, stop_token_ids=ends), live)
    chat.engine = LocalEngine(model, tokenizer=chat, max_batch=1, keep_turns=True, seed=int.from_bytes(os.urandom(4)))
    if live:
        return talk(chat)
    for line in filter(str.strip, sys.stdin if args.prompt is None else [args.prompt]):
        chat.ask(line.rstrip("\n"))
    return None


@contextmanager
def template_errors() -> Iterator[None]:
    """ValueError for a chat template that fails, or that reaches for Python, which its sandbox refuses."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise ValueError(f"the model's chat template cannot be rendered: {type(error).__name__}: {error}") from None


def talk(chat: Chat) -> None:
    """Answer what is typed, until Ctrl-D or an empty line."""
    with suppress(ImportError):
        import readline  # noqa: F401  `input` then edits lines and has a history
    write("Ctrl-C stops an answer, Ctrl-D or an empty line ends.\n")
    while True:
        try:
            if not (line := input("> ")).strip():
                return None
            chat.ask(line)
        except KeyboardInterrupt:
            write("\n")
        except EOFError:
            return write("\n")
        except ValueError as error:
            chat.turns.pop()
            write(f"error: {error}\n")


def kept_flags(folder: Path) -> dict[str, Any]:
    """The flags in the folder's args.json, {} without one; ValueError, with the file, for what no run writes."""
    path, saved = folder / "args.json", read_args(folder)
    for name, kind in TYPES.items():
        if name in saved and not (isinstance(saved[name], kind) and is_text(str(saved[name]))):
            raise ValueError(f"{path} is damaged: {name} is {str(saved[name])[:60]!r}")
    for name, kind in (("stop", str), ("stop_token_ids", int)):
        if not all(isinstance(x, kind) for x in saved.get(name, ())):
            raise ValueError(f"{path} is damaged: {name} is {str(saved[name])[:60]!r}")
    return saved


def base_in(folder: Path, saved: Mapping[str, Any]) -> str:
    """The model that the run in the folder trains: that of its flags, or with `yarn` the one in the folder."""
    from rlkit.model.yarn import EXTENDED

    return str(folder / EXTENDED if saved.get("yarn") else saved["model"])


def chosen_device(device: str | None) -> str:
    """The device, or the one that None stands for."""
    import torch

    from rlkit.model.launch import choose_device

    return choose_device(device, "fp32", cuda=torch.cuda.is_available(), bf16=False)[0]


def load(folder: Path, saved: dict[str, Any], *, device: str | None) -> tuple[Any, Any]:
    """The model and its tokenizer: of the run folder with the flags `saved`, or of another folder or hub id."""
    from rlkit.data.template_files import KEPT, read_template
    from rlkit.data.vocabulary import vocabulary_size
    from rlkit.model.checkpoint import latest_checkpoint, load_checkpoint
    from rlkit.model.launch import load_policy
    from rlkit.model.pretrained import load_tokenizer

    check_device(device)
    device = chosen_device(device)
    exported = (folder / "model" / "config.json").is_file()
    if exported or not saved:
        path = str(folder / "model" if exported else folder)
        return load_policy(path, ParallelArgs(), device=device), load_tokenizer(path)
    newest = latest_checkpoint(folder / "checkpoints")
    if newest is None or "critic_lr" in saved or saved.get("ref_sync_steps") or saved.get("teacher_ema"):
        fault = "no model/ yet, and no checkpoint of the policy alone: wait for the run's end, or resume it (--resume)"
        if saved.get("steps") == 0:
            fault = f"nothing was trained there (--steps 0): talk to its model, rlkit chat {saved.get('model')}"
        raise FileNotFoundError(errno.ENOENT, fault, str(folder))
    of_lora = ("lora_rank", "lora_targets", "lora_alpha", "lora_base", "adapter")
    lora: dict[str, Any] = {name: saved[name] for name in of_lora if name in saved}
    path = base_in(folder, saved)
    tokenizer = load_tokenizer(Model(path, adapter=saved.get("adapter")).tokenizer)
    if saved.get("resize_embeddings"):
        lora["min_rows"] = vocabulary_size(tokenizer)
    model = load_policy(path, ParallelArgs(), device=device, **lora)
    load_checkpoint(newest, model=model, optimizer=None)
    sys.stderr.write(printable(f"{folder} has no model/ yet: this is its checkpoint {newest.name}\n"))
    if isinstance(saved.get("chat_template"), str):
        tokenizer.chat_template = read_template(folder / KEPT)[0]
    return model, tokenizer


def write(text: str) -> None:
    """Write to stdout at once; end where its reader is gone (`| head -1`).

    A terminal gets control characters as escapes: a model could otherwise write its title or its clipboard.
    """
    try:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise SystemExit(1) from None


if __name__ == "__main__":
    run(main, Args, __doc__)
