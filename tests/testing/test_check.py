"""Argument recognition, running laws, printed and returned reports."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rlkit import advantages, losses
from rlkit._util.tensors import upcast
from rlkit.advantages import discounted_returns, group_centered
from rlkit.losses import seq_log_ratio_sum
from rlkit.segments import broadcast_to_tokens
from rlkit.testing import Stream, check_estimator, check_kl, check_loss, check_weights, examine, failures, laws, subject


def quiet() -> io.StringIO:
    return io.StringIO()


def outcomes(report) -> dict[str, str]:
    return {r.law: r.outcome for r in report}


def test_arguments_are_recognised_by_annotation_and_name() -> None:
    def f(
        log_ratio: Float[Tensor, "*shape"],
        logits: Float[Tensor, "*shape V"],
        chosen: Bool[Tensor, "*shape"],
        greedy_rewards: Float[Tensor, "N"],
        lengths: Int[Tensor, "N"],
        bootstrap: Float[Tensor, "N"] | None = None,
        coef: float | Float[Tensor, ""] = 1.0,
        *,
        mask: Bool[Tensor, "*shape"] | None = None,
    ) -> Float[Tensor, "*shape"]:
        return log_ratio

    s = subject(f)
    assert list(s.streams) == ["log_ratio", "logits", "chosen", "greedy_rewards", "lengths", "bootstrap"]
    assert s.streams["logits"].size == (5,)
    assert s.streams["chosen"].dtype == torch.bool
    assert s.streams["lengths"].axis == s.streams["bootstrap"].axis == "N"
    assert s.axis == "T"
    assert s.takes("mask")
    assert s.hidden == ["cu_seqlens", "group_ids", "old"]


def test_arguments_are_recognised_by_name_alone() -> None:
    s = subject(lambda logp, old_logp, advantages, mask: logp)
    assert set(s.streams) == {"logp", "old_logp", "advantages"}
    assert subject(lambda rewards, group_ids: rewards).streams["rewards"].axis == "N"
    assert subject(lambda rewards, group_ids: rewards).axis == "N"


def of_axes(axes: str) -> Any:
    def loss(log_ratio, features):  # type: ignore[no-untyped-def]
        return log_ratio + features

    loss.__annotations__.update(features=Float[Tensor, axes])
    return loss


def test_an_unknown_argument_is_named() -> None:
    """The error names both fixes, and the page."""
    both = r"argument foo is not recognised: .*options=\{'foo': 0.1\}.*streams=\{'foo': Stream\(.*docs/laws.md"
    with pytest.raises(TypeError, match=both):
        subject(lambda log_ratio, foo: log_ratio + foo)
    for annotation in ("N L", "*batch T", "T H"):
        with pytest.raises(TypeError, match="argument features is not recognised"):
            subject(of_axes(annotation))
    assert "foo" in subject(lambda log_ratio, foo: log_ratio + foo, streams={"foo": Stream()}).streams


@pytest.mark.slow
def test_a_target_with_a_gradient_is_found_by_default() -> None:
    """Returns made from the values that are trained: half of the gradient would go to the target."""

    def chases(values: Float[Tensor, "T"], returns: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"]) -> Tensor:
        gap = torch.where(mask, upcast(values) - upcast(returns), 0)
        return 0.5 * gap**2

    def detached(values: Float[Tensor, "T"], returns: Float[Tensor, "T"], *, mask: Bool[Tensor, "T"]) -> Tensor:
        return chases(values, returns.detach(), mask=mask)

    assert [r.law for r in failures(check_loss(chases, out=quiet(), max_examples=10))] == ["no_gradient_by"]
    skip = {"gradcheck": "returns are detached"}
    assert not failures(check_loss(detached, out=quiet(), skip=skip, max_examples=10))
    assert not failures(check_loss(losses.value_mse, out=quiet(), max_examples=10))


@pytest.mark.slow
def test_the_scale_of_a_normalised_baseline_is_found_by_default() -> None:
    def wrong(rewards: Float[Tensor, "N"], *, group_ids: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
        return 0.5 * advantages.group_zscore(rewards, group_ids=group_ids)

    assert [r.law for r in failures(check_estimator(wrong, out=quiet(), max_examples=10))] == ["stated_scale"]
    for right in (advantages.group_zscore, advantages.group_centered, advantages.leave_one_out):
        assert not failures(check_estimator(right, out=quiet(), max_examples=10))


def test_a_report_prints_as_the_check_did() -> None:
    out = quiet()
    report = check_loss(lambda log_ratio, advantages: -log_ratio.exp() * advantages, out=out, max_examples=10)
    assert f"{report}\n" == out.getvalue()
    assert "Result(" not in str(report)
    assert repr(report) == str(report).splitlines()[-1]
    assert repr(report).endswith("2 fail, 0 skipped")
    assert str(failures(report)).endswith("0 hold, 2 fail, 0 skipped")


def test_a_case_gives_its_streams_by_name() -> None:
    seen = {}

    def coefficient(case):
        seen["same"] = case.advantages is case.tokens["advantages"]
        with pytest.raises(AttributeError, match=r"no stream 'advantage'; its function takes \['advantages', 'log_"):
            _ = case.advantage
        return case.log_ratio.exp()

    report = check_loss(losses.importance_sampling, coefficient=coefficient, out=quiet(), max_examples=10)
    assert not failures(report)
    assert seen["same"]


def test_a_law_raises_with_the_smallest_counterexample() -> None:
    def leaks(log_ratio, advantages, mask):
        return -log_ratio.exp() * advantages * mask

    laws.additive(leaks)
    with pytest.raises(AssertionError, match=r"leaks breaks mask_isolation: NaN(.|\n)*mask +(= )?\[0\]") as error:
        laws.mask_isolation(leaks)
    assert "log_ratio  = [0]" in str(error.value)


def test_a_counterexample_has_only_the_token_that_breaks_the_law() -> None:
    @laws.law()
    def small(s, case) -> None:
        """No masked log-ratio is above 1."""
        assert not (case.tokens["log_ratio"][~case.mask] > 1).any()

    found = small.search(subject(lambda log_ratio, advantages, rewards, cu_seqlens, mask: log_ratio), max_examples=100)
    assert found.case.mask.tolist() == [False]
    assert found.case.cu_seqlens.tolist() == [0, 1]
    assert found.case.tokens["log_ratio"].tolist() == [1.125]


def test_a_report_is_printed_and_returned() -> None:
    out = quiet()
    report = check_loss(
        lambda log_ratio, advantages: log_ratio * advantages, name="upside_down", out=out, max_examples=10
    )
    assert outcomes(report)["on_policy"] == "fails"
    assert outcomes(report)["mask_isolation"] == "does not apply"
    assert [r.law for r in failures(report)] == ["dtypes", "on_policy", "descends"]
    text = out.getvalue()
    assert text.startswith("check_loss(upside_down)")
    assert "FAILS    on_policy" in text
    assert "advantages = [0.125]" in text
    assert "mask_isolation" not in text
    assert "11 hold, 3 fail, 0 skipped" in text


def test_a_skip_needs_a_law_and_keeps_its_reason() -> None:
    report = check_loss(losses.cispo, skip={"gradcheck": "detached"}, out=quiet(), max_examples=10)
    assert not failures(report)
    assert next(r.note for r in report if r.outcome == "skipped") == "detached"
    with pytest.raises(ValueError, match="skip must name laws of this check"):
        check_loss(losses.cispo, skip={"gradchek": "a typo"}, out=quiet(), max_examples=10)


def test_a_loss_that_raises_fails_with_its_error() -> None:
    def broken(log_ratio, advantages):
        raise RuntimeError("no")

    assert {r.outcome for r in check_loss(broken, out=quiet(), max_examples=10)} == {"fails", "does not apply"}
    (result,) = examine(subject(broken), [laws.shape], max_examples=10)
    assert "raised RuntimeError: no" in result.note


@pytest.mark.slow
def test_the_clip_and_the_coefficient_are_checked_where_they_are_given() -> None:
    report = check_loss(
        losses.ppo_clip,
        options={"clip_high": 0.3},
        clip_low=0.2,
        clip_high=0.3,
        coefficient=lambda c: c.ratio,
        max_examples=10,
        out=quiet(),
    )
    assert [r.law for r in failures(report)] == ["coefficient"]
    assert (
        outcomes(check_loss(losses.ppo_clip, clip_low=0.2, clip_high=0.3, out=quiet(), max_examples=10))["clipped"]
        == "fails"
    )


def test_pairs_are_checked_for_their_preference() -> None:
    swapped = lambda chosen_logp, rejected_logp: torch.relu(1 + chosen_logp.double() - rejected_logp.double())
    assert outcomes(check_loss(swapped, out=quiet(), max_examples=10))["prefers_chosen"] == "fails"
    assert not failures(
        check_loss(losses.dpo, options={"beta": 0.1}, laws=[laws.margin_only], out=quiet(), max_examples=10)
    )


def test_estimators_and_kls() -> None:
    few = {"max_examples": 10, "out": quiet()}
    assert not failures(check_estimator(advantages.gae, **few))
    assert not failures(check_estimator(advantages.group_centered, **few))
    loop = lambda rewards: [2 * r for r in rewards]
    assert outcomes(check_estimator(advantages.group_centered, loop=loop, **few))["equals_loop"] == "fails"
    assert not failures(check_kl(losses.k3, gradient=laws.backward, **few))
    assert [r.law for r in failures(check_kl(losses.k2, **few))] == ["expectation"]


@pytest.mark.slow
def test_compile_is_one_more_law() -> None:
    report = check_loss(losses.ppo_clip, compile=True, out=quiet())
    assert outcomes(report)["compiles"] == "holds"


@pytest.mark.slow
def test_weights_must_be_detached_and_depend_on_every_token() -> None:
    def mine(log_ratio, mask, cu_seqlens, *, attached: bool = False, forgets: bool = False):
        x = torch.where(mask, log_ratio.float() if log_ratio.dtype.itemsize == 2 else log_ratio, 0)
        left = discounted_returns(mask.double(), mask=mask, cu_seqlens=cu_seqlens)
        total = seq_log_ratio_sum(torch.where(left > 1, x, 0) if forgets else x, mask=mask, cu_seqlens=cu_seqlens)
        weight = total.clamp(max=20).exp()
        return torch.where(mask, weight if attached else weight.detach(), 0)

    def broken(**how) -> list[str]:
        return [r.law for r in failures(check_weights(mine, options=how, max_examples=10, out=quiet()))]

    assert broken() == []
    assert broken(attached=True) == ["detached"]
    assert broken(forgets=True) == ["all_count"]


@pytest.mark.slow
def test_a_function_that_writes_into_its_arguments_is_found_though_laws_share_their_cases() -> None:
    def mine(log_ratio, mask):
        x = log_ratio.detach()
        x[~mask] = 0
        return torch.where(mask, (x.float() if x.dtype.itemsize == 2 else x).clamp(max=20).exp(), 0)

    assert [r.law for r in failures(check_weights(mine, max_examples=10, out=quiet()))] == ["pure"]


@pytest.mark.slow
def test_an_estimator_of_the_wrong_sign_and_one_without_bootstrap_are_found() -> None:
    def upside_down(rewards, group_ids):
        return -group_centered(rewards, group_ids=group_ids)

    def endless(rewards, mask, cu_seqlens, bootstrap):
        return discounted_returns(rewards, mask=mask, cu_seqlens=cu_seqlens)

    def outcome(fn) -> list[str]:
        return [r.law for r in failures(check_estimator(fn, max_examples=10, out=quiet()))]

    assert outcome(upside_down) == ["rewards_raise"]
    assert outcome(endless) == ["all_count"]


def test_rewards_of_sequences_may_become_advantages_of_tokens() -> None:
    def mine(rewards: Float[Tensor, "N"], mask, cu_seqlens):
        return torch.where(
            mask, broadcast_to_tokens(upcast(rewards), cu_seqlens=cu_seqlens, num_tokens=mask.numel()), 0
        )

    assert subject(mine).axis == "T"
    assert not failures(check_estimator(mine, max_examples=10, out=quiet()))
