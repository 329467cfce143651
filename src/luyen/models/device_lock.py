"""A lock between the threads of a process that use one GPU.

One thread may train while another one generates. Their kernels need no lock: each thread has a
stream of its own. What concerns the whole device or the whole process does.
"""

import threading

CALLS = threading.RLock()
"""Held during calls that may synchronize the device or give memory back to it, and while a graph is
captured: a capture that meets either fails."""
MODES = threading.RLock()
"""Held while PyTorch's deterministic mode is on for a call, and by calls that this mode refuses."""
