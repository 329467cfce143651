"""Tasks of inspect-ai, run by its own command in the clients' environment."""

import json
from pathlib import Path

from inspect_ai import Task, task  # pyright: ignore[reportMissingImports] - of the clients
from inspect_ai.dataset import Sample  # pyright: ignore[reportMissingImports]
from inspect_ai.scorer import match  # pyright: ignore[reportMissingImports]
from inspect_ai.solver import generate, use_tools  # pyright: ignore[reportMissingImports]
from inspect_ai.tool import tool  # pyright: ignore[reportMissingImports]


def _samples(file: str) -> list:
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [Sample(input=row["question"], target=row["answer"]) for row in rows]


@task
def sums(file: str) -> Task:
    """Sums without a tool."""
    return Task(dataset=_samples(file), solver=generate(), scorer=match(location="exact"))


@tool
def calculator():
    """A tool that multiplies."""

    async def execute(expression: str) -> str:
        """Compute a product.

        Args:
            expression: Two whole numbers with a star between them.
        """
        first, _, second = expression.partition("*")
        if not (first.isdecimal() and second.isdecimal()):
            return "not a product"
        return f"product {int(first) * int(second)}"

    return execute


@task
def products(file: str) -> Task:
    """Products, for which the model calls a tool."""
    solver = [use_tools(calculator()), generate()]
    return Task(dataset=_samples(file), solver=solver, scorer=match(location="any"))
