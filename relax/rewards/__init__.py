"""Rewards: a table of verifiers (response text, label) -> float, and the user's own function."""

from relax.rewards.verifiers import VERIFIERS, Verifier, custom, verifier

__all__ = ["VERIFIERS", "Verifier", "custom", "verifier"]
