-- Move a reader's cursor forward, and trim what all durable readers have acked.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] epoch of the entry acked
-- ARGV[3] reader
-- ARGV[4] number of the entry acked
-- ARGV[5] chain up to it, as the reader knows it; '': it does not
if ARGV[2] ~= epoch then
  make_none()
  return 0
end
local number = tonumber(ARGV[4])
if ARGV[5] ~= '' and number >= floor and chain_at(number) ~= ARGV[5] then
  -- What is there under these numbers now was never read.
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
