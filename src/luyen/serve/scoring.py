"""Reward models under /v1/score: conversations in, a score for each answer or each step out."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.records import Message, Source
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint
from luyen.checkpoint.tensors import load_state
from luyen.config.model_folder.files import InvalidFile, read_object
from luyen.config.schema.model import ModelConfig
from luyen.config.trust import require_trust
from luyen.data.formats.records import SteppedRow
from luyen.data.formats.render import render_steps
from luyen.data.messages import check_conversation, check_tools
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.models.load import choose_threads
from luyen.models.reward_model import RewardModel, load_reward_model, read_facts
from luyen.models.weights import restore_parameters
from luyen.pipeline.policy_loading import device_for, find_checkpoint, read_config
from luyen.rewards.reward_model import ModelInput
from luyen.runtime.reward_model import LocalScorer
from luyen.serve.dispatch import ServeLimits
from luyen.serve.failures import ApiFailure, queue_full, stopping, too_slow, unknown_model, wrong
from luyen.serve.fields import Read, listed, read_fields, text
from luyen.serve.metrics import ServerMetrics
from luyen.serve.model import weight_digest
from luyen.serve.service import Body, Endpoints, wrong_kind
from luyen.train.builders.setup import load_run_tokenizer

_FIELD = "CHECKPOINT"
_LONGEST = 32_768
_MOST_CONVERSATIONS = 1024
_AT_ONCE = 64
"""Conversations of one pass."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedRewardModel:
    """A reward model under the name that clients call it by.

    Example:
        >>> sorted(ServedRewardModel.__slots__)[:3]
        ['digest', 'is_stepwise', 'max_model_len']
    """

    name: str
    """Name in requests and replies."""
    scorer: LocalScorer
    """The model."""
    renderer: Renderer
    """Its tokenizer and chat template."""
    is_stepwise: bool
    """Whether it scores every line of an answer."""
    max_model_len: int
    """Most tokens of a conversation."""
    digest: str
    """Hash of all weights."""


def is_reward_model(path: str, *, is_trusted: bool) -> bool:
    """Whether a checkpoint, a run directory or a model folder holds a reward model.

    Another user's run that names code is refused unless `is_trusted`, before it is read.
    """
    place = expanded(path)
    is_checkpoint = place.parent.name == "checkpoints"
    run = RunDirectory(place.parent.parent if is_checkpoint else place)
    if run.exists:
        require_trust(run, is_trusted=is_trusted)
        return read_config([run.config], []).trainer.stage == "reward_model"
    try:
        config = read_object(place, "config.json")
    except InvalidFile:
        return False
    kinds: Any = (config or {}).get("architectures")
    return isinstance(kinds, list) and any(
        str(kind).endswith("ForSequenceClassification") for kind in cast(list[Any], kinds)
    )


def open_reward_model(
    path: str, *, name: str | None, overrides: Sequence[str], is_trusted: bool
) -> ServedRewardModel:
    """Load the reward model of a checkpoint, of a run's newest one, or of a model folder."""
    found = find_checkpoint(path)
    if found is not None:
        file = _config_file(found)
        require_trust(RunDirectory(file.parent), is_trusted=is_trusted)
        config = read_config([file], overrides)
        block = config.actor_rollout_ref.model
        tokenizer, is_stepwise = load_run_tokenizer(config), _judges_steps(config)
    else:
        model_path = f'actor_rollout_ref.model.path="{path}"'
        config = read_config([], [model_path, *overrides])
        block, is_stepwise = config.actor_rollout_ref.model, read_facts(path, field=_FIELD)
        is_stepwise = bool(is_stepwise.is_stepwise)
        tokenizer = load_tokenizer(path)
    model = _loaded(block, found, device=device_for(config), seed=config.trainer.seed)
    choose_threads(model)
    positions = read_facts(block.path, field=_FIELD).positions
    rollout = config.actor_rollout_ref.rollout
    longest = min(n for n in (rollout.max_model_len, positions, _LONGEST) if n is not None)
    return ServedRewardModel(
        name=name or path,
        scorer=LocalScorer(
            model,
            max_tokens=max(longest, rollout.max_num_batched_tokens),
            max_sequences=min(_AT_ONCE, rollout.max_num_seqs),
        ),
        renderer=_renderer(tokenizer, config.data.apply_chat_template_kwargs, path),
        is_stepwise=is_stepwise,
        max_model_len=longest,
        digest=weight_digest(model),
    )


