"""The planned activations against the tensors that a pass really has alive at once."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from luyen.config.loader.load import load
from luyen.config.loader.parse import parse
from luyen.config.model_folder.config_json import read_shape
from luyen.config.model_memory import PassMemory, PassTokens
from luyen.config.plan import plan_batches
from luyen.config.schema.run import RunConfig
from luyen.engine.batch import PackedBatch, pack
from luyen.models.load import load_policy

MODEL = "actor_rollout_ref.model"
GROUPS, SAMPLES, PROMPT, NEW, VOCABULARY = 8, 4, 64, 64, 4096


@final
class Alive(TorchDispatchMode):
    """Counts the bytes of every tensor from its making to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return out

    def see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.total += storage.nbytes()
            self.peak = max(self.peak, self.total)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        self.total -= self.sizes.pop(key, 0)


def config_of(*more: str) -> RunConfig:
    words = [
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={GROUPS}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={NEW}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS}",
        f"{MODEL}.init=random",
        f"{MODEL}.override_config={{vocab_size: {VOCABULARY}}}",
    ]
    return parse(load([], [*words, *more])).config


def batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    sequences: list[list[int]] = []
    for _ in range(GROUPS):
        prompt = torch.randint(3, 100, (PROMPT,), generator=generator).tolist()
        for _ in range(SAMPLES):
            sequences.append(prompt + torch.randint(3, 100, (NEW,), generator=generator).tolist())
    masks = [[0] * PROMPT + [1] * NEW for _ in sequences]
    return pack(sequences, masks=masks, groups=[i // SAMPLES for i in range(len(sequences))])


@pytest.mark.parametrize("is_checkpointed", ["false", "true"])
@pytest.mark.parametrize("saving", ["", "tiled_mlp.enabled", "use_fused_kernels"])
def test_the_plan_of_an_update_is_within_fifteen_percent(is_checkpointed: str, saving: str):
    torch.set_num_threads(1)
    words = [f"{MODEL}.enable_gradient_checkpointing={is_checkpointed}"]
    config = config_of(*words, *([f"{MODEL}.{saving}=true"] if saving else []))
    model = config.actor_rollout_ref.model
    shape = read_shape(model)
    assert shape is not None
    tokens = PassTokens.of(config, plan_batches(config, world_size=1))
    planned = PassMemory(shape=shape, model=model, tokens=tokens, width=4, device="cpu")
    policy = load_policy(model, device="cpu", vocabulary=VOCABULARY).train()
    packed = batch()
    assert tokens.packed == packed.tokens.numel()
    with Alive() as alive:
        scored = policy(
            packed.tokens, packed.lengths, packed.layout.mask, entropy=True, entropy_gradient=False
        )
        scored.logp.sum().backward()
    said = planned.forward_bytes() + max(planned.head(is_learning=True), planned.layer())
    assert 0.85 < said / alive.peak < 1.15
