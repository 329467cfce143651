"""A policy that plays rollouts and has them judged, with nothing that trains it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self, final

from luyen.base.records import Prompt, Rollout, make_prompt
from luyen.config.schema.data import Data, Sampler
from luyen.data.build import build_data
from luyen.data.render import Renderer
from luyen.rewards.build import build_reward
from luyen.rewards.step import VALIDATION, Judging, Scored
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Draw, Group
from luyen.train.build_roles import build_engine, generation_of, surroundings_of
from luyen.train.checkpointed import Opened
from luyen.train.engine_judge import PURPOSE as JUDGE
from luyen.train.engine_judge import EngineAsk
from luyen.train.learned_reward import learned_services

_NOBODY = make_prompt([])
"""Stands for the prompts of conversations that are counted together."""


@final
class Player:
    """Rows, engine, tools and reward of a run, for its policy as it is. Close it at the end."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        config = opened.config
        data = config.data
        renderer = Renderer(opened.tokenizer, template_kwargs=data.apply_chat_template_kwargs)
        self._surroundings = surroundings_of(config)
        self._generation = generation_of(config, self._surroundings, renderer)
        ask = EngineAsk(renderer, longest=data.max_prompt_length + data.max_response_length)
        services = learned_services(config, renderer, None, opened.policy.device.type)
        self._reward = build_reward(
            config.reward,
            max_response_length=data.max_response_length,
            services=replace(services, ask=ask),
            require=config.sandbox.require,
        )
        self._engine = build_engine(config, opened.policy, opened.tokenizer)
        ask.connect(partial(self._generate, purpose=JUDGE))
        self.broken: list[Rollout] = []
        """Rollouts that could not be played to an end and were judged by nobody."""

    def prompts(self, files: tuple[str, ...], *, most: int | None = None) -> tuple[Prompt, ...]:
        """Rows of files as the run sees them, in their order, with the tools on offer."""
        config = self._opened.config
        changes: dict[str, object] = {
            "train_files": files,
            "train_max_samples": -1 if most is None else most,
            "val_files": (),
            "filter_duplicates": False,
            "sampler": Sampler(name="sequential"),
        }
        rows: Data = config.data.model_copy(update=changes)
        offered = self._surroundings.offered if self._surroundings is not None else None
        found = build_data(
            rows, tokenizer=self._opened.tokenizer, seed=config.trainer.seed, offered=offered
        )
        self._reward.check_sources({prompt.data_source for prompt in found.train.prompts})
        return found.train.prompts

    def _generate(self, draws: Sequence[Draw], sampling: Sampling, *, purpose: str) -> list[Group]:
        version = self._opened.step or 0
        groups = self._generation.play(
            self._engine, draws, sampling, purpose=purpose, version=version
        )
        return self._generation.all_compared(groups)

    def play(self, draws: Sequence[Draw], sampling: Sampling, *, purpose: str) -> list[Scored]:
        """Rollouts of the draws with their scores; `broken` holds those that have none."""
        groups = self._generate(draws, sampling, purpose=purpose)
        return self._reward.judge(self._sound(groups), Judging(purpose=VALIDATION))

    def _sound(self, groups: Sequence[Group]) -> list[tuple[Prompt, tuple[Rollout, ...]]]:
        talks = self._generation.conversations
        broken: list[Rollout] = []
        if talks is not None:
            broken = talks.faulty(groups, is_learned_from=False, may_be_all=True)
        self.broken += broken
        keys = {rollout.key for rollout in broken}
        kept = [(g.prompt, tuple(r for r in g.rollouts if r.key not in keys)) for g in groups]
        return [(prompt, rollouts) for prompt, rollouts in kept if rollouts]

    def settle(self, scored: Sequence[Scored]) -> None:
        """A UserError when scores are missing and `reward.on_fault` says to stop at that.

        Also when every conversation broke, so that there is nothing to judge.
        """
        talks = self._generation.conversations
        if talks is not None and self.broken and not scored:
            everything = Group(prompt=_NOBODY, rollouts=tuple(self.broken))
            talks.faulty([everything], is_learned_from=False)
        self._reward.settle(scored)

    def close(self) -> None:
        """Let the engine, the tools and the reward's processes go."""
        self._generation.close()
        self._reward.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
