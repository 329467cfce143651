"""One GRPO step on one GPU beside one of TRL's GRPOTrainer, in one run.

    pip install trl datasets        # in an environment that has luyen; needed for nothing else
    python benchmarks/gpu_grpo.py --model ~/.cache/luyen/models/smollm2-135m

The sides are those of `cpu_grpo.py`: same prompts, same number of tokens, same rewards, one
optimizer step, in turns. Of the model the shape and the tokenizer are used; weights are random.
"""

import argparse
from pathlib import Path

import torch
from alternate import Work, alternate
from cpu_grpo import SIDES

PARTS = ("generate", "step")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="~/.cache/luyen/models/smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(256, 256))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    given = vars(parser.parse_args())
    sides, parts = given.pop("sides"), given.pop("parts")
    given["model"] = str(Path(given["model"]).expanduser())
    work = Work(**given, device="cuda", init="random")
    made = {name: SIDES[name](work) for name in sides}
    for what in parts:
        actions = {name: getattr(side, what) for name, side in made.items()}
        torch.cuda.reset_peak_memory_stats()
        medians = alternate(actions, work.rounds)
        for name, seconds in medians.items():
            ratio = seconds / medians[sides[0]]
            print(f"{what:9s} {name:7s} {seconds:7.3f} s   {sides[0]} x {ratio:.2f}")
    print(f"peak of the device {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all sides")


if __name__ == "__main__":
    main()
