"""Kinds of adapters: the arithmetic of peft in training, masks with an address, and exports."""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.seeds import mix
from luyen.config.check import check
from luyen.config.model_folder.config_json import shape_from
from luyen.config.model_memory import trainable
from luyen.config.optimizer_memory import adapter_tensors
from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.config.schema.model import ModelConfig
from luyen.engine.batch import MicroBatching, pack, split_batch
from luyen.engine.optim import MasterOptimizer
from luyen.engine.supervised import SupervisedEngine, TokenAggregation
from luyen.models.adapter_dropout import AdapterDropout, dropout_layers
from luyen.models.export import export_adapter, export_merged
from luyen.models.lora import adapter_layers, adapter_state, add_adapter
from luyen.models.policy import Policy
from luyen.runtime.offline import OfflineRoles
from luyen.train.start import run_training
from tests.runs import MODEL, TINY, train
from tests.tiny_models import read_net, tiny_net
from tests.unit.engine.steps import whole

RANK, ALPHA, LR = 4, 8.0, 1e-3
OPTIM = OptimConfig(lr=LR, weight_decay=0.0)
ROWS = ([3, 9, 4, 11, 7, 21, 5], [8, 2, 6, 30, 12], [40, 41, 42, 43, 44, 45])
KINDS: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True},
    "gaussian": {"lora_init": "gaussian"},
    "dropout": {"lora_dropout": 0.3},
    "DoRA": {"use_dora": True},
    "DoRA, rsLoRA, dropout": {"use_dora": True, "use_rslora": True, "lora_dropout": 0.2},
}


def made(**options: Any) -> Policy:
    net = tiny_net(initializer_range=0.1)
    add_adapter(net, ModelConfig(lora_rank=RANK, lora_alpha=ALPHA, **options))
    return Policy(net, vocabulary=64).eval()


