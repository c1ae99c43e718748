"""Where there is no GPU, Triton's kernels run in its interpreter; it asks when it is imported, which torch may do.
And no test fails for being slow, which tells of the machine, nor for being drawn unluckily: hypothesis draws the same
examples every time, others with `--hypothesis-profile random`."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", untimed)
settings.register_profile("same", untimed, derandomize=True, database=None)
settings.load_profile("same")
