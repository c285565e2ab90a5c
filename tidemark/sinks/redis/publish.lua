-- Publishes the changes of some streams. No other script writes their keys. A repeat of the same call changes nothing.
--
-- KEYS  the positions key of each stream, whose other keys have the same hash tag; in a Cluster also all other keys
-- ARGV  lease token, bound of the list of advances, mode and change of each stream (msgpack of sinks.redis.publish.Change),
--       suffix of the names of channels (client.database_suffix)
--
-- Modes: 'new'      a change of a batch; Redis may not have the stream yet
--        'known'    a change of a batch; the stream was published before, so missing keys are a loss
--        'repair'   from Postgres: entries need not join the list, and the token is computed from the other keys
--        'rebuild'  from Postgres, if too much is missing: the list of advances is written again from empty
--
-- Returns for each stream 'done', 'fenced ' and the newest token, or 'lost'. 'fenced' and 'lost': nothing was written for
-- the stream. 'lost': keys are missing, or an advance of a batch begins beyond the position in Redis; refill the stream
-- from Postgres. The answers are strings, because Redis would send each table separately. On an error, the streams before
-- the failed one are done.
-- IDs are compared as text, by magnitude: they have up to 63 bits and a number here has 53.

local lease, advances_max, suffix = ARGV[1], ARGV[2], ARGV[4]
local byte, sub = string.byte, string.sub

-- Of the current stream.
local POSITIONS, LINEAR, TOKEN, ADVANCES, FENCE, ALLOCATED, CHANNEL
local mode, stream, linear, entries, positions, late, dropped, allocated
local known -- writer -> position, as in the hash
local moved, order -- writer -> message for the channel; writers in the order of their first move
local listed -- whether the key of the list was checked to have the type of a Redis stream

-- Sets the variables of the current stream. item: the mode and the change.
local function set_current(key, item)
    local base = sub(key, 1, -11) -- without ':positions'
    CHANNEL = base .. suffix
    POSITIONS, LINEAR, TOKEN = key, base .. ':linear', base .. ':token'
    ADVANCES, FENCE, ALLOCATED = base .. ':advances', base .. ':fence', base .. ':allocated'
    local change
    mode, change = unpack(item)
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

