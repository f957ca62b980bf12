"""From prompts to groups of trajectories.

rollout, stream                 groups: of a few prompts, of a stream of them (with pausable, journal, limits)
turns, text, chat               an episode in tokens, in text, in messages
env, tools, endpoint            environments: Gym-like objects, functions to call, programs that call the model
local, process, sglang          engines: in this process, in another one, servers
vllm                            a generator for evaluation and judges, not for training
"""

from rlkit._platform import refuse_windows

refuse_windows(__name__)
