"""`luyen init`: a folder with a first configuration, reward and rows."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from luyen.base.errors import UserError
from luyen.base.files import write_whole, writing

# The files that `luyen init` writes, as text.

CONFIG = """\
# A first run of your own: `luyen check config.yaml`, then `luyen train config.yaml`.
# Paths are relative to this file, wherever you call luyen.
# `luyen explain KEY` says what a key means, and `luyen schema` lists all of them.
data:
  train_files: data/train.jsonl # JSONL, JSON or parquet; several as a list
  val_files: data/val.jsonl # never trained on
  max_prompt_length: 32 # tokens; longer prompts are dropped and counted
  max_response_length: 8 # tokens; longer answers are cut
  train_batch_size: 16 # prompts of a step

actor_rollout_ref:
  model:
    # The small model that comes with Luyen. Any Hugging Face causal language model with a chat
    # template takes its place: a directory, or a hub id. `luyen models list` names one to try.
    path: builtin://arithmetic
    enable_gradient_checkpointing: false # less memory, more time
  actor:
    ppo_max_token_len_per_gpu: 8192 # tokens of a forward pass
    optim:
      lr: 3.0e-4 # for a real model: 1.0e-6
  rollout:
    n: 8 # answers to each prompt, compared with one another
    val_kwargs: # validation samples as training does; its likeliest answers are right already
      do_sample: true
      temperature: 1.0
      n: 4

algorithm:
  adv_estimator: grpo

reward:
  custom_reward_function:
    path: reward.py # compute_score in it judges every answer

trainer:
  total_training_steps: 20
  test_freq: 10 # steps between validations
  project_name: starter
  experiment_name: first
"""

REWARD = '''\
"""What an answer is worth. Edit this: the rest of the run follows from it."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number, a little for a number at all, 0 otherwise.

    Return a float, or a dict with `score` and whatever else you want to see in the metrics.
    An exception is reported as a fault of that answer, and never counted as 0.
    """
    answer = solution_str.strip()
    if answer == ground_truth:
        return 1.0
    return 0.1 if answer.isdigit() else 0.0
'''

README = """\
# A first run with Luyen

| file | what it is |
|---|---|
| `config.yaml` | the run: data, model, algorithm, length |
| `reward.py` | what an answer is worth |
| `data/train.jsonl`, `data/val.jsonl` | a row a line: the prompt as messages, the right answer |

Call these in this folder, under which `runs` is made:

```console
$ luyen check config.yaml
$ luyen train config.yaml
$ luyen eval runs/starter/first
$ luyen chat runs/starter/first
$ luyen export runs/starter/first exported
```

Any key can be set on the command line, for one call:

```console
$ luyen train config.yaml trainer.total_training_steps=50 trainer.experiment_name=longer
```
"""


def files() -> dict[str, str]:
    """Path -> content of everything that `init` writes."""
    sums = _sums()
    return {
        "config.yaml": CONFIG,
        "reward.py": REWARD,
        "README.md": README,
        "data/train.jsonl": "".join(islice(sums, 64)),
        "data/val.jsonl": "".join(islice(sums, 32)),
    }


def _sums() -> Iterator[str]:
    """Rows of sums, each pair of operands once; the order looks random and is always the same."""
    for i in range(100 * 100):
        a, b = divmod(i * 6367 % 10_000, 100)
        if a <= b:
            yield json.dumps(_row(a, b)) + "\n"


def _row(a: int, b: int) -> dict[str, object]:
    return {
        "data_source": "starter/sums",
        "prompt": [{"role": "user", "content": f"{a}+{b}="}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
    }


def run_init(directory: Path) -> int:
    """Write a configuration, a reward and rows; refused where any of these files exists."""
    directory = directory.expanduser()
    if directory.exists() and not directory.is_dir():
        raise UserError("DIR", str(directory), "a file of that name is in the way", "name another")
    wanted = files()
    present = [name for name in wanted if (directory / name).exists()]
    if present:
        why = f"it has a {present[0]} already, and nothing is overwritten"
        raise UserError("DIR", str(directory), why, "give a new directory")
    for name, content in wanted.items():
        path = directory / name
        with writing(path, field="DIR", fix="make room, or fix the permissions"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        typer.echo(f"wrote {path}")
    typer.echo(
        f"\nTry next\n  cd {directory}\n  luyen check config.yaml\n  luyen train config.yaml"
    )
    return 0


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write.", metavar="DIR")],
) -> None:
    """Write a first configuration with a reward and rows of its own."""
    raise typer.Exit(run_init(directory))
