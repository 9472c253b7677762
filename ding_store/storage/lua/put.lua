-- Publish a version of a value. A put that is tried again, because its reply was lost, changes nothing.
-- KEYS[1] value   stream  one entry: id "<version>-0", field p (payload)
-- KEYS[2] meta    hash    version; token: of the put that made it
-- ARGV[1] token of this put
-- ARGV[2] newest version that the writer knows: a server that forgot the value counts on from there
-- ARGV[3] version that the value must have now; -1: any
-- ARGV[4] payload
-- Returns {1 if it is published, version now, version before}
local stored = redis.call('HMGET', KEYS[2], 'version', 'token')
local version = tonumber(stored[1]) or 0
if stored[2] == ARGV[1] then
  return { 1, version, version - 1 }
end
local expected = tonumber(ARGV[3])
if expected >= 0 and expected ~= version then
  return { 0, version, version }
end
local new = math.max(version, tonumber(ARGV[2])) + 1
redis.call('XADD', KEYS[1], 'MAXLEN', '=', '1', string.format('%.0f-0', new), 'p', ARGV[4])
redis.call('HSET', KEYS[2], 'version', string.format('%.0f', new), 'token', ARGV[1])
return { 1, new, version }
