"""Tokens per second on a CPU: our engine, `model.generate`, and vLLM's CPU build if there is one.

    python benchmarks/cpu_generate.py --model ~/.cache/luyen/models/smollm2-135m
    python benchmarks/cpu_generate.py --vllm-python /path/to/an/environment/with/vllm/bin/python

All sides answer the same prompts, `samples` times each, with the same number of tokens: stop tokens
are ignored. They take turns, so that a busy machine slows all of them, and medians are compared.
vLLM lives in an environment and a process of its own, which waits while the others work.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alternate import Work, alternate


def luyen_side(work: Work) -> Callable[[], object]:
    """Our engine, on weights loaded as a run loads them."""
    import torch
    from transformers import AutoModelForCausalLM

    from luyen.base.seeds import derive_key
    from luyen.models.policy import Policy
    from luyen.rollout.native.engine import NativeEngine
    from luyen.rollout.protocol import Request, Sampling

    net = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype))
    policy = Policy(net, vocabulary=net.config.vocab_size).eval()
    engine = NativeEngine(
        policy,
        max_model_len=work.prompt_tokens[1] + work.new_tokens,
        max_num_seqs=work.prompts * work.samples,
        max_num_batched_tokens=8192,
        decode=lambda _: "",
    )
    sampling = Sampling(max_new_tokens=work.new_tokens, ignore_stop=True)
    counter = itertools.count()

    def generate() -> None:
        number = next(counter)
        for i, tokens in enumerate(work.tokens()):
            keys = tuple(derive_key(number, "sample", i, j) for j in range(work.samples))
            request = Request(id=str(i), tokens=tuple(tokens), keys=keys, sampling=sampling)
            engine.submit(request)
        done = 0
        while not engine.is_idle:
            done += sum(len(answer.tokens) for answer in engine.advance())
        assert done == work.drawn

    return generate


def transformers_side(work: Work) -> Callable[[], object]:
    """`model.generate` on a left-padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype))
    net.eval()
    prompts = work.tokens()
    longest = max(len(tokens) for tokens in prompts)
    padded = [[0] * (longest - len(tokens)) + tokens for tokens in prompts]
    mask = [[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens in prompts]
    net.generation_config.pad_token_id = 0

    def generate() -> None:
        out = net.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            top_k=0,
            num_return_sequences=work.samples,
            min_new_tokens=work.new_tokens,
            max_new_tokens=work.new_tokens,
        )
        assert out.shape == (work.prompts * work.samples, longest + work.new_tokens)

    return torch.no_grad()(generate)


def vllm_side(work: Work, python: str) -> Callable[[], object]:
    """vLLM in another process, which generates once for each line it is sent."""
    words = [python, __file__, "--serve-vllm", json.dumps(asdict(work))]
    pipe = subprocess.PIPE
    server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    sent, heard = server.stdin, server.stdout

    def generate() -> float:
        sent.write("go\n")
        sent.flush()
        for line in heard:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise SystemExit("vLLM ended before it answered")

    return generate


def serve_vllm(work: Work) -> None:
    """Answer each line of the standard input with the seconds of one generation."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(model=work.model, dtype=work.dtype, enable_prefix_caching=False)
    asked = SamplingParams(
        n=work.samples, temperature=1.0, max_tokens=work.new_tokens, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": tokens} for tokens in work.tokens()]
    for _ in sys.stdin:
        start = time.perf_counter()
        engine.generate(prompts, asked, use_tqdm=False)
        print(f"seconds {time.perf_counter() - start}", flush=True)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="~/.cache/luyen/models/smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(32, 256))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="the Python of an environment that has vLLM")
    parser.add_argument("--serve-vllm", help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    served, python = given.pop("serve_vllm"), given.pop("vllm_python")
    if served:
        serve_vllm(Work(**json.loads(served)))
        return
    from luyen.base.process_setup import prepare_process

    prepare_process()
    import torch

    given["model"] = str(Path(given["model"]).expanduser())
    work = Work(**given)
    torch.set_num_threads(work.threads)
    sides = {"luyen": luyen_side(work), "transformers": transformers_side(work)}
    if python:
        sides["vllm"] = vllm_side(work, python)
    medians = alternate(sides, work.rounds)
    for name, seconds in medians.items():
        ratio, rate = seconds / medians["luyen"], work.drawn / seconds
        print(f"{name:13s} {seconds:7.2f} s {rate:7.0f} tokens/s   luyen x {ratio:.2f}")


if __name__ == "__main__":
    main()
