"""`data`: what is read and how much of it makes a step."""

from typing import Any, Literal

from luyen.config.schema.block import Block, Names, block, key

_DATA = "the data layer"


class Sampler(Block):
    """In which order rows are drawn."""

    name: Literal["shuffled", "sequential", "grouped", "mixed", "curriculum"] = key(
        "shuffled", "Order of the rows; every choice resumes from a few integers.", awaits=_DATA
    )
    class_path: str | None = key(None, "Python file with a sampler class of your own.")
    class_name: str | None = key(None, "Name of the sampler class in `class_path`.")
    kwargs: dict[str, Any] = key({}, "Arguments of the sampler.", awaits=_DATA)


class Data(Block):
    """Files, columns, lengths and the number of prompts of a step."""

    train_files: Names = key(
        (),
        "Training rows: parquet, JSON or JSONL files, or a task source such as `arithmetic://`.",
        required=True,
    )
    val_files: Names = key((), "Validation rows, in the same forms.")
    prompt_key: str = key("prompt", "Column that holds the prompt.", awaits=_DATA)
    reward_fn_key: str = key(
        "data_source", "Column that selects the reward of a row.", awaits="the reward stack"
    )
    max_prompt_length: int = key(512, "Most tokens of a prompt.", ge=1)
    max_response_length: int = key(
        512, "Most tokens after the prompt, all turns and tool results together.", ge=1
    )
    train_batch_size: int = key(1024, "Prompts drawn for one step, over the whole cluster.", ge=1)
    return_raw_chat: bool = key(
        True, "Keep the conversation as messages; tool-calling cannot work without."
    )
    filter_overlong_prompts: bool = key(
        True, "Drop prompts longer than `max_prompt_length` before training, and count them."
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "What to do with a prompt that is too long and was not filtered."
    )
    sampler: Sampler = block(Sampler, "In which order rows are drawn.")
