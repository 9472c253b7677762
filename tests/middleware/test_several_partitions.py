"""A learner that reads several partitions: it takes one part of a chunk from each, and resumes in all of them."""

import random
from types import SimpleNamespace

import pytest

pytest.importorskip('ding')

from ding.framework import task  # noqa: E402
from ding.framework.context import OnlineRLContext  # noqa: E402
from learners import HEADER, Exchanger, Learner, step  # noqa: E402

from ding_store.buffer import StoreBuffer  # noqa: E402
from ding_store.config import LearnersConfig, StoreConfig  # noqa: E402
from ding_store.errors import ConfigError  # noqa: E402
from ding_store.middleware.chunks import ChunkWriter  # noqa: E402
from ding_store.middleware.consumer_offset import ConsumerOffset  # noqa: E402
from ding_store.middleware.feed import LEARNER_READER, Feed  # noqa: E402
from ding_store.middleware.partitions import Partitioner, own_partitions, progress_name_of  # noqa: E402
from ding_store.run.several_learners import decide_num_partitions, num_partitions_of, replay_of, stream_of  # noqa: E402
from ding_store.run.time_spent import TimeSpent  # noqa: E402
from ding_store.storage import open_store  # noqa: E402
from ding_store.storage.testing import WAIT_S, eventually  # noqa: E402

NUM = 6


def config_of(num, partitions=None):
    return StoreConfig(num_learners=num, learners=LearnersConfig(partitions=partitions))


@pytest.fixture(autouse=True)
def threads_that_end_soon(monkeypatch):
    monkeypatch.setattr('ding_store.middleware.read_ahead.READ_S', 0.05)


@pytest.fixture
def store():
    with open_store('memory://', run='r') as store:
        yield store


class Rank(Exchanger):
    """One of two learners, with three of six partitions and a replay on the disk."""

    def __init__(self, store, path, rank=0):
        self.store, self.buffer_ = store, StoreBuffer(500)
        made = Learner(store, self.buffer_)
        made.plan.replay_figures = dict
        session = SimpleNamespace(
            store=store,
            config=config_of(2, NUM),
            replay_path=replay_of(str(path), rank, 2),
            checkpoints=SimpleNamespace(run='r'),
            figures=self._report,
            wait_for=lambda what, attempt, *_: attempt(WAIT_S),
            count_versions_from=lambda versions: None,
            time_spent=TimeSpent(),
            finished=True,
        )
        self.figures = {}
        super().__init__(session, made)
        feeds = [Feed(store, each, NUM) for each in own_partitions(rank, 2, NUM)]
        feeds[0].offset = ConsumerOffset({each.stream: each.offset for each in feeds[1:]})
        self.have(feeds)
        self.ctx = OnlineRLContext()
        self._begin(self.ctx, self._ingest_plan)

    def _report(self, **figures):
        self.figures.update(figures)

    def receive(self, timeout_s=WAIT_S):
        """Return how many parts an iteration takes. None: not every partition has one."""
        self._session.wait_for = lambda what, attempt, *_: attempt(timeout_s)
        return super().receive(self.ctx)

    def agree_with(self, most_passed):
        """Be one of several learners that have agreed."""
        self._rank = SimpleNamespace(most_passed=most_passed, num_passed=0, env_step=0, env_episode=0)

    @property
    def num_passed(self):
        return self._rank.num_passed

    def close(self):
        for feed in self.feeds.values():
            feed.read_ahead.wake()
            feed.read_ahead.rest()
        self.buffer_.close()

    def times(self):
        return sorted(int(item.data.time) for item in self.buffer_)


