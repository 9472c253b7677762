-- Drop what a stream holds and who reads it. The numbers of writers that have not left stay for ENDS_S: else living writers
-- would announce all again. A new epoch begins: what comes next may be another run's, which no writer of this one is to
-- bring what it has left.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- Returns 1 if there was such a stream
if make_none() then
  return 0
end
need_no_memory()
-- A writer that comes later than ENDS_S, and after a restart of the server, takes its run for lost, and brings it back.
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
