"""The embedded engine refuses models whose attention is not causal: their log-probs would depend on later tokens."""

import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

sys.path.append(str(Path(__file__).parents[1] / "model"))
from model_types import config_of

from rlkit.model.families import is_causal
from rlkit.model.small_copy import shrunk
from rlkit.rollout.engines.local import LocalEngine

ENCODERS = [
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
]  # fmt: skip
NOW = ("bert", "roformer", "qwen3", "mamba")


def built(model_type, **changes):
    """A small random model of the type, with transformers' own initial weights."""
    config = shrunk(config_of(model_type))
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.slow_cases("roformer")
@pytest.mark.parametrize("model_type", [n if n in NOW else pytest.param(n, marks=pytest.mark.slow) for n in ENCODERS])
def test_an_encoder_is_refused_and_the_same_model_as_a_decoder_is_not(model_type):
    model = built(model_type)
    assert not is_causal(model)
    with pytest.raises(ValueError, match=rf"\(model type '{model_type}'\) cannot sample: its attention is not causal"):
        LocalEngine(model, max_len=32)
    LocalEngine(built(model_type, is_decoder=True), max_len=32)


@pytest.mark.parametrize("max_len", [2, 3, 9])
@pytest.mark.parametrize("model_type", ["qwen3", "mamba"])
def test_causal_models_are_served_at_any_length(model_type, max_len):
    """Also those without a cache that rlkit knows."""
    LocalEngine(built(model_type), max_len=max_len)
