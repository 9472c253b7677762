-- Drop parts that were sent for a payload that was refused; not those of one that is there, since an earlier try may have
-- come through whose reply was lost.
-- KEYS    as in value.lua
-- ARGV[1] keys of the parts, with a space behind each
-- Returns how many there were
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
