"""Several stores as one: each task lives in the shard that its slot belongs to."""
