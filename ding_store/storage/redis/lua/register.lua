-- Register a reader. A reader that is registered already keeps its cursor.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] reader
-- ARGV[3] 'd' for a durable reader, 'e' for an ephemeral one
-- ARGV[4] start of a new reader: 'oldest' or 'now'
-- ARGV[5] host whose files it can map; '': none
-- ARGV[6] codecs that it can decompress, separated by spaces; the present version always sends ''
-- Returns {epoch, number up to which it has acked, chain up to there}
local durable, ephemeral = 'd:' .. ARGV[2], 'e:' .. ARGV[2]
local cursor = redis.call('HGET', READERS, durable) or redis.call('HGET', READERS, ephemeral)
if not cursor then
  cursor = digits(ARGV[4] == 'oldest' and floor or last)
end
need_no_memory()
redis.call('HDEL', READERS, durable, ephemeral)
redis.call('HSET', READERS, ARGV[3] .. ':' .. ARGV[2], cursor, 'h:' .. ARGV[2], ARGV[5],
  'c:' .. ARGV[2], ARGV[6])
revive()
forgot(ARGV[2], false)
note_readers()
return { epoch, tonumber(cursor), chain_at(tonumber(cursor)) }
