-- Append one entry, unless it is a duplicate or out of turn. With sequence 0, only return the stream's state.
-- KEYS    as in stream.lua
-- ARGV[1] run_id of the server and fresh token, see stream.lua
-- ARGV[2] epoch, by the writer's last reply
-- ARGV[3] writer
-- ARGV[4] sequence of this entry: 1, 2, 3, ... per writer; 0: append nothing
-- ARGV[5] base: the lowest sequence that the writer still holds
-- ARGV[6] size: bytes of the payload
-- ARGV[7] limit: bytes that the stream may hold; 0: no limit
-- ARGV[8] '1': drop the oldest entries to stay below the limit
-- ARGV[9] number of the transport that a reference is for; '' for a payload, which is always accepted
-- ARGV[10] number of parts of the payload; 0: none; -1: only check whether there is room
-- ARGV[11] key of the parts
-- ARGV[12] durable readers before the server lost its memory, in the format of "readers" in stream.lua
-- ARGV[13] compression of the payload, if all readers must have it; the present version always sends ''
-- ARGV[14] "<sequence>:<number>" of this writer's last entry, by its last reply in this epoch; '': none
-- ARGV[15] admission of the writer to this stream; 0: none
-- ARGV[16] "listed" of the last reply with readers
-- ARGV[17] minimum number of writers to keep whose entries are all trimmed
-- ARGV[18] payload, or a reference to it; last, since a server reads twice what follows a large argument
-- Returns {status, epoch ('': there is no such stream, and this request creates none), host, number, last sequence of
-- this writer, floor, room, dropped, plane, wanted, ends (0 unless the epoch differs from ARGV[2]), admission, listed,
-- readers (nil: unchanged), chain up to the entry ('' unless it was appended now)}; statuses as in outbox.py
local writer, sequence, base = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local size, limit, admission = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[15])

local known = redis.call('HGET', META, 'w:' .. writer)
local known_sequence, known_number, known_admission = place_of(known)

local appended = ''
local function verdict(status)
  local is_other = ARGV[2] ~= epoch
  local ends = is_other and num_ends() or 0
  local readers = (is_other or tonumber(ARGV[16]) ~= listed) and known_readers
  return { status, epoch, host, known_number, known_sequence, floor, room, dropped, plane, wanted, ends, known_admission,
    listed, readers, appended }
end

-- Requests of a killed writer may still be on their way. Therefore a request without the current epoch and the writer's
-- admission is refused.
local function admit()
  need_no_memory()
  if redis.call('HINCRBY', META, 'writers', 1) > (tonumber(redis.call('HGET', META, 'sweep_at')) or 0) then
    redis.call('HSET', META, 'keeps', ARGV[17])
    sweep(1)
  end
  known_admission = redis.call('HINCRBY', META, 'admitted', 1)
  redis.call('HSET', META, 'w:' .. writer, '0:0:' .. digits(known_admission))
end

if sequence == 0 then
  if make_none() then
    epoch = ''
    return verdict('STALE')
  end
  if known then
    -- Readers stop waiting for payloads of entries below this base: the writer no longer has them.
    need_no_memory()
    redis.call('HSET', META, 'b:' .. writer, ARGV[5])
  end
end
-- Return whether an entry that this writer got a reply for is missing, and was not dropped with the writer. Then the
-- server went back in time, since no other process appends for this writer.
local function is_older()
  local told, told_number = place_of(ARGV[14])
  if told == 0 then
    return false
  elseif not known then
    return told_number > floor or (tonumber(redis.call('HGET', META, 'num_swept')) or 0) == 0
  end
  return known_sequence < told or (known_sequence == told and known_number ~= told_number)
end
if ARGV[2] == epoch and is_older() then
  begin_epoch()
end
if ARGV[2] ~= epoch then
  if not known then
    admit()
  end
  return verdict('STALE')
end
if admission ~= known_admission then
  return verdict('FORGOTTEN')
end
-- Register the lost readers before this writer sends entries again. Otherwise acks of other readers would trim them.
local has_returned = false
for name, its_host, codecs in string.gmatch(ARGV[12], '([^\t\n]+)\t([^\t\n]*)\t([^\n]*)') do
  local is_known = redis.call('HGET', READERS, 'd:' .. name) or redis.call('HGET', READERS, 'e:' .. name)
  if not is_known and not is_forgotten(name) then
    redis.call('HSET', READERS, 'd:' .. name, digits(floor), 'h:' .. name, its_host, 'c:' .. name, codecs)
    has_returned = true
  end
end
if has_returned then
  revive()
  note_readers()
end
if sequence <= known_sequence then
  return verdict('OK')
end
if sequence > math.max(known_sequence + 1, base) then
  return verdict('GAP')
end
if ARGV[9] ~= '' and tonumber(ARGV[9]) ~= plane then
  return verdict('PLANE')
end
if ARGV[13] ~= '' and not string.find(' ' .. string.match(known_readers, '^[^\n]*'), ' ' .. ARGV[13] .. ' ', 1, true) then
  return verdict('CODEC')
end
if limit > 0 and ARGV[8] == '1' then
  local upto = floor
  local held_from = trimmed
  while upto < last and total - held_from + size > limit do
    upto = upto + 1
    held_from = total_at(upto)
  end
  if upto > floor then
    dropped = dropped + upto - floor
    trim(upto)
    redis.call('HSET', META, 'dropped', digits(dropped))
    if not redis.call('HGET', META, 'w:' .. writer) then
      return verdict('FORGOTTEN')  -- The writer has left, and this request was on its way for long.
    end
  end
end
if limit > 0 and total - trimmed + size > limit then
  return verdict('FULL')
end
local num_parts = tonumber(ARGV[10])
if num_parts < 0 then
  return verdict('ROOM')
end
if not keep_parts(last + 1, num_parts, ARGV[11]) then
  return verdict('NO PARTS')
end

-- Remove entries that a foreign client wrote behind the newest one. Their ids may come from the server's clock, and are
-- then too high for the next entry to follow. A new epoch begins, since readers may wait behind such an id.
local function begin_anew()
  local held = redis.call('XRANGE', LOG, digits(floor + 1) .. '-0', digits(last) .. '-0')
  redis.call('DEL', LOG)
  for _, entry in ipairs(held) do
    redis.call('XADD', LOG, entry[1], unpack(entry[2]))
  end
  begin_epoch()
end

local link = string.sub(redis.sha1hex(chain .. ' ' .. writer .. ' ' .. digits(sequence)), 1, 16)
local fields = { 'e', epoch, 'w', writer, 's', digits(sequence), 'p', ARGV[18], 'c', link }
local added = redis.pcall('XADD', LOG, digits(last + 1) .. '-0', unpack(fields))
if type(added) == 'table' and added.err then
  if not string.find(added.err, 'equal or smaller', 1, true) then
    return added
  end
  begin_anew()
  let_parts_go(last + 1, num_parts, ARGV[11])
  return verdict('STALE')
end
last, total, chain, appended = last + 1, total + size, link, link
known_sequence, known_number = sequence, last
redis.call('HSET', SIZES, digits(last), digits(total) .. ':' .. chain)
redis.call('HSET', META, 'last', digits(last), 'total', digits(total), 'chain', chain, 'w:' .. writer,
  digits(sequence) .. ':' .. digits(last) .. ':' .. digits(admission))
if is_deleted then
  revive()
end
return verdict('OK')
