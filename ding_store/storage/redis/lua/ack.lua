-- Move a reader's cursor forward, and trim what all durable readers have acked.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] epoch of the entry acked
-- ARGV[3] reader
-- ARGV[4] number of the entry acked
if ARGV[2] ~= epoch then
  make_none()
  return 0
end
local field = 'd:' .. ARGV[3]
local cursor = redis.call('HGET', READERS, field)
if not cursor then
  field = 'e:' .. ARGV[3]
  cursor = redis.call('HGET', READERS, field)
end
local number = math.min(tonumber(ARGV[4]), last)
if not cursor or number <= tonumber(cursor) then
  return 0
end
need_no_memory()
redis.call('HSET', READERS, field, digits(number))
trim_acked()
return 1
