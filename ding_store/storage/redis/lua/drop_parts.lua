-- Drop the parts of a payload that was refused. Parts of a stored payload stay: an earlier try whose reply was lost may
-- have succeeded.
-- KEYS    as in value.lua
-- ARGV[1] keys of the parts, with a space behind each
-- Returns how many were dropped
local known = redis.call('HMGET', META, 'parts', 'parts_before')
local needed = {}
for key in string.gmatch((known[1] or '') .. (known[2] or ''), '%S+') do
  needed[key] = true
end
local dropped = 0
for key in string.gmatch(ARGV[1], '%S+') do
  if not needed[key] then
    dropped = dropped + redis.call('UNLINK', key)
  end
end
return dropped
