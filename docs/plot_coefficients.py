"""Draws the coefficient c(ratio) of each surrogate, measured by autograd, into docs/img/coefficients.png.

The gradient of a surrogate is `-c * A * dlogp`. Run `python docs/plot_coefficients.py` after changing one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from torch import Tensor

from rlkit import losses

mpl.use("Agg")
import matplotlib.pyplot as plt

POSITIVE, NEGATIVE, INK, MUTED = "#2a6fb0", "#d9661f", "#222222", "#9a9a9a"
TOP = 3.3


class Panel(NamedTuple):
    """One surrogate at one setting; `low` and `high` bound the ratio axis."""

    title: str
    f: Callable[[Tensor, Tensor], Tensor]
    low: float = 0.25
    high: float = 6.0


def with_old(f: Callable[..., Tensor], prob: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A surrogate that also needs the old policy's probability of the token."""
    return lambda x, a: f(x, a, old_logp=torch.full_like(x, math.log(prob)))


def one_token_sequences(f: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A sequence-level surrogate on sequences of one token."""
    return lambda x, a: f(x, a, mask=None, cu_seqlens=torch.arange(x.numel() + 1))


PANELS = [
    Panel("reinforce (GPG)", losses.reinforce),
    Panel("importance_sampling", losses.importance_sampling),
    Panel("ppo_clip (0.2, 0.2)", losses.ppo_clip),
    Panel("ppo_clip (0.2, 0.28)", lambda x, a: losses.ppo_clip(x, a, clip_high=0.28)),
    Panel("dual_clip (clip_c 1.5)", lambda x, a: losses.dual_clip(x, a, clip_c=1.5)),
    Panel("dual_clip (clip_c 3)", lambda x, a: losses.dual_clip(x, a, clip_c=3.0)),
    Panel("cispo (max_weight 2.5)", lambda x, a: losses.cispo(x, a, max_weight=2.5)),
    Panel("icepop (0.5, 2) * reinforce", lambda x, a: losses.icepop(x, low=0.5, high=2.0) * losses.reinforce(x, a)),
    Panel("topr", losses.topr),
    Panel("aspo (max_weight 3)", lambda x, a: losses.aspo(x, a, max_weight=3.0)),
    Panel("unbounded_positive", losses.unbounded_positive),
    Panel("sapo (1, 1.05)", losses.sapo),
    Panel("dppo, old prob 0.5", with_old(losses.dppo, 0.5), high=2.0),
    Panel("dppo, old prob 0.1", with_old(losses.dppo, 0.1)),
    Panel("dppo_kl, old prob 0.1", with_old(losses.dppo_kl, 0.1)),
    Panel("1.5 ppo_clip (decoupled PPO)", lambda x, a: 1.5 * losses.ppo_clip(x, a)),
    Panel("gspo (3e-4, 4e-4)", one_token_sequences(losses.gspo), low=0.999, high=1.001),
    Panel("gmpo (log 0.4)", one_token_sequences(losses.gmpo)),
    Panel("vespo", one_token_sequences(losses.vespo)),
    Panel("m2po (cutoff 0.5)", lambda x, a: losses.m2po(x, a, cutoff=0.5)),
]


def coefficient(panel: Panel, ratio: Tensor, sign: float) -> Tensor:
    """c = -gradient / A, with breaks (NaN) where it jumps."""
    x = ratio.log().requires_grad_()
    a = torch.full_like(x, sign)
    (grad,) = torch.autograd.grad(panel.f(x, a).sum(), x)
    c = -grad / sign
    jumps = (c.diff().abs() > 0.08 * TOP).nonzero().flatten()
    c[jumps] = torch.nan
    return c


def draw(ax: plt.Axes, panel: Panel) -> None:
    """One panel: both signs of A over a logarithmic ratio axis."""
    ratio = torch.logspace(math.log10(panel.low), math.log10(panel.high), 3001, dtype=torch.float64)
    ax.axvline(1, color=MUTED, lw=0.7)
    ax.axhline(1, color=MUTED, lw=0.7, ls=":")
    ax.plot(ratio, coefficient(panel, ratio, 1.0), color=POSITIVE, lw=3.4, alpha=0.75, solid_capstyle="butt")
    ax.plot(ratio, coefficient(panel, ratio, -1.0), color=NEGATIVE, lw=1.8, dashes=(3, 1.2))
    ax.set_title(panel.title, fontsize=10, color=INK, pad=4)
    ax.set_xscale("log")
    narrow = panel.high < 1.01
    ticks = [0.999, 1, 1.001] if narrow else [t for t in (0.25, 0.5, 1, 2, 4) if t <= panel.high]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.set_xlim(0.999 if narrow else 0.25, 1.001 if narrow else 6)
    ax.set_ylim(-0.12, TOP)
    ax.set_yticks([0, 1, 2, 3])
    ax.tick_params(labelsize=8, colors=INK, length=3)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Writes the picture next to this file."""
    fig, axes = plt.subplots(5, 4, figsize=(12, 12.4), sharey=True)
    for ax, panel in zip(axes.flat, PANELS, strict=True):
        draw(ax, panel)
    for ax in axes[:, 0]:
        ax.set_ylabel("c", fontsize=10, rotation=0, labelpad=8)
    for ax in axes[-1]:
        ax.set_xlabel("ratio (log scale)", fontsize=9)
    handles = [
        plt.Line2D([], [], color=POSITIVE, lw=3.4, alpha=0.75, label="A > 0"),
        plt.Line2D([], [], color=NEGATIVE, lw=1.8, dashes=(3, 1.2), label="A < 0"),
    ]
    fig.legend(handles=handles, loc="upper right", ncols=2, frameon=False, fontsize=11, bbox_to_anchor=(0.985, 0.993))
    fig.text(0.035, 0.979, "Coefficient c of each surrogate: gradient = -c A dlogp", fontsize=13, color=INK)
    fig.tight_layout(rect=(0.01, 0, 1, 0.965), h_pad=1.6)
    target = Path(__file__).parent / "img" / "coefficients.png"
    target.parent.mkdir(exist_ok=True)
    fig.savefig(target, dpi=110)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
