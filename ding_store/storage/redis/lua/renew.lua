-- Begin a new epoch: a reader finds that this one's data are older than what it has read.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] epoch that the reader believes in
-- Returns 1 if that was the epoch until now
if make_none() or ARGV[2] ~= epoch then
  return 0
end
begin_epoch()
return 1
