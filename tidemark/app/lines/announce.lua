-- Publishes lines on the channel, and stores the announced positions of writers, if this sidecar has the lease.
--
-- KEYS  leader, announced (one hash tag)
-- ARGV  token of the lease, channel, msgpack of {lines, {field, position, ...}, {field, ...} to be deleted}
--
-- Returns 1; 0 if this sidecar does not have the lease: then nothing was published or stored.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local lines, positions, removed = unpack(cmsgpack.unpack(ARGV[3]))
for i = 1, #positions, 2 do redis.call('HSET', KEYS[2], positions[i], positions[i + 1]) end
for _, field in ipairs(removed) do redis.call('HDEL', KEYS[2], field) end
for _, line in ipairs(lines) do redis.call('PUBLISH', ARGV[2], line) end
return 1
