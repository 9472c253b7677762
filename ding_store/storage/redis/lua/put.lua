-- Publish a version of a value. A put that is tried again, because its reply was lost, changes nothing.
-- KEYS    as in value.lua
-- ARGV[1] token of this put
-- ARGV[2] newest version that the writer knows: a server that forgot the value counts on from there
-- ARGV[3] version that the value must have now, and ARGV[9] its token, '' if not known; -1: any
-- ARGV[4] payload, or the list of its parts; '': only the reference, to be filled if somebody wants payloads
-- ARGV[5] keys of the parts, with a space behind each
-- ARGV[6] reference to a slot, or ''
-- ARGV[7] writer
-- ARGV[8] number of this put: each that a writer begins has a higher one
-- ARGV[9] token of the version that the writer has seen last, '': of none; '*': he was asked often enough
-- Returns {1 if it is published, 0 if not, -1 if parts are missing, 2 if the writer is asked to put once more; version
-- now, version before, token of the version now}
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
    -- It was long on its way, on a connection that its writer has given up since: what it brings was replaced already.
    return { 1, version, version - 1, token }
  end
elseif expected < 0 and ARGV[9] ~= token and ARGV[9] ~= '*' then
  -- Long on its way, too, perhaps, and its writer dead since. One that lives hears this, and puts it again.
  return { 2, version, version, token }
end
if not keep_parts(ARGV[5]) then
  return { -1, version, version, token }
end
if #ARGV[4] + #ARGV[6] <= 1024 then
  -- As an ack must go through at maxmemory, so must word of it. The version before makes room for this one; after a first
  -- write that needs no memory Redis lets a script finish.
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
  -- Somebody else wrote there, under an id of the server's clock maybe.
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
