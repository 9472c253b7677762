-- Backfill: add the payload of an entry that was appended as a reference. A repeated call changes nothing.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] epoch, by the writer's last reply
-- ARGV[3] writer
-- ARGV[4] sequence of the entry
-- ARGV[5] number of the entry, or an upper bound of it
-- ARGV[6] number of parts of the payload; 0: none
-- ARGV[7] key of the parts
-- ARGV[8] payload; '': the server refused it, so its parts are dropped, unless an earlier try succeeded or the parts
--         belong to the entry itself
-- Returns 1 if the entry has its payload now, -1 if parts are missing, 0 if the entry is not held; then its parts are
-- dropped if the epoch is the same
if ARGV[2] ~= epoch then
  make_none()
  return 0
end
local sequence = tonumber(ARGV[4])

-- Drop the parts of an entry that was acked or dropped while they were on their way. They would only take room.
local function refuse()
  for part = 0, tonumber(ARGV[6]) - 1 do
    redis.call('UNLINK', ARGV[7] .. digits(part))
  end
  return 0
end

for number = math.min(tonumber(ARGV[5]), last), floor + 1, -1 do
  local id = digits(number) .. '-0'
  local found = redis.call('XRANGE', LOG, id, id)[1]
  -- The fields are in the order e, w, s, p.
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
