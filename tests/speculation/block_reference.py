"""Block verification in plain Python (Sun et al., 2024)."""

from collections.abc import Sequence


def accept_block(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    drafts: Sequence[int],
    numbers: Sequence[float],
) -> tuple[int, float]:
    """Return how many drafts pass, and the share of p that is left behind them.

    Args:
        p, q: distributions of the target and of the drafter at each draft; both may be longer.
        numbers: uniform numbers, one for each draft.
    """
    accepted, shares = 0, [1.0]
    for i, x in enumerate(drafts):
        share = min(shares[-1] * p[i][x] / q[i][x], 1.0)
        shares.append(share)
        chance = share
        if i + 1 < len(drafts) and share < 1:
            rest = sum(max(share * a - b, 0.0) for a, b in zip(p[i + 1], q[i + 1], strict=True))
            chance = rest / (rest + 1 - share)
        if numbers[i] < chance:
            accepted = i + 1
    return accepted, shares[accepted]
