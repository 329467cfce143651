"""Takes from Luyen what only Linux and its kin have; Python loads it at the start of a process.

Modules of `luyen` that import `resource`, `fcntl` and the like get an ImportError; `os`, `signal`
and `select` lack the names that Windows lacks; nothing is below /proc and /sys. Other libraries are
left alone: they have builds of their own for other systems. What was refused is appended to the
file that LUYEN_REFUSED names, so that a test knows that something was.
"""

import builtins
import io
import os
import select
import signal
import sys
from types import ModuleType

MODULES = {"resource", "fcntl", "termios", "pwd", "grp", "syslog", "tty", "pty"}
NAMES = {
    os: (
        *("fork", "forkpty", "register_at_fork", "sched_getaffinity", "sysconf", "uname"),
        *("getuid", "geteuid", "getgid", "getegid", "setsid", "getpgid", "killpg", "wait"),
        *("pread", "pwrite", "statvfs", "mkfifo", "posix_fadvise", "fchmod", "fchown", "chown"),
        *("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY", "WNOHANG", "set_blocking"),
    ),
    signal: (
        *("SIGHUP", "SIGALRM", "SIGXCPU", "SIGPROF", "SIGVTALRM", "SIGCHLD", "SIGKILL", "SIGUSR1"),
        *("SIGUSR2", "SIGPIPE", "SIGQUIT", "pthread_sigmask", "setitimer", "alarm", "ITIMER_REAL"),
    ),
    select: ("poll", "epoll"),
}
HIDDEN = ("/proc", "/sys")


def refused(name: str) -> None:
    place = os.environ.get("LUYEN_REFUSED")
    if place is not None:
        with real_open(place, "a") as file:
            file.write(f"{name}\n")


class Without(ModuleType):
    """A module without some of its names."""

    def __init__(self, real: ModuleType, names: tuple[str, ...]) -> None:
        super().__init__(real.__name__)
        vars(self).update({k: v for k, v in vars(real).items() if k not in names})
        self._hidden = names

    def __getattr__(self, name: str) -> object:
        refused(f"{self.__name__}.{name}")
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}' (blocked)")


STRIPPED = {real.__name__: Without(real, names) for real, names in NAMES.items()}
real_import, real_open = builtins.__import__, builtins.open


def is_ours(importer: object) -> bool:
    name = importer.get("__name__", "") if isinstance(importer, dict) else ""
    file = str(importer.get("__file__", "")) if isinstance(importer, dict) else ""
    return name.split(".")[0] == "luyen" or (name == "__main__" and "/luyen/" in file)


def blocking_import(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and is_ours(globals):
        if name in MODULES:
            refused(name)
            raise ModuleNotFoundError(f"No module named '{name}' (blocked)", name=name)
        if name in STRIPPED:
            return STRIPPED[name]
    return real_import(name, globals, locals, fromlist, level)


def without_hidden(function):
    def call(path=".", *args, **kwargs):
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if isinstance(text, str) and text.startswith(HIDDEN):
            refused(text)
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *args, **kwargs)

    return call


builtins.__import__ = blocking_import
builtins.open = io.open = without_hidden(real_open)
for _name in ("stat", "lstat", "listdir", "scandir", "readlink", "open"):
    setattr(os, _name, without_hidden(vars(os)[_name]))
    vars(STRIPPED["os"])[_name] = vars(os)[_name]
sys.modules["sitecustomize"] = sys.modules[__name__]
