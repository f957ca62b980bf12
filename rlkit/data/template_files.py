"""Chat templates from files, for models that come without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit._util import untrusted
from rlkit.data.chat import render_text
from rlkit.data.markup import markup_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ChatTemplate = str | dict[str, str]  # Jinja, or several by name ("default", "tool_use")

KEPT = "chat_template.json"  # of a run folder
_IN_FOLDER = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_ASKED, _SAID = "placeholder of a question", "placeholder of an answer"  # not markup in any template


def set_template(tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Give the tokenizer the chat template of a file or folder, after rendering one question and answer with it.

        tokenizer = AutoTokenizer.from_pretrained("my/base-model")
        set_template(tokenizer, "chatml.jinja")                # a Jinja file, see `read_template` for others
        tokenizer.save_pretrained("out")                       # has the template, as every export of rlkit

    Logs a warning where no special token ends the assistant's turn, and where the template leaves out the bos token
    that the tokenizer puts before every text (`Markup.report`).

    Errors: those of `read_template`; ValueError, with the file and its line where Jinja tells it, for a template that
    does not parse or fails, leaves out what the user or the assistant says, or writes something before an answer that
    it does not write as generation prompt. The tokenizer is unchanged then.
    """
    template, file = read_template(path)
    before = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        _check(tokenizer, file)
    except ValueError:
        tokenizer.chat_template = before
        raise


def read_template(path: str | Path) -> tuple[ChatTemplate, Path]:
    """The template of a file, and the file that has it.

    A `.json` file is a `tokenizer_config.json` or `chat_template.json`, any other one Jinja. Of a folder (a model, a
    tokenizer or a run) the first of chat_template.jinja, chat_template.json and tokenizer_config.json that has one.

    Errors: FileNotFoundError for a path that does not exist; ValueError for a file or folder without a template.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        for file in (path / name for name in _IN_FOLDER):
            if file.is_file() and (template := _of_file(file)):
                extras = path.glob("additional_chat_templates/*.jinja")
                more = {extra.stem: untrusted.read(extra, "template_mib").decode() for extra in extras}
                return ({"default": template, **more} if more and isinstance(template, str) else template), file
        raise ValueError(f"{path}: none of {', '.join(_IN_FOLDER)} in this folder has a chat template")
    if not path.is_file():
        fix = "without --chat-template the model's own is used"
        raise FileNotFoundError(f"{path}: no such file of a chat template (looked for {path.absolute()}); {fix}")
    if not (template := _of_file(path)):
        raise ValueError(f"{path}: there is no chat template in this file")
    return template, path


def keep_template(folder: Path, template: ChatTemplate) -> bool:
    """Write the template to a run folder, if it is not there already; whether another one was there."""
    from rlkit._util.files import replace_file

    file = folder / KEPT
    before = _of_file(file) if file.is_file() else None
    if before != template:
        named: Any = template
        if isinstance(template, dict):
            named = [{"name": name, "template": text} for name, text in template.items()]
        replace_file(file, (json.dumps({"chat_template": named}, indent=1) + "\n").encode())
    return before not in (None, template)


def _of_file(file: Path) -> ChatTemplate | None:
    """The template of a file; None for one without."""
    try:
        text = untrusted.read(file, "template_mib").decode()
        if file.suffix.lower() != ".json":
            if text.strip().startswith('"') and _is_json_text(text):
                raise ValueError("it is quoted as in JSON; write it without the quotes, and its \\n as line breaks")
            return text if text.strip() else None
        config = untrusted.loads(text, file)
    except untrusted.BadFile:
        raise
    except ValueError as error:
        raise ValueError(f"{file}: cannot be read as a chat template: {error}") from None
    value = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(value, list):
        value = {str(item.get("name")): item.get("template") for item in value if isinstance(item, dict)}
    texts = [*value.values()] if isinstance(value, dict) else [] if value is None else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{file}: chat_template must be text, or a list of {{name, template}}, got {repr(value)[:80]}")
    return value or None


def _is_json_text(text: str) -> bool:
    try:
        return isinstance(untrusted.loads(text), str)
    except ValueError:
        return False


def _check(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    user, assistant = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}
    asked = _rendered(tokenizer, [user], file, opened=False)
    opened = _rendered(tokenizer, [user], file, opened=True)
    answered = _rendered(tokenizer, [user, assistant], file, opened=False)
    for text, mark, who in ((opened, _ASKED, "user"), (answered, _SAID, "assistant")):
        if mark not in text:
            raise ValueError(f"{file}: the chat template does not write the content of the {who}'s message: {text!r}")
    opener = answered.rpartition(_SAID)[0]
    if asked == opened and opener.strip() != opened.strip():
        written = opener.removeprefix(opened) if opener.startswith(opened) else opener[-80:]
        raise ValueError(
            f"{file}: the chat template has no generation prompt: it writes {written!r} before an answer, and nothing "
            "with add_generation_prompt; end it with {% if add_generation_prompt %}...{% endif %}"
        )
    markup_of(tokenizer).report(str(file))


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Any], file: Path, *, opened: bool) -> str:
    from jinja2 import TemplateSyntaxError

    try:
        return render_text(tokenizer, messages, add_generation_prompt=opened)
    except TemplateSyntaxError as error:
        raise ValueError(f"{_at(file, error.lineno)}: the chat template does not parse: {error.message}") from None
    except Exception as error:
        line, trace = None, error.__traceback__
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == "<template>" else line
            trace = trace.tb_next
        roles = " and an ".join(message["role"] for message in messages)
        kind, text = type(error).__name__, " ".join(str(error).split())
        raise ValueError(
            f"{_at(file, line)}: the chat template cannot write a {roles} message: {kind}: {text}"
        ) from None


def _at(file: Path, line: int | None) -> str:
    of = " of its chat_template" if file.suffix.lower() == ".json" else ""
    return str(file) if line is None else f"{file}, line {line}{of}"
