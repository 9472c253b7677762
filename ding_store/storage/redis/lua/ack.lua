-- Move a reader's cursor forward, and trim the entries that all durable readers have acked.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] epoch of the acked entry
-- ARGV[3] reader
-- ARGV[4] number of the acked entry
-- ARGV[5] chain up to that entry, from the reader; '': unknown
-- Returns 1 if the cursor moved, else 0
if ARGV[2] ~= epoch then
  make_none()
  return 0
end
local number = tonumber(ARGV[4])
if ARGV[5] ~= '' and number >= floor and chain_at(number) ~= ARGV[5] then
  -- The server went back in time: the reader never read the entries that have these numbers now.
  begin_epoch()
  return 0
end
local field = 'd:' .. ARGV[3]
local cursor = redis.call('HGET', READERS, field)
if not cursor then
  field = 'e:' .. ARGV[3]
  cursor = redis.call('HGET', READERS, field)
end
number = math.min(number, last)
if not cursor or number <= tonumber(cursor) then
  return 0
end
need_no_memory()
redis.call('HSET', READERS, field, digits(number))
trim_acked()
if num_writers > 1 then
  sweep_in_time()
end
return 1
