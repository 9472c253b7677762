"""DI-engine's policies that get one collated batch are those that can collate it."""

import functools
import importlib
import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any, Dict, Iterator, Set

import ding.policy
import pytest

from ding_store.middleware.batch_policies import BATCHES, SEQUENCES, takes_batch, takes_sequences

DQNPolicy, R2D2Policy = ding.policy.DQNPolicy, ding.policy.R2D2Policy


def policies() -> Iterator[type]:
    for found in pkgutil.iter_modules(ding.policy.__path__):
        module = importlib.import_module(f'ding.policy.{found.name}')
        classes = (each for each in vars(module).values() if isinstance(each, type))
        yield from (each for each in classes if each.__module__ == module.__name__)


def that_use(method: str, *names: str) -> Set[str]:
    """Classes of ding.policy whose own method calls one of these functions."""
    found = set()
    for kind in policies():
        if method in vars(kind):
            source = inspect.getsource(inspect.unwrap(vars(kind)[method]))
            if any(f'{name}(' in source for name in names):
                found.add(f'{kind.__module__.rpartition(".")[2]}.{kind.__name__}')
    return found


def test_batches_go_to_the_policies_that_collate_them() -> None:
    assert that_use('_forward_learn', 'default_preprocess_learn') == BATCHES


def test_time_major_batches_go_to_the_policies_that_collate_them() -> None:
    assert that_use('_data_preprocess_learn', 'timestep_collate', 'default_collate') == SEQUENCES


def learn_mode(kind: type) -> Any:
    policy = kind.__new__(kind)
    return SimpleNamespace(forward=policy._forward_learn)


class Inherits(DQNPolicy):
    pass


class Wraps(DQNPolicy):
    @functools.wraps(DQNPolicy._forward_learn)
    def _forward_learn(self, data: Any) -> Dict[str, Any]:
        return super()._forward_learn(data)


class Overrides(DQNPolicy):
    def _forward_learn(self, data: Any) -> Dict[str, Any]:
        return super()._forward_learn(data)


class OverridesSteps(R2D2Policy):
    def _data_preprocess_learn(self, data: Any) -> Dict[str, Any]:
        return super()._data_preprocess_learn(data)


@pytest.mark.parametrize(
    ('kind', 'batch', 'sequences'),
    [
        (DQNPolicy, True, False),
        (ding.policy.TD3Policy, True, False),
        (R2D2Policy, False, True),
        (Inherits, True, False),
        (Wraps, True, False),
        (Overrides, False, False),
        (OverridesSteps, False, False),
    ],
)
def test_own_policy_gets_a_batch_if_it_keeps_the_method(kind: type, batch: bool, sequences: bool) -> None:
    assert (takes_batch(learn_mode(kind)), takes_sequences(learn_mode(kind))) == (batch, sequences)


def test_object_that_is_no_policy_gets_a_list() -> None:
    assert not takes_batch(SimpleNamespace(forward=len))
    assert not takes_sequences(None)


def test_class_of_the_same_name_elsewhere_gets_a_list() -> None:
    kind = type('DQNPolicy', (), {'_forward_learn': lambda self, data: {}})
    assert not takes_batch(learn_mode(kind))
