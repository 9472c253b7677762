-- Put a name on the list of a run's streams and values; at maxmemory, too: a name is short, and what is not listed would
-- be left behind by a run that ends.
-- KEYS[1] index     set   "stream:<name>" and "value:<name>"
-- KEYS[2] counters  hash
-- ARGV[1] member
redis.call('HDEL', KEYS[2], '')  -- After a first write that needs no memory Redis lets a script finish.
return redis.call('SADD', KEYS[1], ARGV[1])
