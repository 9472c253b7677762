"""Stores in forked processes while other threads of the parent use them: each goes on, nothing is lost or doubled."""

import os
import select
import threading
from collections import Counter

import pytest
from processes import child

from ding_store.storage import open_store
from ding_store.storage.exactly_once.reader import Reader
from ding_store.storage.testing import WAIT_S, chunk, number_of

#: As they are chosen for a test; scripts try hundreds.
NUM_FORKS = int(os.environ.get('DING_STORE_FORKS', '8'))
#: Of a child, from this number on.
CHILDREN = 1_000_000


@pytest.mark.parametrize('transport', ['auto', 'off'])
def test_forks_during_appends_reads_and_puts_lose_nothing(redis_server, tmp_path, transport):
    run = f'forks-{transport}'
    options = dict(host_plane=transport, host_cache_dir=str(tmp_path))
    with open_store(redis_server.url, run, **options) as store, open_store(redis_server.url, run, **options) as near:
        reader, seen, is_over = Reader(near, 's', 'near'), Counter(), threading.Event()
        appended, raised = [], []

        def append(first):
            for number in range(first, first + 100_000):
                if is_over.is_set():
                    return
                store.append('s', {}, chunk(number, size=20_000), timeout_s=WAIT_S)
                appended.append(number)

        def put_and_get():
            while not is_over.is_set():
                store.put('v', {}, chunk(1, size=50_000))
                store.get('v')

        def read():
            # On for as long as there is something: what the children appended last, too.
            while not is_over.is_set():
                seen.update(map(number_of, reader.read(timeout_s=0.05)))
                reader.ack()

        def watched(function, *arguments):
            try:
                function(*arguments)
            except BaseException as e:  # noqa: BLE001 - raised below
                raised.append(e)

        work = [(append, 0), (append, 100_000), (put_and_get,), (read,)]
        threads = [threading.Thread(target=watched, args=each, daemon=True) for each in work]
        for thread in threads:
            thread.start()

        def use(number):
            store.append('s', {}, chunk(CHILDREN + 2 * number), timeout_s=WAIT_S)
            assert store.get('v') is not None or store.put('v', {}, chunk(1)) > 0
            store.append('s', {}, chunk(CHILDREN + 2 * number + 1, size=20_000), timeout_s=WAIT_S)
            store.close()

        for number in range(NUM_FORKS):
            with child(lambda pipe, number=number: (use(number), pipe.write('done\n'))) as (_, pipe):
                assert select.select([pipe], [], [], WAIT_S)[0], f'fork {number} hangs'
                assert pipe.readline() == 'done\n', f'fork {number}'
        is_over.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert raised == []
        while entries := reader.read(timeout_s=1.0):
            seen.update(map(number_of, entries))
            reader.ack()
        expected = [*appended, *range(CHILDREN, CHILDREN + 2 * NUM_FORKS)]
        assert seen == Counter(expected)
        assert (reader.num_lost, reader.num_duplicates) == (0, 0)
