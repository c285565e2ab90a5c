-- The beginning of each script.

local attempt = redis.pcall

local function call(...)
    local reply = attempt(...)
    if type(reply) == 'table' and reply.err then
        -- Redis 6 puts the name and line of the script before the code of the error.
        error({err = string.match(reply.err, '^@user_script.-: %-(.*)$') or reply.err})
    end
    return reply
end

