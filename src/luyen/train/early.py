"""The next step's rollouts begin as soon as its weights are there, while this one is written down.

They are asked for while others learn. What is drawn depends on the weights alone, so it is what
would be drawn later.
"""

from luyen.data.samplers import AdaptiveSampler
from luyen.runtime.roles import Described
from luyen.train.run import OnlineRun
from luyen.train.supply import InOrder
from luyen.train.work import weights_print


def ask_early(run: OnlineRun) -> None:
    """Ask for the rollouts of the step after the one that is being learned, while it is.

    They are drawn as soon as the weights are there, if nothing comes between. Work that an earlier
    process has done of that step is not done again: with that, it is asked for when it is known
    whose weights it depends on.
    """
    supply = _supply(run)
    if supply is not None and _is_next_at_once(run) and not _has_work_of(run, run.step + 2):
        supply.ask_early(run.step + 2, version=run.version + 1)


def know_weights(run: OnlineRun, held: Described) -> None:
    """`held` are the weights that the next step is drawn with; ask for it, if nobody has."""
    supply = _supply(run)
    if supply is None or not (supply.has_early or _is_next_at_once(run)):
        return
    with run.phase("digest"):
        run.origin = run.chain, weights_print(held)
        if supply.has_early:
            supply.know(run.origin, version=run.version + 1)
        else:
            supply.ask_up_to(run.step + 2, version=run.version + 1, origin=run.origin)


def _supply(run: OnlineRun) -> InOrder | None:
    return run.supply if isinstance(run.supply, InOrder) else None


def _has_work_of(run: OnlineRun, step: int) -> bool:
    """Whether a process has written down work of a step that is still to come."""
    journals = run.recorder.journals
    return journals is not None and journals.has(step, kind="work")


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
