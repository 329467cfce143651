"""A reward model over the built-in policy, and rollouts for it to judge."""

from collections.abc import Sequence
from pathlib import Path

import torch

from luyen.base.records import GroupId, Prompt, Rollout, Source, StopReason, make_prompt
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.reward import RewardModelConfig
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.models.export import export_tokenizer
from luyen.models.reward_model import load_reward_model
from luyen.runtime.reward_model import LocalScorer, load_scorer

POLICY = "builtin://arithmetic"
QUESTIONS = {"1+1=": ("2", "3", "11"), "20+4=": ("24", "2", "99")}


def saved_judge(folder: Path, *, is_stepwise: bool = False, template: str | None = None) -> str:
    """A reward model with a head that has drawn weights; `template` replaces the chat template."""
    model = load_reward_model(
        ModelConfig(path=POLICY), device="cpu", field="actor_rollout_ref.model.path", new_head=5
    )
    with torch.no_grad():
        model.head.weight.mul_(20)
    model.save(folder, pad_token=None, is_stepwise=is_stepwise)
    export_tokenizer(POLICY, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def renderer() -> Renderer:
    """How the policy's own conversations are rendered."""
    return Renderer(load_tokenizer(POLICY))


def groups(*, is_ended: bool = True) -> list[tuple[Prompt, list[Rollout]]]:
    """Two prompts with three answers each, as tokens of the policy."""
    own, found = renderer(), list[tuple[Prompt, list[Rollout]]]()
    for draw, (question, answers) in enumerate(QUESTIONS.items()):
        asked = make_prompt([{"role": "user", "content": question}], data_source="arithmetic/sum")
        start = own.prompt_tokens(asked.messages)
        said = [own.tokenizer.encode(a + ("<|im_end|>" if is_ended else "")) for a in answers]
        members = [
            _rollout(asked, draw, sample, start, tokens, answers[sample])
            for sample, tokens in enumerate(said)
        ]
        found.append((asked, members))
    return found


def _rollout(
    asked: Prompt, draw: int, sample: int, start: Sequence[int], said: Sequence[int], text: str
) -> Rollout:
    size = len(start) + len(said)
    return Rollout(
        group=GroupId(step=1, draw=draw, uid=asked.uid),
        sample=sample,
        tokens=(*start, *said),
        sources=(Source.PROMPT,) * len(start) + (Source.SAMPLED,) * len(said),
        turns=(0,) * size,
        logps=(None,) * len(start) + (-0.5,) * len(said),
        versions=(None,) * len(start) + (0,) * len(said),
        stop=StopReason.ANSWERED,
        text=text,
    )


def settings(path: str, **rollout: int) -> RewardModelConfig:
    """The block of a reward model that is on."""
    return RewardModelConfig.model_validate(
        {"enable": True, "model_path": path, "rollout": dict(rollout)}
    )


def scorer_of(path: str) -> LocalScorer:
    """The model as a process of a cluster loads it."""
    torch.set_num_threads(1)
    return load_scorer(settings(path), "cpu", is_alone=True)
