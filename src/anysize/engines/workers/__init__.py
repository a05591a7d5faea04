"""Worker processes: the pool, the fork server, what a worker does, and shared memory."""
