-- Publish a version of a value. A put that is tried again, because its reply was lost, changes nothing.
-- KEYS[1] value   stream  one entry: id "<version>-0", fields p (payload, or the place of its parts) and r (reference to
--                         a slot of the writer's host), at least one of them; "<version>-1": p was filled in later
-- KEYS[2] meta    hash    version; token: of the put that made it
--                         parts, parts_before: "<parts>:<key>" of this version and of the one before, which is kept
--                         for those who are still fetching it
--                         want: 1 if payloads are asked for, since somebody cannot read slots
-- KEYS[3] wants   stream  one entry: when a payload was last asked for; wakes the writer
-- ARGV[1] token of this put
-- ARGV[2] newest version that the writer knows: a server that forgot the value counts on from there
-- ARGV[3] version that the value must have now; -1: any
-- ARGV[4] payload, or the place of its parts; '': only the reference, to be filled if somebody wants payloads
-- ARGV[5] number of parts
-- ARGV[6] key of the parts
-- ARGV[7] reference to a slot, or ''
-- Returns {1 if it is published, 0 if not, -1 if parts are missing; version now, version before}
local function digits(number)
  return string.format('%.0f', number)
end

local stored = redis.call('HMGET', KEYS[2], 'version', 'token', 'parts', 'parts_before', 'want')
local version = tonumber(stored[1]) or 0
if stored[2] == ARGV[1] then
  return { 1, version, version - 1 }
end
local expected = tonumber(ARGV[3])
if expected >= 0 and expected ~= version then
  return { 0, version, version }
end
local num_parts = tonumber(ARGV[5])
for part = 0, num_parts - 1 do
  local name = ARGV[6] .. digits(part)
  if redis.call('PERSIST', name) == 0 and redis.call('EXISTS', name) == 0 then
    return { -1, version, version }
  end
end
local new = math.max(version, tonumber(ARGV[2])) + 1
local fields = {}
for field, content in pairs({ p = ARGV[4], r = ARGV[7] }) do
  if content ~= '' then
    table.insert(fields, field)
    table.insert(fields, content)
  end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '=', '1', digits(new) .. '-0', unpack(fields))
if ARGV[4] == '' and stored[5] then
  redis.call('XADD', KEYS[3], 'MAXLEN', '=', '1', '*', 'v', digits(new))
end
local parts = num_parts > 0 and digits(num_parts) .. ':' .. ARGV[6] or ''
local before, old = stored[3] or '', stored[4] or ''
redis.call('HSET', KEYS[2], 'version', digits(new), 'token', ARGV[1], 'parts', parts, 'parts_before', before)
if old ~= '' then
  local colon = string.find(old, ':', 1, true)
  for part = 0, tonumber(string.sub(old, 1, colon - 1)) - 1 do
    redis.call('UNLINK', string.sub(old, colon + 1) .. digits(part))
  end
end
return { 1, new, version }
