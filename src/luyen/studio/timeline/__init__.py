"""The timeline of a run over all of its processes, made from their spans."""
