"""Self-play: a tiny model learns tic-tac-toe from games against itself.

    python examples/tic_tac_toe.py

A Qwen3 with random weights first imitates a perfect player for a short time: it learns the rules and half of the
tactics. Then it plays both roles, X and O, of every game, and each role's rewards are compared with its average in
earlier steps (`moving_average`). A win pays 1, a loss -1. An illegal move ends the game and pays -1.5: one that cost
no more than a loss would come back in every lost game. A KL to the start keeps moves legal and games different, where
an entropy bonus would pay for illegal ones. Each evaluation plays against a perfect player, a random one, and its own
start, which stays frozen. Three to seven minutes on one core.

A board is nine characters, as the player to move sees it: a free field is its number, which is also the move; a field
that is taken is a letter, A to I for own marks, a to i for the other's.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlkit.rollout.envs.turns import Turns
from rlkit.rollout.groups import Prompt, Sampler
from rlkit.scripts.cli import Flat, run
from rlkit.settings import Count, Optim, Penalties, Rollouts, Schedule, check
from rlkit.types import SamplingParams, Trajectory

EMPTY, LINES = "012345678", ("012", "345", "678", "036", "147", "258", "048", "246")
Player = Callable[[str, random.Random], Awaitable[str]]  # the move on a board


@dataclass(frozen=True)
class Args:
    sft_steps: Count = 500
    """steps of imitation, of 128 moves each"""
    eval_games: Count = 60
    """games of an evaluation against each opponent, half of them as X"""
    debug: bool = False
    """show the traceback of an error that is otherwise one line"""
    rollouts: Flat[Rollouts] = Rollouts(prompts_per_step=128, group_size=1, max_new_tokens=1, print_samples_steps=0)
    schedule: Flat[Schedule] = Schedule(Path("runs/tic_tac_toe"), steps=150, eval_steps=25, print_steps=25)
    optim: Flat[Optim] = Optim(lr=2e-4)
    penalties: Flat[Penalties] = Penalties(kl_coef=0.1)

    def __post_init__(self) -> None:
        check(self)


def won(board: str) -> bool:
    """Whether the player who has just moved has won."""
    return any(all(board[int(i)].islower() for i in line) for line in LINES)


def moves(board: str) -> list[str]:
    return [] if won(board) else [field for field in board if field.isdigit()]


def after(board: str, move: str) -> str:
    """The board as the other player then sees it."""
    return board.replace(move, chr(ord("A") + int(move))).swapcase()


@cache
def value(board: str) -> int:
    """What the player to move gets where both play perfectly."""
    return -1 if won(board) else max((-value(after(board, move)) for move in moves(board)), default=0)


def best(board: str) -> list[str]:
    return [move for move in moves(board) if -value(after(board, move)) == value(board)]


async def perfect(board: str, rng: random.Random) -> str:
    return rng.choice(best(board))


async def anything(board: str, rng: random.Random) -> str:
    return rng.choice(moves(board))


def frozen(generate: Any) -> Player:
    """A model that does not train, sampled by an engine of its own; in place of an illegal move it plays any."""

    async def player(board: str, rng: random.Random) -> str:
        params = SamplingParams(max_new_tokens=1, seed=rng.getrandbits(32))
        move = chr((await generate([*board.encode()], params=params)).ids[0])
        return move if move in moves(board) else rng.choice(moves(board))

    return player


async def play(prompt: Prompt, sample: Sampler, *, others: Mapping[str, Player]) -> list[Trajectory]:
    """A game of the policy against itself, or as `row["role"]` against `row["against"]`; each move is a piece."""
    board, role, other, pay = EMPTY, "X", "O", {"X": 0.0, "O": 0.0}
    turns, rng = dict[str, Turns](), random.Random(prompt.row["seed"])
    while moves(board):
        if prompt.row["role"] in (role, None):
            of = turns.setdefault(role, Turns([*board.encode()], sample))
            if of.num_turns:
                of.restart([*board.encode()])
            move = chr((await of.sample()).ids[0])
        else:
            move = await others[prompt.row["against"]](board, rng)
        if move not in moves(board):
            pay[role] = -1.5
            break
        board, role, other = after(board, move), other, role
    else:
        pay |= {other: 1.0, role: -1.0} if won(board) else {}
    numbers = {r: {"win": pay[r] == 1, "draw": not any(pay.values()), "illegal": pay[r] < -1} for r in pay}
    ended = {r: of.pieces(reward=pay[r], truncated=False, info={"metrics": numbers[r]}) for r, of in turns.items()}
    return [replace(piece, role=r) for r, pieces in ended.items() for piece in pieces]


def imitated(args: Args, tokenizer: Any) -> Any:
    """The tiny model after imitation of the perfect player, on boards of random games."""
    from rlkit.data.examples import Example
    from rlkit.data.tiny import tiny_model
    from rlkit.loops.sft import sft
    from rlkit.model.forward import prepare_model

    print(f"drawing {128 * args.sft_steps:,} moves of a perfect player to imitate", flush=True)
    rng, examples = random.Random(args.schedule.seed), list[Example]()
    while len(examples) < 128 * args.sft_steps:
        board = EMPTY
        while moves(board):
            ids = [*board.encode(), ord(rng.choice(best(board)))]
            examples.append(Example(ids, [False] * 9 + [True]))
            board = after(board, rng.choice(moves(board)))
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 16, "intermediate": 256}
    model = prepare_model(tiny_model(tokenizer, **sizes, seed=args.schedule.seed))
    schedule = replace(
        args.schedule, output=args.schedule.output / "sft", steps=args.sft_steps, eval_steps=0, print_steps=50
    )
    optim = Optim(lr=3e-3, lr_schedule="linear")
    sft(model, tokenizer, examples, schedule, optim, batch_size=128)
    return model


def main(args: Args) -> Path:
    from rlkit.controllers import moving_average
    from rlkit.data.tiny import tiny_tokenizer
    from rlkit.loops.evaluate import EvalSet
    from rlkit.loops.grpo import grpo_sync
    from rlkit.loops.rl import Task
    from rlkit.rollout.engines.local import LocalEngine

    tokenizer = tiny_tokenizer()
    model = imitated(args, tokenizer)
    start = copy.deepcopy(model)
    others = {
        "perfect": perfect,
        "random": anything,
        "start": frozen(LocalEngine(start, max_batch=128, max_len=16).generate),
    }

    def prompt(i: int, **row: Any) -> Prompt:
        return Prompt([*EMPTY.encode()], {"seed": i, "role": None, "against": None, **row}, i)

    measured = {
        name: EvalSet([prompt(i, role="XO"[i % 2], against=name) for i in range(args.eval_games)]) for name in others
    }
    return grpo_sync(
        model,
        tokenizer,
        LocalEngine(model, max_batch=128, max_len=16),
        Task([prompt(i) for i in range(4096)], score=None, env=partial(play, others=others), eval_sets=measured),
        args.rollouts,
        replace(args.schedule, output=args.schedule.output / "self_play"),
        args.optim,
        args.penalties,
        baseline=moving_average(decay=0.9),
        reference=start,
    )


if __name__ == "__main__":
    run(main, Args, __doc__)
