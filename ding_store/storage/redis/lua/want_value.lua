-- Ask the writer of a value for its payload, now and from now on: somebody cannot read the slot that it refers to.
-- KEYS    as in value.lua
-- Returns 1 if there is such a value
local version = redis.call('HGET', META, 'version')
if not version then
  return 0
end
-- As in put.lua: also at maxmemory somebody elsewhere can go on.
redis.call('HDEL', META, '')
redis.call('HSET', META, 'want', '1')
redis.call('XADD', WANTS, 'MAXLEN', '=', '1', '*', 'v', version)
return 1
