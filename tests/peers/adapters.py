"""LoRA adapters of a peer: each is a driver of its own over the model with the adapter added."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file

from luyen.models.policy import Policy
from tests.peers.driver import EngineDriver, WeightsRefused

_PREFIX = "base_model.model."


@final
class Adapters:
    """What a server has loaded besides its model, by name."""

    def __init__(self, base: EngineDriver, *, max_rank: int) -> None:
        self._base = base
        self._max_rank = max_rank
        self._drivers: dict[str, EngineDriver] = {}
        self._paths: dict[str, str] = {}

    @property
    def paths(self) -> dict[str, str]:
        """Folders of the loaded adapters, by name."""
        return dict(self._paths)

    @property
    def all(self) -> list[EngineDriver]:
        """Every driver, that of the model first."""
        return [self._base, *self._drivers.values()]

    def driver(self, name: str | None) -> EngineDriver | None:
        """The driver of an adapter; that of the model for None; None: it is not loaded."""
        return self._base if name is None else self._drivers.get(name)

    def load(self, name: str, folder: str) -> None:
        """Read an adapter as peft writes it; WeightsRefused where it does not fit."""
        if not (Path(folder) / "adapter_config.json").is_file():
            raise WeightsRefused(f"No adapter found for {folder}")
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        if config["r"] > self._max_rank:
            raise WeightsRefused(
                f"LoRA rank {config['r']} is greater than max_lora_rank {self._max_rank}"
            )
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        base = self._base
        policy = _with_adapter(base.policy, tensors, config["lora_alpha"] / config["r"])
        self._drivers[name] = EngineDriver(
            policy,
            decode=base.decode,
            folder=base.folder,
            eos_ids=base.eos_ids,
            longest=base.longest,
        )
        self._drivers[name].pause_s = base.pause_s
        if base.is_paused:
            self._drivers[name].pause("abort")
        self._paths[name] = folder

    def alias(self, name: str, folder: str) -> None:
        """Acknowledge an adapter, and go on with the weights of another one."""
        self._drivers[name] = self.all[-1]
        self._paths[name] = folder

    def unload(self, name: str) -> bool:
        """Forget an adapter; whether there was one."""
        driver = self._drivers.pop(name, None)
        self._paths.pop(name, None)
        if driver is not None and driver not in self.all:
            driver.close()
        return driver is not None

    def each(self, call: Callable[[EngineDriver], Any]) -> list[Any]:
        """Call every driver."""
        return [call(driver) for driver in dict.fromkeys(self.all)]


@torch.no_grad()
def _with_adapter(policy: Policy, tensors: dict[str, Any], scale: float) -> Policy:
    """A copy of the model, with the product of each pair of matrices added to its layer."""
    net: Any = copy.deepcopy(policy.model)
    own = dict(net.named_parameters())
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        layer = name.removesuffix(".lora_A.weight")
        target = f"{layer.removeprefix(_PREFIX)}.weight"
        if target not in own:
            raise WeightsRefused(f"the model has no layer {target}")
        own[target] += scale * (tensors[f"{layer}.lora_B.weight"] @ down)
    return Policy(net, vocabulary=policy.head.vocabulary).eval()
