"""Collectors keep within their lead over the learner, and do not wait for one that has caught up."""

import pytest

from ding_store.middleware.backpressure import PROGRESS, Backpressure
from ding_store.storage import open_store
from ding_store.storage.base import EntryId

pytest.importorskip('ding')


@pytest.fixture
def store():
    with open_store('memory://') as store:
        yield store


@pytest.fixture
def backpressure(store):
    return Backpressure(store, max_lead=2)


def ingest(store, epoch, number):
    store.put(PROGRESS, {'ingested': [epoch, number]}, {})


def test_nothing_appended_is_no_lead(backpressure):
    assert backpressure.caught_up(0) is True


def test_waits_beyond_the_lead_until_the_learner_has_taken_enough(store, backpressure):
    backpressure.appended(EntryId('a', 2))
    assert backpressure.caught_up(0) is True
    backpressure.appended(EntryId('a', 5))
    assert backpressure.caught_up(0) is None
    ingest(store, 'a', 2)
    assert backpressure.caught_up(0) is None
    ingest(store, 'a', 3)
    assert backpressure.caught_up(0) is True


def test_learner_that_took_our_last_entry_in_the_next_life_of_the_server_is_not_waited_for(store, backpressure):
    # Appended before the server restarted, read after: the learner's progress is of an epoch we have not seen.
    backpressure.appended(EntryId('a', 100))
    ingest(store, 'a', 97)
    assert backpressure.caught_up(0) is None
    ingest(store, 'b', 100)
    assert backpressure.caught_up(0) is True


def test_entries_of_a_former_life_let_one_chunk_pass_each(store, backpressure):
    backpressure.appended(EntryId('b', 100))
    ingest(store, 'a', 97)
    assert backpressure.caught_up(0) is True
    backpressure.appended(EntryId('b', 101))
    assert backpressure.caught_up(0) is None
    ingest(store, 'a', 98)
    assert backpressure.caught_up(0) is True


def test_late_word_of_a_learner_that_was_thought_dead_sets_nothing_back(store, backpressure):
    backpressure.appended(EntryId('a', 9))
    ingest(store, 'a', 8)
    assert backpressure.caught_up(0) is True
    ingest(store, 'a', 3)
    backpressure.appended(EntryId('a', 11))
    assert backpressure.caught_up(0) is None
    backpressure.appended(EntryId('a', 10))
    assert backpressure.caught_up(0) is True, '8 were taken'
