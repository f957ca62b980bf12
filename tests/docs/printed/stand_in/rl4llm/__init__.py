"""Stands in for rl4llm, which is on no package index, where it is not installed."""