@pytest.mark.parametrize('num_rows', [1, 5, 12, 97])
@pytest.mark.parametrize('num', [1, 2, 3])
def test_learner_gets_the_same_rows_whatever_the_partitions(num_rows, num):
    elements, header = [step(number, env=number // 7) for number in range(num_rows)], dict(HEADER)
    whole = Partitioner(num, keeps_episodes=False).split(elements, header)
    parts = Partitioner(NUM, keeps_episodes=False).split(elements, header)
    for rank in range(num):
        own = [int(each['time']) for i in own_partitions(rank, num, NUM) for each in parts[i].elements]
        assert own == [int(each['time']) for each in whole[rank].elements]


def test_iteration_takes_one_part_of_every_partition(store, tmp_path, serial_task):
    rank = Rank(store, tmp_path)
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    for number, writer in enumerate(writers[:2]):
        writer.write([step(number)], dict(HEADER, env_step=8))
    eventually(lambda: [len(feed.read_ahead) for feed in rank.feeds.values()] == [1, 1, 0], 'two parts are read')
    assert rank.receive(timeout_s=0.0) is None
    writers[2].write([], dict(HEADER, env_step=8))
    assert rank.receive() == 3
    assert (rank.ctx.env_step, rank.times()) == (8, [0, 1])
    rank.send()
    rank.close()
    assert rank.figures['rows'] == 2
    assert rank.figures['chunks'] == 1
    assert all(store.get(progress_name_of(i, NUM)).header['ingested'][1] == 1 for i in range(3))


def write(store, writers, number, lost_in=None):
    """Append a part of a chunk to each partition. One of them may lose it unread."""
    for partition, writer in enumerate(writers):
        place = writer.write([step(10 * number + partition)], dict(HEADER, env_step=8))
        if partition == lost_in:
            store.ack(stream_of(partition, NUM), LEARNER_READER, place)


def test_partitions_are_not_behind_one_that_lost_a_chunk(store, tmp_path, serial_task):
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    rank, taken = Rank(store, tmp_path), []

    def iterate(lens):
        eventually(lambda: [len(feed.read_ahead) for feed in rank.feeds.values()] == lens, 'all parts are read')
        taken.append(rank.receive())
        rank.send()

    write(store, writers, 0)
    iterate([1, 1, 1])
    rank.close()
    write(store, writers, 1, lost_in=0)
    write(store, writers, 2)
    rank = Rank(store, tmp_path)
    iterate([1, 2, 2])
    rank.close()
    rank = Rank(store, tmp_path)  # what was lost is committed with the rows
    write(store, writers, 3)
    iterate([1, 2, 2])
    write(store, writers, 4)
    iterate([1, 1, 1])
    assert taken == [3, 3, 5, 3]
    assert rank.times() == [10 * number + i for number in range(5) for i in range(3) if (number, i) != (1, 0)]
    rank.close()


def test_partition_with_an_old_collector_is_not_ahead(store, tmp_path, serial_task):
    """A learner without a position finds the last chunk of a collector that has left, in one partition alone."""
    with store.another() as old:
        writer = ChunkWriter(old, stream_of(0, NUM))
        store.register(stream_of(0, NUM), LEARNER_READER)
        for number in range(20):
            place = writer.write([step(100 + number)], HEADER)
            if number == 18:
                store.ack(stream_of(0, NUM), LEARNER_READER, place)
    rank = Rank(store, tmp_path)
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    for number in range(3):
        write(store, writers, number)
    eventually(lambda: [len(feed.read_ahead) for feed in rank.feeds.values()] == [4, 3, 3], 'all parts are read')
    assert [rank.receive() for _ in range(3)] == [3, 3, 3]
    rank.close()


def test_learner_is_not_behind_another_that_lost_a_chunk(store, tmp_path, serial_task):
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    for number in range(9):
        writers[number % 3].write([step(number)], dict(HEADER, env_step=8))
    rank = Rank(store, tmp_path)
    eventually(lambda: all(len(feed.read_ahead) == 3 for feed in rank.feeds.values()), 'nine parts are read')
    rank.agree_with(most_passed=1)
    assert rank.receive() == 3
    rank.agree_with(most_passed=3)
    assert rank.receive() == 6
    assert rank.num_passed == 4
    rank.close()


def test_learner_that_lost_its_replay_takes_one_chunk_at_a_time(store, tmp_path, serial_task):
    """The others go on with the counts of their replays, and it begins at 0."""
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    for number in range(4):
        write(store, writers, number)
    rank, taken = Rank(store, tmp_path), []
    eventually(lambda: [len(feed.read_ahead) for feed in rank.feeds.values()] == [4, 4, 4], 'all parts are read')
    for most_passed in (0, 1001, 1002, 1003):
        rank.agree_with(most_passed)
        taken.append(rank.receive())
        rank.send()
    assert taken == [3, 3, 3, 3]
    rank.close()


def test_model_of_a_learner_that_is_killed_has_each_row_once(tmp_path, serial_task):
    """Parts come in any order, and the learner is killed before or after its acks. No row is lost or twice."""
    rng = random.Random(3)
    for case in range(2):
        with open_store('memory://', run=f'case-{case}') as store:
            collectors = [store.another() for _ in range(2)]
            writers = [[ChunkWriter(each, stream_of(i, NUM)) for i in range(3)] for each in collectors]
            sent, num_chunks, rank = 0, [[0] * 3, [0] * 3], Rank(store.another(), tmp_path / str(case))
            for _ in range(40):
                what = rng.random()
                if what < 0.6:
                    collector, partition = rng.randrange(2), rng.randrange(3)
                    rows = [step(sent + i, env=collector) for i in range(rng.randrange(4))]
                    writers[collector][partition].write(rows, dict(HEADER, env_step=4))
                    num_chunks[collector][partition] += 1
                    sent += len(rows)
                elif what < 0.9:
                    if rank.receive(timeout_s=0.05) and rng.random() < 0.7:
                        rank.send()
                else:
                    rank.close()
                    rank = Rank(store.another(), tmp_path / str(case))
            most = max(sum(each[i] for each in num_chunks) for i in range(3))
            for partition in range(3):  # the parts that are missing
                for _ in range(most - sum(each[partition] for each in num_chunks)):
                    writers[0][partition].write([], dict(HEADER, env_step=4))
            while rank.consumer_offset.num_chunks < most:
                assert rank.receive()
                rank.send()
            assert rank.times() == list(range(sent))
            assert rank.ctx.env_step == 4 * most
            rank.close()


@pytest.mark.parametrize('filled', [0, 1, 2])
def test_killed_learner_keeps_its_partitions_in_step(store, tmp_path, serial_task, filled):
    """The parts without rows are committed with those that have some, so all partitions go on with the next chunk."""
    writers = [ChunkWriter(store.another(), stream_of(i, NUM)) for i in range(3)]
    for partition, writer in enumerate(writers):
        writer.write([step(0)] if partition == filled else [], dict(HEADER, env_step=4))
    rank = Rank(store.another(), tmp_path)
    assert rank.receive() == 3
    rank.close()
    rank = Rank(store, tmp_path)
    assert [each.num_chunks for each in rank.consumer_offset.all()] == [1, 1, 1]
    rank.close()


def test_replay_of_other_partitions_is_refused(store, tmp_path, serial_task):
    rank = Rank(store, tmp_path)
    for partition in range(3):
        ChunkWriter(store.another(), stream_of(partition, NUM)).write([step(partition)], HEADER)
    assert rank.receive() == 3
    rank.send()
    rank.close()
    learner = Learner(store, StoreBuffer(500))
    error = r'rows of 3 partitions, and its learner reads 1 now.* to 6 and run .*--partitions 6\. For 2, .*ions 2'
    with pytest.raises(ConfigError, match=error):
        learner.consumer_offset.keep_in(learner.plan.replay, replay_of(str(tmp_path), 0, 2), 'r', 2)
    learner.plan.replay.buffer.close()
    assert not task.finish


def test_number_of_partitions_is_the_same_in_all_processes(store):
    assert decide_num_partitions(store, config_of(1)) == 1
    assert num_partitions_of(store) is None
    assert decide_num_partitions(store, config_of(2, 6)) == 6
    assert decide_num_partitions(store.another(), config_of(2)) == 6, 'a collector that joined without the setting'
    for config in (config_of(2, 4), config_of(4)):
        with pytest.raises(ConfigError, match='has its experience in 6 partitions'):
            decide_num_partitions(store, config)


def test_number_of_partitions_that_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match=r'partitions \(5\) must be a multiple of the number of learners \(2\)'):
        config_of(2, 5)
