"""Prompts: where they come from, in which order they are drawn, and the seeds of the responses."""
