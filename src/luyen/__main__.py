"""`python -m luyen` is the `luyen` command."""

from luyen.cli.main import run

if __name__ == "__main__":
    run()
