"""Reset of inherited signal state at the start of a process.

Blocked and ignored signals are inherited. With SIGCHLD ignored the kernel keeps no exit codes:
Python then reads 0 for a child that failed. With SIGTERM blocked a run cannot be ended.
"""

import signal

from luyen.base.system import signals, unblock_signals

NEEDED = signals("SIGCHLD", "SIGALRM", "SIGXCPU", "SIGPROF", "SIGVTALRM")
"""What limits and exit codes depend on. SIGHUP stays ignored: that is what `nohup` is for."""


def reset_signals() -> None:
    """Unblock all signals, and restore the default handlers of needed ones that are ignored."""
    unblock_signals()
    for number in NEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
