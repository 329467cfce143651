"""A page about one run, made from its directory."""
