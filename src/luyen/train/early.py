"""The next step's rollouts begin as soon as its weights are there, while this one is written down.

What is drawn depends on the weights alone, so it is what would be drawn later.
"""

from luyen.data.samplers import AdaptiveSampler
from luyen.runtime.roles import Described
from luyen.train.run import OnlineRun
from luyen.train.work import weights_print


def ask_early(run: OnlineRun, held: Described) -> None:
    """Ask for the rollouts of the step after the one that is learned, if nothing comes between.

    `held` are the weights that they are to be drawn with.
    """
    if not _is_next_at_once(run):
        return
    with run.phase("digest"):
        run.origin = run.chain, weights_print(held)
        run.supply.ask_up_to(run.step + 2, version=run.version + 1, origin=run.origin)


def foresee(run: OnlineRun) -> None:
    """Have the prompts ready of what will be asked for early."""
    if _is_next_at_once(run):
        run.asking.foresee(run.step + 2, version=run.version + 1)


def _is_next_at_once(run: OnlineRun) -> bool:
    """Whether others draw the next step when this one is learned, and its rows are known then."""
    trainer, learned = run.config.trainer, run.step + 1
    return (
        run.roles.draws_elsewhere
        and trainer.max_staleness == 0
        and learned < run.last_step
        and not run.interruption.is_wanted
        and not any(run.is_due_after(learned, n) for n in (trainer.test_freq, trainer.save_freq))
        and not isinstance(run.data.sampler, AdaptiveSampler)
    )
