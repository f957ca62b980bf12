"""A settings object refuses values of another type than its field's when it is made, naming the field."""

import re
from pathlib import Path

import numpy as np
import pytest

from rlkit.settings import Critic, Optim, Parallel, Penalties, Rollouts, SamplingParams, Schedule

WRONG = [
    (SamplingParams, {"stop": "</answer>"}, "`stop` must be a tuple, each a string, got '</answer>'"),
    (SamplingParams, {"stop_token_ids": 5}, "`stop_token_ids` must be a tuple, each an integer, got 5"),
    (SamplingParams, {"temperature": "1.0"}, "`temperature` must be a number, got '1.0'"),
    (SamplingParams, {"max_new_tokens": 3.0}, "`max_new_tokens` must be an integer, got 3.0"),
    (Rollouts, {"overlap": "false"}, "`overlap` must be True or False, got 'false'"),
    (Rollouts, {"group_size": 2.0}, "`group_size` must be an integer, got 2.0"),
    (Rollouts, {"group_size": "2"}, "`group_size` must be an integer, got '2'"),
    (Rollouts, {"group_size": True}, "`group_size` must be an integer, got True"),
    (Rollouts, {"stop": ("a", 1)}, "`stop` must be a tuple, each a string"),
    (Rollouts, {"staleness": "1"}, "`staleness` must be a number or None, got '1'"),
    (Optim, {"lr": "1e-6"}, "`lr` must be a number, got '1e-6'"),
    (Optim, {"lr": None}, "`lr` must be a number, got None"),
    (Optim, {"dtype": "float32"}, "`dtype` must be 'fp32' or 'bf16' or None, got 'float32'"),
    (Optim, {"lr_at": 1e-6}, "`lr_at` must be a function or None, got 1e-06"),
    (Schedule, {"output": "x", "steps": 1.0}, "`steps` must be an integer, got 1.0"),
    (Schedule, {"output": None, "steps": 1}, "`output` must be a path, got None"),
    (Penalties, {"kl_coef": "0.1"}, "`kl_coef` must be a number, got '0.1'"),
    (Penalties, {"controllers": 3}, "`controllers` must be a mapping, got 3"),
    (Critic, {"bootstrap": 1}, "`bootstrap` must be True or False, got 1"),
    (Parallel, {"tp": 2.0}, "`tp` must be an integer, got 2.0"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), WRONG, ids=lambda x: getattr(x, "__name__", None))
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(kind, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**fields)


def test_ints_numpy_numbers_lists_and_path_strings_are_taken():
    rollouts = Rollouts(group_size=np.int64(4), temperature=np.float32(0.5), top_p=1, stop=["a"])
    assert (rollouts.group_size, rollouts.params.temperature, rollouts.params.stop) == (4, 0.5, ["a"])
    assert Schedule("runs/x", steps=np.int32(3)).output == Path("runs/x")
    assert Optim(lr=1, lr_at=None).lr == 1
