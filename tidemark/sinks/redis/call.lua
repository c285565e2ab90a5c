-- Begins each script.

local attempt = redis.pcall

local function call(...)
    local reply = attempt(...)
    if type(reply) == 'table' and reply.err then
        -- Redis 6 hides the error's code behind the script's name and line.
        error({err = string.match(reply.err, '^@user_script.-: %-(.*)$') or reply.err})
    end
    return reply
end