-- Whether text a comes before text b in byte order. Lua's own comparison of strings depends on the server's locale.
local function before(a, b)
    for i = 1, math.min(#a, #b) do
        local x, y = byte(a, i), byte(b, i)
        if x ~= y then return x < y end
    end
    return #a < #b
end

-- Reads only the writers that the change names: a stream may have thousands of others.
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
    for start = 1, #named, 1000 do -- more names may come than fit on the Lua stack
        local ids = call('HMGET', POSITIONS, unpack(named, start, math.min(start + 999, #named)))
        for i, id in ipairs(ids) do known[named[start + i - 1]] = id or nil end
    end
end

-- The linear position, the allocated ID and the token. GET raises an error for a key that is not a string, and MGET does
-- not. A token of a wrong type is written again.
local function read_texts()
    local linear_position, allocated_before, token = unpack(call('MGET', LINEAR, ALLOCATED, TOKEN))
    return linear_position or call('GET', LINEAR), allocated_before or call('GET', ALLOCATED) or '0', token
end

-- Raises an error if the list of advances has a wrong type. Called before any write other than XADD, which checks the type
-- itself.
local function check_list()
    if not listed then call('XLEN', ADVANCES) end
    listed = true
end

-- Notes that the writer moves from prev to id, for the hash and for the message on the channel. Writes nothing.
local function move(writer, prev, id, is_empty)
    local change = moved[writer]
    if not change then
        change = {prev = prev, is_empty = true}
        moved[writer] = change
        order[#order + 1] = writer
    end
    change.id = id
    change.is_empty = change.is_empty and is_empty
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

-- Whether the change follows the positions in Redis: no advance begins beyond its writer's position. If not, Redis has
-- lost data.
local function follows_positions()
    local reached = {}
    for _, entry in ipairs(entries) do
        local writer, prev, id = entry[1], entry[3], entry[4]
        local position = reached[writer] or known[writer]
        if position and beyond(prev, position) then return false end
        if not position or beyond(id, position) then reached[writer] = id end
    end
    if mode == 'known' then
        for _, pair in ipairs(positions) do -- for example of a writer that retires without a move
            local position = reached[pair[1]] or known[pair[1]]
            if position and beyond(pair[2], position) then return false end
        end
    end
    return true
end

local function write_entry(entry)
    local writer, epoch, prev, id, facts, empty, unseen, skipped, linear_position, batch, time = unpack(entry)
    local position = known[writer]
    local moves = not position or beyond(id, position)
    if position and mode ~= 'rebuild' and beyond(position, prev) then prev = position end -- the list stays chained
    if moves or mode == 'rebuild' then
        call('XADD', ADVANCES, 'MAXLEN', '~', advances_max, '*', 'kind', 'POSITION', 'writer', writer, 'epoch', epoch,
            'prev', prev, 'id', id, 'facts', facts, 'empty', empty, 'unseen', unseen, 'skipped', skipped,
            'linear', linear_position, 'batch', batch, 'time', time)
        listed = true
    end
    if moves then
        -- The message on the channel begins at prev only if all IDs of its range are empty.
        local whole = not position or not beyond(prev, position)
        move(writer, prev, id, whole and facts == '0' and unseen == '0' and skipped == '0')
    end
end

local function write_late(entry)
    local number, writer, epoch, prev, id, facts, why, batch, time = unpack(entry)
    call('XADD', ADVANCES, 'MAXLEN', '~', advances_max, '*', 'kind', 'LATE', 'number', number, 'writer', writer,
        'epoch', epoch, 'prev', prev, 'id', id, 'facts', facts, 'why', why, 'batch', batch, 'time', time)
    listed = true
    call('HSET', FENCE, 'late', number)
end

-- Adds to `known` the other writers that the new token may name: the writers that the old token names, or all writers if
-- there is no old token. The old token names the writers beyond the old linear position. Another writer can be beyond the
-- linear position now only if this call moved the writer. gone: the writers that this call removed.
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

local function token_of(linear_position)
    local writers = {}
    for writer, id in pairs(known) do
        if beyond(id, linear_position) then writers[#writers + 1] = writer end
    end
    if #writers == 0 then return 'm' .. linear_position end
    table.sort(writers, before)
    local parts = {'m' .. linear_position}
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
    -- Reads before writes: a key with a wrong type then fails the whole call.
    local linear_position, allocated_before, token = read_texts()
    if mode == 'repair' or mode == 'rebuild' then token = nil end
    if (mode == 'new' or mode == 'known') and not follows_positions() then return 'lost' end
    if newest ~= lease or mode == 'rebuild' or #dropped > 0 then check_list() end
    if newest ~= lease then call('HSET', FENCE, 'token', lease) end
    if mode == 'rebuild' then
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
    -- The stream ended with its last writer. Its history stays in Postgres.
    if changed and call('EXISTS', POSITIONS) == 0 then call('DEL', ADVANCES) end
    for _, entry in ipairs(entries) do write_entry(entry) end
    for _, pair in ipairs(positions) do
        local position = known[pair[1]]
        if not position or beyond(pair[2], position) then move(pair[1], pair[2], pair[2], false) end
    end
    for _, entry in ipairs(late) do
        if beyond(entry[1], last or '0') then write_late(entry) end
    end
    check_list()
    write_positions()

    local texts = {}
    if not linear_position or beyond(linear, linear_position) then
        texts = {LINEAR, linear}
        linear_position, changed = linear, true
    end
    if beyond(allocated, allocated_before) then texts[#texts + 1], texts[#texts + 2] = ALLOCATED, allocated end
    if changed or #order > 0 or not token then
        read_others(token, gone)
        texts[#texts + 1], texts[#texts + 2] = TOKEN, token_of(linear_position)
    end
    if #texts > 0 then call('MSET', unpack(texts)) end
    for _, writer in ipairs(order) do
        local message = moved[writer]
        local prev = message.is_empty and message.prev or message.id
        call('PUBLISH', CHANNEL, 'POSITION ' .. stream .. ' ' .. writer .. ' ' .. prev .. ' ' .. message.id)
    end
    return 'done'
end

local replies = {}
for at, item in ipairs(cmsgpack.unpack(ARGV[3])) do
    set_current(KEYS[at], item)
    local ok, reply = pcall(publish)
    if not ok and type(reply) == 'table' then return reply end
    if not ok then error(reply) end
    replies[at] = reply
end
return replies
