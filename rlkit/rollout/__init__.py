"""From prompts to groups of trajectories.

rollout, stream, limits         groups of a list of prompts; of an endless stream, interruptible; filters and bounds
envs.turns, text, envs.chat     an episode in tokens, in text, in messages
envs.gym, .tools, .endpoint     environments: Gym-like objects, functions to call, programs that call the model
engines.local, .process         engines in this process and in a process of its own
engines.sglang                  an engine over servers
engines.vllm                    a generator for evaluation and judges, not for training
"""

from rlkit._platform import refuse_windows

refuse_windows(__name__)
