-- Add a name to the list of a run's streams and values. This works at maxmemory, since the end of the run deletes only
-- what is listed, and a name is short.
-- KEYS[1] index     set   "stream:<name>" and "value:<name>"
-- KEYS[2] counters  hash
-- ARGV[1] member
redis.call('HDEL', KEYS[2], '')  -- After a first write that needs no memory, Redis lets a script finish.
return redis.call('SADD', KEYS[1], ARGV[1])
