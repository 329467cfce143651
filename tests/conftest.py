"""Every test runs on one core, so that suites can share a machine."""

import torch

torch.set_num_threads(1)
