"""A game of GEM with GEM's own tool: the class of what is returned tells that it is GEM's."""

import gem
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper


def make():
    """A new game for each episode."""
    return ToolEnvWrapper(gem.make("game:GuessTheNumber-v0-easy"), tools=[PythonCodeTool(timeout=5)])
