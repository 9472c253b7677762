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


def test_collector_that_appended_nothing_has_no_lead(backpressure):
    assert backpressure.wait_within_lead(0) is True


def test_collector_beyond_its_lead_waits_for_the_learner(store, backpressure):
    backpressure.appended(EntryId('a', 2))
    assert backpressure.wait_within_lead(0) is True
    backpressure.appended(EntryId('a', 5))
    assert backpressure.wait_within_lead(0) is None
    ingest(store, 'a', 2)
    assert backpressure.wait_within_lead(0) is None
    ingest(store, 'a', 3)
    assert backpressure.wait_within_lead(0) is True


def test_collector_caught_up_in_a_later_epoch_does_not_wait(store, backpressure):
    # Appended before the server restarted, read after: the learner's progress is of an epoch we have not seen.
    backpressure.appended(EntryId('a', 100))
    ingest(store, 'a', 97)
    assert backpressure.wait_within_lead(0) is None
    ingest(store, 'b', 100)
    assert backpressure.wait_within_lead(0) is True


def test_entries_of_an_earlier_epoch_permit_one_chunk_each(store, backpressure):
    backpressure.appended(EntryId('b', 100))
    ingest(store, 'a', 97)
    assert backpressure.wait_within_lead(0) is True
    backpressure.appended(EntryId('b', 101))
    assert backpressure.wait_within_lead(0) is None
    ingest(store, 'a', 98)
    assert backpressure.wait_within_lead(0) is True


def test_late_progress_of_a_learner_does_not_lower_its_place(store, backpressure):
    backpressure.appended(EntryId('a', 9))
    ingest(store, 'a', 8)
    assert backpressure.wait_within_lead(0) is True
    ingest(store, 'a', 3)
    backpressure.appended(EntryId('a', 11))
    assert backpressure.wait_within_lead(0) is None
    backpressure.appended(EntryId('a', 10))
    assert backpressure.wait_within_lead(0) is True, '8 were taken'