def disturb(policy: Policy) -> None:
    """Move every learned weight by a different amount."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def learner(policy: Policy) -> OfflineRoles:
    trained = [p for p in policy.parameters() if p.requires_grad]
    engine = SupervisedEngine(policy, MasterOptimizer(trained, OPTIM))
    return whole(engine, MicroBatching(sequences=1))


def batch() -> Any:
    masks = [[0, *[1] * (len(row) - 1)] for row in ROWS]
    packed = pack(list(ROWS), masks=masks, groups=list(range(len(ROWS))))
    return TokenAggregation().weigh(packed)


class Masks(nn.Module):
    """Dropout of the plain loop: the masks of an address, written a second time."""

    def __init__(self, share: float, place: int) -> None:
        super().__init__()
        self.share, self.place, self.key = share, place, 0

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(mix(self.key, self.place))
        kept = torch.rand(x.shape, generator=generator) >= self.share
        return torch.where(kept, x / (1 - self.share), torch.zeros_like(x))


def plain_peft(policy: Policy, **options: Any) -> Any:
    """transformers and peft alone, from the adapter that the policy begins with."""
    config = LoraConfig(
        r=RANK,
        lora_alpha=int(ALPHA),
        target_modules="all-linear",
        use_rslora=options.get("use_rslora", False),
        use_dora=options.get("use_dora", False),
        lora_dropout=options.get("lora_dropout", 0.0),
        task_type="CAUSAL_LM",
    )
    model: Any = get_peft_model(tiny_net(initializer_range=0.1), config)
    own = get_peft_model_state_dict(model)
    begin = adapter_state(policy.model)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(begin[name.removeprefix("base_model.model.")])
    if options.get("lora_dropout"):
        layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
        for place, layer in enumerate(layers):
            layer.lora_dropout["default"] = Masks(options["lora_dropout"], place)
    return model.train()


def plain_steps(model: Any, keys: Iterator[int], steps: int) -> None:
    """AdamW on the mean over all tokens, one row in a pass."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=OPTIM.betas, weight_decay=0.0)
    count = sum(len(row) - 1 for row in ROWS)
    for key in itertools.islice(keys, steps):
        for index, row in enumerate(ROWS):
            for module in model.modules():
                if isinstance(module, Masks):
                    module.key = mix(key, index)
            tokens = torch.tensor([row])
            logits = model(tokens).logits[0, :-1].float()
            (F.cross_entropy(logits, tokens[0, 1:], reduction="sum") / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, OPTIM.clip_grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_training_steps_are_those_of_peft(kind: str):
    policy = made(**KINDS[kind])
    disturb(policy)  # a gradient of 0 would make AdamW's step a sign of rounding errors
    reference = plain_peft(policy, **KINDS[kind])
    engine = learner(policy)
    for key in range(3):
        engine.update(batch(), lr=LR, dropout_key=key)
    plain_steps(reference, itertools.count(), 3)
    wanted = get_peft_model_state_dict(reference)
    found = adapter_state(policy.model)
    assert len(found) == len(wanted) > 0
    for name, tensor in wanted.items():
        mine = found[name.removeprefix("base_model.model.")]
        torch.testing.assert_close(mine, tensor, rtol=0, atol=1e-6)


def test_the_kinds_differ():
    def learned(**options: Any) -> Tensor:
        policy = made(**options)
        engine = learner(policy)
        for key in range(3):
            engine.update(batch(), lr=LR, dropout_key=key)
        return torch.cat([t.flatten() for t in adapter_state(policy.model).values()])

    found = [learned(**options) for options in ({}, *KINDS.values())]
    assert not any(
        one.shape == other.shape and torch.allclose(one, other, atol=1e-5)
        for one, other in itertools.combinations(found, 2)
    )


def test_rslora_divides_by_the_root_of_the_rank():
    for layer in adapter_layers(made(use_rslora=True).model).values():
        assert layer.scaling["default"] == ALPHA / math.sqrt(RANK)


def test_a_gaussian_start_has_the_spread_of_peft_and_changes_nothing():
    policy = made(lora_init="gaussian")
    first = torch.cat(
        [t.flatten() for n, t in adapter_state(policy.model).items() if "lora_A" in n]
    )
    assert float(first.std()) == pytest.approx(1 / RANK, rel=0.05)
    tokens, mask = torch.tensor(ROWS[0]), torch.arange(7) > 0
    plain = Policy(tiny_net(initializer_range=0.1), vocabulary=64).eval()
    assert torch.equal(policy(tokens, [7], mask).logp, plain(tokens, [7], mask).logp)


def test_the_norms_of_dora_are_planned():
    policy = made(use_dora=True)
    shape = shape_from(policy.model.config.to_dict())
    assert shape is not None
    count = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert shape.lora_parameters(RANK, has_norms=True) == count
    tensors = list(adapter_tensors(shape, RANK, has_norms=True))
    assert sum(one.size * one.count for one in tensors) == count
    words = [*TINY, f"{MODEL}.lora_rank=4"]
    plain, norms = (
        check([], [*words, f"{MODEL}.use_dora={value}"]).config for value in ("false", "true")
    )
    assert trainable(norms, shape) - trainable(plain, shape) == count - shape.lora_parameters(RANK)


# Masks.


def gradients(key: int, *, checkpointing: bool = False) -> Tensor:
    policy = made(lora_dropout=0.3)
    disturb(policy)
    if checkpointing:
        net: Any = policy.model
        net.gradient_checkpointing_enable({"use_reentrant": False})
    engine = learner(policy)
    caught: list[Tensor] = []
    workers: Any = engine.workers
    optimizer = workers.worker.learner.optimizer
    optimizer.optimizers["adamw"].step = lambda: caught.extend(
        p.grad.flatten().clone() for p in optimizer.masters if p.grad is not None
    )
    engine.update(batch(), lr=LR, dropout_key=key)
    return torch.cat(caught)


def test_masks_depend_on_the_key_and_on_no_global_number():
    first = gradients(5)
    again, other = gradients(5), gradients(6)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    engine = learner(made(lora_dropout=0.3))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    engine.update(batch(), lr=LR, dropout_key=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_the_mean_of_16_bit_inputs_stays(share: float):
    layer = AdapterDropout(share, place=0).train()
    layer.key = 3
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = layer(x).double()
    seen = kept != 0
    x = x.double()
    scale = float((kept * x)[seen].sum() / (x * x)[seen].sum())
    assert scale * (1 - share) == pytest.approx(1.0, abs=2e-4)


def test_a_pass_that_is_computed_again_has_the_same_masks():
    torch.testing.assert_close(gradients(5, checkpointing=True), gradients(5), rtol=0, atol=1e-7)


def test_layers_and_micro_batches_have_masks_of_their_own():
    policy = made(lora_dropout=0.5)
    layers = dropout_layers(policy.model)
    assert len(layers) == len(adapter_layers(policy.model)) == len({one.place for one in layers})
    seen: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda _, x, y: seen.append((y != 0) | (x[0] == 0)))
    rows = [ROWS[0], ROWS[0]]  # the same tokens in both passes
    masks = [[0, *[1] * 6]] * 2
    rowed = TokenAggregation().weigh(pack(rows, masks=masks, groups=[0, 1]))
    learner(policy).update(rowed, lr=LR, dropout_key=0)
    assert len(seen) == 2 * len(layers)
    pairs = [(a, b) for a, b in itertools.combinations(seen, 2) if a.shape == b.shape]
    assert pairs
    assert not any(torch.equal(a, b) for a, b in pairs)
    shares = torch.cat([one.flatten() for one in seen]).float().mean()
    assert float(shares) == pytest.approx(0.5, abs=0.02)


def test_a_rank_without_a_row_takes_the_step_of_the_others():
    """Its passes compute nothing that counts, through the same layers."""
    policy = made(lora_dropout=0.3)
    disturb(policy)
    before = adapter_state(policy.model)
    before = {name: tensor.clone() for name, tensor in before.items()}
    weighed = TokenAggregation().weigh(batch().take([0]))
    _, idle = split_batch(weighed, MicroBatching(sequences=1), ranks=2)
    assert idle.passes == ((),)
    workers: Any = learner(policy).workers
    done = workers.worker.update(idle, lr=LR, dropout_key=5)
    assert done.stepped.is_applied
    assert done.stepped.grad_norm == 0.0
    assert all(torch.equal(t, before[name]) for name, t in adapter_state(policy.model).items())


def test_without_training_nothing_is_masked_and_without_a_key_nothing_trains():
    policy, plain = made(lora_dropout=0.5), made()
    for one in (policy, plain):
        disturb(one)
    tokens, mask = torch.tensor(ROWS[0]), torch.arange(7) > 0
    assert torch.equal(policy(tokens, [7], mask).logp, plain(tokens, [7], mask).logp)
    with pytest.raises(AssertionError, match="gave it a key"):
        policy.train()(tokens, [7], mask)


# Runs.

SFT = (
    *(word for word in TINY if "reward" not in word and "rollout.n=" not in word),
    "trainer.stage=sft",
    "algorithm.adv_estimator=gae",
    "data.train_files=arithmetic://sum?digits=1&size=32&traces=1",
    f"{MODEL}.lora_rank=4",
    "trainer.save_freq=2",
)


def chains(folder: Path, *words: str) -> list[str]:
    report = check([], [*SFT, f"trainer.default_local_dir={folder}", *words])
    assert report.is_sound, report.problems
    run_training(report)
    lines = read_digests(folder / "luyen" / "run" / "digests.jsonl")
    return [line.chain for line in lines]


def test_a_resumed_run_has_the_masks_of_one_that_never_stopped(tmp_path: Path):
    dropout = f"{MODEL}.lora_dropout=0.2"
    whole = chains(tmp_path / "whole", dropout, "trainer.total_training_steps=4")
    chains(tmp_path / "parts", dropout, "trainer.total_training_steps=2")
    torch.manual_seed(77)
    resumed = chains(tmp_path / "parts", dropout, "trainer.total_training_steps=4")
    assert resumed == whole
    assert chains(tmp_path / "plain", "trainer.total_training_steps=4") != whole


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "dropout" not in kind])
def test_sampler_and_trainer_agree_to_the_bit(kind: str, tmp_path: Path):
    words = [f"{MODEL}.{name}={str(value).lower()}" for name, value in KINDS[kind].items()]
    ran = train(tmp_path, f"{MODEL}.lora_rank=4", *words, "trainer.total_training_steps=3")
    assert ran.course("parity/max_gap") == [0.0] * 3
    assert ran.course("parity/exact_fraction") == [1.0] * 3


