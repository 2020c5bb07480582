"""Prompt sets, acceptance metrics, comparisons of decoding methods."""
