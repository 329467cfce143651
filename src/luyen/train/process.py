"""What every process of a run does first: import the plugins, and load the tokenizer."""

import importlib.util
import sys

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary
from luyen.base.paths import expanded
from luyen.base.seeds import derive_key
from luyen.config.schema.run import RunConfig
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from luyen.rollout.build import stop_tokens


def import_plugins(paths: tuple[str, ...]) -> None:
    """Run each plugin file once, so that what it registers exists in this process.

    A UserError when one raises, whatever it raises.
    """
    for path in paths:
        file = expanded(path).resolve()
        name = f"luyen_plugin_{derive_key(0, str(file)):x}"
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None, f"{path} passed the check of trainer.plugins"
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        faults: list[BaseException] = []
        with boundary(faults):
            spec.loader.exec_module(module)
        if faults:
            raise _broken(path, faults[0]) from faults[0]
        sys.modules[name] = module


def _broken(path: str, fault: BaseException) -> UserError:
    if isinstance(fault, UserError):
        return fault
    why = f"importing it failed: {last_line(fault)}"
    return UserError("trainer.plugins", path, why, "mend the file")


def load_run_tokenizer(config: RunConfig) -> Tokenizer:
    """The tokenizer of a run."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        model_path=model.path,
        more_stops=stop_tokens(config.actor_rollout_ref.rollout.multi_turn),
    )
