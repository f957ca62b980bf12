"""Every causal model type of transformers is trained as its own forward says, packed or not; others are refused."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from pathlib import Path

import nightly
import pytest
import torch
import transformers as hf
from model_types import FAMILIES, MODEL_TYPES, config_of, use, verdict
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit.model import families
from rlkit.model.forward import forward, load_model, prepare_model
from rlkit.model.heads import load_reward_model, load_value_model, values
from rlkit.model.small_copy import shrunk
from rlkit.model.vision import auto_class
from rlkit.packing import pack
from rlkit.parallel.attention import IMPLEMENTATION
from rlkit.types import Trajectory

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
IN_CI = [name for names in FAMILIES.values() for name in names]
SIZES = dict(
    vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def groups(seed=7):
    """Other lengths than those of rlkit's own check, and other tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, 64, (n,), generator=generator).tolist()
    out = []
    for prompt_len, lens in [(1, [1]), (8, [2, 9]), (3, [6, 1, 4])]:
        prompt = draw(prompt_len)
        out.append([Trajectory(prompt, draw(n), [True] * n, [0.0] * n, [0] * n) for n in lens])
    return out


def randomized(model, std=0.2):
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=std) if p.ndim > 1 else p.add_(std * torch.randn_like(p))
    return model.eval()


def compare(model, samples):
    """The largest difference of the packed log-probs from the model's own forward, one sequence at a time."""
    true = []
    with torch.no_grad():
        for t in (t for group in samples for t in group):
            ids = torch.tensor([t.prompt_ids + t.ids])
            logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            true += [logp[len(t.prompt_ids) - 1 + i, x] for i, x in enumerate(t.ids)]
        prepare_model(model)
        batches = [pack(samples, share_prompts=share) for share in (True, False)]
        found = [forward(model, batch).logp[batch.mask] for batch in batches]
    assert torch.stack(true).std() > 0.03, "the weights are too small to tell"
    return max(float((x - torch.stack(true)).abs().max()) for x in found)


def check(model_type):
    """Trained and equal, packed or not, or refused in one line that names it; the verdict."""
    found = verdict(model_type)
    if found.status == "not built":
        return found
    torch.manual_seed(3)
    small = config_of(model_type) if found.status == "refused" else shrunk(config_of(model_type))
    if found.status == "refused":
        with pytest.raises(ValueError, match=f"^model type '{small.model_type}' cannot be trained: [^\n]+$"):
            _ = families.check_causal_lm(small), families.check_architecture(small, forward)
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = randomized(auto_class(small).from_config(small, dtype=torch.float32, attn_implementation="eager"))
        assert compare(model, groups()) < 1e-4
    packed = model.config.get_text_config()._attn_implementation == IMPLEMENTATION
    assert packed == (found.status == "packed")
    return found


