"""DPO on pairs as a loop of your own: responses of digits are preferred to responses of letters.

    python examples/own_dpo.py

On a tiny model of random weights, in seconds on a CPU. `rlkit.load_model` gives your own model, and any loss of a pair's
log-ratios takes the place of `dpo` (docs/preference.md). Prints the loss, which begins at ln 2, and the share of pairs
whose chosen response has the larger log-ratio.
"""

import argparse

from rlkit import Policy, adamw, microbatches, optimizer_step, pack, pair_trajectories, with_ref_logp
from rlkit.data.examples import preference_pairs
from rlkit.data.order import batches
from rlkit.data.tiny import tiny_model, tiny_tokenizer
from rlkit.losses import dpo
from rlkit.model.forward import prepare_model
from rlkit.segments import sum_per_seq


def main(steps: int = 30, batch_size: int = 8) -> list[float]:
    """Train, and return the loss of each step."""
    rows = [{"prompt": f"{i}: ", "chosen": str(i + 10), "rejected": chr(97 + i % 26) * 2} for i in range(64)]
    tokenizer = tiny_tokenizer()
    pairs, _ = preference_pairs(rows, tokenizer=tokenizer, max_example_tokens=64, apply_chat_template=False)
    model, reference = (prepare_model(tiny_model(tokenizer, seed=0)) for _ in range(2))  # equal before training
    policy, optimizer, losses = Policy(model), adamw(model, lr=1e-3), []
    for step, chosen in zip(range(steps), batches(len(pairs), batch_size=batch_size, seed=0)):
        batch = pack(pair_trajectories([pairs[i] for i in chosen]))  # sequences 0, 2, 4 ... are chosen, 1, 3, 5 ... not
        batch = with_ref_logp(Policy(reference), batch, max_tokens=4096)
        total, right = 0.0, 0
        for (micro,) in microbatches((batch,), max_tokens=4096, whole_groups=True):
            log_ratio = sum_per_seq(policy(micro).logp - micro.ref_logp, cu_seqlens=micro.cu_seqlens)
            loss = dpo(log_ratio[0::2], log_ratio[1::2], beta=0.1).sum() / batch_size
            loss.backward()
            total, right = total + loss.item(), right + int((log_ratio[0::2] > log_ratio[1::2]).sum())
        optimizer_step(optimizer, max_norm=1.0)
        losses.append(total)
        print(f"{step:3}  loss {total:.3f}  accuracy {right / batch_size:.2f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    main(parser.parse_args().steps)
