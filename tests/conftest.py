"""Every test runs on one core, so that suites can share a machine, and with exact arithmetic."""

import torch

from luyen.base.exactness import prepare_process

prepare_process()
torch.set_num_threads(1)
