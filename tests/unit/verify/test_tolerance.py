"""How far numbers may part."""

from __future__ import annotations

import math

import numpy
import pytest

from instep.verify.tolerance import MOST, Tolerance


def test_sums_in_another_order_stay_within_it() -> None:
    """The errors that it is made for: fp32 sums of n numbers, whole and as the mean of two halves."""
    random = numpy.random.default_rng(0)
    for count in (64, 4096, 262144):
        terms = random.standard_normal((count, 16)).astype(numpy.float32)
        whole = numpy.add.reduce(terms, axis=0)
        halves = numpy.add.reduce(terms[: count // 2], axis=0) + numpy.add.reduce(terms[count // 2 :], axis=0)
        relative = numpy.linalg.norm(whole - halves) / numpy.linalg.norm(whole)
        assert relative < Tolerance("float32", count).first < 1e-3


def test_it_grows_with_steps_up_to_a_limit() -> None:
    tolerance = Tolerance("float32", 100)
    assert tolerance.gradient(3) == pytest.approx(4 * tolerance.first)
    assert tolerance.gradient(60) == MOST


def test_low_precision_between_layers_counts_once_per_number() -> None:
    plain, mixed = Tolerance("float32", 10000), Tolerance("float32", 10000, "bfloat16")
    assert mixed.first - plain.first == pytest.approx(8 * 2.0**-8)
    assert math.isclose(Tolerance("bfloat16", 100, "bfloat16").first, 16 * 2.0**-8 * 10)


def test_it_says_how_it_is_derived() -> None:
    assert Tolerance("float32", 128).describe() == (
        "1.1e-05 in the first step = 16 x 6e-08 (float32) x sqrt(128 additions); each further step may double it, up to "
        "0.01"
    )
