"""The module that the README of rl4llm imports from."""
