"""Where there is no GPU, Triton kernels run in Triton's interpreter; it is chosen when Triton is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
