-- The common beginning of every script on a value: the client puts this text before theirs.
--
-- KEYS[1] value   stream  one entry: id "<version>-0", fields p (payload, or the list of its parts) and r (reference to
--                         a slot on the writer's host), at least one of them; "<version>-1": p was added later;
--                         w: 1 if p is on its way, since payloads are requested; t: token of the put that made it,
--                         since a server that goes back in time gives a version's number twice
-- KEYS[2] meta    hash    version; token of the put that made it; writer of that put; put: its number
--                         parts: the keys of the newest payload's parts, with a space behind each; parts_before: those
--                         of the payload before, kept for readers that are still downloading it. A part may belong to
--                         both, and to a newer payload.
--                         want: 1 if payloads are requested, since a reader cannot read slots
-- KEYS[3] wants   stream  one entry: the time of the last request for a payload; wakes the writer
local VALUE, META, WANTS = KEYS[1], KEYS[2], KEYS[3]

-- Remove the expiry of parts, which they have in case that their writer is killed before it publishes them. If a part
-- is missing, all keep their expiry.
local function keep_parts(keys)
  for _, command in ipairs({ 'EXISTS', 'PERSIST' }) do
    for key in string.gmatch(keys, '%S+') do
      if redis.call(command, key) == 0 and command == 'EXISTS' then
        return false
      end
    end
  end
  return true
end

-- Note the parts of a new payload, and drop those that neither it nor the payload before it needs.
local function replace_parts(keys)
  local known = redis.call('HMGET', META, 'parts', 'parts_before')
  local newest, before = known[1] or '', known[2] or ''
  local needed = {}
  for key in string.gmatch(newest .. keys, '%S+') do
    needed[key] = true
  end
  for key in string.gmatch(before, '%S+') do
    if not needed[key] then
      redis.call('UNLINK', key)
    end
  end
  redis.call('HSET', META, 'parts', keys, 'parts_before', newest)
end
