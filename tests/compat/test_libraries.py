"""Environments of libraries by one line: which ids, which rows, which actions; aviary with the package."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from foreign import user_says, with_row
from scripted import Script, check_exact, prompt_of, tokenizer_with

from rlkit._util.extras import MissingExtra
from rlkit.compat import envs
from rlkit.compat.actions import actions_of, show_observation
from rlkit.compat.libraries import LIBRARIES, env_rows, environment_of, published, with_opponent
from rlkit.compat.recognise import OF_MESSAGES, Published
from rlkit.data.load import load_rows
from rlkit.scripts import grpo, sft
from rlkit.scripts.cli import with_own_data


@pytest.fixture
def arena(monkeypatch):
    """After envs/registration.py and state.py of textarena 0.7.4: a game of one player, and one of two."""

    class Game:
        __module__ = "textarena.game"

        def __init__(self, seats):
            self.seats = seats

        def reset(self, num_players, seed=None):
            assert num_players == self.seats, f"The number of players has to be {self.seats}"

    names = {"Solo-v0": 1, "Poker-v0": 2, "Poker-v0-long": 2}
    textarena = ModuleType("textarena")
    textarena.make = lambda name, **_: Game(names[name.removesuffix("-raw")])
    registration = ModuleType("textarena.envs.registration")
    registration.ENV_REGISTRY = {name + end: None for name in names for end in ("", "-raw", "-train")}
    for module in (textarena, ModuleType("textarena.envs"), registration):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return textarena


def test_ids_and_players(arena):
    with pytest.raises(ValueError, match=r"^textarena has no 'Poker': the nearest are Poker-v0, Poker-v0-long$"):
        published("textarena:Poker")
    with pytest.raises(ValueError, match="at_once is a number of episodes"):
        published("textarena:Poker-v0(at_once=0)")
    solo, poker = published("textarena:Solo-v0"), published("textarena:Poker-v0-raw(at_once=3, rounds=2)")
    assert (poker.kind, poker.at_once) == ("textarena", 3)
    assert with_opponent(solo, None).options == {"opponents": []}
    assert with_opponent(poker, "self").options == {"seats": 2}
    with pytest.raises(ValueError, match=r"has 2 players: add --opponent self .* or --opponent FILE.py:FUNCTION"):
        with_opponent(poker, None)
    with pytest.raises(ValueError, match="textarena:Solo-v0 has one player: drop --opponent"):
        with_opponent(solo, "self")
    with pytest.raises(ValueError, match="is for games of TextArena"):
        with_opponent(Published("gem", None), "self")


def test_a_missing_library_is_one_line_with_the_command(monkeypatch):
    for name, library in LIBRARIES.items():
        monkeypatch.setitem(sys.modules, library.module, None)
        with pytest.raises(MissingExtra, match=f"^--env {name}:... needs .*: pip install {library.package}"):
            published(f"{name}:x")
    assert published("my_env.py:env") is None
    assert {*LIBRARIES} <= {*OF_MESSAGES}


def test_rows_of_games_are_seeds_that_held_out_games_do_not_share(arena):
    train, held_out = (load_rows([env_rows("textarena:Solo-v0", held_out=x)]) for x in (False, True))
    assert (len(train), len(held_out)) == (1024, 64)
    assert not {row["seed"] for row in train} & {row["seed"] for row in held_out}
    assert env_rows("train.jsonl") == "train.jsonl"
    assert envs.gymnasium  # the seed of a row is that of the game: tests/compat/test_envs_games.py


async def test_the_seed_of_a_row_is_that_of_the_game():
    seeds = []

    class Game:
        def reset(self, *, seed, options):
            seeds.append(seed)
            return "go", {}

        def step(self, action):
            return "", 1.0, True, False, {}

    tokenizer = tokenizer_with("chatml")
    for row in ({}, {"seed": 77}):
        await envs.gymnasium(lambda _: Game(), tokenizer)(with_row(tokenizer, row, index=5), Script(tokenizer, "a"))
    assert seeds == [5, 77]


async def test_at_most_so_many_episodes_are_played_at_once():
    tokenizer, playing = tokenizer_with("chatml"), []

    class Game:
        async def reset(self):
            playing.append(1)
            assert len(playing) <= 2
            return "go"

        async def step(self, _):
            await asyncio.sleep(0.01)
            return "", 1.0, True

        def close(self):
            playing.pop()

    env = envs.adapted(Published("object", lambda _: Game(), at_once=2), tokenizer)
    await asyncio.gather(*(env(prompt_of(tokenizer), Script(tokenizer, "a")) for _ in range(5)))


ALONE = """
seeds = []

