-- Ask the writers for all that is there over the wire: somebody cannot read what they referred to.
-- KEYS    as in stream.lua
-- ARGV[1] fresh token, see stream.lua
-- Returns 1 if there is such a stream
if make_none() then
  return 0
end
need_no_memory()
set_plane(host)
return 1
