-- Note that a writer appends no more. It is dropped once the stream holds none of its entries.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] writer
-- ARGV[3] its admission
-- Returns 1 if the stream had this writer with this admission
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
