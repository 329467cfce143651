"""`luyen explain`: what a key or a rule means."""

from typing import Annotated

import typer


def explain(
    key: Annotated[str, typer.Argument(help="A key, block, rule, key of verl, or words.")],
) -> None:
    """Say what a key or a rule means: type, default, choices, and the rules about it.

    Other words list the keys, rules and pages that have to do with them.
    """
    from luyen.config.explain import explain as words

    typer.echo(words(key))
