"""Check losses, estimators and KL functions of other projects with `rlkit.testing`, and write docs/conformance.md.

    python docs/make_conformance.py --fetch --sources DIR      # downloads the packages of `RELEASES` into DIR first
    python docs/make_conformance.py --sources DIR              # DIR/PROJECT-VERSION is an unpacked package or checkout

A function is taken out of its file as it stands, with what it calls there, and run with torch and numpy alone: nothing
of its project is imported. Left out are the decorators that register or compile it. A loss is checked per token, so the
function that sums it over a batch is replaced (`FIXED`).
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
RELEASES = {"verl": "0.9.1", "OpenRLHF": "0.11.2", "SkyRL": "0.3.0", "AReaL": "1.0.4"}  # of the package index
COMMITS = {"slime": "624b824a8"}
_TABLE = (ROOT / "docs" / "conformance.tsv").read_text().splitlines()[1:]
MEANING = [tuple(line.split("\t")) for line in _TABLE]
INTRO = """# Other projects' losses under the laws

[`rlkit.testing`](laws.md) on functions of {versions}.
A law is a property, tested on drawn cases; a failure has the smallest case that was found, and what it means for
training. rlkit's own functions are in [laws.md](laws.md). A law that fails need not be a bug: some are choices, and the
text says so.

    python docs/make_conformance.py --fetch --sources DIR

makes this page again; the checkout of slime is in DIR/slime-{slime}. Each function is taken out of its file as it
stands and runs with torch alone, without the decorators that register or compile it. A loss is checked per token: in
place of the sum over the batch stands the loss where the mask is set, and 0 elsewhere. Left out are the whitening after
a GAE, and `.float()` except for the laws `dtypes` and `finite`: its rounding is no error. In a GAE NaN at masked tokens
counts as 0. Clip distances are 0.2 and 0.28, gamma is 0.9 and lambda 0.8."""
NOT_CHECKED = """## Not checked

- TRL: its losses and advantages are inside methods of its trainers, which no call without a trainer reaches.
- NeMo-RL and other systems: no rows yet.
- GAE of OpenRLHF, AReaL and slime: inside methods of trainers, or it talks to ranks.
- Sums over a batch: they return one number, and a law here is of a loss per token; see [losses.md](losses.md).
- What a trainer adds: rollout corrections, entropy, masks of whole sequences."""
VERL, SKYRL = "verl/trainer/ppo/core_algos.py", "skyrl/backends/skyrl_train/utils/ppo_utils.py"
OPENRLHF = "openrlhf-0.11.2.data/purelib/openrlhf/models"
AREAL, SLIME = "areal/utils/functional/functional.py", "slime/utils/ppo_utils.py"
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def masked(loss: Any, mask: Any) -> Any:
    """A loss per token where the mask is set."""
    return torch.where(mask.bool(), loss, 0.0)


def _mean(x: Any, mask: Any, *_: Any, **__: Any) -> Any:
    return masked(x, mask).sum() / mask.sum().clamp(min=1)


FIXED: dict[str, Any] = {  # stands for what a function calls in other files, and for the sums over a batch
    "agg_loss": lambda loss_mat, loss_mask, **_: masked(loss_mat, loss_mask),
    "reduce_loss": lambda loss, loss_mask: masked(loss, loss_mask),
    "aggregate_loss": lambda loss, loss_mask, **_: masked(loss, loss_mask),
    "apply_off_policy_correction": lambda loss, old, rollout, mask, config: (loss, mask, {}),  # noqa: ARG005
    "masked_mean": _mean,
    "masked_whiten": lambda x, mask: x,  # noqa: ARG005
    "safe_exp_delta": lambda x, clip, out_dtype: x.float().clamp(-clip, clip).exp().to(out_dtype),
    "AlgoConfig": type("AlgoConfig", (), {}), "ActorConfig": SimpleNamespace, "KL_IS_WEIGHT_CLIP": 10.0,
    "torch": torch, "nn": torch.nn, "np": np, "defaultdict": defaultdict,
}  # fmt: skip


class NoCasts(ast.NodeTransformer):
    """Leaves out `.float()`, so that what is computed in fp32 can be compared in fp64."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        cast = isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args
        return node.func.value if cast else node


def load(path: Path, *names: str, casts: bool = True) -> dict[str, Any]:
    """The functions and classes of a file, by name, without the rest of it; with `casts=False` without `.float()`."""
    tree = ast.parse(path.read_text())
    tree = tree if casts else NoCasts().visit(tree)
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names]
    if missing := {*names} - {node.name for node in found}:
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}: it is of another version")
    for node in found:
        node.decorator_list = []
    space = dict(FIXED)
    space["verl_F"] = SimpleNamespace(masked_mean=_mean, masked_whiten=FIXED["masked_whiten"])
    if not casts:
        space["safe_exp_delta"] = lambda x, clip, out_dtype: x.clamp(-clip, clip).exp().to(out_dtype)
    flag = annotations.compiler_flag
    module = ast.Module(found, [])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec", flags=flag, dont_inherit=True), space)
    return {name: space[name] for name in names}


