"""What sharing beginnings saves in a forward and backward, on a CPU, for attention and for recurrent layers.

    OMP_NUM_THREADS=2 python benchmarks/sharing.py

`answers`: eight answers of 30 to 90 tokens to one prompt of 1,000. Random models of four layers, 192 wide: Qwen3
(attention), Qwen3.5 (three gated delta nets to one attention), Nemotron-H (Mamba 2, MLP, Mamba 2, attention):

    shared      the prompt, and its recurrent state, once for the group
    unshared    packed, each answer with its prompt
    unpacked    the model's own forward on padded rows

`tree`: an agent's episode of 8 turns of 32 tokens, each continued by 4 branches, with the same random models and with
SmolLM2-135M-Instruct: in a forest, with shared prompts alone (each turn's branches in a forward of their own), and
apart. The rows of a side are the tokens that it forwards; a ratio is that of a side to the first one, within a round.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from functools import partial
from typing import Any

import torch
from _models import build
from _timing import Variants, interleaved, machine
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rlkit import Trajectory, pack
from rlkit.model import families
from rlkit.model.forward import forward, prepare_model

WIDTH: dict[str, Any] = {
    "vocab_size": 263, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 512,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_num_heads": 6, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2, "chunk_size": 64,
}  # fmt: skip
TURNS = 8
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4, "layer_types": HYBRID, **DELTA},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"], **MAMBA},
}


def trajectory(prompt: list[int], ids: list[int]) -> Trajectory:
    """A sample whose every token trains."""
    return Trajectory(prompt, ids, [True] * len(ids), [0.0] * len(ids), [0] * len(ids))


def drawn(n: int) -> list[int]:
    """`n` random tokens."""
    return torch.randint(3, 260, (n,)).tolist()


def step(model: Any, batch: Any) -> None:
    """Forward and backward."""
    forward(model, batch).logp.sum().backward()
    model.zero_grad(set_to_none=True)


def steps(model: Any, batches: list[Any]) -> None:
    """`step` on each."""
    for batch in batches:
        step(model, batch)


def random_model(kind: str) -> Any:
    """A small model of this type."""
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**WIDTH | CONFIGS[kind])).eval()


def answers(kind: str) -> Variants:
    """The three ways of one group."""
    torch.manual_seed(0)
    packed = random_model(kind)
    own = copy.deepcopy(packed)
    prompt = drawn(1000)
    group = [[trajectory(prompt, drawn(30 + 60 * i // 7)) for i in range(8)]]
    shared, unshared = (pack(group, share_prompts=share) for share in (True, False))
    prepare_model(packed)
    families.runs_unpacked(own, families.Verdict(False, "for comparison"))
    sides = {"shared": (packed, shared), "unshared": (packed, unshared), "unpacked": (own, shared)}
    logp = [forward(*side).logp[side[1].mask] for side in sides.values()]
    assert all((logp[0] - other).abs().max() < 1e-3 for other in logp[1:])
    return {name: partial(step, *side) for name, side in sides.items()}


def tree(kind: str) -> Variants:
    """The three ways of an episode of pieces."""
    torch.manual_seed(0)
    model, now, turns = prepare_model(random_model(kind) if kind in CONFIGS else build(kind)), drawn(32), []
    for _ in range(TURNS):
        turns.append([trajectory(now, drawn(32)) for _ in range(4)])
        now = [*now, *turns[-1][-1].ids]
    group = [piece for turn in turns for piece in turn]
    batches = {
        "forest": [pack([group])],
        "prompts": [pack([turn]) for turn in turns],
        "apart": [pack([group], share_prompts=False)],
    }
    sides = {name: partial(steps, model, parts) for name, parts in batches.items()}
    num, named = 0, {}

    def count(_: Any, inputs: Any) -> None:
        nonlocal num
        num += inputs[0].numel()

    watch = model.get_input_embeddings().register_forward_pre_hook(count)
    for name, side in sides.items():
        num = 0
        side()
        named[f"{name} ({num:,} rows)"] = side
    watch.remove()
    return named


CASES = {f"answers/{kind}": partial(answers, kind) for kind in CONFIGS}
CASES |= {f"tree/{kind}": partial(tree, kind) for kind in (*CONFIGS, "smollm")}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    args = parser.parse_args()
    print(json.dumps(machine()), flush=True)
    for name in args.only:
        times = interleaved(CASES[name](), repeats=args.rounds)
        (first, base), *others = times.items()
        line = f"{name}: {first} {statistics.median(base):.2f} s"
        for side, values in others:
            ratios = sorted(x / y for x, y in zip(values, base, strict=True))
            line += f"; {side} {statistics.median(ratios):.1f}x ({ratios[0]:.1f}-{ratios[-1]:.1f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
