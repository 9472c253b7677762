-- Begin a new epoch, because a reader has found that the server went back in time.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] epoch of the entries that the reader has read
-- Returns 1 if that was the epoch until now
if make_none() or ARGV[2] ~= epoch then
  return 0
end
begin_epoch()
return 1
