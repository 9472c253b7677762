-- Publish a version of a value. A put that is repeated, because its reply was lost, changes nothing.
-- KEYS    as in value.lua
-- ARGV[1] token of this put
-- ARGV[2] newest version of the writer: if the server lost the value, versions continue from there
-- ARGV[3] version that the value must have now, and ARGV[9] its token, '' if not known; -1: any
-- ARGV[4] payload, or the list of its parts; '': only the reference, and the writer backfills if payloads are requested
-- ARGV[5] keys of the parts, with a space behind each
-- ARGV[6] reference to a slot, or ''
-- ARGV[7] writer
-- ARGV[8] number of this put: it grows with each put of a writer
-- ARGV[9] token of the version that the writer has seen last; '': none; '*': the writer has confirmed often enough
-- Returns {1 if it is published, 0 if not, -1 if parts are missing, 2 if the writer must confirm the put by sending it
-- again; version now, version before, token of the version now}
local function digits(number)
  return string.format('%.0f', number)
end

local stored = redis.call('HMGET', META, 'version', 'token', 'want', 'writer', 'put')
local version, token = tonumber(stored[1]) or 0, stored[2] or ''
if token == ARGV[1] then
  return { 1, version, version - 1, token }
end
local expected = tonumber(ARGV[3])
if expected >= 0 and (expected ~= version or (ARGV[9] ~= '' and ARGV[9] ~= token)) then
  return { 0, version, version, token }
end
if expected < 0 and stored[4] == ARGV[7] then
  if tonumber(ARGV[8]) < tonumber(stored[5]) then
    -- This put was long on its way, on a connection that its writer has closed since. A newer put replaced it.
    return { 1, version, version - 1, token }
  end
elseif expected < 0 and ARGV[9] ~= token and ARGV[9] ~= '*' then
  -- This put, too, may have been long on its way, and its writer may have exited. A running writer sends it again.
  return { 2, version, version, token }
end
if not keep_parts(ARGV[5]) then
  return { -1, version, version, token }
end
if #ARGV[4] + #ARGV[6] <= 1024 then
  -- Like acks, small values must be accepted at maxmemory, since they report acks to other processes. This version
  -- replaces the one before, which makes room. After a first write that needs no memory, Redis lets a script finish.
  redis.call('HDEL', META, '')
end
local new = math.max(version, tonumber(ARGV[2])) + 1
local fields = {}
local is_wanted = ARGV[4] == '' and stored[3]
for field, content in pairs({ p = ARGV[4], r = ARGV[6], w = is_wanted or '', t = ARGV[1] }) do
  if content ~= '' then
    table.insert(fields, field)
    table.insert(fields, content)
  end
end
local added = redis.pcall('XADD', VALUE, 'MAXLEN', '=', '1', digits(new) .. '-0', unpack(fields))
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then
    return added
  end
  -- A foreign client wrote there, perhaps with an id from the server's clock.
  redis.call('DEL', VALUE)
  redis.call('XADD', VALUE, digits(new) .. '-0', unpack(fields))
end
if ARGV[4] ~= '' then
  replace_parts(ARGV[5])
elseif is_wanted then
  redis.call('XADD', WANTS, 'MAXLEN', '=', '1', '*', 'v', digits(new))
else
  replace_parts('')
end
redis.call('HSET', META, 'version', digits(new), 'token', ARGV[1], 'writer', ARGV[7], 'put', ARGV[8])
return { 1, new, version, ARGV[1] }
