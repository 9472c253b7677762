"""Golden calls of the Lua scripts: what clients do is recorded."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Optional
from unittest import mock

from golden_files import RawRedis, keys_of
from redis_server import RedisServer

from ding_store.errors import StoreError, StoreTimeout, VersionConflict
from ding_store.storage.base import OLDEST
from ding_store.storage.encoding.framing import encode, encode_pieces
from ding_store.storage.exactly_once.outbox import Payload
from ding_store.storage.protocol import AppendRequest, Backfill
from ding_store.storage.redis.store import RedisStore
from golden_makers.common import arrays_of, binary, fixed_names, small_parts, write_json
from golden_makers.recorder import Recorder


class Referenced(Payload):
    """An entry in a file of the host named 'here'."""

    def reference(self, host: str) -> Optional[bytes]:
        return b'DGH\x01' + b'reference'.ljust(44, b'.') if host == 'here' else None


class Scenario:
    """What clients do, part by part, each on streams of its own."""

    def __init__(self, recorder: Recorder, server: RedisServer) -> None:
        self._recorder = recorder
        self._server = server

    def store(self, writer: str, **options: Any) -> RedisStore:
        with mock.patch('ding_store.storage.client.writer_id', return_value=writer):
            return RedisStore(self._recorder.url, 'golden', check_every_s=5.0, **options)

    @contextmanager
    def raw(self) -> Iterator[RawRedis]:
        """Another program's connection, which is recorded, too."""
        with closing(RawRedis(self._recorder.path)) as redis:
            yield redis

    def appends_reads_and_acks(self) -> None:
        a, b, reader = self.store('a'), self.store('b'), self.store('reader')
        place = reader.register('s', 'learner')
        for number in (1, 2):
            a.append('s', {'of': 'a', 'number': number}, {})
            b.append('s', {'of': 'b', 'number': number}, {})
        reader.register('s', 'watcher', durable=False, start='now')
        entries = reader.read('s', place)
        assert [entry.header['of'] for entry in entries] == ['a', 'b', 'a', 'b']
        reader.ack('s', 'learner', entries[1].id)
        reader.ack('s', 'learner', entries[0].id)
        reader.ack('s', 'watcher', entries[3].id)
        a.append('s', {'number': 3}, {})
        a.client.own_writer.check_stream('s', wait_s=1.0)
        assert reader.put('cursor', {'at': 1}, {}) == 1
        reader.advance('s', 'learner', entries[2].id, 'cursor', {'at': 3})
        reader.flush()
        assert reader.forget('s', 'watcher')
        assert not reader.forget('s', 'watcher')
        b.close()
        reader.ack('s', 'learner', reader.read('s', entries[2].id)[-1].id)
        a.close()
        assert reader.forget('s', 'learner')
        reader.info()
        reader.close()

    def limits(self) -> None:
        tight = {'max_pending_bytes': 700, 'overflow': 'block'}
        a = self.store('limited', stream_options={'full': tight, 'dropping': {**tight, 'overflow': 'drop_oldest'}})
        a.register('full', 'learner')
        with suppress(StoreTimeout):
            for _ in range(9):
                a.append('full', {}, arrays_of(1), timeout_s=0)
        (first,) = a.read('full', max_entries=1)
        a.ack('full', 'learner', first.id)
        a.append('full', {}, arrays_of(1))
        for _ in range(5):
            a.append('dropping', {}, arrays_of(1))
        assert a.stream_info('dropping').num_dropped
        blocking = self.store('blocking', max_pending_bytes=700)
        with suppress(StoreError):
            for _ in range(9):
                blocking.append('full', {}, arrays_of(1), timeout_s=0.05)
        blocking.close()
        a.close()

    def parts(self) -> None:
        a = self.store('parted')
        a.register('p', 'learner')
        for count in (50, 80):
            a.append('p', {'count': count}, arrays_of(count))
        entries = a.read('p')
        assert [entry.header['count'] for entry in entries] == [50, 80]
        a.ack('p', 'learner', entries[0].id)
        state = a.client.server._appends.send_request(AppendRequest('p', entries[0].id.epoch, 0, 3))
        said = AppendRequest('p', state.epoch, 3, 3, admission=state.admission, listed=state.listed)
        a.client.server._appends._append(said, b'', 2, 'ding:{golden/p/0}:not there', None)  # NO PARTS
        with self.raw() as redis:
            redis.ask('EXISTS', *sorted(redis.ask('KEYS', 'ding:{golden/p/*part*')))
        a.delete('p')
        a.close()

    def planes(self) -> None:
        a, reader = self.store('host writer'), self.store('host reader')
        reader.client.server.register_reader('h', 'near', host='here')
        for size in (1, 2, 3):
            a.client.append('h', Referenced(encode({'size': size}, arrays_of(size))))
        assert [len(record.payload) for record in reader.client.read('h', OLDEST, 9, 0.0)][1:] == [48, 48]
        reader.client.server.request_backfills('h')
        a.client.own_writer.check_stream('h', wait_s=1.0)
        records = reader.client.read('h', OLDEST, 9, 0.0)
        assert reader.client.wait_for_backfill('h', records[-1], 1.0) is not None
        reader.client.server.read_backfill('h', records[1])
        for size in (5, 60):  # of the second one the payload comes in parts
            a.client.append('h', Referenced(encode({'size': size}, arrays_of(size))))
        reader.client.server.register_reader('h', 'far', host='')
        reader.client.server.wait_for_transports({'h': 0}, 0.01)
        a.client.append('h', Referenced(encode({'size': 5}, arrays_of(5))))  # refused: PLANE
        last = reader.client.read('h', OLDEST, 9, 0.0)[-2:]
        reader.client.wait_for_backfill('h', last[0], 1.0)
        a.client.server._appends.backfill(
            Backfill('h', last[0].id.epoch, 5, 9, encode({}, {}))
        )  # which is there already
        a.client.server._appends.backfill(Backfill('h', last[0].id.epoch, 99, 9, encode({}, {})))  # of no entry
        missing = (last[0].id.epoch, 'host writer', 5, 9, 2, 'ding:{golden/h/0}:not there', b'place')
        a.client.server.connection.call(
            'fill', lambda session: a.client.server.keys.run(session, 'fill', 'h', missing)
        )  # its parts are missing
        reader.ack('h', 'near', last[1].id)
        reader.ack('h', 'far', last[1].id)
        a.client.server._appends.backfill(
            Backfill('h', last[0].id.epoch, 5, 9, encode({}, arrays_of(60)))
        )  # of an entry that is gone
        reader.forget('h', 'far')
        a.client.append('h', Referenced(encode({}, {})))
        a.client.append('h', Referenced(encode({}, {})))
        reader.forget('h', 'near')
        a.close()
        reader.close()

    def codecs(self) -> None:
        a = self.store('compressing', compression='auto')
        reader = self.store('decompressing')
        reader.register('c', 'both')
        a.append('c', {}, arrays_of(50))
        reader.ack('c', 'both', reader.read('c')[-1].id)
        a.close()
        reader.close()

    def verdicts(self) -> None:
        """Announcements that a writer makes when its connection was lost at some point."""
        a = self.store('announcing')
        a.register('v', 'learner')
        send_request, payload = a.client.server._appends.send_request, encode({}, {})

        def say(sequence: int, **changes: Any) -> str:
            said = AppendRequest('v', state.epoch, sequence, 1, payload, size=len(payload), admission=state.admission)
            reply = send_request(said._replace(**changes))
            return reply.status

        state = send_request(AppendRequest('nowhere', '', 0, 1))
        assert state.epoch == ''
        state = send_request(AppendRequest('v', '', 1, 1, payload, size=len(payload)))
        assert state.status == 'STALE'
        assert say(1) == 'OK'
        assert say(1) == 'OK'  # again
        assert say(3) == 'GAP'
        assert say(3, base=3) == 'OK'
        assert say(4, transport=7) == 'PLANE'
        assert say(4, admission=state.admission + 1) == 'FORGOTTEN'
        assert say(4, max_pending_bytes=100) == 'FULL'
        assert say(4, epoch='another') == 'STALE'
        assert say(4, readers='learner\there\tlz4\nreturned\there\tlz4\n') == 'OK'
        assert say(5, last_reply='4:5') == 'STALE'  # by its last reply there is more: a new epoch
        a.client.server._appends.leave('v', state.admission + 7)
        a.client.server._appends.leave('v', state.admission)
        a.forget('v', 'learner')
        a.forget('v', 'returned')
        a.close()

    def values(self) -> None:
        a, b = self.store('putting'), self.store('also putting')
        assert a.get('w') is None
        assert a.put('w', {'of': 'a'}, {}) == 1
        assert a.put('w', {'of': 'a'}, arrays_of(2), expected_version=1) == 2
        with suppress(VersionConflict):
            a.put('w', {}, {}, expected_version=1)
        with suppress(VersionConflict):
            a.put('w', {}, arrays_of(60), expected_version=1)  # its parts are dropped
        assert b.put('w', {'of': 'b'}, {}) == 3  # it is asked once, since it has not seen the version before
        assert a.get('w', newer_than=3) is None
        for count in (60, 60, 70, 20):
            version = a.put('large', {'count': count}, arrays_of(count))
            found = b.get('large', newer_than=version - 1)
            assert found is not None
            assert found.header == {'count': count}
        missing = 'ding:{golden/w/0}:not there'
        assert (
            a.client.server._values._run('put', 'w', 'token', 0, -1, b'list', missing, b'', 'putting', 99, '*')[0] == -1
        )
        reference = b'DGV\x01' + b'reference'.ljust(44, b'.')
        a.client.server.put('slot', None, reference)
        assert b.client.get('slot').payload == b''
        b.client.server.request_version('slot')
        wanted = a.client.server.wait_for_requests({'slot': ''}, 0.01)
        assert a.client.server._values._run('fill_value', 'slot', 1, b'list', missing, '') == -1
        assert a.client.server.backfill_version('slot', 1, encode_pieces({'filled': 1}, {}))
        assert b.client.get('slot', 1, or_filled=True).payload
        assert not a.client.server.backfill_version('slot', 1, encode_pieces({'filled': 1}, {}))
        assert not a.client.server.backfill_version('slot', 9, encode_pieces({'filled': 1}, arrays_of(60)))
        a.client.server.put('slot', None, reference)  # on its way, since it was wanted before
        a.client.server.wait_for_requests(wanted, 0.01)
        assert a.client.server.backfill_version('slot', 2, encode_pieces({'filled': 2}, arrays_of(60)))
        b.client.server.request_version('nothing')
        for name in ('w', 'large', 'slot', 'nothing'):
            a.delete(name)
        a.close()
        b.close()

    def counters_and_deletes(self) -> None:
        a = self.store('deleting')
        a.add('started', 2)
        a.add('started', -5)
        a.add('started')
        a.append('d', {}, {})
        a.register('d', 'learner')
        assert a.delete('d')
        assert not a.delete('d')
        a.append('d', {}, {})
        a.append('d', {}, {})
        b = self.store('deleted meanwhile')
        b.append('d', {}, {})
        a.delete('d')
        b.append('d', {}, {})
        b.delete('started')
        b.close()
        a.delete('d')
        a.close()

    def silent_writers(self) -> None:
        """Two are kept of those whose entries are all gone; the others are forgotten when more come."""
        reader = self.store('sweeping')
        reader.register('many', 'learner')
        writers = [self.store(f'silent {number}') for number in range(7)]
        for writer in writers:
            writer.append('many', {}, {})
            reader.ack('many', 'learner', reader.read('many')[-1].id)
        writers[0].append('many', {}, {})  # FORGOTTEN, and admitted again
        writers[-1].append('many', {}, {})
        reader.ack('many', 'learner', reader.read('many')[-1].id)
        assert len(reader.stream_info('many').writers) < 7
        for writer in writers:
            writer.close()
        reader.close()

    def other_programs(self) -> None:
        """Foreign entries in the streams of a stream, under ids of the server's clock."""
        a = self.store('disturbed')
        a.register('f', 'learner')
        a.append('f', {}, {})
        with self.raw() as redis:
            redis.ask('XADD', 'ding:{golden/f/0}:room', '1700000000000-0', 'foreign', '1')
            redis.ask('XADD', 'ding:{golden/f/0}:planes', '1700000000000-0', 'foreign', '1')
            redis.ask('XADD', 'ding:{golden/f/0}:log', '1700000000000-0', 'foreign', '1')
        a.client.server.wait_for_capacity('f', 0, 0.01)
        a.client.server.wait_for_transports({'f': 0}, 0.01)
        a.append('f', {}, {})
        entries = a.read('f')
        assert len(entries) == 2
        a.ack('f', 'learner', entries[-1].id)
        assert a.put('f', {}, {}) == 1
        with self.raw() as redis:
            redis.ask('XADD', 'ding:{golden/f/0}:value', '1700000000000-0', 'foreign', '1')
        assert a.put('f', {}, {}) == 2
        a.delete('f')
        a.close()

    def lost_memory(self) -> None:
        """A server whose memory is gone, in one life of it: writers bring back what was not acked."""
        a, reader = self.store('returning'), self.store('rereading')
        reader.register('l', 'learner')
        for number in (1, 2, 3):
            a.append('l', {'number': number}, {})
        entries = reader.read('l')
        reader.ack('l', 'learner', entries[0].id)
        a.client.own_writer.check_stream('l', wait_s=1.0)
        assert a.put('l', {}, {}) == 1
        assert a.put('l', {}, {}) == 2
        with self.raw() as redis:
            redis.ask('FLUSHALL')
        a.append('l', {'number': 4}, {})
        assert [entry.header['number'] for entry in reader.read('l', entries[0].id)] == [2, 3, 4]
        reader.ack('l', 'learner', entries[1].id)  # of the epoch before
        assert a.put('l', {}, {}) == 3
        with self.raw() as redis:
            redis.ask('FLUSHALL')
        # Calls that make no stream of one that is gone.
        reader.ack('l', 'learner', entries[1].id)
        reader.client.server.request_backfills('l')
        reader.forget('l', 'learner')
        a.client.server._appends.leave('l', 1)
        a.delete('l')
        a.close()
        reader.close()

    def older_data(self) -> None:
        """A server that went back to older data: other entries come under numbers that were read already."""
        a, reader = self.store('ahead'), self.store('rereading older data')
        reader.register('o', 'learner')
        a.append('o', {'number': 1}, {})
        with closing(RawRedis(str(self._server.socket))) as redis:
            kept = keys_of(redis, 'ding:{golden/o/0}*')
        a.append('o', {'number': 2}, {})
        entries = reader.read('o')
        a.client.server.connection.close()  # as if it were killed
        for is_renewed in (True, False):
            with self.raw() as redis:
                redis.ask('DEL', *{command[1] for command in kept})
                for command in kept:
                    redis.ask(*command)
            b = self.store(f'other {is_renewed}')
            b.append('o', {'number': 'another'}, {})
            if is_renewed:
                assert len(reader.read('o', entries[1].id)) == 2  # from the oldest, in a new epoch
            else:
                reader.ack('o', 'learner', entries[1].id)  # its chain does not match
            b.close()
        reader.close()

    def restart(self) -> None:
        """Another life of a server that kept its data."""
        a, reader = self.store('outliving'), self.store('outliving reader')
        reader.register('r', 'learner')
        for number in (1, 2):
            a.append('r', {'number': number}, {})
        entries = reader.read('r')
        assert a.put('r', {'number': 1}, {}) == 1
        self._server.restart()
        a.append('r', {'number': 3}, {})
        assert [entry.header['number'] for entry in reader.read('r', entries[0].id)] == [1, 2, 3]
        reader.ack('r', 'learner', reader.read('r')[-1].id)
        assert a.put('r', {'number': 2}, {}) == 2
        a.append('r', {'number': 4}, {})
        a.close()
        reader.close()

    def retirement(self) -> None:
        a = self.store('retiring')
        a.append('last', {}, {})
        a.retire()
        a.close()
        with self.raw() as redis:
            redis.ask('KEYS', '*')


