"""`data`: what is read and how much of it makes a step."""

from typing import Any, Literal

from luyen.config.schema.block import Block, Names, Numbers, Steps, block, key


class SamplerConfig(Block):
    """The order of the training rows."""

    name: str = key(
        "shuffled",
        "Order of the rows: `shuffled`, `sequential`, `grouped`, `mixed`, `curriculum`, or a name "
        "that a plugin registers. Every choice resumes from a few integers.",
    )
    class_path: str | None = key(None, "Python file with a sampler class of your own.")
    class_name: str | None = key(None, "Name of the sampler class in `class_path`.")
    kwargs: dict[str, Any] = key({}, "Arguments of the sampler.")


class DataConfig(Block):
    """Files, columns, lengths and the number of prompts of a step."""

    train_files: Names = key(
        (),
        "Training rows: parquet, JSON or JSONL files, or a task source such as `arithmetic://sum`. "
        "An entry of a list may be a mapping with `path`, `weight`, `max_samples` and `name`.",
        required=True,
    )
    val_files: Names = key((), "Validation rows, in the same forms.")
    train_weights: Numbers = key(
        (),
        "Share of each entry of `train_files` in every batch, in any unit; empty: all rows alike. "
        "An entry may say it itself: `{path: rows.jsonl, weight: 2, name: math}`.",
    )
    train_file_samples: Steps = key(
        (), "Rows to keep of each entry of `train_files`, from the first; -1: all; empty: all."
    )
    train_names: Names = key(
        (), "Name of each entry of `train_files` in metrics (`data/share/NAME`); empty: the paths."
    )
    prompt_key: str = key(
        "prompt",
        "Column that holds the prompt as messages; a row without it has `messages` or, as plain "
        "text, `question`.",
    )
    string_prompts: Literal["refuse", "user"] = key(
        "refuse",
        "A prompt that is plain text: refuse it, or make it one user message. A `question` and "
        "what `prompt_template` is put around always become one.",
    )
    system_prompt: str | None = key(
        None, "Text of a system message for conversations that begin without one; null: none."
    )
    prompt_template: str | None = key(
        None,
        "Text that takes the place of a plain prompt or of the user's last message: `{prompt}` "
        "is that text, `{COLUMN}` a column of the row, `{{NAME}}` is `{NAME}` as it stands; null: "
        "prompts stay as they are.",
    )
    ground_truth_key: str | None = key(
        None,
        "Column that holds the answer; null: `reward_model.ground_truth`, or the `answer` to a "
        "`question`.",
    )
    reward_fn_key: str = key("data_source", "Column that selects the reward of a row.")
    seed: int | None = key(None, "Seed of the order of the rows; null: `trainer.seed`.", ge=0)
    train_max_samples: int = key(-1, "Training rows to keep, from the first; -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Validation rows to keep, from the first; -1: all.", ge=-1)
    apply_chat_template_kwargs: dict[str, Any] = key(
        {}, "Arguments of the chat template, e.g. `enable_thinking`."
    )
    max_prompt_length: int = key(512, "Most tokens of a prompt.", ge=1)
    max_response_length: int = key(
        512, "Most tokens after the prompt, all turns and tool results together.", ge=1
    )
    train_batch_size: int = key(1024, "Prompts of one step, over the whole cluster.", ge=1)
    return_raw_chat: bool = key(
        True, "Keep the conversation as messages.", only="conversations are always messages"
    )
    filter_duplicates: bool = key(
        True, "Drop training rows that repeat an earlier row, and count them."
    )
    filter_overlong_prompts: bool = key(
        True, "Drop prompts longer than `max_prompt_length` before training, and count them."
    )
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error", "What to do with a prompt that is too long and was not filtered."
    )
    sampler: SamplerConfig = block(SamplerConfig, "The order of the training rows.")
