"""Tic-tac-toe by self-play: the rules, the perfect player and the rewards of both roles."""

from __future__ import annotations

import asyncio
import random

import pytest
import tic_tac_toe as game

from rlkit.rollout.groups import Prompt, sample_group
from rlkit.types import Completion


def reachable(board: str, seen: set[str]) -> set[str]:
    seen.add(board)
    for move in game.moves(board):
        if (then := game.after(board, move)) not in seen:
            reachable(then, seen)
    return seen


def worst(board: str, *, mine: bool) -> int:
    """The worst end, for a player of any best moves, over all that the other may do: 1, 0 or -1."""
    if game.won(board):
        return -1 if mine else 1
    options = game.best(board) if mine else game.moves(board)
    return min((worst(game.after(board, move), mine=not mine) for move in options), default=0)


@pytest.mark.slow
def test_the_rules_and_the_perfect_player():
    """5478 positions can be reached, 958 of them ends (626 won by X, 316 by O, 16 drawn); nobody can win by force."""
    boards = reachable(game.EMPTY, set())
    ends = [board for board in boards if not game.moves(board)]
    by_x = sum(game.won(board) and sum(map(str.isalpha, board)) % 2 == 1 for board in ends)
    drawn = sum(not game.won(board) for board in ends)
    assert (len(boards), len(ends), by_x, drawn) == (5478, 958, 626, 16)
    assert game.value(game.EMPTY) == 0
    assert worst(game.EMPTY, mine=True) == worst(game.EMPTY, mine=False) == 0


def played(script: str, **row: object) -> dict[str, tuple[float, int, dict[str, float]]]:
    """Reward, pieces and numbers of each role where the policy's moves are those of the script."""
    left = iter(script)

    async def sample(prompt_ids, *, max_new_tokens=None, stop=()):
        assert len(prompt_ids) == 9
        return Completion([ord(next(left))], [-1.0], [0], "length")

    async def first(board: str, rng: random.Random) -> str:
        return game.moves(board)[0]

    prompt = Prompt([1], {"seed": 0, "role": None, "against": None, **row}, 0)

    async def env(prompt, sample):
        return await game.play(prompt, sample, others={"first": first})

    pieces = asyncio.run(sample_group(prompt, [sample], env=env))
    ends = {t.role: (t.reward, t.info["metrics"]) for t in pieces if t.info}
    return {role: (reward, sum(t.role == role for t in pieces), kept) for role, (reward, kept) in ends.items()}


@pytest.mark.parametrize(
    ("script", "row", "expected"),
    [
        ("03142", {}, {"X": (1.0, 3, "win"), "O": (-1.0, 2, "")}),
        ("03183", {}, {"X": (-1.5, 3, "illegal"), "O": (0.0, 2, "")}),
        ("041", {"role": "O", "against": "first"}, {"O": (-1.5, 1, "illegal")}),
        ("048", {"role": "X", "against": "first"}, {"X": (1.0, 3, "win")}),
        ("432", {"role": "O", "against": "first"}, {"O": (-1.0, 2, "")}),
        ("048176253", {}, {"X": (0.0, 5, "draw"), "O": (0.0, 4, "draw")}),
    ],
)  # fmt: skip
def test_a_game_pays_each_role(script, row, expected):
    found = played(script, **row)
    assert {role: (reward, pieces) for role, (reward, pieces, _) in found.items()} == {
        role: (reward, pieces) for role, (reward, pieces, _) in expected.items()
    }
    for role, (_, _, name) in expected.items():
        assert {key for key, x in found[role][2].items() if x} == ({name} if name else set())
