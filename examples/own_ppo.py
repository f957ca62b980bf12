"""PPO with a critic as a loop of your own, on padded `[B, L]` tensors: plain torch and transformers around functions.

    python examples/own_ppo.py

On a tiny model of random weights, in a minute on a CPU; the reward is the share of digits in eight sampled tokens. The
policy is any model of `AutoModelForCausalLM`, the critic another one with a linear head. Rows keep their padding:
`gae` alone needs packed streams, and `from_padded` and `to_padded` convert both ways.
"""

import argparse

import torch
from torch import Tensor

from rlkit import from_padded, gae, ppo_clip, to_padded, token_mean
from rlkit.advantages import whiten
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.kernels.logits_logp import logits_logp
from rlkit.losses import value_clip


def padded_gae(rewards: Tensor, values: Tensor, mask: Tensor, *, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns `[B, L]` of rows with padding; `mask` is True at the tokens of the policy."""
    (r, v), cu_seqlens = from_padded(rewards, values, padding_mask=mask)
    out = gae(r, v, mask=torch.ones_like(r, dtype=torch.bool), cu_seqlens=cu_seqlens, lam=lam)
    advantages, returns = to_padded(*out, padding_mask=mask)
    return advantages, returns


def main(steps: int = 25, batch_size: int = 64, length: int = 8, epochs: int = 2) -> list[float]:
    """Train, and return the mean reward of each step."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    policy, critic = tiny_model(tokenizer, seed=0), tiny_model(tokenizer, seed=1)
    head = torch.nn.Linear(critic.config.hidden_size, 1)
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters(), *head.parameters()], lr=2e-3)
    prompt = torch.tensor(tokenizer.encode("say: ")).expand(batch_size, -1)
    start, history = prompt.shape[1] - 1, []

    def logp_and_values(ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = policy(ids).logits[:, start:-1]  # entry t is about the action taken after token t
        hidden = critic.model(ids).last_hidden_state[:, start:-1]
        targets = ids[:, start + 1 :]
        return logits_logp(logits.flatten(0, 1), targets.flatten()).logp.view_as(targets), head(hidden).squeeze(-1)

    for step in range(steps):
        ids = policy.generate(
            prompt, max_new_tokens=length, do_sample=True, top_k=0, pad_token_id=tokenizer.pad_token_id
        )
        texts, actions = tokenizer.batch_decode(ids[:, start + 1 :], skip_special_tokens=True), ids[:, start + 1 :]
        ended = (actions == tokenizer.eos_token_id).cumsum(1)
        mask = (ended - (actions == tokenizer.eos_token_id).long()) == 0  # up to and with the first end of text
        score = torch.tensor([sum(map(str.isdigit, text)) / length for text in texts])
        rewards = torch.zeros(mask.shape).scatter(1, mask.sum(1, keepdim=True) - 1, score[:, None])  # on the last token
        with torch.no_grad():
            old_logp, old_values = logp_and_values(ids)
        advantages, returns = padded_gae(rewards, old_values, mask, lam=0.95)
        advantages = whiten(advantages, mask=mask)
        weights = token_mean(mask, num_tokens=int(mask.sum()))
        for _ in range(epochs):
            logp, values = logp_and_values(ids)
            loss = ppo_clip(logp - old_logp, advantages, clip_high=0.2, mask=mask)
            loss = loss + value_clip(values, old_values, returns, clip=0.5, mask=mask)
            optimizer.zero_grad()
            (weights * loss).sum().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        history.append(score.mean().item())
        print(f"{step:3}  reward {history[-1]:.3f}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    main(parser.parse_args().steps)
