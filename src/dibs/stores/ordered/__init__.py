"""The queue on an ordered key-value engine."""
