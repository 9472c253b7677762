"""Compiled powers: as good as the library's, of every number that there is."""

from typing import Any

import numpy as np
import pytest
from needs import lacking

from ding_store.buffer.kernels.load import load_kernels

EXPONENTS = [0.0, 1e-3, 0.4, 0.6, 1.0]
EXTREMES = np.array([0.0, 5e-324, 1e-310, 2.0**-1000, 2.0**-999, 0.5, 1.0, 4.0, 2.0**1000, 1e302, 1.7e308, np.inf])


@pytest.fixture
def kernels() -> Any:
    found = load_kernels()
    if found is None:
        lacking('no numba, which scripts/setup.sh installs')
    return found


def masses_of(kernels: Any, priorities: np.ndarray, alpha: float, epsilon: float = 0.0) -> np.ndarray:
    masses = np.full(len(priorities), np.nan)
    kernels.mass(priorities, epsilon, alpha, masses)
    return masses


@pytest.mark.parametrize('alpha', EXPONENTS)
@pytest.mark.parametrize(('spread', 'error'), [(2, 2e-15), (15, 5e-15), (300, 1e-13)])
def test_power_kernel_masses_equal_those_of_numpy(alpha: float, spread: int, error: float, kernels: Any) -> None:
    priorities = 10.0 ** np.random.RandomState(0).uniform(-spread, spread, 20_001)
    np.testing.assert_allclose(masses_of(kernels, priorities, alpha), priorities**alpha, rtol=error)
    np.testing.assert_allclose(masses_of(kernels, priorities, alpha, 0.25), (priorities + 0.25) ** alpha, rtol=error)


@pytest.mark.parametrize('alpha', EXPONENTS)
def test_power_kernel_masses_of_extremes_equal_numpy(alpha: float, kernels: Any) -> None:
    # What is 0 stays 0, or a row would come that must not; and of alpha 1 a priority is its mass.
    assert alpha < 1 or masses_of(kernels, EXTREMES + 0.1, alpha).tolist() == (EXTREMES + 0.1).tolist()
    np.testing.assert_allclose(masses_of(kernels, EXTREMES, alpha), EXTREMES**alpha, rtol=1e-13, atol=0)


def test_power_kernel_mass_does_not_depend_on_its_place(kernels: Any) -> None:
    # The first ones are made many at a time, the last ones not, and neighbours that are extreme change nothing.
    priorities = 10.0 ** np.random.RandomState(1).uniform(-6, 6, 50)
    alone = np.concatenate([masses_of(kernels, priorities[i : i + 1], 0.6) for i in range(50)])
    for start in range(9):
        assert masses_of(kernels, priorities[start:].copy(), 0.6).tolist() == alone[start:].tolist()
    mixed = np.stack([priorities, np.resize(EXTREMES, 50)], 1).reshape(-1)
    assert masses_of(kernels, mixed, 0.6)[::2].tolist() == alone.tolist()


@pytest.mark.parametrize('beta', EXPONENTS)
def test_power_kernel_weights_equal_those_of_numpy(beta: float, kernels: Any) -> None:
    random = np.random.RandomState(2)
    masses = 10.0 ** random.uniform(-12, 12, 1000)
    masses[:3] = 1e-150, 1e150, np.nextafter(1e-150, 1)
    slots = np.append(random.randint(0, 1000, 509), [0, 1, 2])
    weights = np.empty(512, np.float32)
    kernels.weigh(masses, slots, masses.min(), -beta, weights)
    expected = ((masses[slots] / masses.min()) ** -beta).astype(np.float32)
    np.testing.assert_allclose(weights, expected, rtol=2e-7)
    assert (weights <= 1).all()
    assert weights[-3] == 1
