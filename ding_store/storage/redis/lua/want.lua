-- Ask the writers for all that is there over the wire: somebody cannot read what they referred to.
-- KEYS    as in stream.lua
-- ARGV[1] fresh token, see stream.lua
-- Returns the new plane
need_no_memory()
set_plane(host)
return plane