def _config_file(found: Checkpoint) -> Path:
    return found.path.parent.parent / "config.yaml"


def _judges_steps(config: Any) -> bool:
    return config.reward_training.objective == "process"


def _renderer(tokenizer: Tokenizer, kwargs: Mapping[str, Any], path: str) -> Renderer:
    if not tokenizer.has_template:
        why = "its tokenizer has no chat template"
        raise UserError(_FIELD, path, why, "add a chat template to its tokenizer's files")
    return Renderer(tokenizer, template_kwargs=kwargs)


def _loaded(block: ModelConfig, found: Checkpoint | None, *, device: str, seed: int) -> RewardModel:
    block = block.model_copy(update={"enable_gradient_checkpointing": False})
    if found is None:
        return load_reward_model(block, device=device, field=_FIELD)
    model = load_reward_model(block, device=device, field=_FIELD, new_head=seed)
    restore_parameters(model, load_state(found.path, "actor"))
    return model


def score_input(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], model: ServedRewardModel
) -> ModelInput:
    """What the model reads of a conversation, and where it scores: as in training."""
    *before, last = messages
    if model.is_stepwise:
        lines = [line for line in str(last["content"]).splitlines() if line.strip()]
        steps = tuple(lines) or ("",)
        row = SteppedRow(
            prompt=tuple(before), steps=steps, labels=(None,) * len(steps), tools=tuple(tools)
        )
        laid = render_steps(row, model.renderer)
        start = len(laid.prompt)
        judged = tuple(start + end for end in laid.ends)
        return ModelInput(tokens=laid.prompt + laid.tokens, prompt=start, judged=judged)
    found = model.renderer.conversation(messages, tools)[-1]
    start = found.sources.index(Source.SAMPLED) if Source.SAMPLED in found.sources else 0
    return ModelInput(tokens=found.tokens, prompt=start, judged=(len(found.tokens) - 1,))


