"""Tools that only read run directories, of runs that go on and of runs that ended."""
