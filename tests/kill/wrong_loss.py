"""A loss that breaks on the last rank, and takes the connections to it along."""

from importlib import import_module

from luyen.algorithms.policy_losses.inputs import PolicyInputs, TokenLoss, policy_losses


@policy_losses.register("wrong_on_the_last")
def wrong_on_the_last(inputs: PolicyInputs) -> TokenLoss:
    """What a mistake of a user looks like on several ranks."""
    ranks = import_module("torch.distributed")
    if ranks.get_rank() == ranks.get_world_size() - 1:
        ranks.destroy_process_group()
        raise ValueError("this loss is wrong")
    return TokenLoss(per_token=-inputs.advantages * inputs.logp, metrics={})
