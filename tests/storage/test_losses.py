"""What a reader counts as lost, against a plain model: neither more nor less than what never came, over all its lives.

The server forgets everything again and again, and some of the writers are killed at that moment, who then announce
nothing any more; what they had is lost as far as the reader has not read it. It had heard of all, and committed that.
"""

import json
import math

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from needs import IS_LONG

from ding_store.storage.exactly_once import losses
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.memory.store import MemoryStore
from ding_store.storage.testing import abandon, chunk

STREAM = 'experience'
picks = st.integers(0, 5)


class Losses(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.store = MemoryStore()
        self.writers, self.appended = [], {}  # those that live; writer -> how many entries it appended
        self.seen, self.committed = [], ('{}', 0)
        self.start_reader()

    def start_reader(self):
        known, count = self.committed
        del self.seen[count:]
        self.reader = Reader(self.store, STREAM, 'learner', loss_grace_s=math.inf, **json.loads(known))

    @rule(writer=picks, count=st.integers(1, 4))
    def append(self, writer, count):
        if writer >= len(self.writers):
            self.writers.append(self.store.another())
        store = self.writers[min(writer, len(self.writers) - 1)]
        for _ in range(count):
            store.append(STREAM, {}, chunk(0))
        self.appended[store.writer] = self.appended.get(store.writer, 0) + count

    @rule(count=st.sampled_from([1, 2, 64]), looks=st.booleans())
    def read(self, count, looks):
        self.reader.losses.looked_at = -math.inf if looks else math.inf
        self.seen += [(entry.writer, entry.sequence) for entry in self.reader.read(count)]

    @rule(acks=st.booleans(), num_held=st.integers(0, 3))
    def commit(self, acks, num_held=0):
        """All that was read, or what was taken of it by who reads ahead."""
        count = max(len(self.seen) - num_held, self.committed[1])
        marks = dict(self.seen[:count])
        self.committed = json.dumps({'marks': marks, 'heads': self.reader.heads(marks)}), count
        if acks and count == len(self.seen):
            self.reader.ack()

    @rule(killed=st.sets(picks, max_size=2), acks=st.booleans(), num_held=st.integers(0, 3))
    def forget_everything(self, killed, acks, num_held):
        self.read(1, looks=True)
        self.commit(acks, num_held)
        for number in sorted(killed, reverse=True):
            if number < len(self.writers):
                abandon(self.writers.pop(number))
        self.store.lose_memory()

    @rule()
    def send_again(self):
        for writer in self.writers:
            writer.client.own_writer.check(now=True)

    def teardown(self):
        self.send_again()
        while self.reader.lag():
            self.read(64, looks=True)
            self.commit(acks=True)
        self.read(64, looks=True)
        self.reader.losses.deadline = -math.inf  # The grace is over.
        self.read(64, looks=True)
        appended = {(writer, sequence + 1) for writer, count in self.appended.items() for sequence in range(count)}
        missing = appended - set(self.seen)
        assert len(self.seen) == len(set(self.seen))
        assert not {writer for writer, _ in missing} & {store.writer for store in self.writers}
        assert self.reader.num_lost == len(missing)
        self.store.close()


class Lives(Losses):
    """The reader is killed, too, and goes on from what was committed."""

    keeps_heads = True

    @rule()
    def kill_the_reader(self):
        self.start_reader()

    def start_reader(self):
        if not self.keeps_heads:
            known, count = self.committed
            self.committed = json.dumps({**json.loads(known), 'heads': {}}), count
        super().start_reader()


class Late(Losses):
    """The grace ends at any moment: who is late was counted, and is counted back."""

    @rule()
    def end_the_grace(self):
        self.reader.losses.deadline = -math.inf
        self.read(64, looks=True)


@pytest.mark.parametrize('kind', [Lives, Late])
def test_losses_counted_equal_a_model(kind):
    run_state_machine_as_test(
        kind, settings=settings(max_examples=300 if IS_LONG else 100, stateful_step_count=30, deadline=None)
    )


def test_losses_model_finds_a_reader_without_its_heads(monkeypatch):
    monkeypatch.setattr(Lives, 'keeps_heads', False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Lives, settings=settings(max_examples=500, deadline=None, database=None, phases=[Phase.generate])
        )


@pytest.mark.parametrize('looks', [False, True])
def test_reader_without_marks_counts_losses_of_a_dead_writer(looks, monkeypatch):
    """Not what its former life had taken: that is behind its cursor, by whatever sequences."""
    monkeypatch.setattr(losses, 'LOOK_EVERY_S', 0.0)
    with MemoryStore() as store:
        dead, living = store.another(), store.another()
        former = Reader(store, STREAM, 'learner')
        for _ in range(10):
            dead.append(STREAM, {}, chunk(0))
        assert len(former.read()) == 10
        former.ack()
        for _ in range(3):
            dead.append(STREAM, {}, chunk(0))
        reader = Reader(store, STREAM, 'learner', loss_grace_s=0.0)
        if looks:
            assert len(reader.read(1)) == 1
        else:
            reader._look_around()
        abandon(dead)  # as if it were killed
        store.lose_memory()
        for _ in range(2):
            living.append(STREAM, {}, chunk(0))
            reader.read()
        assert reader.num_lost == (2 if looks else 3)
