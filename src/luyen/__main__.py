"""`python -m luyen` is the `luyen` command."""

from luyen.cli.main import run

run()
