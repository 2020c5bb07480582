"""Prompt sets, acceptance metrics, comparisons of ways to decode."""
