-- Drop what a stream holds and who reads it. The writers' numbers stay: else living writers would announce all again. A new
-- epoch begins: what comes next may be another run's, which no writer of this one is to bring what it has left.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- Returns 1 if there was such a stream
-- Who comes later than that, and after a restart of the server, takes his run for lost, and brings back what he has.
local ENDS_S = 86400
if make_none() then
  return 0
end
need_no_memory()
local ends = digits(num_ends() + 1)
redis.call('SET', ENDS, ends, 'EX', ENDS_S)
trim(last)
redis.call('DEL', READERS)
note_readers()
local existed = redis.call('HGET', META, 'deleted') ~= '1'
redis.call('HSET', META, 'deleted', '1', 'dropped', '0', 'epoch', fresh, 'ends', ends)
return existed and 1 or 0
