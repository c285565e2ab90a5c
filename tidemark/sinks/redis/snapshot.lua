-- Reads the keys of some streams; writes nothing.
--
-- KEYS  the positions key of each stream, whose other keys have the same hash tag; in a Cluster also all other keys
-- ARGV  the number of positions after which to stop, the number of streams
--
-- Returns for each stream one text: JSON [linear, allocated, {writer: position}, late, lease token], with null for a
-- missing key; then, if the key `token` exists, its value in a second line. If a key of the stream causes an error, the
-- error is returned instead. After the stream that reaches the number of positions, no stream is read: Redis runs nothing
-- else during the script.

local left = tonumber(ARGV[1])

local function read(key)
    local base = string.match(key, '^(.*):positions$')
    local linear, allocated = call('GET', base .. ':linear'), call('GET', base .. ':allocated')
    local flat, positions = call('HGETALL', key), {}
    for i = 1, #flat, 2 do positions[flat[i]] = flat[i + 1] end
    left = left - #flat / 2
    local fence = call('HMGET', base .. ':fence', 'late', 'token')
    local token = redis.pcall('GET', base .. ':token') -- an invalid token can be written again from the other keys
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
