"""The writing side of metrics, spans and rollouts. Nothing here loads torch."""
