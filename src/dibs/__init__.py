"""dibs: a durable task queue."""
