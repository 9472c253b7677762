-- Add the payload to a value's newest version, which so far is only a reference to a slot of its writer's host.
-- KEYS[1] value, KEYS[2] meta: as in put.lua
-- ARGV[1] version
-- ARGV[2] payload, or the place of its parts
-- ARGV[3] number of parts
-- ARGV[4] key of the parts
-- Returns 1 if it is filled, 0 if another version is the newest by now, or somebody filled it before, -1 if parts are
-- missing
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not newest or newest[1] ~= ARGV[1] .. '-0' then
  return 0
end
for part = 0, tonumber(ARGV[3]) - 1 do
  local name = ARGV[4] .. string.format('%.0f', part)
  if redis.call('PERSIST', name) == 0 and redis.call('EXISTS', name) == 0 then
    return -1
  end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '=', '1', ARGV[1] .. '-1', 'p', ARGV[2], unpack(newest[2]))
if tonumber(ARGV[3]) > 0 then
  redis.call('HSET', KEYS[2], 'parts', ARGV[3] .. ':' .. ARGV[4])
end
return 1
