"""Check losses, estimators and KL functions of other projects with `rlkit.testing`, and write docs/conformance.md.

    python docs/make_conformance.py --fetch --sources DIR      # downloads the packages of `RELEASES` into DIR first
    python docs/make_conformance.py --sources DIR              # DIR/PROJECT-VERSION is an unpacked package or checkout

A function, or a method of a trainer, is taken out of its file as it stands, with what it calls there, and runs with
torch and numpy alone: nothing of its project is imported. Left out are the decorators that register or compile it. A
loss is checked per token: the function that sums it over a batch is replaced (`FIXED`), or each token is a batch of its
own.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import textwrap
import zipfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conformance.md"
RELEASES = {  # of the package index
    "TRL": "1.16.0", "verl": "0.9.1", "OpenRLHF": "0.11.2", "SkyRL": "0.3.0", "AReaL": "1.0.4",
}  # fmt: skip
COMMITS = {"slime": "624b824a8", "NeMo-RL": "7ea279abf"}
_TABLE = (ROOT / "docs" / "conformance.tsv").read_text().splitlines()[1:]
MEANING = [tuple(line.split("\t")) for line in _TABLE]
INTRO = """# Other projects' losses under the laws

[`rlkit.testing`](laws.md) on functions of {versions}.
A law is a property, tested on drawn cases; a failure has the smallest case that was found, and what it means for
training. rlkit's own functions are in [laws.md](laws.md). A law that fails need not be a bug: some are choices, and the
text says so.

    python docs/make_conformance.py --fetch --sources DIR

makes this page again; {checkouts} are checkouts in DIR. Each function is taken out of its file as it stands and runs
with torch alone, without the decorators that register or compile it; a method of a trainer runs with an object that has
only the settings it reads. A loss is checked per token: in place of the sum over the batch stands the loss where the
mask is set, and 0 elsewhere, or each token is a batch of its own. Left out are the whitening after a GAE, and
`.float()` except for the laws `dtypes` and `finite`: its rounding is no error. In a GAE NaN at masked tokens counts as
0. Clip distances are 0.2 and 0.28, gamma is 0.9 and lambda 0.8. `expectation` and `gradient_expectation`
enumerate four tokens with logits in [-3, 3], so a cap that only larger log-ratios reach is not seen. "holds in fp32":
other dtypes fail, of which training that keeps log-probs in fp32 has none."""
NOT_CHECKED = """## Not checked

- Advantages of TRL and the GAE of AReaL: a few lines inside long methods that also sample, score or log.
- GAE of slime: it talks to ranks.
- TRL's `dapo`, `bnpo`, `grpo` and `dr_grpo` differ in the sum over a batch alone, so they are one row.
- Sums over a batch: they return one number, and a law here is of a loss per token; see [losses.md](losses.md).
- What a trainer adds: rollout corrections, entropy, masks of whole sequences."""
VERL, SKYRL = "verl/trainer/ppo/core_algos.py", "skyrl/backends/skyrl_train/utils/ppo_utils.py"
OPENRLHF = "openrlhf-0.11.2.data/purelib/openrlhf"
TRL, NEMO = "trl/trainer/grpo_trainer.py", "nemo_rl/algorithms"
AREAL, SLIME = "areal/utils/functional/functional.py", "slime/utils/ppo_utils.py"
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def masked(loss: Any, mask: Any) -> Any:
    """A loss per token where the mask is set."""
    return torch.where(mask.bool(), loss, 0.0)


def _mean(x: Any, mask: Any, *_: Any, **__: Any) -> Any:
    return masked(x, mask).sum() / mask.sum().clamp(min=1)


class Settings:
    """Stands for the classes of settings: what it is given, then the defaults of its class."""

    def __init_subclass__(cls, **_: Any) -> None: ...
    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


class Names:
    """Stands for enumerations: each member is its name."""

    def __getattr__(self, name: str) -> str:
        return name


FIXED: dict[str, Any] = {  # stands for what a function calls in other files, and for the sums over a batch
    "agg_loss": lambda loss_mat, loss_mask, **_: masked(loss_mat, loss_mask),
    "reduce_loss": lambda loss, loss_mask: masked(loss, loss_mask),
    "aggregate_loss": lambda loss, loss_mask, **_: masked(loss, loss_mask),
    "apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {}),  # noqa: ARG005
    "masked_mean": _mean,
    "masked_whiten": lambda x, mask: x,  # noqa: ARG005
    "safe_exp_delta": lambda x, clip, out_dtype: x.float().clamp(-clip, clip).exp().to(out_dtype),
    "AlgoConfig": type("AlgoConfig", (), {}), "ActorConfig": SimpleNamespace, "KL_IS_WEIGHT_CLIP": 10.0,
    "BaseModel": Settings, "LossFunction": object, "LossInputType": Names(), "LossType": Names(),
    "MetricNormalizer": Names(), "nanmin": torch.min, "nanmax": torch.max,
    "torch": torch, "nn": torch.nn, "np": np, "defaultdict": defaultdict,
}  # fmt: skip


class NoCasts(ast.NodeTransformer):
    """Leaves out `.float()`, so that what is computed in fp32 can be compared in fp64."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        cast = isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args
        return node.func.value if cast else node


