"""Tokens per second on one GPU: our engine, `model.generate`, and continuous batching.

    python benchmarks/gpu_generate.py --model smollm2-135m

All sides have a model of the same shape with random weights and answer the same prompts with the
same number of tokens: stop tokens are ignored. They take turns, and medians are compared.
Continuous batching is transformers' `generate_batch`.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from alternate import Work, alternate

from luyen.base.seeds import derive_key
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.models.random_policy import SHAPES, shaped_policy
from luyen.rollout.engines import native
from luyen.rollout.protocol import Request, Sampling, generate


def luyen_side(work: Work) -> Callable[[], object]:
    """The embedded engine as a run builds it, exact log-probabilities included."""
    policy = shaped_policy(work.model, dtype=getattr(torch, work.dtype), device=work.device)
    rows = work.prompts * work.samples
    rollout = RolloutConfig(
        max_num_seqs=rows, max_num_batched_tokens=32768, gpu_memory_utilization=0.4
    )
    longest = work.prompt_tokens[1] + work.new_tokens
    engine = native(policy, rollout, longest=longest, decode=lambda _: "")
    sampling = Sampling(max_new_tokens=work.new_tokens, ignore_stop=True)
    counter = itertools.count()

    def answer() -> None:
        number = next(counter)
        asked = [
            Request(
                id=str(i),
                tokens=tuple(tokens),
                keys=tuple(derive_key(number, "sample", i, j) for j in range(work.samples)),
                sampling=sampling,
            )
            for i, tokens in enumerate(work.tokens())
        ]
        found = generate(engine, asked)
        assert sum(len(done.tokens) for done in found.values()) == work.drawn

    return answer


def plain_model(work: Work) -> Any:
    """Transformers' own model of the shape, with its own attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"max_position_embeddings": 32768, **SHAPES[work.model]}
    loader: Any = AutoConfig
    config = loader.for_model(shape.pop("model_type"), **shape)
    makes: Any = AutoModelForCausalLM
    net = makes.from_config(config, dtype=getattr(torch, work.dtype)).to(work.device).eval()
    net.generation_config.pad_token_id = 0
    net.generation_config.eos_token_id = None
    return net


def transformers_side(work: Work) -> Callable[[], object]:
    """`model.generate` on a left-padded batch."""
    net = plain_model(work)
    prompts = work.tokens()
    longest = max(len(tokens) for tokens in prompts)
    padded = [[0] * (longest - len(tokens)) + tokens for tokens in prompts]
    mask = [[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts]

    def answer() -> None:
        out = net.generate(
            input_ids=torch.tensor(padded, device=work.device),
            attention_mask=torch.tensor(mask, device=work.device),
            do_sample=True,
            top_k=0,
            num_return_sequences=work.samples,
            min_new_tokens=work.new_tokens,
            max_new_tokens=work.new_tokens,
        )
        torch.cuda.synchronize()
        assert out.shape == (work.prompts * work.samples, longest + work.new_tokens)

    return torch.no_grad()(answer)


def continuous_side(work: Work) -> Callable[[], object]:
    """transformers' continuous batching; it has no samples, so prompts are repeated."""
    from transformers import GenerationConfig

    net = plain_model(work)
    prompts = [tokens for tokens in work.tokens() for _ in range(work.samples)]
    asked = GenerationConfig(
        max_new_tokens=work.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )

    def answer() -> None:
        # What it prepares is kept for the next round, as ours is.
        found = net.generate_batch(
            inputs=prompts, generation_config=asked, progress_bar=False, persistent_manager=True
        )
        assert sum(len(one.generated_tokens) for one in found.values()) == work.drawn

    return torch.no_grad()(answer)


SIDES = {
    "luyen": luyen_side,
    "model.generate": transformers_side,
    "generate_batch": continuous_side,
}


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(256, 256))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    given = vars(parser.parse_args())
    sides = given.pop("sides")
    work = Work(**given, device="cuda", init="random")
    medians = alternate({name: SIDES[name](work) for name in sides}, work.rounds)
    for name, seconds in medians.items():
        ratio = seconds / medians[sides[0]]
        rate = work.drawn / seconds
        print(f"{name:15s} {seconds:7.3f} s {rate:9.0f} tokens/s   {sides[0]} x {ratio:.2f}")


if __name__ == "__main__":
    main()
