"""From prompts to groups of trajectories.

rollout, stream, limits         groups for a list of prompts; an endless, interruptible stream; filters and limits
envs.turns, text, envs.chat     episodes in tokens, in text, in messages
envs.gym, .tools, .endpoint     environments: Gym-like objects, functions to call, programs that use HTTP
agents                          what `.endpoint` is made of: formats, the tree of calls, commands
engines.local, .process         the local engine, in this process or its own
engines.sglang                  SGLang servers
engines.vllm                    vLLM servers
"""

from rlkit._platform import refuse_windows

refuse_windows(__name__)
