"""Where there is no GPU, Triton's kernels run in its interpreter; it asks when it is imported, which torch may do."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
