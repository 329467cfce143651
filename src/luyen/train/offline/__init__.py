"""Learning from rows that are given: one loop, and a stage for each thing that can be learned."""
