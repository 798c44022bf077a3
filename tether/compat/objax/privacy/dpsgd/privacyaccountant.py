# SPDX-License-Identifier: Apache-2.0
"""What privacy DP-SGD leaves: Renyi differential privacy of the sampled Gaussian mechanism, and (eps, delta) from it.

| Objax | here | what differs |
| --- | --- | --- |
| analyze_dp, analyze_renyi, analyze_heterogeneous_renyi | one integral for all orders | no cancellation at small q |
| both with sample_without_replacement | the same bound | its moments are integrals, too |
| convert_renyidp_to_dp | the same bounds | delta of an rdp of 0 is 0 |

All is float64 of NumPy, on the host. With z ~ N(0, sigma^2), the ratio of the densities of N(1, sigma^2) and
N(0, sigma^2) at z is e^w, w = (2 z - 1) / (2 sigma^2). Sampled at the rate q it is 1 + u, u = q (e^w - 1); E[u] = 0.
Hence A = E[(1 + u)^order] is 1 + E[(1 + u)^order - 1 - order u], where nothing is negative and nothing cancels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tether.compat.objax._errors import ConflictError, MisuseError

__all__ = [
    "analyze_dp",
    "analyze_dp_sample_without_replacement",
    "analyze_renyi",
    "analyze_renyi_sample_without_replacement",
    "convert_renyidp_to_dp",
]

_ORDERS = (*(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5), *range(5, 21))
_REACH = 12  # standard deviations; beyond them is e^-72 of a Gaussian
_NEGLIGIBLE = 60  # what is e^-60 of the largest is left out
_LEAST_STABLE_ORDER = 1.01  # nearer to 1 the bound on eps loses its digits
_GREATEST_EXACT_ORDER = 256
_LEAST_RESOLVED = 0.05  # below this sigma the pole is in the valley, 10 sigma from all that counts
_LARGE_W = 500.0  # its exponential is a float64 still


def analyze_dp(
    q: float, noise_multiplier: float, steps: int, orders: Sequence[float] = _ORDERS, delta: float = 1e-05
) -> float:
    """The eps of DP-SGD whose batches have each example with probability q, independently.

    Args:
        q: Probability that a batch has an example, in [0, 1].
        noise_multiplier: Standard deviation of the noise, in units of the greatest norm of one example's gradient.
        steps: Number of steps.
        orders: Orders of the Renyi divergence to try, above 1.
        delta: Probability with which eps may not hold.
    Example:
        >>> round(objax.privacy.dpsgd.analyze_dp(q=0.01, noise_multiplier=1.0, steps=1000), 3)
        2.108
    """
    return _eps(analyze_renyi, q, noise_multiplier, steps, orders, delta)


def analyze_dp_sample_without_replacement(
    q: float, noise_multiplier: float, steps: int, orders: Sequence[float] = _ORDERS, delta: float = 1e-05
) -> float:
    """The eps of DP-SGD whose batches are q of all examples, drawn without replacement; arguments as in analyze_dp."""
    return _eps(analyze_renyi_sample_without_replacement, q, noise_multiplier, steps, orders, delta)


def analyze_renyi(q: float, noise_multiplier: float, steps: int, orders: Any) -> Any:
    """The Renyi divergence of DP-SGD at one order, or at each of several; arguments as in analyze_dp.

    References:
        Mironov, Talwar and Zhang 2019, arXiv:1908.10530, section 3.
    """
    return steps * _at_each(orders, functools.partial(_renyi, q, noise_multiplier))


def analyze_renyi_sample_without_replacement(q: float, noise_multiplier: float, steps: int, orders: Any) -> Any:
    """The same where a batch is q of all examples, drawn without replacement, and one example may be exchanged.

    References:
        Wang, Balle and Kasiviswanathan 2019, arXiv:1808.00087, theorem 27, and corollary 10 between whole orders.
    """
    moment = functools.cache(functools.partial(_log_moment, noise_multiplier))
    return steps * _at_each(orders, functools.partial(_renyi_without_replacement, q, noise_multiplier, moment))


def analyze_heterogeneous_renyi(
    sampling_probabilities: Sequence[float],
    noise_multipliers: Sequence[float],
    steps_list: Sequence[int],
    orders: Any,
) -> Any:
    """The Renyi divergence of several runs of DP-SGD, one after another on the same examples."""
    if not len(sampling_probabilities) == len(noise_multipliers) == len(steps_list):
        raise MisuseError(
            "analyze_heterogeneous_renyi: the lists differ in length.",
            got=f"{len(sampling_probabilities)} probabilities, {len(noise_multipliers)} noise multipliers, "
            f"{len(steps_list)} numbers of steps",
            expected="one of each for each run",
        )
    runs = zip(sampling_probabilities, noise_multipliers, steps_list, strict=True)
    return sum(analyze_renyi(q, noise_multiplier, steps, orders) for q, noise_multiplier, steps in runs)


def convert_renyidp_to_dp(
    orders: Any, rdp: Any, target_eps: float | None = None, target_delta: float | None = None
) -> tuple[float, float, float]:
    """The least delta for an eps, or the least eps for a delta, and the order at which it is found.

    Args:
        orders: Orders, at least 1.
        rdp: The Renyi divergence at each of them.
        target_eps: The eps, or None.
        target_delta: The delta, or None.
    Returns:
        ``(eps, delta, order)``.
    Raises:
        ConflictError: not exactly one target, or a number is out of its range.
    References:
        Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12 in version 4.
    """
    a, r = np.atleast_1d(np.asarray(orders, np.float64)), np.atleast_1d(np.asarray(rdp, np.float64))
    if (target_eps is None) == (target_delta is None):
        raise ConflictError(
            f"Exactly one out of eps and delta must be None. ({'Both are' if target_eps is None else 'None is'}).",
            got=f"target_eps={target_eps}, target_delta={target_delta}",
            expected="the one to be kept, alone",
        )
    if a.shape != r.shape or a.ndim != 1 or not a.size:
        raise ConflictError(
            "Input lists must have the same length.",
            got=f"orders of shape {a.shape}, rdp of shape {r.shape}",
            expected="a divergence for each order",
        )
    _check("Renyi divergence order must be >=1.", a, bool(np.all(a >= 1)))
    _check("Renyi divergence must be >=0.", r, bool(np.all(r >= 0)))
    if target_eps is not None:
        _check("Value of privacy loss bound epsilon must be >=0.", target_eps, target_eps >= 0)
        log_deltas = _log_deltas(a, r, target_eps)
        best = int(np.argmin(log_deltas))
        return target_eps, min(math.exp(log_deltas[best]), 1.0), float(a[best])
    delta: Any = target_delta
    _check("Privacy failure probability bound delta must be >0.", delta, delta > 0)
    eps = _epsilons(a, r, delta)
    best = int(np.argmin(eps))
    return max(0.0, float(eps[best])), delta, float(a[best])


def _check(sentence: str, got: Any, is_good: bool) -> None:
    if not is_good:
        raise ConflictError(sentence, got=f"{got}")


def _log_deltas(a: np.ndarray, r: np.ndarray, eps: float) -> np.ndarray:
    """Two bounds at each order: that of Bretagnolle and Huber through the divergence of order 1, and proposition 12."""
    with np.errstate(divide="ignore"):  # the log of a delta of 0
        log_deltas = 0.5 * np.log(-np.expm1(-r))
    stable = a > _LEAST_STABLE_ORDER
    a, r = a[stable], r[stable]
    log_deltas[stable] = np.minimum(log_deltas[stable], (a - 1) * (r - eps + np.log1p(-1 / a)) - np.log(a))
    return log_deltas


def _epsilons(a: np.ndarray, r: np.ndarray, delta: float) -> np.ndarray:
    """The same two bounds, solved for eps."""
    eps = np.full(a.shape, np.inf)
    stable = a > _LEAST_STABLE_ORDER
    eps[stable] = r[stable] + np.log1p(-1 / a[stable]) - np.log(delta * a[stable]) / (a[stable] - 1)
    eps[delta**2 + np.expm1(-r) >= 0] = 0
    return eps


def _eps(analyze: Callable[..., Any], q: float, noise: float, steps: int, orders: Any, delta: float) -> float:
    if noise == 0:
        return math.inf
    return convert_renyidp_to_dp(orders, analyze(q, noise, steps, orders), target_delta=delta)[0]


def _at_each(orders: Any, renyi: Callable[[float], float]) -> Any:
    return renyi(float(orders)) if np.ndim(orders) == 0 else np.array([renyi(float(order)) for order in orders])


def _known(q: float, sigma: float, order: float) -> float | None:
    """The divergence where it is no sum: nothing is sampled, or all is, or the order or the noise has its limit."""
    if not (0 <= q <= 1 and sigma >= 0 and order > 1):
        raise MisuseError(
            "Privacy of the sampled Gaussian mechanism: a number is out of its range.",
            got=f"q={q}, noise_multiplier={sigma}, order={order}",
            expected="0 <= q <= 1, noise_multiplier >= 0, order > 1",
        )
    if q == 0:
        return 0.0
    if sigma == 0 or math.isinf(order):
        return math.inf
    return order / (2 * sigma**2) if q == 1 else None


def _renyi(q: float, sigma: float, order: float) -> float:
    """log(A) / (order - 1)."""
    known = _known(q, sigma, order)
    if known is not None:
        return known

    def excess(w: np.ndarray) -> np.ndarray:
        """The log of (1 + u)^order - 1 - order u."""
        u = q * np.expm1(np.minimum(w, _LARGE_W))
        power = order * np.where(w < _LARGE_W, np.log1p(u), math.log(q) + w)
        small = np.expm1(np.minimum(power, 1)) - order * u
        large = power + np.log1p(-(1 + order * u) * np.exp(-np.maximum(power, 1)))
        return np.where(power < 1, np.log(np.maximum(small, 0)), large)

    return float(np.logaddexp(0, _log_mean(excess, sigma, order))) / (order - 1)


def _renyi_without_replacement(q: float, sigma: float, moment: Callable[[int], float], order: float) -> float:
    """log(1 + sum over j of ...) / (order - 1), linear in the logarithm between whole orders."""
    known = _known(q, sigma, order)
    if known is not None:
        return known
    below = math.floor(order)
    low = _log_sum(q, sigma, moment, below)
    high = _log_sum(q, sigma, moment, below + 1) if order > below else 0.0
    return (low + (order - below) * (high - low)) / (order - 1)


def _log_sum(q: float, sigma: float, moment: Callable[[int], float], order: int) -> float:
    """The log of 1 + sum over j from 2 of q^j binomial(order, j) times the j-th moment's bound, of theorem 27."""
    logs = [0.0]
    for j in range(2, order + 1):
        bound = math.log(2) + j * (j - 1) / (2 * sigma**2)
        if j == 2 or order <= _GREATEST_EXACT_ORDER:
            bound = min(bound, math.log(4) + (moment(j // 2 * 2) + moment((j + 1) // 2 * 2)) / 2)
        logs.append(j * math.log(q) + math.log(math.comb(order, j)) + bound)
    return float(np.logaddexp.reduce(logs))


def _log_moment(sigma: float, power: int) -> float:
    """The log of E[(e^w - 1)^power], for an even power."""

    def log_power(w: np.ndarray) -> np.ndarray:
        large = w + np.log(-np.expm1(-np.maximum(w, 1)))
        return power * np.where(w > 1, large, np.log(np.abs(np.expm1(np.minimum(w, 1)))))

    return _log_mean(log_power, sigma, power)


def _log_mean(log_of: Callable[[np.ndarray], np.ndarray], sigma: float, order: float) -> float:
    """The log of E[e^log_of(w)], where e^log_of grows as e^(order w), by the trapezoidal rule.

    Its error is about exp(-2 pi d / step), d = pi sigma^2 the distance of the next pole from the real line; the mass
    is between 0 and ``order``, one sigma or so around each.
    """

    def log_integrand(z: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):  # the log of 0 at w = 0
            return log_of((2 * z - 1) / (2 * sigma**2)) - z**2 / (2 * sigma**2)

    # Cells of half a sigma, w = 0 in the middle of one; those that count are parted further.
    cells = 0.5 + sigma / 2 * (np.arange(-2 * _REACH - math.ceil(1 / sigma), 2 * (_REACH + order / sigma)) + 0.5)
    coarse = log_integrand(cells)
    parts = math.ceil(2 / min(1, max(sigma, _LEAST_RESOLVED)))
    step = sigma / 2 / parts
    z = cells[coarse > coarse.max() - _NEGLIGIBLE, None] + step * np.arange(parts)
    return float(np.logaddexp.reduce(log_integrand(z).ravel())) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
