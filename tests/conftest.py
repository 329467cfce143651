"""Every test runs on one core, so that suites can share a machine, and with exact arithmetic."""

import torch
from hypothesis import settings

from luyen.base.exactness import prepare_process

prepare_process()
torch.set_num_threads(1)

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")
