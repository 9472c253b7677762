-- What every script on a value begins with: this text is put before theirs.
--
-- KEYS[1] value   stream  one entry: id "<version>-0", fields p (payload, or the list of its parts) and r (reference to
--                         a slot of the writer's host), at least one of them; "<version>-1": p was filled in later;
--                         w: 1 if p is on its way, since the writer knows that it is wanted; t: token of the put that
--                         made it: a server that goes back in time gives a version's number twice
-- KEYS[2] meta    hash    version; token: of the put that made it; writer and put: whose, and which of his that was
--                         parts: the keys of the newest payload's parts, with a space behind each; parts_before: of the
--                         payload before that, which is kept for those who are still fetching it. One part may be of
--                         both, and of a newer payload.
--                         want: 1 if payloads are asked for, since somebody cannot read slots
-- KEYS[3] wants   stream  one entry: when a payload was last asked for; wakes the writer
local VALUE, META, WANTS = KEYS[1], KEYS[2], KEYS[3]

-- Parts have a time to live until now, in case that their writer is killed before it says that they are there: all of
-- them, or those that are there keep it.
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

-- A payload has these parts: those that neither it nor the one before it needs may go.
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
