-- A writer has appended its last: it is dropped once none of its entries is held.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] writer
-- ARGV[3] its admission
-- Returns 1 if it was known
if make_none() then
  return 0
end
local sequence, number, admission = place_of(redis.call('HGET', META, 'w:' .. ARGV[2]))
if admission == 0 or admission ~= tonumber(ARGV[3]) then
  return 0
end
need_no_memory()
if number <= floor then
  drop_writers({ ARGV[2] })
elseif redis.call('HSETNX', SIZES, 'l' .. digits(number), ARGV[2]) == 1 then
  redis.call('HINCRBY', META, 'leaving', 1)
end
return 1
