"""A stand-in for the `verifiers` package, 0.4: the part of its interface that is used here."""
