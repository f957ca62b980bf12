"""A real tokenizer and a real model, built in milliseconds, so that demos and tests need no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 263 entries with a ChatML template.

    Ids 0 to 255 are the bytes themselves, so every text is representable and `len(text.encode())` is its token count.
    Then come `<|endoftext|>` (256, padding), `<|im_start|>` (257), `<|im_end|>` (258, end of turn and eos) and one
    token for each role name, `system user assistant tool` (259 to 262), which also stands for that word in a message.

    A chat turn is `<|im_start|>`, role, newline, content, `<|im_end|>`, newline: 5 tokens around the content, and the
    generation prompt is 3 more. The user message "394215" renders to 14 tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # a printable byte is itself, each other one is past 255
    others = iter(symbol for symbol in symbols if ord(symbol) > 255)
    vocab = {chr(byte) if chr(byte) in symbols else next(others): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 512,
    tie_word_embeddings: bool = False,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """A random `Qwen3ForCausalLM` in fp32 on the CPU, with the tokenizer's vocabulary, eos and padding ids.

    The defaults give 1.05 M parameters. The weights depend on `seed` only; the global random state is unchanged.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def tiny_vision_model(folder: Path, *, hidden: int = 96, layers: int = 3, seed: int = 0) -> None:
    """Write a random Qwen3-VL of 0.8 M weights, with its tokenizer and image processor, to a folder.

    Pictures keep their size, in multiples of 8 pixels; 8 x 8 pixels are one token.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = tiny_tokenizer()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks], special_tokens=True)
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, marks)
    text = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 4 * hidden, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,  # as transformers always has it; servers read it
        },
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    seen = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 256, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": hidden, "num_position_embeddings": 256, "deepstack_visual_indexes": [1],
    }  # fmt: skip
    ids: dict[str, Any] = {"vision_start_token_id": start, "vision_end_token_id": end}
    ids |= {"image_token_id": image, "video_token_id": video}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=seen, **ids))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=65536).save_pretrained(folder)
