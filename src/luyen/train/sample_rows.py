"""Every rollout of a measurement as a row: what was asked, said, scored, and how it was drawn."""

from typing import Any

from luyen.base.records import Prompt, Rollout
from luyen.telemetry.record_trees import score_tree
from luyen.train.checkpointed import Opened
from luyen.train.measure import Measured
from luyen.train.sampling import validation_sampling


def sample_rows(opened: Opened, measured: Measured) -> list[dict[str, Any]]:
    """Rows in the order of prompts and samples; what broke is among them, with its fault."""
    prompts = measured.prompts
    played = [rollout for group in measured.groups for rollout in group.rollouts]
    rollouts = sorted([*played, *measured.broken], key=lambda r: (r.group.draw, r.sample))
    shared = {
        "checkpoint": opened.name,
        "step": opened.step,
        "decoding": decoding_of(opened),
    }
    return [{**shared, **_row(prompts[r.group.draw], r)} for r in rollouts]


def decoding_of(opened: Opened) -> dict[str, Any]:
    """How the samples were drawn: rows with equal values here share their random numbers."""
    config = opened.config
    sampling = validation_sampling(config, opened.tokenizer)
    more = {
        "min_p": sampling.min_p,
        "min_new_tokens": sampling.min_new_tokens,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": sorted(sampling.stop_ids - opened.tokenizer.stop_ids),
    }
    return {
        "samples": config.actor_rollout_ref.rollout.val_kwargs.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_response_length": sampling.max_new_tokens,
        "seed": config.trainer.seed,
        # Named where they are set, so that rows of other days compare.
        **{name: value for name, value in more.items() if value},
    }


def _row(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    score = rollout.score
    return {
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "prompt": [dict(message) for message in prompt.messages],
        "ground_truth": prompt.ground_truth,
        "sample": rollout.sample,
        "messages": [dict(message) for message in rollout.messages],
        "answer": rollout.text,
        "reward": None if score is None else score.value,
        "score": None if score is None else score_tree(score, is_timed=False),
        "fault": rollout.fault,
        "stop": rollout.stop.value,
        "tokens": rollout.response_length,
    }
