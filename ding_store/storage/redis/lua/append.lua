-- Append one entry, unless it is known already or out of turn; or, with sequence 0, only tell the stream's state.
-- KEYS    as in stream.lua
-- ARGV[1] life and fresh token, see stream.lua
-- ARGV[2] epoch that the writer believes in
-- ARGV[3] writer
-- ARGV[4] sequence of this entry, 1, 2, 3, ... of its writer; 0: only tell
-- ARGV[5] base: the lowest sequence that the writer still holds
-- ARGV[6] size: bytes of the payload
-- ARGV[7] limit: bytes that the stream may hold; 0: no limit
-- ARGV[8] '1': drop the oldest entries to stay below the limit
-- ARGV[9] plane that the writer believes in, if it is a reference; '' for a payload, which may always come
-- ARGV[10] number of parts that the payload is in; 0: none; -1: only ask whether there is room
-- ARGV[11] key of the parts
-- ARGV[12] durable readers that were there before the server lost its memory, as "readers" in stream.lua
-- ARGV[13] what the payload is compressed with, if that is good only while all readers have it; ''
-- ARGV[14] "<sequence>:<number>" of this writer's last entry, as it was told in this epoch; '': it was told nothing
-- ARGV[15] payload, or a reference to it; last, since a server reads what follows a large argument once more
-- Returns {status, epoch ('': there is no such stream, and nobody asked for one), host, number, last sequence of this
-- writer, floor, room, dropped, plane, wanted, ends (of use to who knows another epoch; else 0), readers, chain up to the
-- entry ('' unless it was appended now)}; statuses are those of outbox.py
local writer, sequence, base = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local size, limit = tonumber(ARGV[6]), tonumber(ARGV[7])

local known_sequence, known_number = 0, 0
local known = redis.call('HGET', META, 'w:' .. writer)
if known then
  local colon = string.find(known, ':', 1, true)
  known_sequence = tonumber(string.sub(known, 1, colon - 1))
  known_number = tonumber(string.sub(known, colon + 1))
end

local appended = ''
local function verdict(status)
  local ends = ARGV[2] ~= epoch and num_ends() or 0
  return { status, epoch, host, known_number, known_sequence, floor, room, dropped, plane, wanted, ends, known_readers,
    appended }
end

if sequence == 0 then
  if make_none() then
    epoch = ''
    return verdict('STALE')
  end
  -- Whoever waits for this writer to fill what is below waits in vain.
  need_no_memory()
  redis.call('HSET', META, 'b:' .. writer, ARGV[5])
end
if ARGV[2] ~= epoch then
  return verdict('STALE')
end
if ARGV[14] ~= '' and ARGV[14] ~= known then
  -- Nobody else appends for this writer: only data that are older lack what it was told.
  local colon = string.find(ARGV[14], ':', 1, true)
  if known_sequence <= tonumber(string.sub(ARGV[14], 1, colon - 1)) then
    begin_epoch()
    return verdict('STALE')
  end
end
-- Before the first entry that this writer brings back: what others ack is kept for them until they come.
local has_returned = false
for name, its_host, codecs in string.gmatch(ARGV[12], '([^\t\n]+)\t([^\t\n]*)\t([^\n]*)') do
  local is_known = redis.call('HGET', READERS, 'd:' .. name) or redis.call('HGET', READERS, 'e:' .. name)
  if not is_known and not redis.call('HGET', META, 'f:' .. name) then
    redis.call('HSET', READERS, 'd:' .. name, digits(floor), 'h:' .. name, its_host, 'c:' .. name, codecs)
    has_returned = true
  end
end
if has_returned then
  redis.call('HDEL', META, 'deleted')
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

-- Put the stream back to its newest entry, behind which somebody else wrote, under an id of the server's clock maybe: no
-- entry of ours could follow. In a new epoch, since readers may look for what comes behind that id.
local function begin_anew()
  local held = redis.call('XRANGE', LOG, digits(floor + 1) .. '-0', digits(last) .. '-0')
  redis.call('DEL', LOG)
  for _, entry in ipairs(held) do
    redis.call('XADD', LOG, entry[1], unpack(entry[2]))
  end
  begin_epoch()
end

local link = string.sub(redis.sha1hex(chain .. ' ' .. writer .. ' ' .. digits(sequence)), 1, 16)
local fields = { 'e', epoch, 'w', writer, 's', digits(sequence), 'p', ARGV[15], 'c', link }
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
redis.call('HSET', META, 'last', digits(last), 'total', digits(total), 'chain', chain,
  'w:' .. writer, digits(sequence) .. ':' .. digits(last))
if is_deleted then
  redis.call('HDEL', META, 'deleted')
end
return verdict('OK')
