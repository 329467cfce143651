"""A few rollouts of a policy, played as training or validation would play them."""

from luyen.base.errors import UserError
from luyen.base.records import Prompt, Rollout
from luyen.rollout.protocol import Sampling
from luyen.train.checkpointed import Opened
from luyen.train.draws import draws_of
from luyen.train.player import Player
from luyen.train.sampling import training_sampling, validation_sampling


def played(
    opened: Opened, *, count: int, samples: int, is_validation: bool
) -> list[tuple[Prompt, Rollout]]:
    """Rollouts of the first prompts, judged; those that broke are among them."""
    data = opened.config.data
    files = data.val_files if is_validation else data.train_files
    if not files:
        field = f"data.{'val' if is_validation else 'train'}_files"
        raise UserError(field, None, "there are no rows to play", "name a file or a task source")
    sampling: Sampling = training_sampling(opened.config, opened.tokenizer)
    if is_validation:
        sampling = validation_sampling(opened.config, opened.tokenizer)
    with Player(opened) as player:
        prompts = player.prompts(files, most=count)
        draws = draws_of(prompts, step=0, first=0, samples=samples)
        purpose = "validation" if is_validation else "rollout"
        scored = player.play(draws, sampling, purpose=purpose)
        by_uid = {prompt.uid: prompt for prompt in prompts}
        found = [rollout for group in scored for rollout in group.rollouts]
        found = sorted([*found, *player.broken], key=lambda rollout: rollout.key)
    return [(by_uid[rollout.group.uid], rollout) for rollout in found]
