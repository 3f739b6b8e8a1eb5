"""Statistics that the sampling tests share."""

import math

import torch


def chi_square(tokens, probabilities):
    """Pearson's statistic over its 99.99 % bound, for tokens with a positive probability."""
    p = torch.as_tensor(probabilities, dtype=torch.float64)
    counts = torch.bincount(tokens, minlength=len(p)).double()
    assert counts[p == 0].sum() == 0, "a token of probability 0 was emitted"
    live = p > 0
    expected = p[live] * len(tokens)
    statistic = float(((counts[live] - expected) ** 2 / expected).sum())
    freedom = int(live.sum()) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    return statistic / bound
