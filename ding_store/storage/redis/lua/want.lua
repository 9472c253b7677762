-- Request the payloads of all entries from their writers, because a reader cannot follow their references.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- Returns 1 if there is such a stream
if make_none() then
  return 0
end
need_no_memory()
set_plane(host)
return 1
