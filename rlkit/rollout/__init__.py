"""From prompts to groups of trajectories.

rollout, stream                 groups: of a few prompts, of a stream of them (with pausable, journal, limits)
turns, text, chat               an episode in tokens, in text, in messages
env, tools, endpoint            environments: Gym-like objects, functions to call, programs that call the model
local, process, sglang, vllm    engines: in this process, in another one, servers
"""
