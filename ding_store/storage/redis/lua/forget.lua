-- Drop a reader for good, and trim what only it was waited for.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] reader
-- Returns 1 if it was known
if make_none() then
  return 0
end
local known = redis.call('HDEL', READERS, 'd:' .. ARGV[2], 'e:' .. ARGV[2])
redis.call('HDEL', READERS, 'h:' .. ARGV[2])
trim_acked()
choose_plane()
return known
