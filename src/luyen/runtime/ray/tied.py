"""A process that ends with the one that started it, whatever it is doing then.

Ray asks a worker to end, and one that waits in a collective may not hear of it: on a node that was
given up and is back, a rank would wait for ranks that have long been begun again elsewhere.
"""

import os
import threading
import time

_LOOK_S = 1.0


def end_with_parent() -> None:
    """From now on this process ends within seconds of its parent."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="tied", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
