"""A recorded batch of eight sequences in three groups, and engines that learn from it."""

import torch

from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching, PackedBatch, pack
from luyen.engine.critic import CriticEngine
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import RowLearner
from luyen.models.policy import ValueModel
from luyen.runtime.in_process import LocalWorkers
from luyen.runtime.offline import OfflineRoles, OfflineWorker
from tests.tiny_models import tiny_policy

LENGTHS = (9, 4, 20, 33, 7, 12, 40, 5)
OPTIM = OptimConfig(lr=0.01, clip_grad=1e9, weight_decay=0.0)


def recorded(*, garbage: float | None = None) -> PackedBatch:
    """Streams are random on trainable tokens and `garbage` (0 by default) elsewhere."""
    generator = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, 60, (n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[int(i >= 3 and i % 7 != 5) for i in range(n)] for n in LENGTHS]
    batch = pack(sequences, masks=masks, groups=[0, 0, 0, 1, 1, 1, 2, 2])
    mask = batch.layout.mask
    rest = torch.tensor(0.0 if garbage is None else garbage)

    def stream(scale: float, shift: float = 0.0) -> torch.Tensor:
        numbers = torch.randn(mask.shape, generator=generator) * scale + shift
        return torch.where(mask, numbers, rest)

    return batch.with_streams(
        old_logp=stream(0.5, -4.0),
        ref_logp=stream(0.5, -4.0),
        rollout_logp=stream(0.5, -4.0),
        is_weights=stream(0.1, 1.0),
        advantages=stream(1.0),
        values=stream(1.0),
        returns=stream(1.0),
    )


def whole(learner: RowLearner, passes: MicroBatching) -> OfflineRoles:
    """A learner of this process for whole batches, in these passes."""
    return OfflineRoles(LocalWorkers(OfflineWorker(learner=learner)), passes)


def actor(passes: MicroBatching, *, temperature: float = 1.0) -> ActorEngine:
    """An engine over a fresh policy; the same one each time."""
    policy = tiny_policy(initializer_range=0.1)
    return ActorEngine(
        policy, MasterOptimizer(policy.parameters(), OPTIM), passes, temperature=temperature
    )


def critic(passes: MicroBatching) -> CriticEngine:
    """An engine over a fresh value model with a head that is not 0."""
    model = ValueModel(tiny_policy(initializer_range=0.1))
    torch.nn.init.normal_(model.value.weight, generator=torch.Generator().manual_seed(1))
    return CriticEngine(
        model,
        MasterOptimizer(model.parameters(), OPTIM),
        passes,
        cliprange_value=0.5,
        aggregation="token-mean",
        loss_scale_factor=None,
    )


PASSES = {
    "one by one": MicroBatching(sequences=1),
    "three at once": MicroBatching(sequences=3),
    "by tokens": MicroBatching(max_tokens=45),
    "all at once": MicroBatching(sequences=8),
}
