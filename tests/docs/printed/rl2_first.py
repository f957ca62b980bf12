"""A reward and tools in the form that the first README of RL2, and that of its fork, print."""


def reward_fn(messages, answer):
    return len(messages[-1]["content"]) / 100 + float(answer in messages[-1]["content"])


def interact(messages):
    queries = [messages[-1]["content"]] if len(messages) < 4 else []
    return [{"role": "tool", "content": f"nothing about {query[:3]}"} for query in queries]
