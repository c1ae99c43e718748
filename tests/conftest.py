"""Where there is no GPU, Triton's kernels run in its interpreter; it asks when it is imported, which torch may do.
And no test fails for being slow: that tells of the machine."""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
