"""Tool schemas enter prompts in one place, so that training and inference render the same ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from luyen.base.errors import UserError
from luyen.base.records import Prompt, make_prompt
from luyen.data.sources import Dataset

Offered: TypeAlias = Callable[[Prompt], tuple[Mapping[str, Any], ...]]
"""Schemas of the tools that a prompt's conversations may call."""


def with_tools(dataset: Dataset, offered: Offered) -> Dataset:
    """The prompts with the schemas of the run's own tools; what a row lists only chooses by name.

    A UserError names the row that asks for a tool the run does not have.
    """
    prompts: list[Prompt] = []
    for prompt, origin in zip(dataset.prompts, dataset.origins, strict=True):
        try:
            tools = offered(prompt)
        except UserError as error:
            raise UserError(f"{origin}: {error.field}", error.value, error.why, error.fix) from None
        prompts.append(
            make_prompt(
                prompt.messages,
                tools=tools,
                data_source=prompt.data_source,
                ground_truth=prompt.ground_truth,
                extra_info=prompt.extra_info,
            )
        )
    return replace(dataset, prompts=tuple(prompts))
