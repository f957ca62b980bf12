"""A data set of tasks of aviary."""

from aviary.env import DummyEnv, EnvsTaskDataset

tasks = EnvsTaskDataset([DummyEnv(task="cats"), DummyEnv(task="dogs")])
