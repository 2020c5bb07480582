"""Attention over a paged KV cache: its keys and values are written, moved and read."""
