-- Request the payload of a value from its writer, because a reader cannot read the slot. It holds for later versions.
-- KEYS    as in value.lua
-- Returns 1 if there is such a value
local version = redis.call('HGET', META, 'version')
if not version then
  return 0
end
-- Like small values in put.lua, requests are accepted at maxmemory, so that readers on other hosts can continue.
redis.call('HDEL', META, '')
redis.call('HSET', META, 'want', '1')
redis.call('XADD', WANTS, 'MAXLEN', '=', '1', '*', 'v', version)
return 1
