"""The bounds that PSP gives on the lag of updates: equations 1 to 3 of the paper.

An update arrives at another place of the sequence than it would with BSP; how far away is its lag.
Wang, Catterall and Mortier, "Probabilistic Synchronous Parallel" (arXiv 1709.07772), bound the mean
of the lags, and the mean of their squares. Both shrink fast with the sample size: a few samples are
worth nearly as much as many.
"""

import math


def mean_bound(sample_size: int, staleness: int, within: float, updates: int) -> float:
    """Returns the bound on the average mean of the lags (equation 1); infinite without a sample.

    Args:
        sample_size: How many others each worker asks (the paper's beta).
        staleness: How many steps these may lag behind (r).
        within: The probability that a worker lags at most so many steps (F(r)), above 0 and below 1.
        updates: Length of the sequence of updates (T), above the staleness.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        engines.mean_bound(sample_size=5, staleness=4, within=0.9, updates=10_000)
    """
    a, scale = _terms(sample_size, staleness, within, updates)
    if a == 1:
        return math.inf
    r = staleness
    return scale * (r * (r + 1) / 2 + a * (r + 2) / (1 - a) ** 2)


def variance_bound(sample_size: int, staleness: int, within: float, updates: int) -> float:
    """Returns the bound on the average of the squared lags (equation 2); infinite without a sample.

    The arguments are those of `mean_bound`, and what it raises.

    Example:
        engines.variance_bound(sample_size=5, staleness=4, within=0.9, updates=10_000)
    """
    a, scale = _terms(sample_size, staleness, within, updates)
    if a == 1:
        return math.inf
    r = staleness
    return scale * (r * (r + 1) * (2 * r + 1) / 6 + a * (r**2 + 4) / (1 - a) ** 3)


def _terms(sample_size: int, staleness: int, within: float, updates: int) -> tuple[float, float]:
    """Returns `a`, which is F(r)^beta, and the factor S of equation 3."""
    if sample_size < 0 or staleness < 0:
        raise ValueError(
            f"sample_size and staleness are at least 0, not {sample_size} and {staleness}"
        )
    if not 0 < within < 1:
        raise ValueError(f"within is a probability above 0 and below 1, not {within}")
    if updates <= staleness:
        raise ValueError(f"updates is above the staleness of {staleness}, not {updates}")
    a = within**sample_size
    if a == 1:
        return a, math.nan
    return a, (1 - a) / (within * (1 - a) + a - a ** (updates - staleness + 1))
