"""Run directories that are damaged, one file at a time, and those who read them."""
