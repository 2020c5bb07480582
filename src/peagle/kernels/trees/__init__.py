"""Candidate trees: how they grow, how their rows relate, and which nodes are likely."""
