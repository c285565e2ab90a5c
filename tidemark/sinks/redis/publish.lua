-- Publishes the changes of some streams; the only writer of their keys. A repeat of the same call changes nothing.
--
-- KEYS  of each stream the positions, beside which its other keys are (one hash tag); behind those of all, in a Cluster,
--       the others too
-- ARGV  lease token, entries kept, of each stream its mode and change (msgpack of sinks.redis.publish.Change), what the
--       names of channels end with (names.database_suffix)
--
-- Modes: 'new'    the stream may be unknown here
--        'known'  we have published it before: where it is gone, or a move does not join, nothing is written
--        'mend'   from Postgres: entries need not join what is here, and the token is made again from the other keys
--        'anew'   from Postgres, where too much is missing: the entries are written from an empty list
--
-- Answers of each stream 'done', 'fenced ' and the newest token, or 'lost' (Redis lost data: fill it from Postgres): no
-- tables, each of which Redis would send by itself. An error may be of any of them, and those before it are done.
-- IDs are compared as text, by magnitude: they have up to 63 bits and a number here has 53.

local lease, kept, suffix = ARGV[1], ARGV[2], ARGV[4]
local byte, sub = string.byte, string.sub

-- Of the stream in hand.
local POSITIONS, LINEAR, TOKEN, ADVANCES, FENCE, ALLOCATED, CHANNEL
local mode, stream, linear, entries, positions, late, dropped, allocated
local known -- writer -> position, as in the hash
local moved, order -- writer -> what to tell the channel; in the order of their first move
local listed -- whether the list of advances is known to be one

local function take(key, call)
    local base = sub(key, 1, -11) -- without ':positions'
    CHANNEL = base .. suffix
    POSITIONS, LINEAR, TOKEN = key, base .. ':linear', base .. ':token'
    ADVANCES, FENCE, ALLOCATED = base .. ':advances', base .. ':fence', base .. ':allocated'
    local change
    mode, change = unpack(call)
    stream, linear, entries, positions, late, dropped, allocated = unpack(change)
    known, moved, order, listed = {}, {}, {}, false
end

-- Whether ID a is farther from 0 than ID b.
local function beyond(a, b)
    if a == b then return false end
    if byte(a) == 45 then a = sub(a, 2) end
    if byte(b) == 45 then b = sub(b, 2) end
    if #a ~= #b then return #a > #b end
    return a > b
end

