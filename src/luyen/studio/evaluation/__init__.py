"""What samples of a policy say: intervals, and whether two policies differ."""
