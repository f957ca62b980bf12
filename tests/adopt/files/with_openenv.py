"""A server of OpenEnv whose actions have two fields."""

import sys

import uvicorn
from openenv.core import Environment, State
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class Guess(Action):
    """An action."""

    number: int = Field(description="from 0 to 9")
    sure: bool = Field(default=False, description="whether it is final")


class Heard(Observation):
    """An observation."""

    text: str


class Game(Environment):
    """Guess the seed's last digit."""

    def reset(self, seed=None, **_):
        """The opening."""
        self.secret = (seed or 0) % 10
        return Heard(text="Guess my number.")

    def step(self, action, **_):
        """Whether it is right."""
        right = action.number == self.secret
        return Heard(text="right" if right else "wrong", reward=float(right), done=right)

    @property
    def state(self):
        """Nothing more."""
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Heard, max_concurrent_envs=1)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