# Exports and adapters that are read.


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([ROWS[0]])).logits.float()


@pytest.mark.parametrize("kind", KINDS)
def test_exports_have_the_logits_of_the_policy(kind: str, tmp_path: Path):
    base = tiny_net(initializer_range=0.1)
    base.save_pretrained(tmp_path / "base")
    policy = made(**KINDS[kind])
    disturb(policy)
    tokens, mask = torch.tensor(ROWS[0]), torch.arange(7) > 0
    wanted = policy(tokens, [7], mask).logp.detach()

    def logp(model: Any) -> Tensor:
        scores = logits(model)[0, :-1].log_softmax(-1)
        return scores.gather(1, tokens[1:, None])[:, 0]

    (tmp_path / "adapter").mkdir()
    export_adapter(policy, str(tmp_path / "base"), tmp_path / "adapter")
    read: Any = PeftModel.from_pretrained(read_net(tmp_path / "base"), str(tmp_path / "adapter"))
    torch.testing.assert_close(logp(read), wanted, rtol=0, atol=1e-5)
    export_merged(policy, str(tmp_path / "base"), tmp_path / "whole", stop_ids=frozenset({2}))
    torch.testing.assert_close(logp(read_net(tmp_path / "whole")), wanted, rtol=0, atol=1e-5)
    again = made(**KINDS[kind], lora_adapter_path=str(tmp_path / "adapter"))
    assert torch.equal(again(tokens, [7], mask).logp, wanted)


def test_an_adapter_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "adapter").mkdir()
    export_adapter(made(use_rslora=True), str(tmp_path), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["use_rslora"] is True
    with pytest.raises(UserError, match="was trained with True") as refused:
        made(lora_adapter_path=str(tmp_path / "adapter"))
    assert refused.value.field == f"{MODEL}.use_rslora"
    words = [f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"]
    path = f"{MODEL}.lora_adapter_path={tmp_path / 'adapter'}"
    found = {p.field for p in check([], [*TINY, *words, path]).problems}
    assert f"{MODEL}.use_rslora" in found
    again = check([], [*TINY, *words, path, f"{MODEL}.use_rslora=true"])
    assert f"{MODEL}.use_rslora" not in {p.field for p in again.problems}