class Game:
    def reset(self, seed, options):
        seeds.append(seed)
        return "go"

    def step(self, turn):
        return "", 1.0, True

class Silent(Game):
    def reset(self): ...
"""


async def test_a_class_made_without_arguments_plays_seeds_of_which_none_is_held_out(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    tokenizer, spec = tokenizer_with("chatml"), f"{tmp_path}/alone.py:Game"
    train, held_out = (load_rows([env_rows(spec, held_out=x)]) for x in (False, True))
    assert (len(train), len(held_out)) == (1024, 64)
    assert not {*train.sources} & {*held_out.sources}, "the same name is said to be not held out"
    Game = environment_of(spec).source
    game = envs.adapted(environment_of(spec), tokenizer)
    for rows in (train, held_out):
        await game(with_row(tokenizer, rows[3], index=3), Script(tokenizer, "a"))
    assert Game.reset.__globals__["seeds"] == [train[3]["seed"], held_out[3]["seed"]] == [3, 1_000_003]
    silent = envs.adapted(environment_of(f"{tmp_path}/alone.py:Silent"), tokenizer)
    asked = {"messages": [{"role": "user", "content": "question"}], "seed": 5}
    await silent(with_row(tokenizer, asked), Script(tokenizer, "a"))
    with pytest.raises(TypeError, match=r"Silent.reset returns None, for the prompt of the row.* give --data FILE"):
        await silent(with_row(tokenizer, load_rows([env_rows(f"{tmp_path}/alone.py:Silent")])[3]), Script(tokenizer))


def test_an_environment_of_an_installed_package_is_named_by_its_module(monkeypatch, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "rlkit_test_package.py").write_text(ALONE)
    (tmp_path / "site" / "rlkit_test_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert len(load_rows([env_rows("rlkit_test_package:Game")])) == 1024
    line = ["--model", "m", "--env", "rlkit_test_package:Game"]
    assert with_own_data(line, grpo.Args) == ["--data", line[-1], *line]
    for data in (
        "rlkit_test_folder:train",
        "squad:plain",
        "owner/rlkit_test_package:Game",
        "rlkit_test_package::train",
    ):
        assert env_rows(data) == data, "rows, not an environment"


def test_what_names_no_environment_is_refused_before_any_data_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text("def make(): ...")
    for spec, said in {
        "gym:FrozenLake-v1": r"did you mean gymnasium:FrozenLake-v1\?",
        "rlkit_no_package:tw-simple": r"another package write `def make\(\): return ...`, and give FILE.py:make",
        "rlkit_no_package": r"nor gem, textarena, gymnasium",
        "game:make()": r"did you mean game.py:make",
        "game.py": r"game.py has \['make'\]",
    }.items():
        with pytest.raises(ValueError, match=said) as raised:
            with_own_data(["--model", "m", "--env", spec], grpo.Args)
        assert str(raised.value).startswith(f"`env` {spec}: ")
        with pytest.raises(ValueError, match=said):
            environment_of(spec)


def test_a_file_whose_environment_has_no_rows_asks_for_data(tmp_path):
    (tmp_path / "my_env.py").write_text("class Game:\n    def __init__(self, prompt): ...\n    reset = step = None\n")
    with pytest.raises(ValueError, match=r"my_env.py:Game brings no rows of its own: give --data FILE"):
        load_rows([env_rows(f"{tmp_path}/my_env.py:Game")])


def test_the_environment_is_the_data_of_a_command_without_data():
    line = ["--model", "m", "--env", "gem:game:Sudoku-v0-easy"]
    assert with_own_data(line, grpo.Args) == ["--data", line[-1], *line]
    for whole in ([*line, "--data", "d"], line[:2], ["--model", "m", "--env", "a=x.py:a", "b=x.py:b"]):
        assert with_own_data(whole, grpo.Args) == whole
    assert with_own_data(line[:2], sft.Args) == line[:2]


def test_actions_by_their_schema():
    metadata = {"metadata": {"type": "object"}}
    act, hint = actions_of({"properties": {"message": {"type": "string", "description": "Say it"}, **metadata}})
    assert (act("<think>x</think> hello "), hint) == (
        {"message": "hello"},
        "Your whole answer is the action's message: Say it",
    )
    how = {"enum": ["a", "b"], "type": "string"}
    schema = {"properties": {"n": {"type": "integer", "title": "N"}, "how": how, **metadata}, "required": ["n"]}
    act, hint = actions_of(schema)
    assert json.loads(hint.partition("schema: ")[2])["properties"]["n"] == {"type": "integer"}
    assert act('First {"n": 1}, no: ```json\n{"n": 2, "how": "b"}\n```') == {"n": 2, "how": "b"}
    for text, problem in (
        ("two", "no JSON object"),
        ('{"n": "2"}', "argument 'n' must be integer"),
        ('{"how": "a"}', "missing arguments"),
        ('{"n": 2, "how": "c"}', "must be one of"),
    ):
        with pytest.raises(ValueError, match=problem):
            act(text)
    assert show_observation({"text": "hi", "done": False, "reward": None, "metadata": {}}) == "hi"
    assert json.loads(show_observation({"a": 1, "b": "é"})) == {"a": 1, "b": "é"}


def aviary_game():
    """A real environment of fhaviary, with a tool that it runs itself."""
    env = pytest.importorskip("aviary.env")
    from aviary.core import Message, Tool

    class Doubling(env.Environment):
        def __init__(self, limit: int = 3):
            self.limit = limit

        async def reset(self):
            def double(x: int) -> str:
                """Double a number.

                Args:
                    x: the number
                """
                return str(2 * x)

            self.tools, self.state = [Tool.from_function(double)], SimpleNamespace(turns=0)
            return [Message(content="What is 2*21?")], self.tools

        async def step(self, action):
            self.state.turns += 1
            cut = self.state.turns == self.limit
            if not getattr(action, "tool_calls", None):
                return [Message(content="Use the tool.")], float(action.content == "42"), action.content == "42", cut
            return await self.exec_tool_calls(action), 0.25, False, cut

    return Doubling


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3", "mistral"])
async def test_aviary(template):
    """The tools are shown, calls are run by the environment, and each sampled token is where it was sampled."""
    game, tokenizer = aviary_game(), tokenizer_with(template)
    call = {"name": "double", "arguments": {"x": 21}}
    said = (
        f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        if template == "qwen3"
        else f"[TOOL_CALLS] {json.dumps([call])}"
    )
    script = Script(tokenizer, said, "hm", "42", end=tokenizer.eos_token)
    pieces = await envs.adapted(game, tokenizer)(prompt_of(tokenizer), script)
    check_exact(pieces, script.calls)
    assert "Double a number." in tokenizer.decode(pieces[0].prompt_ids)
    whole = tokenizer.decode(script.calls[1][0])
    assert "42" in whole.rpartition("21")[2], whole
    end = pieces[-1]
    assert (end.reward, end.info["num_calls"], end.info["num_bad_calls"]) == (1.25, 1, 0)
    assert user_says(end)[-1] == "Use the tool."
    script = Script(tokenizer, "<tool_call>{</tool_call>", end=tokenizer.eos_token)
    if template == "qwen3":
        (piece,) = await envs.aviary(lambda _: game(1), tokenizer)(prompt_of(tokenizer), script)
        assert (piece.truncated, piece.info["num_bad_calls"]) == (True, 1)


@pytest.mark.slow
async def test_a_dataset_of_aviary_with_one_object_for_each_task():
    env = pytest.importorskip("aviary.env")
    game, tokenizer = aviary_game(), tokenizer_with("qwen3")
    whole = envs.resolved(env.EnvsTaskDataset([game(2), game(2)]))
    first, again = (whole.made(with_row(tokenizer, {"task": 1})) for _ in range(2))
    assert first is not again
    assert [row["task"] for row in whole.rows(False)] == [0, 1]