def make_calls(golden: Path) -> None:
    with ExitStack() as stack:
        for patched in (small_parts(), fixed_names()):
            stack.enter_context(patched)
        stack.enter_context(mock.patch('ding_store.storage.redis.appends.ASK_BYTES', 1200))
        stack.enter_context(mock.patch('ding_store.storage.redis.appends.MAX_SILENT_WRITERS', 2))
        server = stack.enter_context(RedisServer(binary(), '--appendonly', 'yes', '--appendfsync', 'always'))
        recorder = stack.enter_context(closing(Recorder(server)))
        scenario = Scenario(recorder, server)
        for part in (
            scenario.appends_reads_and_acks,
            scenario.limits,
            scenario.parts,
            scenario.planes,
            scenario.codecs,
            scenario.verdicts,
            scenario.values,
            scenario.counters_and_deletes,
            scenario.silent_writers,
            scenario.other_programs,
            scenario.lost_memory,
            scenario.older_data,
            scenario.restart,
            scenario.retirement,
        ):
            recorder.say(part.__name__.replace('_', ' '))
            part()
        text = json.dumps(recorder.calls, ensure_ascii=True)
        for number, generation in enumerate(recorder.lives, 1):
            text = text.replace(generation, f'{number:x}' * 40)
        write_json(golden / 'calls.json', json.loads(text))