-- Byte order: Lua's own comparison of strings follows the server's locale.
local function before(a, b)
    for i = 1, math.min(#a, #b) do
        local x, y = byte(a, i), byte(b, i)
        if x ~= y then return x < y end
    end
    return #a < #b
end

-- Of the writers that the change names: a stream may have thousands of others.
local function read_positions()
    local named, seen = {}, {}
    local function name(writer)
        if not seen[writer] then
            seen[writer] = true
            named[#named + 1] = writer
        end
    end
    for _, entry in ipairs(entries) do name(entry[1]) end
    for _, pair in ipairs(positions) do name(pair[1]) end
    if #named == 0 then call('HLEN', POSITIONS) end
    for start = 1, #named, 1000 do -- more than a Lua stack holds may be named
        local found = call('HMGET', POSITIONS, unpack(named, start, math.min(start + 999, #named)))
        for i, id in ipairs(found) do known[named[start + i - 1]] = id or nil end
    end
end

-- One that is no text fails the call, as GET does and MGET does not; but for the token, which is written again.
local function read_texts()
    local line, allocated_before, token = unpack(call('MGET', LINEAR, ALLOCATED, TOKEN))
    return line or call('GET', LINEAR), allocated_before or call('GET', ALLOCATED) or '0', token
end

-- Before anything but an entry is written; an entry tells the same by itself.
local function check_list()
    if not listed then call('XLEN', ADVANCES) end
    listed = true
end

local function move(writer, prev, id, plain)
    local line = moved[writer]
    if not line then
        line = {prev = prev, plain = true}
        moved[writer] = line
        order[#order + 1] = writer
    end
    line.id = id
    line.plain = line.plain and plain
    known[writer] = id
end

local function write_positions()
    for start = 1, #order, 1000 do
        local fields = {}
        for i = start, math.min(start + 999, #order) do
            local writer = order[i]
            fields[#fields + 1], fields[#fields + 2] = writer, known[writer]
        end
        call('HSET', POSITIONS, unpack(fields))
    end
end

local function joins()
    local reached = {}
    for _, entry in ipairs(entries) do
        local writer, prev, id = entry[1], entry[3], entry[4]
        local here = reached[writer] or known[writer]
        if here and beyond(prev, here) then return false end
        if not here or beyond(id, here) then reached[writer] = id end
    end
    if mode == 'known' then
        for _, pair in ipairs(positions) do -- a writer that retires, say, without a move
            local here = reached[pair[1]] or known[pair[1]]
            if here and beyond(pair[2], here) then return false end
        end
    end
    return true
end

local function write_entry(entry)
    local writer, epoch, prev, id, facts, empty, unseen, skipped, line, batch, time = unpack(entry)
    local here = known[writer]
    local moves = not here or beyond(id, here)
    if here and mode ~= 'anew' and beyond(here, prev) then prev = here end -- the list stays chained
    if moves or mode == 'anew' then
        call('XADD', ADVANCES, 'MAXLEN', '~', kept, '*', 'kind', 'POSITION', 'writer', writer, 'epoch', epoch,
            'prev', prev, 'id', id, 'facts', facts, 'empty', empty, 'unseen', unseen, 'skipped', skipped,
            'linear', line, 'batch', batch, 'time', time)
        listed = true
    end
    if moves then
        -- A reader may move along unseen only if it stood at prev and nothing but empty IDs follow.
        local whole = not here or not beyond(prev, here)
        move(writer, prev, id, whole and facts == '0' and unseen == '0' and skipped == '0')
    end
end

local function write_late(entry)
    local number, writer, epoch, prev, id, facts, why, batch, time = unpack(entry)
    call('XADD', ADVANCES, 'MAXLEN', '~', kept, '*', 'kind', 'LATE', 'number', number, 'writer', writer,
        'epoch', epoch, 'prev', prev, 'id', id, 'facts', facts, 'why', why, 'batch', batch, 'time', time)
    listed = true
    call('HSET', FENCE, 'late', number)
end

-- The writers that stood beyond the line, as the token tells: no other is beyond it now, unless it moved.
local function read_others(token, gone)
    if not token then
        local flat = call('HGETALL', POSITIONS)
        for i = 1, #flat, 2 do known[flat[i]] = flat[i + 1] end
        return
    end
    for name, id in string.gmatch(token, '~([^~]*)%.(%-?%d+)') do
        local writer = string.gsub(string.gsub(name, '%%7E', '~'), '%%25', '%%')
        if not known[writer] and not gone[writer] then known[writer] = id end
    end
end

local function token_of(line)
    local writers = {}
    for writer, id in pairs(known) do
        if beyond(id, line) then writers[#writers + 1] = writer end
    end
    if #writers == 0 then return 'm' .. line end
    table.sort(writers, before)
    local parts = {'m' .. line}
    for _, writer in ipairs(writers) do
        local name = string.gsub(string.gsub(writer, '%%', '%%25'), '~', '%%7E')
        parts[#parts + 1] = name .. '.' .. known[writer]
    end
    return table.concat(parts, '~')
end

local function publish()
    local newest, last = unpack(call('HMGET', FENCE, 'token', 'late'))
    if newest and beyond(newest, lease) then return 'fenced ' .. newest end
    if mode == 'known' and not newest then return 'lost' end
    read_positions()
    -- All is read before anything is written: a key that somebody else has put there fails the whole call.
    local line, allocated_before, token = read_texts()
    if mode == 'mend' or mode == 'anew' then token = nil end
    if (mode == 'new' or mode == 'known') and not joins() then return 'lost' end
    if newest ~= lease or mode == 'anew' or #dropped > 0 then check_list() end
    if newest ~= lease then call('HSET', FENCE, 'token', lease) end
    if mode == 'anew' then
        call('DEL', ADVANCES)
        call('HDEL', FENCE, 'late')
        last = nil
    end

    local changed, gone = false, {}
    for _, writer in ipairs(dropped) do
        if call('HDEL', POSITIONS, writer) == 1 then changed = true end
        known[writer] = nil
        gone[writer] = true
    end
    -- With its last writer the stream has ended: its history is Postgres's.
    if changed and call('EXISTS', POSITIONS) == 0 then call('DEL', ADVANCES) end
    for _, entry in ipairs(entries) do write_entry(entry) end
    for _, pair in ipairs(positions) do
        local here = known[pair[1]]
        if not here or beyond(pair[2], here) then move(pair[1], pair[2], pair[2], false) end
    end
    for _, entry in ipairs(late) do
        if beyond(entry[1], last or '0') then write_late(entry) end
    end
    check_list()
    write_positions()

    local texts = {}
    if not line or beyond(linear, line) then
        texts = {LINEAR, linear}
        line, changed = linear, true
    end
    if beyond(allocated, allocated_before) then texts[#texts + 1], texts[#texts + 2] = ALLOCATED, allocated end
    if changed or #order > 0 or not token then
        read_others(token, gone)
        texts[#texts + 1], texts[#texts + 2] = TOKEN, token_of(line)
    end
    if #texts > 0 then call('MSET', unpack(texts)) end
    for _, writer in ipairs(order) do
        local told = moved[writer]
        local prev = told.plain and told.prev or told.id
        call('PUBLISH', CHANNEL, 'POSITION ' .. stream .. ' ' .. writer .. ' ' .. prev .. ' ' .. told.id)
    end
    return 'done'
end

local replies = {}
for at, change in ipairs(cmsgpack.unpack(ARGV[3])) do
    take(KEYS[at], change)
    local ok, reply = pcall(publish)
    if not ok and type(reply) == 'table' then return reply end
    if not ok then error(reply) end
    replies[at] = reply
end
return replies
