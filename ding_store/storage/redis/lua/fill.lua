-- Make an entry readable over the wire that was appended as a reference. Done twice, it changes nothing.
-- KEYS    as in stream.lua
-- ARGV[1] fresh token, see stream.lua
-- ARGV[2] epoch that the writer believes in
-- ARGV[3] writer
-- ARGV[4] sequence of the entry
-- ARGV[5] number of the entry, or an upper bound of it
-- ARGV[6] number of parts that the payload is in; 0: none
-- ARGV[7] key of the parts
-- ARGV[8] payload; '': it was refused, so that its parts are dropped, unless an earlier try came through,
--         or they are the entry's own
-- Returns 1 if it is filled now, 0 if it is not held (its parts are dropped in its epoch), -1 if parts are missing
if ARGV[2] ~= epoch then
  make_none()
  return 0
end
local sequence = tonumber(ARGV[4])

-- Nobody will ask for it: it was acked or dropped while its parts were on their way, and they would only take room.
local function refuse()
  for part = 0, tonumber(ARGV[6]) - 1 do
    redis.call('UNLINK', ARGV[7] .. digits(part))
  end
  return 0
end

for number = math.min(tonumber(ARGV[5]), last), floor + 1, -1 do
  local id = digits(number) .. '-0'
  local found = redis.call('XRANGE', LOG, id, id)[1]
  -- Fields in their order: e, w, s, p.
  if found and found[2][4] == ARGV[3] then
    local known = tonumber(found[2][6])
    if known == sequence then
      if ARGV[8] == '' then
        local of_it = redis.call('HGET', SIZES, 'p' .. digits(number)) == ARGV[6] .. ':' .. ARGV[7]
        return (of_it or redis.call('HGET', FILLED, digits(number))) and 1 or refuse()
      end
      if not keep_parts(number, tonumber(ARGV[6]), ARGV[7]) then
        return -1
      end
      redis.call('HSET', FILLED, digits(number), ARGV[8])
      tell_room()
      return 1
    elseif known < sequence then
      return refuse()
    end
  end
end
return refuse()
