"""Render a chat template once under limits of time and memory. A script of the standard library and Jinja.

    python -I template_trial.py < '{"template": ..., "args": {...}, "seconds": ..., "memory": ...}'

It prints nothing for a template that ends within the limits, whether or not it writes these conversations, else what
it exceeded. A limit of processor time ends it by a signal. The environment is that of transformers, see
`transformers.utils.chat_template_utils`.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

MAX_TEXT = 4 << 20  # characters that a template may write of a conversation of a few words

_TOOL = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
_ASKED = [{"role": "user", "content": "a"}]
_SAID = [*_ASKED, {"role": "assistant", "content": "b"}, *_ASKED]
_CALLED = [*_ASKED, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, {"role": "tool", "content": "c"}]
_TOLD = [{"role": "system", "content": "d"}, *_SAID]
_CONVERSATIONS = ((_ASKED, None), (_SAID, None), (_TOLD, None), (_CALLED, [_TOOL]))


def main() -> None:
    """Read the template, set the limits and report what it exceeds."""
    spec = json.load(sys.stdin)
    sys.stdout.write(exceeded(spec))


def exceeded(spec: dict[str, Any]) -> str:
    """What the template exceeds; "" for nothing."""
    import resource  # not on Windows

    for kind, most in ((resource.RLIMIT_AS, spec["memory"]), (resource.RLIMIT_CPU, spec["seconds"])):
        resource.setrlimit(kind, (math.ceil(most), math.ceil(most)))
    try:
        template = _environment().from_string(spec["template"])
        special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        for messages, tools in _CONVERSATIONS:
            size = 0
            try:
                for part in template.generate(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=True, **special | spec["args"]
                ):
                    size += len(part)
                    if size > MAX_TEXT:
                        return f"writes more than {MAX_TEXT:,} characters"
            except (RecursionError, OverflowError, MemoryError):
                raise
            except Exception:  # any of the template: it is reported where a row is rendered
                continue
    except MemoryError:
        return f"needs more than {spec['memory'] >> 20} MiB of memory"
    except RecursionError:
        return "calls itself without end"
    except OverflowError as error:
        return f"fails: {error}"
    except Exception:  # a template that does not parse is reported there, too
        return ""
    return ""


def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return str(caller())

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    def refuse(message: str) -> None:
        raise ValueError(message)

    from datetime import datetime

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    jinja.filters["tojson"] = tojson
    jinja.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return jinja


if __name__ == "__main__":
    main()