def load(paths: Path | list[Path], *names: str, casts: bool = True) -> dict[str, Any]:
    """Functions, classes and methods out of files, without the rest; with `casts=False` without `.float()`.

    A name is `FUNCTION`, `CLASS` or `CLASS.METHOD`; the result has a method without its class.
    """
    paths = paths if isinstance(paths, list) else [paths]
    found = {}
    for path in paths:
        tree = ast.parse(path.read_text())
        tree = tree if casts else NoCasts().visit(tree)
        places = [("", tree.body), *((f"{x.name}.", x.body) for x in tree.body if isinstance(x, ast.ClassDef))]
        nodes = [(prefix, x) for prefix, body in places for x in body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        found |= {prefix + x.name: x for prefix, x in nodes if prefix + x.name in names}
    if missing := {*names} - found.keys():
        raise ValueError(f"{paths[0]} has no {', '.join(sorted(missing))}: it is of another version")
    for node in found.values():
        node.decorator_list = []
    space = dict(FIXED)
    space["verl_F"] = SimpleNamespace(masked_mean=_mean, masked_whiten=FIXED["masked_whiten"])
    if not casts:
        space["safe_exp_delta"] = lambda x, clip, out_dtype: x.clamp(-clip, clip).exp().to(out_dtype)
    flag = annotations.compiler_flag
    module = ast.fix_missing_locations(ast.Module([*found.values()], []))
    exec(compile(module, str(paths[0]), "exec", flags=flag, dont_inherit=True), space)
    return {name: space[name] for name in (x.rpartition(".")[2] for x in names)}


@dataclass(frozen=True, eq=False)
class Row:
    """A function of a project: `make(functions of the files)` is what a check of `rlkit.testing` takes."""

    name: str
    project: str
    family: str
    file: str
    names: tuple[str, ...]
    make: Callable[[dict[str, Any]], Any]
    how: dict[str, Any] = field(default_factory=dict)


def padded(x: Any, cu_seqlens: Any) -> Any:
    """Packed [T] as padded [N, L]."""
    parts = [x[a:b] for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:])]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) if parts else x.new_zeros(0, 0)


def packed(x: Any, cu_seqlens: Any) -> Any:
    """The inverse."""
    lens = cu_seqlens.diff().tolist()
    return torch.cat([x[i, :n] for i, n in enumerate(lens)]) if lens else x.new_zeros(0)