@dataclass(frozen=True, eq=False)
class Row:
    """A function of a project: `make(functions of the file)` is what a check of `rlkit.testing` takes."""

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
            _kl("OpenRLHF", f"{OPENRLHF}/utils.py", "compute_approx_kl", kind,
                lambda f, p, q, kind=kind: f(p, q, kl_estimator=kind), options),
            _kl("SkyRL", SKYRL, "compute_approx_kl", kind,
                lambda f, p, q, kind=kind: f(p, q, None, kl_estimator_type=kind), options),
            _kl("slime", SLIME, "compute_approx_kl", kind, lambda f, p, q, kind=kind: f(p, q, kind), options),
        ]  # fmt: skip
    capped = partial(_kl, "slime", SLIME, "compute_approx_kl", "low_var_kl")
    return [*rows, capped(lambda f, p, q: f(p, q, "low_var_kl"), how["k3"])]


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

    detached = {"skip": {"gradcheck": "the weight of log p is detached, by definition"}}
    vanilla, cispo = "compute_policy_loss_vanilla", "compute_policy_loss_cispo"
    return [
        Row(f"verl `{vanilla}`", "verl", "policy", VERL, (vanilla,), verl(vanilla)),
        Row(f"verl `{cispo}`", "verl", "policy", VERL, (cispo,), verl(cispo), detached),
        Row("OpenRLHF `PolicyLoss`", "OpenRLHF", "policy", f"{OPENRLHF}/loss.py", ("PolicyLoss",), openrlhf(), CLIPS),
        Row("SkyRL `ppo_policy_loss`", "SkyRL", "policy", SKYRL, ("ppo_policy_loss",),
            skyrl("ppo_policy_loss", "regular"), CLIPS),
        Row(f"SkyRL `{cispo}`", "SkyRL", "policy", SKYRL, (cispo,), skyrl(cispo, "cispo"), detached),
        Row("AReaL `ppo_actor_loss_fn`", "AReaL", "policy", AREAL, ("ppo_actor_loss_fn",),
            lambda f: areal_loss(f["ppo_actor_loss_fn"]), CLIPS),
        Row("slime `compute_policy_loss`", "slime", "policy", SLIME, ("compute_policy_loss",), slime, CLIPS),
    ]  # fmt: skip


def _baseline_of(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda functions: group_baseline(functions[name])


def estimator_rows() -> list[Row]:
    """GAE over tokens, and baselines over the samples of a prompt."""
    name = "compute_gae_advantage_return"
    rows = [
        Row(f"verl `{name}`", "verl", "gae", VERL, (name,), lambda f: gae(f[name], "lam")),
        Row(f"SkyRL `{name}`", "SkyRL", "gae", SKYRL, (name,), lambda f: gae(f[name], "lambd")),
    ]
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
    return rows


def check(row: Row, sources: Path, *, max_examples: int = 60) -> list[Any]:
    """The results of a row's laws, on `max_examples` drawn cases each."""
    from rlkit.testing import check_estimator, check_kl, check_loss

    version = RELEASES.get(row.project) or COMMITS[row.project]
    path = sources / f"{row.project}-{version}" / row.file
    call = {"kl": check_kl, "policy": check_loss, "gae": check_estimator, "groups": check_estimator}[row.family]
    as_it_is, in_fp64 = (
        call(
            row.make(load(path, *row.names, casts=casts)),
            name=row.name,
            max_examples=max_examples,
            out=io.StringIO(),
            **row.how,
        )
        for casts in (True, False)
    )
    return [a if a.law in ("dtypes", "finite") else b for a, b in zip(as_it_is, in_fp64, strict=True)]


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
SIGNS = {"holds": "holds", "fails": "**fails**", "skipped": "(1)", "does not apply": "-"}


def page(found: dict[Row, list[Any]]) -> str:
    """The text of docs/conformance.md."""
    versions = ", ".join(f"{name} {x}" for name, x in {**RELEASES, **COMMITS}.items())
    parts = [INTRO.format(versions=versions, slime=COMMITS["slime"])]
    for family, title in TITLES.items():
        rows = [row for row in found if row.family == family]
        laws = list(dict.fromkeys(x.law for row in rows for x in found[row] if x.outcome != "does not apply"))
        table = ["| law | " + " | ".join(row.name for row in rows) + " |", "|---|" + "---|" * len(rows)]
        notes: dict[str, None] = {}
        for law in laws:
            results = [next((x for x in found[row] if x.law == law), None) for row in rows]
            table.append(f"| {law} | " + " | ".join("-" if x is None else SIGNS[x.outcome] for x in results) + " |")
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
            if x.outcome == "fails":
                groups[x.law, meaning(row, x.law)].append((row, x))
    parts = []
    for (law, text), failed in groups.items():
        names = ", ".join(row.name for row, _ in failed)
        example = textwrap.indent(textwrap.dedent(failed[0][1].note), "    ")
        parts += [f"**{law}** ({failed[0][1].statement.rstrip('.')}): {names}.", text, example]
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
