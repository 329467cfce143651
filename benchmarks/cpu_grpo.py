"""One GRPO step of Luyen beside one of TRL's GRPOTrainer, in one run: same weights, data, tokens.

    pip install trl datasets        # in an environment that has luyen; needed for nothing else
    python benchmarks/cpu_grpo.py --model builtin://arithmetic
    python benchmarks/cpu_grpo.py --model ~/.cache/luyen/models/smollm2-135m --dtype bfloat16 \\
        --prompts 4 --prompt-tokens 128 256

Both sides answer the same prompts with the same number of tokens (stop tokens are ignored), score
them with the same function and take one optimizer step. The two alternate, so that a busy machine
slows both; the median of each is compared. Generation alone is compared with `model.generate` in
the same way. Peak memory is that of a process of its own.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from alternate import Work, alternate

from luyen.base.process_setup import prepare_process


def questions(work: Work) -> list[str]:
    """Prompts the same for all sides: sums, or texts whose token counts span the given range."""
    low, high = work.prompt_tokens
    if not high:
        return [f"{17 * i % 90 + 3}+{31 * i % 90 + 5}=" for i in range(work.prompts)]
    from transformers import AutoTokenizer

    from luyen.models.load import model_directory

    tokenizer = AutoTokenizer.from_pretrained(model_directory(work.model))
    overhead = len(chat_tokens(tokenizer, ""))
    texts = []
    for i in range(work.prompts):
        wanted = low + (high - low) * i // max(1, work.prompts - 1) - overhead
        ids = tokenizer(" ".join(f"word{(i + j) % 37}" for j in range(wanted)))["input_ids"]
        texts.append(tokenizer.decode(ids[:wanted]))
    return texts


def chat_tokens(tokenizer: Any, question: str) -> list[int]:
    """The question as the model reads it."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def reward(completions: list[str]) -> list[float]:
    """Something that differs inside a group and costs nothing."""
    return [float(len(set(text)) % 7) for text in completions]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side can do: answer all prompts, and take a whole step."""

    generate: Callable[[], object]
    step: Callable[[], object]
    """Gives the seconds it took, if it knows better than a clock around it."""


def luyen_side(work: Work) -> Side:
    """Ours: generate, score, credit, update."""
    import torch

    from luyen.base.records import GroupId, Score, make_prompt
    from luyen.config.check import check
    from luyen.config.plugins import read_plugins
    from luyen.data.render import Renderer
    from luyen.rollout.protocol import Sampling
    from luyen.rollout.single_turn import Group, PromptRequest
    from luyen.train.advantages import AdvantageConfig, compute_advantages
    from luyen.train.batch import pack_groups, required_signals
    from luyen.train.builders.roles import build_roles
    from luyen.train.builders.run import build_objective
    from luyen.train.builders.setup import load_run_tokenizer

    words = [
        "data.train_files=arithmetic://sum",
        f"data.train_batch_size={work.prompts}",
        "data.max_prompt_length=512",
        f"data.max_response_length={work.new_tokens}",
        f"actor_rollout_ref.model.path={work.model}",
        f"actor_rollout_ref.model.dtype={work.dtype}",
        f"actor_rollout_ref.model.init={work.init}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.rollout.n={work.samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=160000",
        f"trainer.device={work.device}",
    ]
    config = check([], words).config
    tokenizer = load_run_tokenizer(config)
    known, _ = read_plugins(())
    needs = required_signals(config, known.estimators["grpo"])
    roles = build_roles(config, Renderer(tokenizer), tokenizer, needs, work.device)
    torch.set_num_threads(work.threads)
    rules = AdvantageConfig(
        estimator="grpo", hparams={}, is_group_relative=True, kl_kind=None, correction=None
    )
    objective = build_objective(config, known)
    sampling = Sampling(max_new_tokens=work.new_tokens, ignore_stop=True)
    prompts = [make_prompt([{"role": "user", "content": q}]) for q in questions(work)]
    counter = itertools.count()

    def answer() -> list[Group]:
        number = next(counter)
        draws = [
            PromptRequest(
                group=GroupId(step=number, draw=i, uid=p.uid), prompt=p, samples=work.samples
            )
            for i, p in enumerate(prompts)
        ]
        return roles.submit(draws, sampling, purpose="rollout", version=number).result()

    def step() -> None:
        groups = answer()
        judged = []
        for group in groups:
            values = reward([r.text for r in group.rollouts])
            scored = [
                replace(r, score=Score(name="reward", value=v))
                for r, v in zip(group.rollouts, values, strict=True)
            ]
            judged.append(Group(prompt=group.prompt, rollouts=tuple(scored)))
        batch = compute_advantages(
            pack_groups(judged, device=work.device), rules, kl_coef=0.0
        ).batch
        roles.update_actor(batch, objective, lr=1e-6, seed=0)

    return Side(generate=answer, step=step)


def trl_side(work: Work) -> Side:
    """TRL's trainer, and the `model.generate` it is built on."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from luyen.models.load import model_directory

    path = model_directory(work.model)
    makes: Any = AutoModelForCausalLM
    dtype = getattr(torch, work.dtype)
    if work.init == "random":
        model = makes.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
    else:
        model = makes.from_pretrained(path, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = [{"prompt": [{"role": "user", "content": q}]} for q in questions(work)]
    arguments = GRPOConfig(
        output_dir="/tmp/trl_benchmark",
        use_cpu=work.device == "cpu",
        bf16=False,
        per_device_train_batch_size=work.prompts * work.samples,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        generation_kwargs={"min_new_tokens": work.new_tokens},
        learning_rate=1e-6,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=10**9,
        save_strategy="no",
        max_steps=1,
        disable_tqdm=True,
    )

    def scored(completions: list[Any], **_: Any) -> list[float]:
        return reward([c[0]["content"] for c in completions])

    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=scored,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    torch.set_num_threads(work.threads)

    texts = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in rows
    ]
    tokenizer.padding_side = "left"
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    def answer() -> object:
        model.eval()
        return model.generate(
            **batch.to(model.device),
            do_sample=True,
            top_k=0,
            num_return_sequences=work.samples,
            min_new_tokens=work.new_tokens,
            max_new_tokens=work.new_tokens,
        )

    def step() -> float:
        # What TRL itself counts, which leaves the preparations of a call of `train` out.
        return trainer.train().metrics["train_runtime"]

    return Side(generate=torch.no_grad()(answer), step=step)


