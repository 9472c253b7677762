-- Add to a counter, also at maxmemory: a number is short, and processes that join a run need one.
-- KEYS[1] counters  hash
-- ARGV[1] counter
-- ARGV[2] amount
-- Returns its new value
redis.call('HDEL', KEYS[1], '')  -- After a first write that needs no memory, Redis lets a script finish.
return redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