@pytest.mark.slow_cases("jamba", "llama4_text", "nemotron_h", "qwen2_5_vl", "qwen3_5", "deepseek_v3", "gemma4_text")
@pytest.mark.parametrize("model_type", nightly.only(IN_CI, *IN_CI[::2]))
def test_a_model_of_each_kind_is_its_own_forward_or_refused(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    found, how = check(model_type), page()
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{model_type}` |"))
    cells = dict(zip(how.HEAD, (cell.strip() for cell in line.split("|")[1:-1]), strict=True))
    told = cells["trained"], cells["images"], cells["reason"]
    assert told == (found.status, found.images, found.reason), "run python docs/make_models.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_model_type_is_its_own_forward_or_refused_and_the_page_says_so():
    verdicts = {name: check(name) for name in MODEL_TYPES}
    assert sum(v.status in ("packed", "unpacked") for v in verdicts.values()) >= 140
    if f"models of transformers {hf.__version__}," in PAGE.read_text():
        uses = {name: use(name, found) for name, found in verdicts.items()}
        assert PAGE.read_text() == page().page(verdicts, uses), "run python docs/make_models.py"


def test_the_text_of_the_page_is_that_of_its_script():
    for part in re.split(r"\{\w+\}", page().PAGE):
        assert part in PAGE.read_text(), "change docs/make_models.py, and run it"


def page():
    spec = importlib.util.spec_from_file_location("make_models", PAGE.parent / "make_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow_cases("qwen3_next")
@pytest.mark.parametrize("model_type", ["qwen3_next", "bloom"])
def test_a_model_with_one_label_is_its_own_forward_too(model_type, tmp_path):
    """`load_value_model` and `load_reward_model` compare their numbers with the model's own, or raise."""
    bloom = model_type == "bloom"  # unpacked; its critics have another head
    sizes = dict(hidden_size=32, n_head=4, n_layer=2, vocab_size=67) if bloom else SIZES | LINEAR | EXPERTS
    torch.manual_seed(0)
    randomized(hf.AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes))).save_pretrained(tmp_path)
    for load in (load_reward_model,) if bloom else (load_value_model, load_reward_model):
        model, batch = load(tmp_path), pack(groups())
        with torch.no_grad():
            model.score.weight.normal_()
        assert values(model, batch).std() > 0.03


def test_a_critic_of_a_type_without_a_class_for_it_is_refused(tmp_path):
    hf.GraniteConfig(**SIZES).save_pretrained(tmp_path)  # no weights
    with pytest.raises(ValueError, match="model type 'granite' has no class in transformers"):
        load_value_model(tmp_path)


@pytest.mark.slow_cases("llama4_text-its layers of type 'chunked_attention' have no packed form")
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bart", "takes no position_ids"),
        ("bloom", "not transformers' AttentionInterface"),
        ("modernbert-decoder", "its logits are not the product of the last hidden states and one matrix"),
        ("llama4_text", "its layers of type 'chunked_attention' have no packed form"),
    ],
)
def test_a_warning_says_once_why_a_model_is_trained_unpacked(model_type, why, checked, caplog):
    model = hf.AutoModelForCausalLM.from_config(shrunk(config_of(model_type)))
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        prepare_model(prepare_model(model))
    (said,) = caplog.messages
    assert said.startswith(f"model type '{model_type}' is trained unpacked: ")
    assert re.search(why, said)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("bert", "its attention is not causal"), ("t5", "transformers has no causal language model of this type")],
)
def test_a_refusal_says_why_in_one_line(model_type, why, tmp_path):
    config_of(model_type).save_pretrained(tmp_path)  # no weights
    with pytest.raises(ValueError, match=f"^model type '{model_type}' cannot be trained: [^\n]*{why}[^\n]*$"):
        load_model(tmp_path)


def test_a_model_that_was_not_prepared_is_refused():
    model = hf.AutoModelForCausalLM.from_config(hf.Starcoder2Config(**SIZES))
    with pytest.raises(
        ValueError, match=r"Starcoder2ForCausalLM is not set up for training: pass `prepare_model\(model\)`"
    ):
        forward(model, pack(groups()))


class LeakyConfig(hf.LlamaConfig):
    model_type = "leaky"


class LeakyLayer(nn.Module):
    """A causal convolution over two tokens, after the layer: it reads across the ends of packed sequences."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, **options):
        out = self.layer(hidden_states, **options)
        return out + 0.5 * torch.cat((torch.zeros_like(out[:, :1]), out[:, :-1]), 1)


class LeakyForCausalLM(hf.LlamaForCausalLM):
    config_class = LeakyConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(LeakyLayer(x) for x in self.model.layers)


@pytest.mark.parametrize("std", [0.2, 1e-4])
def test_a_leak_between_sequences_is_found_at_any_size_of_the_weights(std, checked):
    """The first sequence of a pack is right, and at small weights so are all, up to a tolerance."""
    torch.manual_seed(0)
    model = prepare_model(LeakyForCausalLM(LeakyConfig(**SIZES, initializer_range=std)))
    assert not families.runs_packed(model)


def test_sequences_past_the_limit_of_their_rotary_frequencies_are_refused():
    """Frequencies of longrope follow the longest sequence of the pack: the short ones would get the long one's."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    rope = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=14, **factors)
    config = hf.Phi3Config(**SIZES | dict(original_max_position_embeddings=14), rope_parameters=rope)
    config.max_position_embeddings = 56
    torch.manual_seed(0)
    model = randomized(hf.Phi3ForCausalLM(config))
    short, one = groups()[:1] + groups()[2:], groups()[1:2]  # up to 9 tokens; 10 and 17
    assert compare(model, short) < 1e-4
    with pytest.raises(ValueError, match=r"of a batch is 16, and the model has 14 positions: .* replace longrope"):
        forward(model, pack([*short, *one]))


def test_a_small_copy_keeps_a_layer_of_each_kind_and_what_the_maths_reads():
    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    big = dict(num_hidden_layers=12, hidden_size=2048, num_attention_heads=32, vocab_size=150_000)
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
    small = shrunk(
        hf.Qwen2Config(
            **big, num_key_value_heads=4, layer_types=layers, use_sliding_window=True, sliding_window=4096,
            tie_word_embeddings=True, rope_parameters=yarn,
        )
    )  # fmt: skip
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert small.sliding_window == 4
    assert small.num_attention_heads == 2 * small.num_key_value_heads == 4
    assert small.tie_word_embeddings
    assert small.rope_parameters == yarn
    assert hf.Qwen2ForCausalLM(small).num_parameters() < 100_000
    single = shrunk(hf.LlamaConfig(**big, num_key_value_heads=1))
    assert (single.num_key_value_heads, single.num_hidden_layers) == (1, 2)
    gemma = shrunk(hf.Gemma2Config(attn_logit_softcapping=50.0, final_logit_softcapping=None))
    assert (gemma.attn_logit_softcapping, gemma.final_logit_softcapping) == (2.0, None)
    moe = hf.AutoModelForCausalLM.from_config(shrunk(hf.Qwen3MoeConfig(**big, mlp_only_layers=[0], num_experts=64)))
    assert {type(x.mlp).__name__ for x in moe.model.layers} == {"Qwen3MoeMLP", "Qwen3MoeSparseMoeBlock"}


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """An empty cache on the disk and in the process; its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(families, "_proven", {})
    monkeypatch.setattr(families, "_unpacked", {})
    return tmp_path / "cache" / "rlkit" / "checked"


def test_a_verdict_is_kept_for_the_next_process(checked, monkeypatch):
    assert families.check_architecture(hf.LlamaConfig(**SIZES), forward)
    (file,) = checked.iterdir()
    monkeypatch.setattr(families, "_proven", {})
    monkeypatch.setattr(families, "_built", lambda *_: pytest.fail("it was checked again"))
    assert families.check_architecture(hf.LlamaConfig(**SIZES), forward)
    file.write_text('{"model_type": "llama", "packed": "equal"}')  # of another version
    families._proven.clear()
    monkeypatch.setattr(families, "_built", lambda *_: None)
    assert not families.check_architecture(hf.LlamaConfig(**SIZES), forward)
    file.unlink()
    monkeypatch.setattr(families, "_built", lambda *_: None)
    assert not families.check_architecture(hf.LlamaConfig(**SIZES), forward)


def test_only_verdicts_are_kept_and_of_each_architecture_its_own(checked, monkeypatch):
    for _ in range(2):
        with pytest.raises(ValueError, match="not causal"):
            families.check_architecture(config_of("bert"), forward)
    assert not checked.exists()
    assert families.check_architecture(hf.LlamaConfig(**SIZES), forward).packed
    assert families.check_architecture(hf.LlamaConfig(**SIZES, attention_bias=True), forward).packed
    monkeypatch.setattr(families, "_source", lambda: 0)  # another version of the code
    assert families.check_architecture(hf.LlamaConfig(**SIZES), forward).packed
    assert len(list(checked.iterdir())) == 3
    found = families.check_architecture(config_of("modernbert-decoder"), forward)
    monkeypatch.setattr(families, "_proven", {})
    monkeypatch.setattr(families, "_built", lambda *_: pytest.fail("it was checked again"))
    assert families.check_architecture(config_of("modernbert-decoder"), forward) == found
    assert not found.packed
    assert found.logits


def test_a_cache_that_cannot_be_written_is_no_error(checked):
    checked.parents[1].write_text("a file where the folder should be")
    assert families.check_architecture(hf.LlamaConfig(**SIZES), forward)


def test_the_check_leaves_random_numbers_and_the_model_as_they_were(checked):
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    before, weights = torch.get_rng_state(), {n: p.clone() for n, p in model.named_parameters()}
    prepare_model(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    assert model.config.num_attention_heads == SIZES["num_attention_heads"]


def test_a_model_whose_own_forward_fails_is_refused():
    config = hf.XmodConfig(**SIZES | dict(hidden_size=32, is_decoder=True))  # it wants a language to be set
    with pytest.raises(
        ValueError, match="'xmod' cannot be trained: its own forward fails on plain text: Input language"
    ):
        prepare_model(hf.XmodForCausalLM(config))


def test_without_a_small_copy_the_model_is_checked_at_full_size(checked, monkeypatch, caplog):
    monkeypatch.setattr(families, "_MAX_SIZE", 1)
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        prepare_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)))
    assert "'llama'" in caplog.text
    assert "checked at full size" in caplog.text
    assert not checked.exists()
    prepare_model(LeakyForCausalLM(LeakyConfig(**SIZES, initializer_range=0.2)))
    assert "'leaky' is trained unpacked: its packed log-probs differ" in caplog.text
