-- Write the notifications of room and transport again, after a foreign client wrote to their keys.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- Returns 1 if there is such a stream
redis.call('DEL', ROOM, PLANES)
if make_none() then
  return 0
end
if room > 0 then
  tell(ROOM, room, 'e', epoch, 'f', digits(floor), 'c', floor_chain)
end
if plane > 0 then
  tell(PLANES, plane, 'h', host)
end
return 1
