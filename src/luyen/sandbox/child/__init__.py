"""The child side of the sandbox: guard, isolation and program; standard library only."""
