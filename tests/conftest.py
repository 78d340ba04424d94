"""What the tests need of their process.

Where there is no GPU, Triton kernels run in Triton's interpreter; it is chosen when Triton is first imported.  A shell
that starts pytest in the background has Ctrl-C ignored; tests of it need Python's own handler.
"""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
