-- Remove a reader for good, and trim the entries that only it still needed. If it was the last durable one, trim all.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] reader
-- Returns 1 if it was registered
if make_none() then
  return 0
end
local was_durable = redis.call('HDEL', READERS, 'd:' .. ARGV[2])
local was_ephemeral = redis.call('HDEL', READERS, 'e:' .. ARGV[2])
redis.call('HDEL', READERS, 'h:' .. ARGV[2], 'c:' .. ARGV[2])
if was_ephemeral == 0 then
  forgot(ARGV[2], true)
end
if not trim_acked() and was_durable == 1 then
  trim(last)
end
note_readers()
return math.max(was_durable, was_ephemeral)
