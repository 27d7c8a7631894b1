"""Relax: reinforcement-learning post-training of language models, every stage an artifact."""

__version__ = "0.1.0"
