"""A game of text that is registered with gymnasium."""

import gymnasium


class Echo(gymnasium.Env):
    """Say something, twice."""

    def reset(self, *, seed=None, options=None):
        """The opening."""
        super().reset(seed=seed, options=options)
        self.num_turns = 0
        return "Say your name.", {}

    def step(self, action):
        """Repeat what was said."""
        self.num_turns += 1
        return f"You said {action}", len(action) / 100, self.num_turns == 2, False, {}


gymnasium.register("Echo-v0", Echo, disable_env_checker=True)
