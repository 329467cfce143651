"""What a tool or a session may say about itself, besides what every one does."""

from luyen.rollout.tools.protocol import ToolSession


class Standing:
    """Mark of a tool with one session for all rollouts: it holds nothing and scores nothing.

    Such a session is neither opened nor scored nor released, all of which can take time.
    """

    session: ToolSession


class Remembers:
    """Mark of a session whose calls depend on earlier ones: they share its state.

    The state dies with the process. A rollout that is played again after that makes them again.
    """


class RunLimits:
    """Mark of a tool that says nothing about how long it may run: the run's limit holds."""


class OneAtATime(Remembers):
    """Mark of a session whose calls must not overlap, since they share its state."""


class OwnClock:
    """Mark of a session that keeps the time of a call itself, and raises `TimeIsUp`.

    It is for calls that wait for a process first: the wait must not count.
    """


class TimeIsUp(Exception):
    """A call took longer than the limit of its tool."""
