"""Small tokenizers with the chat templates of families of models, shortened to what they write around messages."""

import json
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """`special` tokens, further `added` ones, the chat template, and what is true of them.

    `adds_bos`: the tokenizer puts bos before a text. `folder_eos`: of generation_config.json. `end` ends a turn, and
    `opened` is what the generation prompt opens, `closed` what stands between an answer and its end.
    """

    special: tuple[str, ...]
    template: str | None
    end: str
    eos: str
    bos: str | None = None
    adds_bos: bool = False
    added: tuple[str, ...] = ()
    folder_eos: tuple[str, ...] = ()
    opened: str = ""
    closed: str = ""
    writes_end: bool = True


def _turns(start: str, close: str, prompt: str, *, before: str = "", assistant: str = "") -> str:
    said = "{% if m.role == 'assistant' %}" + assistant + "{% endif %}" if assistant else ""
    return (
        f"{before}{{% for m in messages %}}{start}{said}{{{{ m.content }}}}{close}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


_CHATML = _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n")
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADER = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
_LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} </s>"
    "{% else %}{{ bos_token }}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
)
_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_GLM = _turns("<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n", "", "<|assistant|>\n", before="[gMASK]<sop>")
_GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_COMMAND = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    '{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{"tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}]<|END_ACTION|>'
    "{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    "{% else %}<|{{ 'USER' if m.role == 'user' else 'SYSTEM' }}_TOKEN|>{{ m.content }}{% endif %}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
_GLM_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GEMMA = _turns(
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n", "<end_of_turn>\n",
    "<start_of_turn>model\n", before="{{ bos_token }}",
)  # fmt: skip

FAMILIES = {
    "qwen2.5": Family(_IM, _CHATML, "<|im_end|>", "<|im_end|>", added=("<tool_call>", "</tool_call>")),
    "qwen3": Family(
        _IM, _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n",
                    assistant="{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"),
        "<|im_end|>", "<|im_end|>", added=("<think>", "</think>"), folder_eos=("<|im_end|>", "<|endoftext|>"),
    ),
    "qwen3.5": Family(
        _IM, _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n<think>\n",
                    assistant="<think>\n\n</think>\n\n"),
        "<|im_end|>", "<|im_end|>", added=("<think>", "</think>"), opened="<think>\n",
    ),
    "llama2": Family(("<s>", "</s>"), _LLAMA2, "</s>", "</s>", bos="<s>", adds_bos=True),
    "llama3": Family(
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|eom_id|>"),
        _turns(_HEADER, "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", before="{{ bos_token }}"),
        "<|eot_id|>", "<|end_of_text|>", bos="<|begin_of_text|>", adds_bos=True,
        folder_eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "mistral": Family(("<s>", "</s>", "[INST]", "[/INST]"), _MISTRAL, "</s>", "</s>", bos="<s>", adds_bos=True),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), _GEMMA, "<end_of_turn>", "<eos>", bos="<bos>",
        adds_bos=True, folder_eos=("<eos>", "<end_of_turn>"),
    ),
    "phi3": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        _turns("<|{{ m.role }}|>\n", "<|end|>\n", "<|assistant|>\n"), "<|end|>", "<|endoftext|>",
        folder_eos=("<|endoftext|>", "<|assistant|>", "<|end|>"),
    ),
    "phi4": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        _turns("<|im_start|>{{ m.role }}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
        "<|im_end|>", "<|endoftext|>",
    ),
    "zephyr": Family(  # its template has no bos, which its tokenizer adds
        ("<s>", "</s>"), _turns("<|{{ m.role }}|>\n", "</s>\n", "<|assistant|>\n"), "</s>", "</s>", bos="<s>",
        adds_bos=True,
    ),
    "deepseek-r1": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"), _R1,
        "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>", adds_bos=True,
        added=("<think>", "</think>"), opened="<think>\n",
    ),
    "glm-4.5": Family(
        _GLM_TOKENS, _GLM, "<|user|>", "<|endoftext|>", folder_eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
        writes_end=False,
    ),
    "gpt-oss": Family(
        ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>",
         "<|call|>"),
        _GPT_OSS, "<|return|>", "<|return|>", folder_eos=("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "command": Family(
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
         "<|SYSTEM_TOKEN|>", "<|END_RESPONSE|>", "<|START_RESPONSE|>"),
        _COMMAND, "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>", adds_bos=True,
        added=("<|START_ACTION|>", "<|END_ACTION|>"), closed="<|END_RESPONSE|>",
    ),
    "nemotron3": Family(
        (*_IM, "<think>", "</think>"),
        _turns("<|im_start|>{{ m.role }}\n", "<|im_end|>\n", "<|im_start|>assistant\n<think>\n",
               assistant="<think></think>"),
        "<|im_end|>", "<|im_end|>", opened="<think>\n",
    ),
    "chatml of no special tokens": Family(
        ("<|endoftext|>",), _CHATML, "<|im_end|>", "<|endoftext|>", added=("<|im_start|>", "<|im_end|>"),
    ),
    "chatml without end": Family(
        ("<|endoftext|>", "<|im_start|>"), _turns("<|im_start|>{{ m.role }}\n", "\n", "<|im_start|>assistant\n"),
        "<|endoftext|>", "<|endoftext|>", writes_end=False,
    ),
    "alpaca": Family(
        ("<s>", "</s>"), _turns("### {{ m.role }}:\n", "\n\n", "### assistant:\n"), "</s>", "</s>", bos="<s>",
        adds_bos=True, writes_end=False,
    ),
    "special tags": Family(
        (*_IM, "<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>"), _CHATML, "<|im_end|>",
        "<|im_end|>",
    ),
}  # fmt: skip


def tokenizer_of(family: Family, folder) -> PreTrainedTokenizerFast:
    """Bytes and the family's tokens, as if from `folder`, which gets its generation_config.json."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(s for s in symbols if ord(s) > 255)
    vocab = {chr(b) if chr(b) in symbols else next(others): b for b in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*family.special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    if family.adds_bos:
        pair = (family.bos, backend.token_to_id(family.bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[pair])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    if family.folder_eos:
        ids = [tokenizer.convert_tokens_to_ids(token) for token in family.folder_eos]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer.name_or_path = str(folder)
    return tokenizer
