"""The options of `luyen data`."""

from pathlib import Path
from typing import Annotated

import typer

data = typer.Typer(
    help="Look at files of rows, and convert them.", no_args_is_help=True, rich_markup_mode=None
)
As = Annotated[
    str | None,
    typer.Option("--as", help="Format of the file; default: found out.", metavar="FORMAT"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@data.command()
def inspect(
    file: Annotated[
        str, typer.Argument(help="A file, a directory or an address of rows.", metavar="FILE")
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Show and count tokens: a directory, a hub id, or `builtin`.", metavar="PATH"
        ),
    ] = None,
    form: As = None,
    as_json: AsJson = False,
) -> None:
    """Say which format a file has, show its first rows, and find what is wrong with it.

    What would be learned is in colour, or in double brackets where there is none. Exit code 1 when
    there are problems. Nothing is written.
    """
    from luyen.cli.data_inspect import run_inspect

    code = run_inspect(file, shown=rows, tokenizer=tokenizer, form=form, as_json=as_json)
    raise typer.Exit(code)


@data.command()
def convert(
    source: Annotated[str, typer.Argument(help="A file, directory or address.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="A new .jsonl or .parquet file.", metavar="OUT")],
    to: Annotated[
        str | None, typer.Option(help="Kind of rows to write; default: the same.", metavar="KIND")
    ] = None,
    form: As = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out rows with problems, and count them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write rows of any known format in the form that Luyen reads everywhere.

    Says what that form cannot hold. Exit code 1, and nothing written, when a row has a problem.
    """
    from luyen.cli.data_convert import run_convert

    raise typer.Exit(run_convert(source, target, to=to, form=form, skip=skip, as_json=as_json))
