-- Backfill: add the payload to a value's newest version, which so far is only a reference to a slot.
-- KEYS    as in value.lua
-- ARGV[1] version
-- ARGV[2] payload, or the list of its parts
-- ARGV[3] keys of the parts, with a space behind each
-- ARGV[4] token of the put that made the version, '' if not known
-- Returns 1 if the payload was added, 0 if another put's version is the newest or the payload was there already, -1 if parts
-- are missing
local newest = redis.call('XREVRANGE', VALUE, '+', '-', 'COUNT', 1)[1]
if not newest or newest[1] ~= ARGV[1] .. '-0' then
  return 0
end
if ARGV[4] ~= '' and redis.call('HGET', META, 'token') ~= ARGV[4] then
  return 0
end
if not keep_parts(ARGV[3]) then
  return -1
end
redis.call('XADD', VALUE, 'MAXLEN', '=', '1', ARGV[1] .. '-1', 'p', ARGV[2], unpack(newest[2]))
replace_parts(ARGV[3])
return 1
