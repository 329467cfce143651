"""From a configuration to a wired run. The one place that knows every package."""

import importlib.util
import sys

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.seeds import derive_key
from luyen.config.check import Report
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rewards.build import build_reward
from luyen.rollout.build import Surroundings, stop_tokens
from luyen.rollout.protocol import Sampling
from luyen.telemetry.display import Display
from luyen.train.build_learning import learning_rules
from luyen.train.build_roles import build_roles
from luyen.train.recorder import Recorder
from luyen.train.run import OnlineRun


def import_plugins(paths: tuple[str, ...]) -> None:
    """Run each plugin file once, so that what it registers exists in this process."""
    for path in paths:
        file = expanded(path).resolve()
        name = f"luyen_plugin_{derive_key(0, str(file)):x}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, f"{path} passed the check of trainer.plugins"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        model_path=model.path,
        more_stops=stop_tokens(config.actor_rollout_ref.rollout.multi_turn),
    )


def build_run(
    report: Report,
    data: TrainData,
    tokenizer: Tokenizer,
    recorder: Recorder,
    display: Display,
    surroundings: Surroundings | None,
) -> OnlineRun:
    """Every part of a run, made from a configuration that passed its check."""
    config = report.config
    rules = learning_rules(config)
    reward = build_reward(config.reward, max_response_length=config.data.max_response_length)
    validation = data.validation.prompts if data.validation is not None else ()
    reward.check_sources({p.data_source for p in (*data.train.prompts, *validation)})
    return OnlineRun(
        config=config,
        data=data,
        roles=build_roles(
            config,
            data.renderer,
            tokenizer,
            rules.needs,
            report.plan.where.device,
            surroundings=surroundings,
        ),
        reward=reward,
        rules=rules,
        sampling=training_sampling(config, tokenizer),
        recorder=recorder,
        display=display,
        total_steps=total_steps(config, len(data.train.prompts)),
    )


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the run; a UserError when the rows do not make one."""
    trainer, data = config.trainer, config.data
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    steps = trainer.total_epochs * rows // data.train_batch_size
    if steps == 0:
        raise UserError(
            "data.train_batch_size",
            data.train_batch_size,
            f"{trainer.total_epochs} epochs of {rows} rows do not fill one step",
            "lower train_batch_size, or set trainer.total_training_steps",
        )
    return steps


def training_sampling(config: RunConfig, tokenizer: Tokenizer) -> Sampling:
    """How training draws."""
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        stop_ids=tokenizer.stop_ids,
    )