@final
class ScoreService:
    """The endpoints of one reward model; lives on the event loop."""

    def __init__(self, model: ServedRewardModel, limits: ServeLimits) -> None:
        self.limits = limits
        self.metrics = ServerMetrics()
        self._model = model
        self._open = 0
        self._started = int(time.time())
        # The one thread that the model is used on.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")
        self._is_closed = False
        self.metrics.watch(
            "luyen_open_sequences", "Conversations that are being scored.", lambda: self._open
        )

    @property
    def model(self) -> ServedRewardModel:
        """The model that is served."""
        return self._model

    def endpoints(self) -> Endpoints:
        """What is answered at which path."""
        refused = {
            path: partial(wrong_kind, path, "it is a reward model: use /v1/score")
            for path in ("/v1/completions", "/v1/chat/completions", "/admin/weights")
        }
        return Endpoints(
            posts={"/v1/score": self.score, **refused},
            gets={"/v1/models": self.models, "/health": self.health},
        )

    async def close(self) -> None:
        """End the thread and release the model."""
        self._is_closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._model.scorer.close)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def score(self, body: Body) -> Body:
        """Scores of conversations."""
        readers: dict[str, Read[Any]] = {
            "model": text,
            "messages": _conversation,
            "conversations": listed(_conversation, least=1, most=_MOST_CONVERSATIONS),
            "text_1": text,
            "text_2": _texts,
            "tools": lambda value, _: tuple(check_tools(value, wrong)),
        }
        found = read_fields(body, readers)
        if found.get("model", self._model.name) != self._model.name:
            raise unknown_model(found["model"], self._model.name)
        named = _conversations(found)
        if len(named) > self.limits.max_queue:
            # It would never be taken: to retry, as status 429 says, is no use.
            why = f"it has {len(named)} conversations, and the server takes {self.limits.max_queue}"
            field = named[0][0].partition("[")[0]
            raise wrong(field, len(named), f"{why} at once", "send fewer in a request")
        if self._open + len(named) > self.limits.max_queue:
            raise queue_full(self._open, self.limits.max_queue)
        self._open += len(named)
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                inputs, scores = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._scored, named, found.get("tools", ())
                )
        except TimeoutError:
            raise too_slow(self.limits.timeout_s) from None
        finally:
            self._open -= len(named)
        return self._reply(inputs, scores)

    def _scored(
        self,
        named: Sequence[tuple[str, Sequence[Message]]],
        tools: Sequence[Mapping[str, Any]],
    ) -> tuple[list[ModelInput], list[tuple[float, ...]]]:
        """Runs on the thread of the model."""
        inputs: list[ModelInput] = []
        most = self._model.max_model_len
        for field, messages in named:
            try:
                made = score_input(messages, tools, self._model)
            except UserError as error:
                # Its own field would name a file of this machine.
                raise wrong(field, len(messages), error.why, "send other messages") from None
            if len(made.tokens) > most:
                said = f"{field}: it has {len(made.tokens)} tokens, and the model reads {most}"
                code = "context_length_exceeded"
                raise ApiFailure(400, said + ". Fix: shorten it", param=field, code=code)
            inputs.append(made)
        return inputs, self._model.scorer.score(inputs)

    def _reply(self, inputs: Sequence[ModelInput], scores: Sequence[tuple[float, ...]]) -> Body:
        model = self._model
        data: list[Body] = []
        for index, steps in enumerate(scores):
            entry: Body = {"index": index, "object": "score", "score": min(steps)}
            data.append({**entry, "steps": steps} if model.is_stepwise else entry)
        tokens = sum(len(one.tokens) for one in inputs)
        self.metrics.prompt_tokens.inc(tokens)
        return {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.digest,
            "data": data,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        }

    async def models(self) -> Body:
        """The list of models: this one."""
        return {"object": "list", "data": [await self.one_model(self._model.name)]}

    async def one_model(self, name: str) -> Body:
        """The card of the model."""
        model = self._model
        if name != model.name:
            raise unknown_model(name, model.name)
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "luyen",
            "max_model_len": model.max_model_len,
            "system_fingerprint": model.digest,
        }

    async def health(self) -> Body:
        """Whether the model can be used."""
        if self._is_closed:
            raise stopping()
        return {"status": "ok"}


def _conversation(value: Any, name: str) -> tuple[Message, ...]:
    found = check_conversation(value, name, wrong)
    if found[-1]["role"] != "assistant" or len(found) < 2:
        why = "an answer of the assistant after another message is scored"
        raise wrong(f"{name}[{len(found) - 1}].role", found[-1]["role"], why, "add the answer")
    return tuple(found)


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return listed(text, least=1, most=_MOST_CONVERSATIONS)(value, name)


def _conversations(found: Mapping[str, Any]) -> list[tuple[str, Sequence[Message]]]:
    """Each conversation and the field that it came in."""
    forms = [name for name in ("messages", "conversations", "text_1") if name in found]
    if len(forms) != 1 or ("text_1" in found) != ("text_2" in found):
        why = "one of messages, conversations, or text_1 with text_2 is scored"
        raise wrong(forms[-1] if forms else "messages", None, why, "send one of them")
    if "messages" in found:
        return [("messages", found["messages"])]
    if "conversations" in found:
        return [(f"conversations[{i}]", one) for i, one in enumerate(found["conversations"])]
    ask: Message = {"role": "user", "content": found["text_1"]}
    return [
        (f"text_2[{i}]", (ask, {"role": "assistant", "content": answer}))
        for i, answer in enumerate(found["text_2"])
    ]
