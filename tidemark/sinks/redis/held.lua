-- Reads what the keys of some streams hold; writes nothing.
--
-- KEYS  of each stream the positions, beside which its other keys are (one hash tag); behind those of all, in a Cluster,
--       the others too
-- ARGV  how many positions are enough, how many streams there are
--
-- Answers of each stream, as JSON, [linear, allocated, {writer: position}, late, lease token] with null for what is not
-- there, and in a second line its token, if there is one; or the error that one of its other keys gave. Of the last ones
-- none where there were enough positions before them: their time is that of everybody who waits for Redis.

local left = tonumber(ARGV[1])

local function read(key)
    local channel = string.match(key, '^(.*):positions$')
    local linear, allocated = call('GET', channel .. ':linear'), call('GET', channel .. ':allocated')
    local flat, positions = call('HGETALL', key), {}
    for i = 1, #flat, 2 do positions[flat[i]] = flat[i + 1] end
    left = left - #flat / 2
    local fence = call('HMGET', channel .. ':fence', 'late', 'token')
    local token = redis.pcall('GET', channel .. ':token') -- whatever is there can be written again from the others
    local null = cjson.null
    local json = cjson.encode({linear or null, allocated or null, positions, fence[1] or null, fence[2] or null})
    return type(token) == 'string' and json .. '\n' .. token or json
end

local answers = {}
for at = 1, tonumber(ARGV[2]) do
    if left <= 0 then break end
    local ok, answer = pcall(read, KEYS[at])
    if not ok and type(answer) ~= 'table' then error(answer) end
    answers[at] = answer
end
return answers
