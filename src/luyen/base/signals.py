"""Signals as a fresh process has them, whatever the process that started it left behind.

Blocked and ignored signals are inherited. With SIGCHLD ignored the kernel keeps no exit codes:
Python then reads 0 for a child that failed. With SIGTERM blocked nobody can end a run.
"""

import signal

NEEDED = (
    signal.SIGCHLD,
    signal.SIGALRM,
    signal.SIGXCPU,
    signal.SIGPROF,
    signal.SIGVTALRM,
)
"""What limits and exit codes depend on. SIGHUP stays ignored: that is what `nohup` is for."""


def reset_signals() -> None:
    """Unblock all signals, and undo that needed ones are ignored; for the start of a process."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in NEEDED:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
