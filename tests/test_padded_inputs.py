"""Padded tensors, 0/1 masks, labels and consecutive groups: the error gives the conversion, and it gives the truth.

Every tensor is `[B, L]` with B = L, so that a wrong broadcast of `[B]` would raise nothing.
"""

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlkit import advantages as A
from rlkit import losses as L
from rlkit.packing import from_padded, pack, to_padded, with_streams
from rlkit.segments import broadcast_to_tokens, cumulative
from rlkit.types import Trajectory

B = 4
LENS = [4, 1, 3, 2]
RNG = torch.Generator().manual_seed(0)
LOG_RATIO = 0.4 * torch.randn(B, B, generator=RNG, dtype=torch.float64)
REF = LOG_RATIO + 0.3 * torch.randn(B, B, generator=RNG, dtype=torch.float64)
VALUES = torch.randn(B, B, generator=RNG, dtype=torch.float64)
REAL = torch.arange(B) < torch.tensor(LENS)[:, None]
LABELS = torch.where(REAL, 7, -100)
PER_ROW = torch.tensor([1.0, -0.5, 2.0, -1.5], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 0.0, 3.0, 2.0, 5.0, 5.0, 0.0, 1.0], dtype=torch.float64)  # two groups of four
CU = cumulative(torch.tensor(LENS))


def packed(x):
    return from_padded(x, padding_mask=REAL).streams[0]


def at_real(f):
    """f(row, position) at real tokens, 0 elsewhere, by a loop."""
    return torch.tensor([[f(i, t) if t < LENS[i] else 0.0 for t in range(B)] for i in range(B)], dtype=torch.float64)


def everywhere(f):
    return torch.tensor([[f(i, t) for t in range(B)] for i in range(B)], dtype=torch.float64)


def clipped(x, a, high=0.2):
    r = math.exp(x)
    return max(-a * r, -a * min(max(r, 0.8), 1 + high))


def ppo(i, t):
    return clipped(LOG_RATIO[i, t].item(), PER_ROW[i].item())


def k3(i, t):
    d = (REF[i, t] - LOG_RATIO[i, t]).item()
    return math.exp(d) - d - 1


