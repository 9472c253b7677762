"""The number of a run's learners is fixed while it has experience that is distributed over them."""

import pytest

from ding_store.errors import ConfigError
from ding_store.run.recording import check_one_partition
from ding_store.run.several_learners import LEARNERS, check_num_learners, decide_num_learners, num_learners_of
from ding_store.storage import open_store


def test_run_with_one_learner_puts_no_value():
    with open_store('memory://') as store:
        check_num_learners(store, 1)
        decide_num_learners(store, 1)
        assert num_learners_of(store) == 1
        assert LEARNERS not in store.info().values


def test_run_with_several_learners_keeps_their_number():
    with open_store('memory://', run='r') as store:
        check_num_learners(store, 3)
        decide_num_learners(store, 3)
        decide_num_learners(store, 3)
        assert num_learners_of(store) == 3
        for other in (1, 2):
            with pytest.raises(ConfigError, match='has the experience of 3 learners, and this command has learner='):
                check_num_learners(store, other)
        with pytest.raises(ConfigError, match='Use learner=3 to continue it'):
            decide_num_learners(store, 2)


def test_experience_of_one_learner_is_refused_to_several():
    with open_store('memory://', run='r') as store:
        store.append('experience', {}, {})
        check_num_learners(store, 1)
        with pytest.raises(ConfigError, match='has the experience of 1 learner, and this command has learner=2'):
            check_num_learners(store, 2)


def test_value_of_another_program_is_no_number_of_learners():
    with open_store('memory://') as store:
        store.put(LEARNERS, {'num': 'many'}, {})
        assert num_learners_of(store) == 1


def test_run_with_several_learners_cannot_be_recorded():
    with pytest.raises(ConfigError, match='2 learners cannot be recorded yet'):
        check_one_partition(2, 2)
