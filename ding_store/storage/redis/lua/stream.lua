-- The common beginning of every script on a stream: the client puts this text before theirs.
--
-- KEYS[1] meta    hash    epoch, life     random token of the epoch; run_id of the server in which it began
--                         last, floor     number of the newest entry; numbers up to floor are trimmed
--                         total, trimmed  bytes ever appended; the part of them up to floor
--                         chain, floor_chain  hash of all entries up to the newest one; of those up to floor
--                         dropped         entries dropped unread
--                         room            counts trims, backfills and changes of transport; newest id of KEYS[4]
--                         deleted         set from a delete until the next append or register
--                         ends            the count of KEYS[8]: it must not restart if a run lasts longer than that key
--                         w:<writer>      "<sequence>:<number>:<admission>": its last accepted entry, and the number of
--                                         its admission; entries of a writer without this field are refused
--                         b:<writer>      the lowest sequence that it held when it last requested the state
--                         admitted        counts admissions of writers
--                         writers         number of writers that have a field
--                         keeps           number of writers without entries that a sweep keeps
--                         sweep_at        a sweep runs if there are more writers than this
--                         swept           "floor" at the last sweep
--                         num_swept       number of writers that sweeps have dropped in all
--                         leaving         number of writers that have left and still have entries here
--                         forgot          the last MAX_FORGOT removed readers, one per line: no writer's list registers
--                                         them again
--                         plane, host     counts changes of transport; host of all readers, '': payloads through Redis
--                         wanted          entries up to this number must be readable through Redis
--                         parted          number of held entries with a payload in parts
--                         readers         for writers: a line of the codecs that all readers have, then one line per
--                                         durable reader, "<name>\t<host>\t<codecs>", to register it again after a loss
--                         listed          counts changes of "readers" in an epoch: replies only contain a new list
-- KEYS[2] log     stream  the entries: id "<number>-0", fields e (epoch), w (writer), s (sequence), p (payload, or a
--                         reference to a file of the readers' host, or the place of its parts), c (chain)
-- KEYS[3] sizes   hash    number -> "<total>:<chain>" after that entry: scripts never read payloads
--                         p<number> -> "<parts>:<key>" of an entry in parts; each part's key is <key><part's number>
--                         l<number> -> the writer whose last entry this is, and which has left
-- KEYS[4] room    stream  one entry, replaced by every trim, backfill and change of transport: waiting clients block on
--                         it; fields e (epoch), f (floor), c (floor_chain)
-- KEYS[5] readers hash    d:<name> (durable) or e:<name> (ephemeral) -> number up to which it has acked
--                         h:<name> -> its host, '' if it reads through Redis only
--                         c:<name> -> codecs that it can decompress, separated by spaces; '' in the present version
-- KEYS[6] filled  hash    number -> payload, of backfilled entries
-- KEYS[7] planes  stream  one entry, replaced by every change of transport: id "<plane>-0"
-- KEYS[8] ends    string  how often the stream was deleted: it outlives the stream and its meta for ENDS_S
-- ARGV[1]         run_id of the server (40 hex digits), as the client read it on this connection, which ends with that
--                 server process (INFO here would cost 10 us); then a fresh token: the epoch, if one begins now
local META, LOG, SIZES, ROOM, READERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local FILLED, PLANES, ENDS = KEYS[6], KEYS[7], KEYS[8]

local stored = redis.call('HMGET', META, 'epoch', 'life', 'last', 'floor', 'total', 'trimmed', 'dropped', 'room',
  'plane', 'host', 'wanted', 'parted', 'deleted', 'readers', 'chain', 'floor_chain', 'listed', 'leaving', 'writers',
  'swept')
local epoch = stored[1]
local last, floor = tonumber(stored[3]) or 0, tonumber(stored[4]) or 0
local total, trimmed = tonumber(stored[5]) or 0, tonumber(stored[6]) or 0
local dropped, room = tonumber(stored[7]) or 0, tonumber(stored[8]) or 0
local plane, host, wanted = tonumber(stored[9]) or 0, stored[10] or '', tonumber(stored[11]) or 0
local parted, is_deleted, known_readers = tonumber(stored[12]) or 0, stored[13], stored[14] or ''
local chain, floor_chain = stored[15] or '', stored[16] or ''
local listed, leaving = tonumber(stored[17]) or 0, tonumber(stored[18]) or 0
local num_writers, swept = tonumber(stored[19]) or 0, tonumber(stored[20]) or 0
-- Seconds that a deleted stream's count of ends and its writers' sequences are kept.
local ENDS_S = 86400
local MAX_FORGOT = 256

-- After a first write that needs no memory, Redis lets a script finish at maxmemory. Acks must succeed to free some.
local function need_no_memory()
  redis.call('HDEL', SIZES, '')
end

local life, fresh = string.sub(ARGV[1], 1, 40), string.sub(ARGV[1], 41)

-- A new epoch begins when the server went back in time. The newest entries are missing, and other entries get their
-- numbers. A changed run_id shows a restart or a replica that took over. With the same run_id, a server may reload an
-- old file or be a replica for a while. Then clients notice, by the chain or by an earlier reply of this epoch.
local function begin_epoch()
  epoch = fresh
  need_no_memory()
  redis.call('HSET', META, 'epoch', epoch)
end

local is_new = not stored[2]
if stored[2] ~= life then
  begin_epoch()
  redis.call('HSET', META, 'life', life)
  if is_new then
    redis.call('HSET', META, 'deleted', 1, 'ends', redis.call('GET', ENDS) or 0)
    is_deleted = '1'
  end
end

-- Undo the creation of a new stream, for requests that make sense only for an old one. Its run may be over for good.
local function make_none()
  if is_new then
    redis.call('DEL', META)
  end
  return is_new
end

local function num_ends()
  return tonumber(redis.call('HGET', META, 'ends') or redis.call('GET', ENDS)) or 0
end

-- Format a number as plain decimal digits, also a large one.
local function digits(number)
  return string.format('%.0f', number)
end

-- Return the chain up to a number; '' if its entry is trimmed, or not there yet.
local function chain_at(number)
  if number == last then
    return chain
  elseif number == floor then
    return floor_chain
  end
  return string.match(redis.call('HGET', SIZES, digits(number)) or '', ':(.*)') or ''
end

-- Mark a deleted stream as used again.
local function revive()
  redis.call('HDEL', META, 'deleted')
  for _, key in ipairs({ META, ROOM, PLANES }) do
    redis.call('PERSIST', key)
  end
  is_deleted = false
end

-- Parse the sequence, number and admission of a writer's last accepted entry.
local function place_of(known)
  local sequence, number, admission = string.match(known or '', '^(%d+):(%d+):?(%d*)')
  return tonumber(sequence) or 0, tonumber(number) or 0, tonumber(admission) or 0
end

-- Drop writers. With the last writer of a deleted stream, drop all keys of the stream.
local function drop_writers(writers)
  for _, writer in ipairs(writers) do
    redis.call('HDEL', META, 'w:' .. writer, 'b:' .. writer)
  end
  local left = redis.call('HINCRBY', META, 'writers', 0 - #writers)
  if left <= 0 and is_deleted then
    -- If the stream was deleted more than once, unlisted writers of an earlier one may still need the count.
    if num_ends() <= 1 then
      redis.call('DEL', ENDS)
    end
    redis.call('DEL', META, LOG, SIZES, ROOM, READERS, FILLED, PLANES)
  end
end

-- Drop writers whose entries are all trimmed, except for some with the newest entries. Most likely, the dropped writers
-- were killed. A running one gets FORGOTTEN at its next request. "coming" is the number of new writers without a field.
local function sweep(coming)
  local fields, silent, others = redis.call('HGETALL', META), {}, coming
  for i = 1, #fields, 2 do
    if string.sub(fields[i], 1, 2) == 'w:' then
      local _, number, admission = place_of(fields[i + 1])
      if number <= floor then
        silent[#silent + 1] = { string.sub(fields[i], 3), number, admission }
      else
        others = others + 1
      end
    end
  end
  table.sort(silent, function(one, other)
    return one[2] > other[2] or (one[2] == other[2] and one[3] > other[3])
  end)
  local keeps, gone = tonumber(redis.call('HGET', META, 'keeps')) or 0, {}
  for i = keeps + 1, #silent do
    gone[#gone + 1] = silent[i][1]
  end
  local kept = others + #silent - #gone
  redis.call('HSET', META, 'sweep_at', digits(kept + keeps), 'swept', digits(floor))
  redis.call('HINCRBY', META, 'num_swept', #gone)
  drop_writers(gone)
end

-- Sweep once enough entries were trimmed since the last sweep, so that the cost per entry stays constant.
local function sweep_in_time()
  local keeps = tonumber(redis.call('HGET', META, 'keeps')) or 0
  if num_writers > 2 * keeps and floor - swept >= num_writers / 2 then
    sweep(0)
  end
end

-- Replace the one entry of a notification stream. If XADD fails, a foreign client wrote a higher id: then start anew.
local function tell(key, number, ...)
  local told = redis.pcall('XADD', key, 'MAXLEN', '=', '1', digits(number) .. '-0', ...)
  if type(told) == 'table' and told.err then
    redis.call('DEL', key)
    redis.call('XADD', key, digits(number) .. '-0', ...)
  end
end

local function tell_room()
  room = room + 1
  redis.call('HSET', META, 'room', digits(room))
  tell(ROOM, room, 'e', epoch, 'f', digits(floor), 'c', floor_chain)
end

-- Remove the expiry of parts, which they have in case that their writer is killed before its entry is appended. If a
-- part is missing, all keep their expiry.
local function keep_parts(number, num_parts, key)
  for _, command in ipairs({ 'EXISTS', 'PERSIST' }) do
    for part = 0, num_parts - 1 do
      if redis.call(command, key .. digits(part)) == 0 and command == 'EXISTS' then
        return false
      end
    end
  end
  if num_parts > 0 and redis.call('HSETNX', SIZES, 'p' .. digits(number), digits(num_parts) .. ':' .. key) == 1 then
    parted = parted + 1
    redis.call('HSET', META, 'parted', digits(parted))
  end
  return true
end

-- Set the expiry of parts again, because their entry was not appended after all. Its writer may not come back.
local function let_parts_go(number, num_parts, key)
  if num_parts > 0 and redis.call('HDEL', SIZES, 'p' .. digits(number)) == 1 then
    parted = parted - 1
    redis.call('HSET', META, 'parted', digits(parted))
  end
  for part = 0, num_parts - 1 do
    redis.call('EXPIRE', key .. digits(part), 7200)
  end
end

local function delete_parts(numbers)
  local fields = {}
  for i, number in ipairs(numbers) do
    fields[i] = 'p' .. number
  end
  for _, known in ipairs(redis.call('HMGET', SIZES, unpack(fields))) do
    if known then
      local colon = string.find(known, ':', 1, true)
      for part = 0, tonumber(string.sub(known, 1, colon - 1)) - 1 do
        redis.call('UNLINK', string.sub(known, colon + 1) .. digits(part))
      end
      parted = parted - 1
    end
  end
  redis.call('HDEL', SIZES, unpack(fields))
  redis.call('HSET', META, 'parted', digits(parted))
end

-- Return the bytes that were appended up to a held entry.
local function total_at(number)
  return tonumber(string.match(redis.call('HGET', SIZES, digits(number)), '^%d+'))
end

-- Drop the writers that have left and whose last entry has one of these numbers.
local function drop_left(numbers)
  local fields, gone = {}, {}
  for i, number in ipairs(numbers) do
    fields[i] = 'l' .. number
  end
  for _, writer in ipairs(redis.call('HMGET', SIZES, unpack(fields))) do
    if writer then
      gone[#gone + 1] = writer
    end
  end
  if #gone > 0 then
    leaving = leaving - #gone
    redis.call('HDEL', SIZES, unpack(fields))
    redis.call('HSET', META, 'leaving', digits(leaving))
    drop_writers(gone)
  end
end

local function trim(upto)
  if upto <= floor then
    return
  end
  floor_chain = chain_at(upto)
  trimmed = total_at(upto)
  redis.call('XTRIM', LOG, 'MINID', '=', digits(upto + 1) .. '-0')
  for first = floor + 1, upto, 1000 do
    local gone = {}
    for number = first, math.min(first + 999, upto) do
      gone[#gone + 1] = digits(number)
    end
    if parted > 0 then
      delete_parts(gone)
    end
    if leaving > 0 then
      drop_left(gone)
    end
    redis.call('HDEL', SIZES, unpack(gone))
    redis.call('HDEL', FILLED, unpack(gone))
  end
  floor = upto
  redis.call('HSET', META, 'floor', digits(floor), 'trimmed', digits(trimmed), 'floor_chain', floor_chain)
  tell_room()
end

-- Change the transport. References for the old one are refused from now on. Writers must backfill the entries that are
-- there now.
local function set_plane(new_host)
  plane, host, wanted = plane + 1, new_host, last
  redis.call('HSET', META, 'plane', digits(plane), 'host', host, 'wanted', digits(wanted))
  tell(PLANES, plane, 'h', host)
  tell_room()
end

-- Update what depends on the readers. Shared memory is used only if all readers are on one host. Before the first
-- reader registers, payloads go through Redis.
local function note_readers()
  local of, names, has = { ['h:'] = {}, ['c:'] = {} }, {}, {}
  local fields = redis.call('HGETALL', READERS)
  for i = 1, #fields, 2 do
    local kind, name = string.sub(fields[i], 1, 2), string.sub(fields[i], 3)
    if of[kind] then
      of[kind][name] = fields[i + 1]
    else
      names[#names + 1] = name
    end
  end
  local hosts, codecs, lines, everywhere = of['h:'], of['c:'], '', ''
  local common = hosts[names[1] or ''] or ''
  for _, name in ipairs(names) do
    if hosts[name] ~= common then
      common = ''
    end
    for codec in string.gmatch(codecs[name] or '', '%S+') do
      has[codec] = (has[codec] or 0) + 1
      if has[codec] == #names then
        everywhere = everywhere .. codec .. ' '
      end
    end
    if redis.call('HGET', READERS, 'd:' .. name) then
      lines = lines .. name .. '\t' .. (hosts[name] or '') .. '\t' .. (codecs[name] or '') .. '\n'
    end
  end
  known_readers = everywhere .. '\n' .. lines
  listed = listed + 1
  redis.call('HSET', META, 'readers', known_readers, 'listed', digits(listed))
  if common ~= host then
    set_plane(common)
  end
end

-- Add a reader to the list of removed readers, or take it off.
local function forgot(reader, is_forgotten)
  local names = {}
  for name in string.gmatch(redis.call('HGET', META, 'forgot') or '', '[^\n]+') do
    if name ~= reader then
      names[#names + 1] = name
    end
  end
  if is_forgotten then
    names[#names + 1] = reader
  end
  redis.call('HSET', META, 'forgot', table.concat(names, '\n', math.max(1, #names - MAX_FORGOT + 1)))
end

local function is_forgotten(reader)
  local names = '\n' .. (redis.call('HGET', META, 'forgot') or '') .. '\n'
  return string.find(names, '\n' .. reader .. '\n', 1, true) ~= nil
end

-- Trim the entries up to the lowest cursor of a durable reader, and return that cursor. Without a durable reader, keep
-- all entries and return nil.
local function trim_acked()
  local lowest = nil
  local cursors = redis.call('HGETALL', READERS)
  for i = 1, #cursors, 2 do
    if string.sub(cursors[i], 1, 2) == 'd:' then
      lowest = math.min(lowest or math.huge, tonumber(cursors[i + 1]))
    end
  end
  if lowest then
    trim(lowest)
  end
  return lowest
end
