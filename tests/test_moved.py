"""Who imports a name of rlkit 0.1 that has moved is told where it is now, in one line."""

from __future__ import annotations

import importlib

import pytest

OLD = {  # import of rlkit 0.1: where it is now
    "rlkit.rewards.adapters:scorer": "in rlkit.rewards",
    "rlkit.rewards.adapters:trl": "in rlkit.compat.rewards",
    "rlkit.rollout.envs.adapters:gymnasium": "in rlkit.compat.envs",
    "rlkit.data.forms:SFT": "in rlkit.data.rows",
    "rlkit.data.forms:with_prompt": "rlkit.compat.rows.read",
    "rlkit.scripts.common:Data": "in rlkit.scripts.args",
    "rlkit.scripts.rollouts:environment": "read_reward and read_env in rlkit.scripts.task",
    "rlkit.model.forward:prepare": "prepare_model",
    "rlkit.model.forward:score": "compute_log_probs",
    "rlkit.model.parallelize:mesh_of": "in rlkit.model.sharding",
    "rlkit.kernels.linear_logp:fused_loss": "the loss of what `linear_logp` returns",
}


@pytest.mark.parametrize("old", OLD)
def test_a_name_that_has_moved_says_where_it_is(old):
    module, name = old.split(":")
    with pytest.raises(ImportError, match=f"^{module}.{name} of rlkit 0.1 is now {OLD[old]} "):
        exec(f"from {module} import {name}", {})


def test_other_names_are_missing_as_ever():
    for module in sorted({old.split(":")[0] for old in OLD}):
        found = importlib.import_module(module)
        assert not hasattr(found, "nothing")
        with pytest.raises(AttributeError):
            _ = found.__wrapped__
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'rlkit.model.forward'"):
        exec("from rlkit.model.forward import nothing", {})
