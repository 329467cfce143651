"""The reasoning-gym environment: it poses a task, verifies answers, and may allow retries."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.rollout.env.protocol import Observation, envs, number_or_none, with_text
from luyen.rollout.tools.executors import ThreadExecutor
from luyen.rollout.tools.protocol import Tool

if TYPE_CHECKING:
    from luyen.data.reasoning_gym_adapter import GymTask

_FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
_ROW = "reasoning_gym"
_FEEDBACK = "That is not right. Try again."
_RIGHT = 1.0
_threads = ThreadExecutor(most_hanging=64)
"""Verifiers are third-party code: one that hangs must not stop the other conversations."""


@final
class ReasoningGymEnv:
    """One task. It is over when an answer is right, or after the last attempt.

    The reward is what the dataset's own verifier says about the last answer, or about None where
    there was no whole answer. A verifier that raises is a fault.
    """

    def __init__(
        self,
        *,
        dataset: str | None = None,
        config: Mapping[str, Any] | None = None,
        attempts: int = 1,
        feedback: str = _FEEDBACK,
    ) -> None:
        """`dataset` and `config` are for rows without an entry; `feedback` follows a wrong try."""
        if attempts < 1:
            raise UserError(
                f"{_FIELD}: attempts", attempts, "no answer would be allowed", "set 1 or more"
            )
        self._dataset = dataset
        self._config = dict(config or {})
        self._left = attempts
        self._feedback = feedback
        self._task: GymTask | None = None
        self._verdict: float | None = None

    @property
    def tools(self) -> Sequence[Tool]:
        """None."""
        return ()

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """The row's own task with its prompt, or a generated one as the user's message.

        The seed is the row's `seed`, which a group shares, or else `key`.
        """
        carried = prompt.extra_info.get(_ROW)
        if isinstance(carried, Mapping):
            task = cast(Mapping[str, Any], carried)
            named = {"dataset": str(task["dataset"]), "entry": task["entry"]}
            self._task = await _threads.run(_adapter().task_from_entry, named)
            return prompt.messages
        if self._dataset is None:
            why = f"the row carries no `{_ROW}` in extra_info, and no dataset is set to make one"
            raise UserError(f"{_FIELD}: dataset", None, why, "set dataset: NAME")
        seed = int(prompt.extra_info.get("seed", key))
        wanted = {"dataset": self._dataset, "config": self._config, "seed": seed}
        self._task = await _threads.run(_adapter().make_task, wanted)
        assert self._task is not None
        return with_text(prompt.messages, str(self._task.entry["question"]))

    async def act(self, messages: Sequence[Message]) -> Observation:
        """Verify the answer; a wrong one is followed by the feedback while attempts are left."""
        self._left -= 1
        text = str(messages[-1].get("content") or "")
        self._verdict = await self._verify(_adapter().answer_in(text))
        if self._verdict >= _RIGHT or self._left == 0:
            return Observation(is_done=True)
        return Observation(messages=({"role": "user", "content": self._feedback},))

    async def score(self) -> float | None:
        """The verdict on the last answer."""
        if self._verdict is None and self._task is not None:
            self._verdict = await self._verify(None)
        return self._verdict

    async def close(self) -> None:
        """There is nothing to release."""

    async def _verify(self, answer: str | None) -> float:
        assert self._task is not None
        said = await _threads.run(
            self._task.score_answer, {"answer": answer, "entry": self._task.entry}
        )
        verdict = number_or_none(said, "the verifier of reasoning-gym")
        if verdict is None:
            raise TypeError("the verifier of reasoning-gym gave no score")
        return verdict


def _adapter() -> ModuleType:
    try:
        from luyen.data import reasoning_gym_adapter
    except ImportError as error:
        fix = 'install it: pip install "luyen[tasks]"'
        raise UserError(_FIELD, _ROW, "reasoning-gym is not installed", fix) from error
    return reasoning_gym_adapter


@envs.register("reasoning_gym")
def gym(
    *,
    dataset: str | None = None,
    config: Mapping[str, Any] | None = None,
    attempts: int = 1,
    feedback: str = _FEEDBACK,
) -> ReasoningGymEnv:
    """A task of reasoning-gym."""
    return ReasoningGymEnv(dataset=dataset, config=config, attempts=attempts, feedback=feedback)
