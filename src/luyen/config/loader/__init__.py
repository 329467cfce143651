"""From YAML files and overrides to a frozen `RunConfig`: read, merge, resolve, parse."""
