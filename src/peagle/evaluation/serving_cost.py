"""The cost of serving on instances like the machine of a benchmark.

Output tokens carry the whole price. Each instance runs at the measured load: there is no idle
time, and no room for peaks.
"""

import math


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Return price per hour / (3,600 s * tokens per second) * 1,000,000; None without tokens."""
    return price_per_hour / (3600 * tokens_per_s) * 1e6 if tokens_per_s else None


def instances_for(requests_per_second: float, of_one: float | None) -> int | None:
    """Return the least number of instances that serve so many requests per second.

    `of_one` is the requests per second of one instance; None if it serves none.
    """
    return math.ceil(requests_per_second / of_one) if of_one else None
