"""Which files of the machine a program may see: the interpreter, its packages and the system's."""

import os
import sys

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
"""The only devices; among the others are disks, whose blocks hold every file."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/sys/devices/system")
_SETTINGS = (
    "ld.so.cache ld.so.conf ld.so.conf.d alternatives localtime timezone os-release passwd group "
    "nsswitch.conf host.conf hosts resolv.conf gai.conf protocols services mime.types "
    "ssl/certs ssl/openssl.cnf ca-certificates pki/tls/certs fonts"
)
"""What of /etc libraries look for; keys and hashes of passwords lie there too."""
_ABOUT = (
    "self thread-self cpuinfo meminfo stat uptime loadavg version filesystems mounts "
    "sys/kernel/osrelease sys/kernel/random sys/vm/overcommit_memory"
)
"""What of /proc may be read where it shows the processes of everybody."""


def readable(*, own_processes: bool) -> list[str]:
    """Paths that a program may read; `own_processes`: /proc shows no process but its own."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]
    found = [*_SYSTEM, *(f"/etc/{name}" for name in _SETTINGS.split())]
    found += ["/proc"] if own_processes else [f"/proc/{name}" for name in _ABOUT.split()]
    found += [path for path in own if os.path.isabs(path)]
    found += [os.path.realpath(path) for path in own if os.path.isabs(path)]
    return [path for path in dict.fromkeys(found) if path != "/" and os.path.exists(path)]
