-- Drop what a stream holds and who reads it. The writers' numbers stay: else living writers would announce all again. A new
-- epoch begins: what comes next may be another run's, which no writer of this one is to bring what it has left.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- Returns 1 if there was such a stream
if make_none() then
  return 0
end
need_no_memory()
trim(last)
redis.call('DEL', READERS)
choose_plane()
local existed = redis.call('HGET', META, 'deleted') ~= '1'
redis.call('HSET', META, 'deleted', '1', 'dropped', '0', 'epoch', fresh)
return existed and 1 or 0