SIDES = {"luyen": luyen_side, "trl": trl_side}


def peak_memory(side: str, work: Work) -> float:
    """MiB of a process that takes two steps of one side and nothing else."""
    words = [sys.executable, __file__, "--memory-of", side, "--work", json.dumps(asdict(work))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin://arithmetic")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(0, 0))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", dest="rounds", type=int, default=5)
    parser.add_argument("--memory-of", choices=SIDES)
    parser.add_argument("--work")
    given = parser.parse_args()
    prepare_process()
    if given.memory_of:
        side = SIDES[given.memory_of](Work(**json.loads(given.work)))
        side.step()
        side.step()
        # The kernel hands ru_maxrss on from the parent; VmHWM is this process's own.
        status = Path("/proc/self/status").read_text().splitlines()
        print(int(next(x for x in status if x.startswith("VmHWM")).split()[1]) / 1024)
        return
    names = (
        "model",
        "dtype",
        "prompts",
        "samples",
        "new_tokens",
        "prompt_tokens",
        "threads",
        "rounds",
    )
    work = Work(**{name: vars(given)[name] for name in names})
    sides = {name: make(work) for name, make in SIDES.items()}
    memory = {name: peak_memory(name, work) for name in SIDES}
    medians = {
        what: alternate({name: getattr(side, what) for name, side in sides.items()}, work.rounds)
        for what in ("generate", "step")
    }
    for name in SIDES:
        generate, step = medians["generate"][name], medians["step"][name]
        print(
            f"{name:6s} generate {generate:7.3f} s ({work.drawn / generate:6.0f} tokens/s)   "
            f"step {step:7.3f} s   peak {memory[name]:6.0f} MiB"
        )
    for what, times in medians.items():
        print(f"{what}: {times['trl'] / times['luyen']:.2f} times as fast")


if __name__ == "__main__":
    main()
