# SPDX-License-Identifier: Apache-2.0
"""The accountant against published numbers, and against sums and integrals of many digits."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from tether.compat.objax.privacy.dpsgd import (
    analyze_dp,
    analyze_dp_sample_without_replacement,
    analyze_renyi,
    analyze_renyi_sample_without_replacement,
    convert_renyidp_to_dp,
)
from tether.compat.objax.privacy.dpsgd.privacyaccountant import analyze_heterogeneous_renyi

# log(A) / (order - 1) of the definition, integrated by mpmath 1.4.1 at 50 digits: (q, noise_multiplier, order, value).
INTEGRALS = [
    (1e-6, 1, 1.5, 1.2887096300232071e-12),
    (1e-4, 0.5, 2.25, 6.1350350131707288e-7),
    (1e-4, 10, 1.25, 6.2813496772631111e-11),
    (0.01, 1.1, 4.5, 0.000303039349413455),
    (0.01, 0.3, 1.75, 0.5027531313841147),
    (0.1, 2, 3.5, 0.0051762573660984254),
    (0.5, 0.1, 20.5, 1024.2713068101806),
    (0.3, 50, 1.05, 1.8901931530261067e-5),
    (0.99, 4, 63.5, 1.9743703632552159),
    (0.02, 0.05, 7.5, 1495.4861273014291),
]


class TestRenyi:
    @pytest.mark.parametrize(("q", "sigma", "order", "value"), INTEGRALS)
    def test_broken_orders(self, q, sigma, order, value):
        np.testing.assert_allclose(analyze_renyi(q, sigma, 1, order), value, rtol=1e-9)

    @pytest.mark.parametrize("q", ["1e-6", "0.001", "0.1", "0.9"])
    @pytest.mark.parametrize("sigma", ["0.1", "0.5", "1", "2", "7.3", "50"])
    @pytest.mark.parametrize("order", [2, 3, 20, 64])
    def test_whole_orders(self, q, sigma, order):
        """A = sum over k of binomial(order, k) (1 - q)^(order - k) q^k e^(k (k - 1) / (2 sigma^2)), in 120 digits."""
        with localcontext(prec=120, Emax=10**8, Emin=-(10**8)):
            rate, variance = Decimal(q), Decimal(sigma) ** 2
            terms = (
                math.comb(order, k) * (1 - rate) ** (order - k) * rate**k * (k * (k - 1) / (2 * variance)).exp()
                for k in range(order + 1)
            )
            a = sum(terms, start=Decimal(0))
            expected = float(a.ln() / (order - 1))
        np.testing.assert_allclose(analyze_renyi(float(q), float(sigma), 1, order), expected, rtol=1e-9)

    def test_published(self):
        """From rdp_accountant_test.py of TensorFlow Privacy, which gives them to five places."""
        orders = [1.5, 2.5, 5, 50, 100, np.inf]
        expected = [0.00065, 0.001085, 0.00218075, 0.023846, 167.416307, np.inf]
        np.testing.assert_allclose(analyze_renyi(0.01, 2.5, 50, orders), expected, atol=1e-5)
        np.testing.assert_allclose(analyze_renyi(0.1, 2, 10, 5), 0.07737, atol=5e-6)
        assert analyze_heterogeneous_renyi([0, 1], [10, 10], [1, 1], 20) == 0.1

    def test_limits(self):
        for analyze in (analyze_renyi, analyze_renyi_sample_without_replacement):
            assert analyze(0.0, 1.0, 10, 3) == 0
            assert analyze(1.0, 2.0, 10, 3) == 10 * 3 / (2 * 4)
            assert analyze(0.1, 0.0, 10, 3) == analyze(0.1, 1.0, 10, np.inf) == np.inf

    def test_little_noise(self):
        """The greatest term alone is left: q^order e^(order (order - 1) / (2 sigma^2))."""
        for sigma in (1e-3, 0.01, 0.04):
            order, q = 20, 0.01
            expected = order * math.log(q) / (order - 1) + order / (2 * sigma**2)
            np.testing.assert_allclose(analyze_renyi(q, sigma, 1, order), expected, rtol=1e-9)

    def test_one_order_or_several(self):
        assert np.ndim(analyze_renyi(0.1, 1.0, 3, 2)) == np.ndim(analyze_renyi(0.1, 1.0, 3, np.float64(2.5))) == 0
        several = analyze_renyi(0.1, 1.0, 3, (2, 2.5))
        assert several.shape == (2,) and several[1] == analyze_renyi(0.1, 1.0, 3, 2.5)

    def test_runs_add_up(self):
        orders = [1.5, 4, 32]
        both = analyze_renyi(0.01, 1.1, 100, orders) + analyze_renyi(0.2, 3.0, 7, orders)
        np.testing.assert_allclose(analyze_heterogeneous_renyi([0.01, 0.2], [1.1, 3.0], [100, 7], orders), both)


class TestWithoutReplacement:
    def test_published(self):
        """From the same file. The value at 256 there, 792.838516, is below the sum of the theorem, 792.974427."""
        orders = [1.001, 1.5, 2.5, 5, 50, 100, 512, 1024, np.inf]
        expected = [0.003470, 0.003470, 0.004638, 0.0087633, 0.098474, 167.766388, 1817.35871, 3865.55029, np.inf]
        np.testing.assert_allclose(
            analyze_renyi_sample_without_replacement(0.01, 2.5, 50, orders), expected, rtol=1e-8, atol=1e-5
        )

    @pytest.mark.parametrize(
        ("q", "sigma", "order"),
        [
            ("0.01", "2.5", 256),
            ("0.3", "12", 256),
            ("0.01", "2.5", 20),
            ("0.9", "10", 20),
            ("0.1", "0.7", 9),
            ("1e-4", "30", 3),
        ],
    )
    def test_the_sum_of_theorem_27(self, q, sigma, order):
        """With B(l) as the alternating sum, in as many digits as it cancels."""
        with localcontext(prec=500, Emax=10**8, Emin=-(10**8)):
            rate, variance = Decimal(q), Decimal(sigma) ** 2
            powers = [(k * (k - 1) / (2 * variance)).exp() for k in range(order + 2)]

            def moment(power):
                terms = ((-1) ** k * math.comb(power, k) * powers[k] for k in range(power + 1))
                return sum(terms, start=Decimal(0))

            moments = {power: moment(power) for power in range(2, order + 2, 2)}
            total = 1 + rate**2 * math.comb(order, 2) * min(4 * (powers[2] - 1), 2 * powers[2])
            for j in range(3, order + 1):
                root = (moments[j // 2 * 2] * moments[(j + 1) // 2 * 2]).sqrt()
                total += rate**j * math.comb(order, j) * min(4 * root, 2 * powers[j])
            expected = float(total.ln() / (order - 1))
        found = analyze_renyi_sample_without_replacement(float(q), float(sigma), 1, order)
        np.testing.assert_allclose(found, expected, rtol=1e-9)

    def test_above_256(self):
        """The looser bound of the theorem, without moments, as Objax and TensorFlow Privacy have it there."""
        q, sigma, order = 0.3, 12.0, 257
        logs = [j * math.log(q) + math.log(2 * math.comb(order, j)) + j * (j - 1) / 288 for j in range(3, order + 1)]
        logs += [0.0, math.log(4 * q**2 * math.comb(order, 2) * math.expm1(1 / 144))]
        expected = np.logaddexp.reduce(logs) / (order - 1)
        np.testing.assert_allclose(analyze_renyi_sample_without_replacement(q, sigma, 1, order), expected, rtol=1e-12)
        assert analyze_renyi_sample_without_replacement(q, sigma, 1, 256) < 0.9 * expected

    def test_between_whole_orders(self):
        low, high = analyze_renyi_sample_without_replacement(0.05, 1.3, 1, [3, 4])
        between = analyze_renyi_sample_without_replacement(0.05, 1.3, 1, 3.25)
        np.testing.assert_allclose(between * 2.25, 0.75 * low * 2 + 0.25 * high * 3, rtol=1e-12)


class TestEps:
    # TensorFlow Privacy, compute_dp_sgd_privacy_test.py: examples, batch, noise multiplier, epochs, delta, eps, order.
    @pytest.mark.parametrize(
        ("n", "batch", "noise", "epochs", "delta", "eps", "order"),
        [
            (60000, 150, 1.3, 15, 1e-5, 0.7242234026109595, 19.0),
            (100000, 100, 1.0, 30, 1e-7, 1.4154988495444842, 13.0),
            (100000000, 1024, 0.1, 10, 1e-7, 5907982.3113978775, 1.25),
        ],
    )
    def test_published(self, n, batch, noise, epochs, delta, eps, order):
        orders = (1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512)
        rdp = analyze_renyi(batch / n, noise, math.ceil(epochs * n / batch), orders)
        found, same, best = convert_renyidp_to_dp(orders, rdp, target_delta=delta)
        np.testing.assert_allclose(found, eps, rtol=1e-10)
        assert (same, best) == (delta, order)

    # The table and the output in tutorials/README.md there, for MNIST in batches of 256 and delta = 1e-5. They are of
    # the older conversion, eps = rdp - log(delta) / (order - 1).
    @pytest.mark.parametrize(
        ("noise", "epochs", "eps"), [(1.12, 60, 2.92), (1.2, 10, 1.20), (1.12, 1, 1.00), (1.12, 2, 1.04)]
    )
    def test_tutorial(self, noise, epochs, eps):
        orders = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))
        rdp = analyze_renyi(256 / 60000, noise, epochs * 60000 // 256, orders)
        assert round(float(np.min(rdp - np.log(1e-5) / (orders - 1))), 2) == eps
        assert convert_renyidp_to_dp(orders, rdp, target_delta=1e-5)[0] < eps

    def test_a_gaussian(self):
        """Without sampling, noise of 4.530877117 is (1, 1e-6)-private by this bound, as TensorFlow Privacy has it."""
        orders = np.arange(1.001, 100, 0.001)
        rdp = analyze_renyi(1, 4.530877117, 1, orders)
        eps, _, order = convert_renyidp_to_dp(orders, rdp, target_delta=1e-6)
        np.testing.assert_allclose(eps, 1, atol=1e-7)
        np.testing.assert_allclose(convert_renyidp_to_dp(orders, rdp, target_eps=1.0), (1, 1e-6, order), rtol=1e-5)

    def test_never_below_what_a_gaussian_gives_away(self):
        """delta(eps) of the Gaussian mechanism is known: Balle and Wang 2018, arXiv:1805.06530, theorem 8."""
        orders = np.arange(1.1, 50, 0.1)
        rdp = analyze_renyi(1, 1, 1, orders)
        for eps in (0.0, 0.3, 1.0, 4.0, 15.0):
            delta = convert_renyidp_to_dp(orders, rdp, target_eps=eps)[1]
            least = math.erfc((eps - 0.5) / math.sqrt(2)) / 2
            least -= math.exp(eps) * math.erfc((eps + 0.5) / math.sqrt(2)) / 2
            assert least <= delta <= (1 if eps < 0.5 else math.exp(-0.5 * (eps - 0.5) ** 2))

    def test_pure_privacy(self):
        """The same divergence at all orders: the greatest is best, and eps follows by hand."""
        orders = range(2, 33)
        eps, _, order = convert_renyidp_to_dp(orders, [1.1] * 31, target_delta=1e-5)
        by_hand = 1.1 + math.log1p(-1 / 32) - math.log(1e-5 * 32) / 31
        assert order == 32
        np.testing.assert_allclose(eps, by_hand, rtol=1e-14)
        np.testing.assert_allclose(convert_renyidp_to_dp(orders, [1.1] * 31, target_eps=eps)[1], 1e-5, rtol=1e-12)

    def test_little_divergence(self):
        """delta <= sqrt(1 - e^-rdp), at whatever order."""
        eps, delta, _ = convert_renyidp_to_dp([1.005, 1.0], [1e-6, 3.0], target_delta=1.1e-3)
        assert (eps, delta) == (0.0, 1.1e-3)
        np.testing.assert_allclose(
            convert_renyidp_to_dp(1.005, 1e-6, target_eps=0.0)[1], math.sqrt(-math.expm1(-1e-6)), rtol=1e-12
        )
        assert convert_renyidp_to_dp(1.005, 3.0, target_delta=1e-5)[0] == np.inf
        assert convert_renyidp_to_dp(2, 0.0, target_eps=0.5)[1] == 0

    def test_in_one_step(self):
        for analyze, renyi in (
            (analyze_dp, analyze_renyi),
            (analyze_dp_sample_without_replacement, analyze_renyi_sample_without_replacement),
        ):
            orders = (1.5, 2, 8, 16)
            expected = convert_renyidp_to_dp(orders, renyi(0.02, 1.1, 500, orders), target_delta=1e-6)[0]
            assert analyze(0.02, 1.1, 500, orders, 1e-6) == expected
            assert analyze(q=0.02, noise_multiplier=0, steps=500) == math.inf
            assert analyze(0.02, 1.1, 500) < analyze(0.02, 1.1, 501)

    def test_the_orders_of_objax(self):
        """By default 1.25 to 20: where the best order would be above 20, a longer list finds a smaller eps."""
        assert analyze_dp(0.001, 2.0, 100) > analyze_dp(0.001, 2.0, 100, range(2, 200))


class TestErrors:
    def test_targets(self):
        for targets, which in (({}, "Both are"), ({"target_eps": 1.0, "target_delta": 0.1}, "None is")):
            with pytest.raises(ValueError, match=rf"must be None\. \({which}\)"):
                convert_renyidp_to_dp([2], [1.0], **targets)

    @pytest.mark.parametrize(
        ("orders", "rdp", "target", "message"),
        [
            ([2, 3], [1.0], {"target_delta": 0.1}, "Input lists must have the same length."),
            ([], [], {"target_delta": 0.1}, "Input lists must have the same length."),
            ([0.5], [1.0], {"target_delta": 0.1}, "Renyi divergence order must be >=1."),
            ([2], [-1.0], {"target_delta": 0.1}, "Renyi divergence must be >=0."),
            ([2], [np.nan], {"target_delta": 0.1}, "Renyi divergence must be >=0."),
            ([2], [1.0], {"target_delta": 0.0}, "Privacy failure probability bound delta must be >0."),
            ([2], [1.0], {"target_eps": -1.0}, "Value of privacy loss bound epsilon must be >=0."),
        ],
    )
    def test_numbers_of_the_conversion(self, orders, rdp, target, message):
        with pytest.raises(ValueError) as caught:
            convert_renyidp_to_dp(orders, rdp, **target)
        assert str(caught.value).startswith(message + "\n  got: ")

    @pytest.mark.parametrize(("q", "sigma", "order"), [(1.5, 1.0, 2), (-0.1, 1.0, 2), (0.1, -1.0, 2), (0.1, 1.0, 1)])
    @pytest.mark.parametrize("analyze", [analyze_renyi, analyze_renyi_sample_without_replacement])
    def test_numbers_of_the_mechanism(self, analyze, q, sigma, order):
        with pytest.raises(AssertionError) as caught:
            analyze(q, sigma, 1, order)
        assert str(caught.value) == (
            "Privacy of the sampled Gaussian mechanism: a number is out of its range.\n"
            f"  got:      q={q}, noise_multiplier={sigma}, order={float(order)}\n"
            "  expected: 0 <= q <= 1, noise_multiplier >= 0, order > 1"
        )

    def test_lists_of_runs(self):
        with pytest.raises(AssertionError) as caught:
            analyze_heterogeneous_renyi([0.1], [1.0, 2.0], [3], 2)
        assert str(caught.value) == (
            "analyze_heterogeneous_renyi: the lists differ in length.\n"
            "  got:      1 probabilities, 2 noise multipliers, 1 numbers of steps\n"
            "  expected: one of each for each run"
        )