def leave_one_out():
    rewards = REWARDS.tolist()
    return torch.tensor(
        [r - (sum(rewards[i // 4 * 4 : i // 4 * 4 + 4]) - r) / 3 for i, r in enumerate(rewards)], dtype=torch.float64
    )


def gspo(i, t):
    mean = sum(LOG_RATIO[i, : LENS[i]].tolist()) / LENS[i]
    r, a = math.exp(mean), PER_ROW[i].item()
    return max(-a * r, -a * min(max(r, 1 - 3e-4), 1 + 4e-4))


def reward_to_go(i, t):
    return sum(VALUES[i, t : LENS[i]].tolist())


ROWS = PER_ROW[:, None].expand(B, B)
IDS = torch.arange(8) // 4
SHIFTED = torch.cat([torch.ones(B, 1, dtype=torch.bool), REAL], 1)  # of tokens 0 .. L, as from a collator
CASES = {  # name: function, arguments, the foreign one, its conversion, the truth
    "advantages [B]": (L.ppo_clip, {"log_ratio": LOG_RATIO, "advantages": PER_ROW, "mask": REAL}, "advantages",
                       "advantages[:, None].expand_as(log_ratio)", at_real(ppo)),
    "advantages [B, 1]": (L.ppo_clip, {"log_ratio": LOG_RATIO, "advantages": PER_ROW[:, None], "mask": REAL},
                          "advantages", "advantages.expand_as(log_ratio)", at_real(ppo)),
    "packed, advantages [N]": (L.ppo_clip, {"log_ratio": packed(LOG_RATIO), "advantages": PER_ROW}, "advantages",
                               "broadcast_to_tokens(advantages, cu_seqlens=cu_seqlens)", packed(at_real(ppo))),
    "clip [B]": (L.ppo_clip, {"log_ratio": LOG_RATIO, "advantages": ROWS, "clip_high": PER_ROW.abs()}, "clip_high",
                 "clip_high[:, None].expand_as(log_ratio)",
                 everywhere(lambda i, t: clipped(LOG_RATIO[i, t].item(), PER_ROW[i].item(), abs(PER_ROW[i].item())))),
    "mask 0/1": (L.k3, {"logp": LOG_RATIO, "ref_logp": REF, "mask": REAL.long()}, "mask", "mask.bool()", at_real(k3)),
    "mask 0./1.": (L.k3, {"logp": LOG_RATIO, "ref_logp": REF, "mask": REAL.float()}, "mask", "mask.bool()",
                   at_real(k3)),
    "mask as a list": (L.k3, {"logp": LOG_RATIO, "ref_logp": REF, "mask": REAL.tolist()}, "mask",
                       "torch.as_tensor(mask).bool()", at_real(k3)),
    "labels": (L.k3, {"logp": LOG_RATIO, "ref_logp": REF, "mask": LABELS}, "mask", "labels != -100", at_real(k3)),
    "mask of tokens": (L.k3, {"logp": LOG_RATIO, "ref_logp": REF, "mask": SHIFTED}, "mask", "mask[:, 1:]",
                       at_real(k3)),
    "weights of a 0/1 mask": (L.token_mean, {"mask": REAL.long()}, "mask", "mask.bool()",
                              at_real(lambda i, t: 1 / sum(LENS))),
    "weights of labels": (L.token_mean, {"mask": LABELS}, "mask", "labels != -100",
                          at_real(lambda i, t: 1 / sum(LENS))),
    "padded mask": (L.seq_mean, {"mask": REAL, "cu_seqlens": CU}, "mask",
                    "from_padded(mask, padding_mask=padding_mask)", packed(at_real(lambda i, t: 1 / LENS[i] / B))),
    "padded log_ratio": (L.gspo, {"log_ratio": LOG_RATIO, "advantages": ROWS, "mask": None, "cu_seqlens": CU},
                         ("log_ratio", "advantages"), "from_padded(log_ratio, padding_mask=padding_mask)",
                         packed(at_real(gspo))),
    "padded rewards": (A.discounted_returns, {"rewards": VALUES, "mask": REAL, "cu_seqlens": CU}, ("rewards", "mask"),
                       "from_padded(rewards, padding_mask=padding_mask)", packed(at_real(reward_to_go))),
    "lengths for cu_seqlens": (A.discounted_returns, {"rewards": packed(VALUES), "mask": packed(REAL),
                               "cu_seqlens": torch.tensor(LENS)}, "cu_seqlens", "cumulative(cu_seqlens)",
                               packed(at_real(reward_to_go))),
    "bootstrap [N, 1]": (A.discounted_returns, {"rewards": packed(VALUES), "mask": packed(REAL), "cu_seqlens": CU,
                         "bootstrap": PER_ROW[:, None]}, "bootstrap", "bootstrap.flatten()",
                         packed(at_real(lambda i, t: reward_to_go(i, t) + PER_ROW[i].item()))),
    "gamma as one tensor": (A.discounted_returns, {"rewards": packed(VALUES), "mask": packed(REAL), "cu_seqlens": CU,
                            "gamma": torch.tensor(1.0)}, "gamma", "gamma.expand_as(mask)",
                            packed(at_real(reward_to_go))),
    "a group size": (A.leave_one_out, {"rewards": REWARDS, "group_ids": 4}, "group_ids", "torch.arange(8) // 4",
                     leave_one_out()),
    "uids": (A.leave_one_out, {"rewards": REWARDS, "group_ids": np.array([*"xxxxbbbb"], dtype=object)}, "group_ids",
             "torch.as_tensor(np.unique(group_ids, return_inverse=True)[1])", leave_one_out()),
    "ids [N, 1]": (A.leave_one_out, {"rewards": REWARDS, "group_ids": IDS[:, None]}, "group_ids",
                   "group_ids.flatten()", leave_one_out()),
    "ids as floats": (A.leave_one_out, {"rewards": REWARDS, "group_ids": IDS.float()}, "group_ids",
                      "group_ids.long()", leave_one_out()),
    "an id per prompt": (A.leave_one_out, {"rewards": REWARDS, "group_ids": torch.arange(2)}, "group_ids",
                         "group_ids.repeat_interleave(4)", leave_one_out()),
    "rewards [P, G]": (A.leave_one_out, {"rewards": REWARDS.view(2, 4), "group_ids": IDS}, "rewards",
                       "rewards.flatten()", leave_one_out()),
    "rewards [N, 1]": (A.leave_one_out, {"rewards": REWARDS[:, None], "group_ids": IDS}, "rewards",
                       "rewards.flatten()", leave_one_out()),
    "token rewards [N, L]": (A.max_at_k, {"rewards": REWARDS[:, None] * torch.tensor([0.25, 0.75]), "group_ids": IDS,
                             "k": 1}, "rewards", "rewards.sum(1)", leave_one_out()),
    "rewards as ints": (A.leave_one_out, {"rewards": REWARDS.long(), "group_ids": IDS}, "rewards", "rewards.float()",
                        leave_one_out().float()),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_error_gives_the_conversion_and_it_gives_the_truth(name):
    function, arguments, foreign, fix, truth = CASES[name]
    foreign = (foreign,) if isinstance(foreign, str) else foreign
    with pytest.raises((TypeError, ValueError)) as caught:
        function(**arguments)
    message = str(caught.value)
    assert message.startswith(foreign[0]) or foreign[0] == "group_ids"
    assert foreign[0] in message
    assert fix in message
    assert "\n" not in message
    scope = {"torch": torch, "np": np, "broadcast_to_tokens": broadcast_to_tokens, "cumulative": cumulative,
             "from_padded": from_padded, "cu_seqlens": CU, "padding_mask": REAL, "labels": LABELS}  # fmt: skip
    converted = {}
    for argument in foreign:  # the same call for each padded argument
        result = eval(fix.replace(foreign[0], argument) if len(foreign) > 1 else fix, scope | arguments)
        converted[argument] = result.streams[0] if hasattr(result, "streams") else result
    out = function(**(arguments | converted))
    torch.testing.assert_close(out, truth.to(out.dtype), rtol=1e-6, atol=1e-6)


WITH_BOUNDS = [
    f for module in (L, A) for name in module.__all__
    if inspect.isfunction(f := getattr(module, name)) and "cu_seqlens" in inspect.signature(f).parameters
]  # fmt: skip


@pytest.mark.parametrize("function", WITH_BOUNDS, ids=lambda f: f.__name__)
def test_every_function_of_packed_streams_refuses_padded_ones(function):
    """All per-token arguments `[B, L]`, cu_seqlens of B rows: the error names one of them and `from_padded`."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = str(parameter.annotation)
        if name == "cu_seqlens":
            arguments[name] = CU
        elif name == "mask":
            arguments[name] = REAL
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif name in ("group_ids", "source_ids"):
            arguments[name] = torch.arange(B)
        elif '"T"' in annotation or "Tensor, 'T'" in annotation:
            arguments[name] = -VALUES.abs()  # possible as log-probs too
        elif "Bool" in annotation:
            arguments[name] = torch.ones(B, dtype=torch.bool)
        else:
            arguments[name] = PER_ROW if "Float" in annotation else 1
    tokens = "|".join(name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.ndim == 2)
    with pytest.raises(ValueError, match=rf"^({tokens}) must be packed, of shape \[T\], got \[4, 4\]; use from_padded"):
        function(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: L.token_mean(REAL, num_tokens=REAL.sum(1)), r"num_tokens must be one number .* shape \[4\]"),
        (lambda: L.token_mean(REAL, num_tokens=REAL.sum(1, keepdim=True)), r"num_tokens must be one number"),
        (lambda: L.seq_mean(packed(REAL), cu_seqlens=CU, num_seqs=CU), "num_seqs must be one number"),
        (lambda: L.batch_normalized(LOG_RATIO.exp(), mean=PER_ROW), "mean must be one number"),
        (lambda: L.token_covariance(LOG_RATIO, REF, mean_logp=PER_ROW), "mean_logp must be one number"),
        (lambda: L.token_covariance(LOG_RATIO, REF, mean_advantage=PER_ROW), "mean_advantage must be one number"),
        (lambda: L.top_entropy_mask(LOG_RATIO, threshold=PER_ROW), "threshold must be one number"),
        (lambda: L.m2po(LOG_RATIO, REF, cutoff=PER_ROW), "cutoff must be one number"),
        (lambda: L.kl_in_reward(VALUES, LOG_RATIO, REF, kl_coef=PER_ROW, mask=None), "kl_coef must be one number"),
        (lambda: L.k3(LOG_RATIO, REF, mask=REAL.long() * 3), "use a comparison: mask has values other than 0 and 1"),
        (lambda: L.ppo_clip(LOG_RATIO[None], PER_ROW), r"advantages must have the shape of log_ratio, \[1, 4, 4\]"),
        (lambda: A.bootstrap_values(VALUES[0], truncated=torch.ones(1), cu_seqlens=CU[[0, 1]]), r"truncated.bool\(\)"),
        (lambda: A.bootstrap_values(VALUES[0], truncated=REAL, cu_seqlens=CU[[0, 1]]), "one entry per sequence"),
    ],
)
def test_what_would_be_broadcast_wrongly_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_scalar_tensors_are_still_accepted():
    count = torch.tensor(17)
    assert torch.equal(L.token_mean(REAL, num_tokens=count), L.token_mean(REAL, num_tokens=count[None]))
    assert torch.equal(
        L.ppo_clip(LOG_RATIO, ROWS, clip_low=torch.tensor(0.2, dtype=torch.float64)), L.ppo_clip(LOG_RATIO, ROWS)
    )


def test_masks_on_another_device_name_both_conversions():
    """Their values cannot be read without a sync; "meta" stands for a GPU."""
    x = torch.zeros(2, 3, device="meta")
    with pytest.raises(TypeError, match=r"use mask.bool\(\) for 0 and 1, or labels != -100 for labels"):
        L.k3(x, x, mask=torch.ones(2, 3, device="meta", dtype=torch.long))


def test_padding_masks():
    with pytest.raises(TypeError, match=r"padding_mask must be bool .* use padding_mask.bool\(\)"):
        from_padded(VALUES, padding_mask=REAL.long())
    with pytest.raises(TypeError, match=r"padding_mask must be bool .* use labels != -100"):
        from_padded(padding_mask=LABELS)
    with pytest.raises(TypeError, match=r"padding_mask must be bool .* use padding_mask.bool\(\)"):
        to_padded(packed(VALUES), padding_mask=REAL.long())
    with pytest.raises(ValueError, match=r"padding_mask must have shape \[B, L\], got \[4\]"):
        from_padded(PER_ROW, padding_mask=REAL[0])
    with pytest.raises(ValueError, match=r"streams\[1\] must be \[B, L, ...\] .* got \[4\]; one value per row"):
        from_padded(VALUES, PER_ROW, padding_mask=REAL)


GOOD = Trajectory([1], [2, 3], [True, True], [-1.0, -1.0], [0, 0])


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"input_ids": LABELS}, "groups must be lists of Trajectory, .* got a dict; .* from_padded"),
        (LABELS, "groups must be lists of Trajectory, .* got a Tensor; .* from_padded"),
        ([[GOOD, replace(GOOD, ids=torch.tensor([2, 3]))]], r"groups\[0\]\[1\]: ids must be a list, .* ids.tolist\(\)"),
        ([[replace(GOOD, mask=[-100, 3])]], r"groups\[0\]\[0\]: mask must hold bools; use \[label != -100"),
    ],
)
def test_pack_says_what_it_takes(groups, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pack(groups)


def test_pack_takes_masks_of_0_and_1():
    assert pack([[replace(GOOD, mask=[0, 1])]]).mask.tolist() == [False, True]


def test_with_streams_names_the_stream():
    batch = pack([[GOOD, GOOD]])
    with pytest.raises(
        ValueError, match=r"advantages must have the shape of mask, \[4\], got \[2\]; .*broadcast_to_to"
    ):
        with_streams(batch, advantages=torch.zeros(2))