def surrogate(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(logp, old_logp, advantages, mask)`, of one sequence of a batch, as a loss of our packed tokens."""

    def loss(logp, old_logp, advantages, mask):
        return call(logp[None], old_logp[None], advantages[None], mask[None])[0]

    return loss


def group_baseline(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Advantages of one reward per sequence: each has one token here."""

    def estimate(rewards, group_ids):
        if not len(rewards):
            return rewards * 1.0
        mask = torch.ones(len(rewards), 1, dtype=rewards.dtype)
        return function(rewards[:, None].clone(), mask, group_ids.numpy(), **options)[0][:, 0]

    return estimate


def gae(function: Callable[..., Any], lam: str) -> Callable[..., Any]:
    """A GAE with gamma 0.9 and lambda 0.8, without the whitening over the batch that follows it."""

    def estimate(rewards, values, mask, cu_seqlens):
        if not rewards.numel():
            return rewards * 1.0
        finite = [torch.where(mask | x.isfinite(), x, 0.0) for x in (rewards, values)]  # as those systems have it
        r, v, m = (padded(x, cu_seqlens) for x in (*finite, mask.to(rewards.dtype)))
        found = function(r, v, m, **{"gamma": 0.9, lam: 0.8})[0]
        return torch.where(mask, packed(found, cu_seqlens), 0.0)

    return estimate


def verl_config(**more: Any) -> Any:
    """What verl's losses read of their settings."""
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info={}, **more)
    config.get = lambda name, default=None: getattr(config, name, default)
    return config


def skyrl_config(kind: str) -> Any:
    """What SkyRL's losses read of theirs."""
    cispo = SimpleNamespace(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0)
    return SimpleNamespace(
        policy_loss_type=kind, eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=3.0, cispo=cispo,
        off_policy_correction=None,
    )  # fmt: skip


def areal_loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """AReaL divides by the number of tokens inside the function: a token alone has the loss of that token."""

    def loss(logp, old_logp, advantages, mask):
        if not logp.numel():
            return logp * 1.0
        alone = torch.eye(logp.numel(), dtype=torch.bool).reshape(-1, *logp.shape) & mask
        fixed = (logp, old_logp, old_logp, advantages, 0.2)
        return torch.stack([function(*fixed, one, eps_clip_higher=0.28)[0] for one in alone]).reshape(logp.shape)

    return loss


def each_alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(logp, old_logp, advantages, mask)`, of a batch of one token, as a loss of our packed tokens."""

    def loss(logp, old_logp, advantages, mask):
        tokens = zip(*(x.reshape(-1, 1, 1) for x in (logp, old_logp, advantages, mask)))
        parts = [call(*token) for token in tokens]
        return torch.stack(parts).reshape(logp.shape) if parts else logp * 1.0

    return loss


def trl_loss(method: Callable[..., Any], kind: str, *, beta: float = 0.0, **args: Any) -> Callable[..., Any]:
    """`GRPOTrainer._compute_loss(loss_type=kind)` of `(logp, old_logp, advantages, mask[, ref_logp])` of one token."""
    quiet = SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1)

    def call(logp, old_logp, advantages, mask, ref_logp=None):
        trainer = SimpleNamespace(
            loss_type=kind, beta=beta, importance_sampling_level="token", epsilon_low=0.2,
            epsilon_high=4.0 if kind == "cispo" else 0.28, max_completion_length=1, top_entropy_quantile=1.0,
            args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
                                 steps_per_generation=1, **args),
            off_policy_mask_threshold=None, use_vllm=False, aux_loss_enabled=False, _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=1, model=SimpleNamespace(training=True), accelerator=quiet,
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        )  # fmt: skip
        ids = torch.zeros_like(mask, dtype=torch.long)
        inputs = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids) | {
            "completion_mask": mask.to(logp.dtype), "advantages": advantages, "old_per_token_logps": old_logp,
            "ref_per_token_logps": ref_logp, "num_items_in_batch": torch.ones(()),
        }  # fmt: skip
        return method(trainer, None, inputs)

    return call


def nemo_loss(functions: dict[str, Any], **settings: Any) -> Callable[..., Any]:
    """NeMo-RL's `ClippedPGLossFn` of one token, without the KL term."""
    config = functions["ClippedPGLossConfig"](
        ratio_clip_min=0.2, ratio_clip_max=0.28, reference_policy_kl_penalty=0.0, **settings
    )
    loss = functions["ClippedPGLossFn"](config)

    def call(logp, old_logp, advantages, mask):
        after_first = {"advantages": advantages, "prev_logprobs": old_logp, "generation_logprobs": old_logp}
        data = {key: torch.cat([x, x], 1) for key, x in (after_first | {"token_mask": mask.to(logp.dtype)}).items()}
        one = 1 - 1e-8  # it divides by this plus 1e-8
        return loss(logp, data | {"sample_mask": torch.ones(1, dtype=logp.dtype)}, one, one)[0]

    return call


def _kl(project: str, file: str, name: str, kind: str, call: Callable[..., Any], how: dict[str, Any]) -> Row:
    def make(functions: dict[str, Any]) -> Any:
        return lambda logp, ref_logp: call(functions[name], logp, ref_logp)

    return Row(f"{project} `{name}` {kind}", project, "kl", file, (name,), make, how)


def kl_rows() -> list[Row]:
    """The mean of k1 is the KL, and its gradient's 0; k2's gradient is the KL's; k3's that of the backward KL."""
    from rlkit.testing import laws

    how = {
        "k1": {"gradient": laws.nothing, "skip": {"non_negative": "k1 may be negative"}},
        "k2": {"value": laws.nothing, "skip": {"expectation": "k2 is biased, by definition"}},
        "k3": {"gradient": laws.backward},
    }
    rows = []
    for kind, options in how.items():
        rows += [
            _kl("verl", VERL, "kl_penalty_forward", kind, lambda f, p, q, kind=kind: f(p, q, kind), options),
            _kl("OpenRLHF", f"{OPENRLHF}/models/utils.py", "compute_approx_kl", kind,
                lambda f, p, q, kind=kind: f(p, q, kl_estimator=kind), options),
            _kl("SkyRL", SKYRL, "compute_approx_kl", kind,
                lambda f, p, q, kind=kind: f(p, q, None, kl_estimator_type=kind), options),
            _kl("slime", SLIME, "compute_approx_kl", kind, lambda f, p, q, kind=kind: f(p, q, kind), options),
        ]  # fmt: skip
        name = "calculate_kl"
        rows.append(_kl("NeMo-RL", f"{NEMO}/utils.py", name, kind, lambda f, p, q, kind=kind: f(p, q, kind), options))
    capped = partial(_kl, "slime", SLIME, "compute_approx_kl", "low_var_kl")
    name = "GRPOTrainer._compute_loss"

    def trl(functions: dict[str, Any]) -> Any:
        call = trl_loss(functions["_compute_loss"], "dr_grpo", beta=1.0, use_bias_correction_kl=False)
        kl = each_alone(lambda logp, ref_logp, zero, mask: call(logp, logp.detach(), zero, mask, ref_logp))
        return lambda logp, ref_logp: kl(logp, ref_logp, torch.zeros_like(logp), torch.ones_like(logp).bool())

    return [
        Row("TRL `GRPOTrainer` beta", "TRL", "kl", TRL, (name,), trl, how["k3"]),
        *rows,
        capped(lambda f, p, q: f(p, q, "low_var_kl"), how["k3"]),
    ]


def policy_rows() -> list[Row]:
    """PPO's clip, with and without the dual clip, and CISPO."""

    def verl(name: str, **more: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda f: surrogate(lambda p, q, a, m: f[name](q, p, a, m, config=verl_config(**more))[0])

    def skyrl(name: str, kind: str) -> Callable[[dict[str, Any]], Any]:
        return lambda f: surrogate(lambda p, q, a, m: f[name](p, q, a, skyrl_config(kind), m)[0])

    def openrlhf(**more: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda f: surrogate(
            lambda p, q, a, m: f["PolicyLoss"](clip_eps_low=0.2, clip_eps_high=0.28, **more)(p, q, a, m)[0]
        )

    def slime(f: dict[str, Any]) -> Any:
        call = f["compute_policy_loss"]
        return lambda logp, old_logp, advantages, mask: masked(call(old_logp - logp, advantages, 0.2, 0.28)[0], mask)

    def trl(kind: str) -> Callable[[dict[str, Any]], Any]:
        return lambda f: each_alone(trl_loss(f["_compute_loss"], kind))

    def nemo(**more: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda f: each_alone(nemo_loss(f, **more))

    method = ("GRPOTrainer._compute_loss",)
    nemo_files = f"{NEMO}/loss/loss_functions.py {NEMO}/utils.py"
    nemo_names = ("ClippedPGLossFn", "ClippedPGLossConfig", "calculate_kl", "masked_mean")
    detached = {"skip": {"gradcheck": "the weight of log p is detached, by definition"}}
    vanilla, cispo = "compute_policy_loss_vanilla", "compute_policy_loss_cispo"
    return [
        Row("TRL `GRPOTrainer` dapo", "TRL", "policy", TRL, method, trl("dr_grpo"), CLIPS),
        Row("TRL `GRPOTrainer` cispo", "TRL", "policy", TRL, method, trl("cispo"), detached),
        Row("TRL `GRPOTrainer` sapo", "TRL", "policy", TRL, method, trl("sapo")),
        Row(f"verl `{vanilla}`", "verl", "policy", VERL, (vanilla,), verl(vanilla)),
        Row(f"verl `{cispo}`", "verl", "policy", VERL, (cispo,), verl(cispo), detached),
        Row("OpenRLHF `PolicyLoss`", "OpenRLHF", "policy", f"{OPENRLHF}/models/loss.py", ("PolicyLoss",),
            openrlhf(), CLIPS),
        Row("SkyRL `ppo_policy_loss`", "SkyRL", "policy", SKYRL, ("ppo_policy_loss",),
            skyrl("ppo_policy_loss", "regular"), CLIPS),
        Row(f"SkyRL `{cispo}`", "SkyRL", "policy", SKYRL, (cispo,), skyrl(cispo, "cispo"), detached),
        Row("AReaL `ppo_actor_loss_fn`", "AReaL", "policy", AREAL, ("ppo_actor_loss_fn",),
            lambda f: areal_loss(f["ppo_actor_loss_fn"]), CLIPS),
        Row("slime `compute_policy_loss`", "slime", "policy", SLIME, ("compute_policy_loss",), slime, CLIPS),
        Row("NeMo-RL `ClippedPGLossFn`", "NeMo-RL", "policy", nemo_files, nemo_names, nemo(), CLIPS),
        Row("NeMo-RL `ClippedPGLossFn` cispo", "NeMo-RL", "policy", nemo_files, nemo_names, nemo(use_cispo=True),
            detached),
    ]  # fmt: skip


def _baseline_of(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda functions: group_baseline(functions[name])


def estimator_rows() -> list[Row]:
    """GAE over tokens, and baselines over the samples of a prompt."""
    name = "compute_gae_advantage_return"
    rows = [
        Row(f"verl `{name}`", "verl", "gae", VERL, (name,), lambda f: gae(f[name], "lam")),
        Row(f"SkyRL `{name}`", "SkyRL", "gae", SKYRL, (name,), lambda f: gae(f[name], "lambd")),
        Row("OpenRLHF `get_advantages_and_returns`", "OpenRLHF", "gae",
            f"{OPENRLHF}/trainer/ppo_utils/experience_maker.py",
            ("RemoteExperienceMaker.get_advantages_and_returns",),
            lambda f: gae(lambda r, v, m, **how: f["get_advantages_and_returns"](None, v, r, m, **how), "lambd")),
        Row("NeMo-RL `GeneralizedAdvantageEstimator`", "NeMo-RL", "gae", f"{NEMO}/advantage_estimator.py",
            ("GeneralizedAdvantageEstimator._compute_gae",),
            lambda f: gae(lambda r, v, m, gamma, lam: f["_compute_gae"](SimpleNamespace(gae_gamma=gamma), r, v, m, lam),
                          "lam")),
    ]  # fmt: skip
    for project, file, functions in (
        ("verl", VERL, ("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage")),
        ("SkyRL", SKYRL, ("compute_grpo_outcome_advantage", "compute_maxrl_advantage")),
    ):
        for function in functions:
            of_mean = {"shift_invariant": "it divides by the mean, by definition"}
            of_mean |= {"stated_scale": of_mean["shift_invariant"], "rewards_raise": "it is for rewards of 0 and 1"}
            how = {"skip": of_mean} if function == "compute_maxrl_advantage" else {}
            rows.append(
                Row(f"{project} `{function}`", project, "groups", file, (function,), _baseline_of(function), how)
            )

    def nemo(functions: dict[str, Any]) -> Any:
        options = SimpleNamespace(use_leave_one_out_baseline=True, normalize_rewards=True)
        estimator = functions["GRPOAdvantageEstimator"](options, None)

        def estimate(rewards, group_ids):
            default = torch.get_default_dtype()
            torch.set_default_dtype(rewards.dtype)  # of the matrix that it makes
            try:
                return estimator.compute_advantage(group_ids[:, None], rewards, rewards.new_ones(len(rewards), 1))[:, 0]
            finally:
                torch.set_default_dtype(default)

        return estimate

    names = ("GRPOAdvantageEstimator", "calculate_baseline_and_std_per_prompt")
    files = f"{NEMO}/advantage_estimator.py {NEMO}/utils.py"
    return [*rows, Row("NeMo-RL `GRPOAdvantageEstimator`", "NeMo-RL", "groups", files, names, nemo)]


def check(row: Row, sources: Path, *, max_examples: int = 60) -> list[Any]:
    """The results of a row's laws, on `max_examples` drawn cases each."""
    from rlkit.testing import check_estimator, check_kl, check_loss
    from rlkit.testing.cases import cast
    from rlkit.testing.law import law
    from rlkit.testing.subject import tensors

    @law()
    def in_fp32(s: Any, case: Any) -> None:
        """Of fp32 inputs the result is fp32."""
        assert all(x.dtype == torch.float32 for x in tensors(s(cast(case, torch.float32))) if x.is_floating_point())

    version = RELEASES.get(row.project) or COMMITS[row.project]
    files = [sources / f"{row.project}-{version}" / file for file in row.file.split()]
    call = {"kl": check_kl, "policy": check_loss, "gae": check_estimator, "groups": check_estimator}[row.family]
    how = {**row.how, "laws": [*row.how.get("laws", ()), in_fp32]}
    as_it_is, in_fp64 = (
        call(
            row.make(load(files, *row.names, casts=casts)),
            name=row.name,
            max_examples=max_examples,
            out=io.StringIO(),
            **how,
        )
        for casts in (True, False)
    )
    found = {
        a.law: a if a.law in ("dtypes", "finite", "in_fp32") else b for a, b in zip(as_it_is, in_fp64, strict=True)
    }
    if found.pop("in_fp32").outcome == "holds" and found["dtypes"].outcome == "fails":
        found["dtypes"] = found["dtypes"]._replace(outcome="holds in fp32")
    return [*found.values()]


def meaning(row: Row, law: str) -> str:
    """What the failure means; ValueError for one that nobody has explained yet."""
    for name, part, projects, text in MEANING:
        if name == law and part in row.name and (not projects or row.project in projects.split()):
            return text
    raise ValueError(f"{row.name} fails {law}: add what that means to docs/conformance.tsv")


TITLES = {
    "policy": "Policy losses", "kl": "KL estimators", "gae": "Generalized advantage estimation",
    "groups": "Group baselines",
}  # fmt: skip
LABELS = {law: f"{law}, within the drawn cases" for law in ("expectation", "gradient_expectation")}
SIGNS = {
    "holds": "holds",
    "fails": "**fails**",
    "holds in fp32": "holds in fp32",
    "skipped": "(1)",
    "does not apply": "-",
}


def page(found: dict[Row, list[Any]]) -> str:
    """The text of docs/conformance.md."""
    versions = ", ".join(f"{name} {x}" for name, x in {**RELEASES, **COMMITS}.items())
    checkouts = " and ".join(f"{name}-{x}" for name, x in COMMITS.items())
    intro = INTRO.format(versions=versions, checkouts=checkouts).split("\n\n")
    parts = [x if x.startswith((" ", "#")) else textwrap.fill(x, 120, break_on_hyphens=False) for x in intro]
    for family, title in TITLES.items():
        rows = [row for row in found if row.family == family]
        laws = list(dict.fromkeys(x.law for row in rows for x in found[row] if x.outcome != "does not apply"))
        table = ["| law | " + " | ".join(row.name for row in rows) + " |", "|---|" + "---|" * len(rows)]
        notes: dict[str, None] = {}
        for law in laws:
            results = [next((x for x in found[row] if x.law == law), None) for row in rows]
            table.append(
                f"| {LABELS.get(law, law)} | "
                + " | ".join("-" if x is None else SIGNS[x.outcome] for x in results)
                + " |"
            )
            notes |= {f"{law}: {x.note}": None for x in results if x is not None and x.outcome == "skipped"}
        parts += [f"## {title}", "\n".join(table)]
        parts += ["(1) does not apply: " + "; ".join(notes) + "."] if notes else []
        parts += list(_failures({row: found[row] for row in rows}))
    return "\n\n".join([*parts, NOT_CHECKED]) + "\n"


def _failures(found: dict[Row, list[Any]]) -> list[str]:
    """A paragraph for each law and meaning, with the functions and the counterexample of the first."""
    groups: dict[tuple[str, str], list[tuple[Row, Any]]] = defaultdict(list)
    for row, results in found.items():
        for x in results:
            if x.outcome in ("fails", "holds in fp32"):
                groups[x.law, meaning(row, x.law)].append((row, x))
    parts = []
    for (law, text), failed in groups.items():
        names = ", ".join(row.name for row, _ in failed)
        example = textwrap.indent(textwrap.dedent(failed[0][1].note), "    ")
        parts += [f"**{LABELS.get(law, law)}** ({failed[0][1].statement.rstrip('.')}): {names}.", text, example]
    return parts


def fetch(sources: Path) -> None:
    """Download and unpack the packages of `RELEASES`, without their dependencies."""
    for name, version in RELEASES.items():
        target = sources / f"{name}-{version}"
        if not target.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(sources)]
            subprocess.run([*pip, f"{name.lower()}=={version}"], check=True)
            (wheel,) = sources.glob(f"{name.lower()}-{version}-*.whl")
            zipfile.ZipFile(wheel).extractall(target)


def main() -> None:
    """Check all rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--fetch", action="store_true")
    args = parser.parse_args()
    args.sources.mkdir(parents=True, exist_ok=True)
    if args.fetch:
        fetch(args.sources)
    rows = [*policy_rows(), *kl_rows(), *estimator_rows()]
    missing = sorted({f"{row.project}-{RELEASES.get(row.project) or COMMITS[row.project]}" for row in rows})
    if missing := [name for name in missing if not (args.sources / name).is_dir()]:
        what = "--fetch downloads packages; a checkout is yours to make"
        raise SystemExit(f"error: {args.sources} has no {', '.join(missing)}: {what}")
    PAGE.write_text(page({row: check(row, args.sources) for row in rows}))


if __name__ == "__main__":
    main()
