"""Programs that call the policy as a model behind HTTP: what `rlkit.agents.endpoint` is made of.

request                              a request and its answer, whatever format they have
completions, responses, messages     the formats: OpenAI's chat completions and Responses, Anthropic's Messages
server                               one address for all episodes, with a secret path for each
branches                             the calls of an episode as a tree of turns, each trained as it was sampled
command, supervise                   a command as the program: its folder, limits, log and end
"""


class AgentError(Exception):
    """A program failed in its episode, for the reason that is the message."""
