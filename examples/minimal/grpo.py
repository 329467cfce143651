"""GRPO in one file of plain torch: sample, compare, take a clipped step.

    python examples/minimal/grpo.py --steps 40

The framework does the same with packed batches, another sampler and many options; a test holds its
losses, gradients and weights against this file, step by step.
"""

import argparse
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from luyen.models.load import model_directory


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of; the names are those of the configuration."""

    model: str = "builtin://arithmetic"
    steps: int = 40
    prompts: int = 16
    n: int = 8
    max_response_length: int = 8
    temperature: float = 1.0
    digits: int = 2
    ppo_epochs: int = 1
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    std_epsilon: float = 1e-6
    lr: float = 2e-4
    lr_warmup_steps: int = 5
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    seed: int = 0


class Group(NamedTuple):
    """The answers to one prompt, side by side: `[n, response]`, padded at the right.

    A causal model never looks right, so padding changes nothing to its left, and no attention mask
    is needed.
    """

    prompt: Tensor
    """`[prompt]` token ids."""
    answers: Tensor
    """`[n, response]` token ids."""
    mask: Tensor
    """`[n, response]` True where the policy drew the token."""
    old_logp: Tensor
    """`[n, response]` log-probability that each token was drawn with."""
    rewards: Tensor
    """`[n]` one number an answer."""


# --- the model -----------------------------------------------------------------------------------


def load(path: str) -> tuple[Any, Any]:
    """A model and its tokenizer, as transformers has them."""
    directory = model_directory(path)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


def token_log_probs(model: Any, group: Group, temperature: float) -> Tensor:
    """`[n, response]` log-probability of every answer token, given all tokens before it."""
    prompt = group.prompt.expand(len(group.answers), -1)
    tokens = torch.cat([prompt, group.answers], dim=1)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    # The logits before a token predict it: those of the last prompt token, the first answer token.
    logits = logits[:, len(group.prompt) - 1 :].float() / temperature
    return logits.log_softmax(-1).gather(-1, group.answers[..., None])[..., 0]


# --- sampling ------------------------------------------------------------------------------------


@torch.no_grad()
def sample(
    model: Any, prompt: Tensor, stop: set[int], settings: Settings, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers, where they are real, and the log-probability of every token of theirs."""
    alive = torch.ones(settings.n, dtype=torch.bool)
    tokens, cache = prompt.expand(settings.n, -1), None
    answers, masks, logps = [], [], []
    for _ in range(settings.max_response_length):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logp = (out.logits[:, -1].float() / settings.temperature).log_softmax(-1)
        tokens = torch.multinomial(logp.exp(), 1, generator=draw)
        answers.append(tokens)
        masks.append(alive[:, None])
        logps.append(logp.gather(-1, tokens))
        # The token that ends an answer belongs to it; what comes after does not.
        alive = alive & ~torch.tensor([int(token) in stop for token in tokens])
        if not alive.any():
            break
    return torch.cat(answers, 1), torch.cat(masks, 1), torch.cat(logps, 1)


def ask(a: int, b: int, tokenizer: Any) -> Tensor:
    """A sum as a chat, up to where the assistant speaks."""
    messages = [{"role": "user", "content": f"{a}+{b}="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False))


def stop_ids(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends an answer."""
    named = model.generation_config.eos_token_id
    more = named if isinstance(named, list) else [named]
    return {token for token in (*more, tokenizer.eos_token_id) if token is not None}


def rollout(
    model: Any, tokenizer: Any, settings: Settings, pairs: random.Random, draw: torch.Generator
) -> list[Group]:
    """One group for each of the step's prompts, judged: 1 for the right sum, 0 otherwise."""
    stop, groups = stop_ids(model, tokenizer), []
    for _ in range(settings.prompts):
        a, b = (pairs.randrange(10**settings.digits) for _ in range(2))
        prompt = ask(a, b, tokenizer)
        answers, mask, logps = sample(model, prompt, stop, settings, draw)
        texts = [
            tokenizer.decode(row[real], skip_special_tokens=True)
            for row, real in zip(answers, mask, strict=True)
        ]
        rewards = torch.tensor([float(text.strip() == str(a + b)) for text in texts])
        groups.append(Group(prompt, answers, mask, logps, rewards))
    return groups


# --- the algorithm -------------------------------------------------------------------------------


def group_advantages(rewards: Tensor, std_epsilon: float) -> Tensor:
    """How much better each answer is than its siblings, in units of their spread."""
    return (rewards - rewards.mean()) / (rewards.std() + std_epsilon)


def clipped_losses(logp: Tensor, old_logp: Tensor, advantage: Tensor, settings: Settings) -> Tensor:
    """PPO's pessimistic loss of every token, with the dual clip for negative advantages."""
    ratio = (logp - old_logp).exp()
    clipped = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    capped = torch.minimum(loss, -advantage * settings.clip_ratio_c)
    return torch.where(advantage < 0, capped, loss)


def backward(model: Any, groups: list[Group], settings: Settings) -> float:
    """Add the step's gradient to the parameters; its loss, the mean over all tokens drawn."""
    tokens = sum(int(group.mask.sum()) for group in groups)
    total = 0.0
    for group in groups:
        advantage = group_advantages(group.rewards, settings.std_epsilon)[:, None]
        logp = token_log_probs(model, group, settings.temperature)
        losses = clipped_losses(logp, group.old_logp, advantage, settings)
        loss = losses[group.mask].sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def update(model: Any, optimizer: torch.optim.AdamW, groups: list[Group], s: Settings) -> float:
    """Every optimizer step on one set of rollouts; the loss of the first."""
    losses: list[float] = []
    for _ in range(s.ppo_epochs):
        losses.append(backward(model, groups, s))
        torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses[0]


def make_optimizer(model: Any, settings: Settings) -> torch.optim.AdamW:
    """AdamW over all weights."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)


def train(settings: Settings) -> list[float]:
    """Mean reward of every step."""
    model, tokenizer = load(settings.model)
    optimizer = make_optimizer(model, settings)
    pairs = random.Random(settings.seed)
    draw = torch.Generator().manual_seed(settings.seed)
    rewards: list[float] = []
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / settings.lr_warmup_steps)
        groups = rollout(model, tokenizer, settings, pairs, draw)
        loss = update(model, optimizer, groups, settings)
        rewards.append(float(torch.cat([g.rewards for g in groups]).mean()))
        print(f"step {step + 1}/{settings.steps}  reward {rewards[-1]:.3f}  loss {loss:+.4f}")
    return rewards


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="GRPO on sums, in one file.")
    for name, kind in (("model", str), ("steps", int), ("prompts", int), ("n", int), ("lr", float)):
        parser.add_argument(f"--{name}", type=kind, default=vars(Settings)[name])
    train(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
