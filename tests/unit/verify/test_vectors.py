"""Distances, factors and weights of gradients."""

from __future__ import annotations

import math

import numpy
import pytest

from instep.verify.vectors import farthest, fit_factor, fit_weights, mean, scales

RANDOM = numpy.random.default_rng(1)


def vectors(scale: float = 1.0) -> dict[str, numpy.ndarray]:
    return {"a": scale * RANDOM.standard_normal(12), "b": scale * RANDOM.standard_normal(3)}


def test_the_farthest_parameter_is_named_relative_to_its_size() -> None:
    one = {"a": numpy.array([4.0, 0.0]), "b": numpy.array([1.0])}
    other = {"a": numpy.array([4.04, 0.0]), "b": numpy.array([1.5])}
    found = farthest(one, other, scales(one))
    assert found.name == "b"
    assert found.relative == pytest.approx(0.5)


def test_a_gradient_of_rounding_is_compared_with_the_others() -> None:
    one = {"a": numpy.full(100, 1.0), "bias": numpy.array([1e-9])}
    other = {"a": numpy.full(100, 1.0), "bias": numpy.array([-3e-9])}
    assert farthest(one, other, scales(one)).relative < 1e-6


def test_not_a_number_is_far() -> None:
    one, other = {"a": numpy.array([1.0])}, {"a": numpy.array([math.nan])}
    assert farthest(one, other, {"a": 1.0}).relative == math.inf


def test_a_common_factor_is_found_and_told_from_none() -> None:
    one = vectors()
    fit = fit_factor(one, {name: 0.25 * vector for name, vector in one.items()})
    assert fit is not None
    assert fit.factor == pytest.approx(0.25)
    assert fit.rest < 1e-12
    unrelated = fit_factor(one, vectors())
    assert unrelated is not None
    assert unrelated.rest > 0.1


def test_weights_of_ranks_are_found() -> None:
    parts = [vectors(), vectors(), vectors()]
    whole = {name: 0.5 * parts[0][name] + 0.3 * parts[1][name] + 0.2 * parts[2][name] for name in parts[0]}
    fit = fit_weights(parts, whole)
    assert fit is not None
    assert fit[0] == pytest.approx([0.5, 0.3, 0.2])
    assert fit[1] < 1e-12
    assert fit_weights([parts[0], parts[0]], whole) is None, "equal parts say nothing about weights"


def test_a_rank_without_a_gradient_counts_as_zero() -> None:
    assert mean([{"a": numpy.array([2.0])}, {}])["a"] == pytest.approx([1.0])
