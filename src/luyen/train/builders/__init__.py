"""From a configuration to the parts of a run: rows, roles, reward, objective."""
