-- What every script on a stream begins with: this text is put before theirs.
--
-- KEYS[1] meta    hash    epoch, life     random token of this life of the stream; run_id of the server it lives in
--                         last, floor     newest entry's number; numbers up to floor are trimmed
--                         total, trimmed  bytes ever appended; the part of them up to floor
--                         chain, floor_chain  hash of all entries up to the newest one; of those up to floor
--                         dropped, room   entries dropped unread; counts every trim, is the room stream's newest id
--                         deleted         set from a delete until the next append or register
--                         ends            the count of KEYS[8], which must not begin anew where a run outlasts the key
--                         w:<writer>      "<sequence>:<number>:<admission>": its last accepted entry, and which admission
--                                         to the stream this is; without the field its entries are refused
--                         b:<writer>      the lowest sequence that it still held when it last asked for the state
--                         admitted        counts admissions of writers
--                         writers         how many writers have a field
--                         keeps           of the writers of which all is trimmed, so many are kept in a sweep
--                         sweep_at        there is a sweep when there are more writers
--                         swept           "floor" at the last one
--                         num_swept       how many writers sweeps have dropped, in all
--                         leaving         how many writers have left, and still have entries here
--                         forgot          the last MAX_FORGOT readers that were forgotten, a line each: no writer that
--                                         has not heard of that brings them back
--                         plane, host     counts changes of plane; host that all readers are on, '': the wire plane
--                         wanted          entries up to this number must be readable over the wire
--                         parted          how many of the entries held have their payload in parts
--                         readers         for writers: a line of the codecs that all readers have; and of each durable
--                                         one "<name>\t<host>\t<codecs>", in case that it is to be brought back
--                         listed          counts changes of "readers" in an epoch: writers are told of new ones only
-- KEYS[2] log     stream  the entries: id "<number>-0", fields e (epoch), w (writer), s (sequence), p (payload, or a
--                         reference to where the readers' host has it, or the place of its parts), c (chain)
-- KEYS[3] sizes   hash    number -> "<total>:<chain>" when that entry was appended: payloads are never read here
--                         p<number> -> "<parts>:<key>" of an entry in parts; key and part's number are that part's key
--                         l<number> -> the writer of that entry, which was its last
-- KEYS[4] room    stream  one entry, replaced by every trim, fill and change of plane: who waits for one blocks on it;
--                         fields e (epoch), f (floor), c (floor_chain)
-- KEYS[5] readers hash    d:<name> (durable) or e:<name> (ephemeral) -> number up to which it has acked
--                         h:<name> -> host that it is on, '' if it reads over the wire only
--                         c:<name> -> what it can decompress, with a blank between any two
-- KEYS[6] filled  hash    number -> payload, of entries that hold a reference but are wanted over the wire
-- KEYS[7] planes  stream  one entry, replaced by every change of plane: id "<plane>-0"
-- KEYS[8] ends    string  how often the stream was deleted: outlives it, and its meta, for ENDS_S
-- ARGV[1]         run_id of the server (40 hex digits), as the client learnt it on this very connection, which ends with
--                 that life of the server (INFO here costs 10 us); then a fresh token: the epoch, if one begins now
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
-- How long a deleted stream's count of ends is kept, and its writers' numbers.
local ENDS_S = 86400
local MAX_FORGOT = 256

-- A first write that needs no memory makes Redis let a script finish at maxmemory: acks must go through to free some.
local function need_no_memory()
  redis.call('HDEL', SIZES, '')
end

local life, fresh = string.sub(ARGV[1], 1, 40), string.sub(ARGV[1], 41)

-- Where data are older than they were, the newest entries are missing, and their numbers go to others. The life tells of a
-- server that restarted, and of a replica that took over. In one life, too, a server may reload an old file, or be a
-- replica for a while: then clients tell, by the chain, or by what they had been told in this epoch.
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

-- Who only asks, or says what is of no use to a new stream, makes none: its run may be over for good.
local function make_none()
  if is_new then
    redis.call('DEL', META)
  end
  return is_new
end

local function num_ends()
  return tonumber(redis.call('HGET', META, 'ends') or redis.call('GET', ENDS)) or 0
end

-- Plain decimal digits, whatever the size.
local function digits(number)
  return string.format('%.0f', number)
end

-- The chain up to a number; '' if that is trimmed, or not there yet.
local function chain_at(number)
  if number == last then
    return chain
  elseif number == floor then
    return floor_chain
  end
  return string.match(redis.call('HGET', SIZES, digits(number)) or '', ':(.*)') or ''
end

-- The stream is in use again.
local function revive()
  redis.call('HDEL', META, 'deleted')
  for _, key in ipairs({ META, ROOM, PLANES }) do
    redis.call('PERSIST', key)
  end
  is_deleted = false
end

-- Sequence, number and admission of a writer's last accepted entry.
local function place_of(known)
  local sequence, number, admission = string.match(known or '', '^(%d+):(%d+):?(%d*)')
  return tonumber(sequence) or 0, tonumber(number) or 0, tonumber(admission) or 0
end

-- Once the last writer of a deleted stream has left, nothing of it is needed any more.
local function drop_writers(writers)
  for _, writer in ipairs(writers) do
    redis.call('HDEL', META, 'w:' .. writer, 'b:' .. writer)
  end
  local left = redis.call('HINCRBY', META, 'writers', 0 - #writers)
  if left <= 0 and is_deleted then
    -- A stream that had ended before this one began may have writers that nothing here knows of.
    if num_ends() <= 1 then
      redis.call('DEL', ENDS)
    end
    redis.call('DEL', META, LOG, SIZES, ROOM, READERS, FILLED, PLANES)
  end
end

-- Drop writers of which all is trimmed, but for some with the newest entries: the others were killed, most likely. One that
-- lives is told so when it comes back. "coming" are counted as writers, and have no field yet.
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

-- What a sweep costs is paid for by the entries that were trimmed since the last one.
local function sweep_in_time()
  local keeps = tonumber(redis.call('HGET', META, 'keeps')) or 0
  if num_writers > 2 * keeps and floor - swept >= num_writers / 2 then
    sweep(0)
  end
end

-- Replace the one entry of such a stream; also what somebody else wrote there, under an id of the server's clock maybe.
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

-- Parts have a time to live until now, in case that their writer is killed before it says that they are there: all of
-- them, or those that are there keep it.
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

-- The number is another entry's: these parts have a time to live again, for a writer that does not come back.
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

-- The bytes that were appended up to an entry that is held.
local function total_at(number)
  return tonumber(string.match(redis.call('HGET', SIZES, digits(number)), '^%d+'))
end

-- Of these numbers those that are the last of a writer that has left: it comes no more.
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

-- Begin a new plane: writers must look at it before they append a reference again, and must make readable over the wire
-- what is there by now.
local function set_plane(new_host)
  plane, host, wanted = plane + 1, new_host, last
  redis.call('HSET', META, 'plane', digits(plane), 'host', host, 'wanted', digits(wanted))
  tell(PLANES, plane, 'h', host)
  tell_room()
end

-- Readers came or went. The host plane is for streams whose readers are all on one host. Before the first one is known,
-- nobody knows.
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

-- Put a reader on the list of those that were forgotten, or take it off.
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

-- Entries up to the lowest cursor of a durable reader are nobody's any more; without a durable reader all are kept, and
-- nothing is returned.
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
