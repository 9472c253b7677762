-- Drop a stream's entries and readers. The sequences of writers that have not left stay for ENDS_S. Without them,
-- running writers would send all their entries again. A new epoch begins. The next stream of this name may belong to
-- another run, and old writers must not append to it.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- Returns 1 if there was such a stream
if make_none() then
  return 0
end
need_no_memory()
-- Without the count, writers would take the deleted entries for lost and send them again. That happens only to a writer
-- that returns later than ENDS_S, after a restart of the server.
local ends = digits(num_ends() + 1)
redis.call('SET', ENDS, ends, 'EX', ENDS_S)
trim(last)
redis.call('DEL', READERS, LOG)
note_readers()
local existed = redis.call('HGET', META, 'deleted') ~= '1'
redis.call('HSET', META, 'deleted', '1', 'dropped', '0', 'epoch', fresh, 'ends', ends)
for _, key in ipairs({ META, ROOM, PLANES }) do
  redis.call('EXPIRE', key, ENDS_S)
end
is_deleted = '1'
drop_writers({})
return existed and 1 or 0
