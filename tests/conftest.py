"""What the tests need of their process.

Where there is no GPU, Triton kernels run in Triton's interpreter; it is chosen when Triton is first imported.  A shell
that starts pytest in the background has Ctrl-C ignored; tests of it need Python's own handler.  With several GPUs,
workers of pytest-xdist (`-n`) share them out.
"""

import os
import signal

import torch

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER:
    # before CUDA starts: `device_count` asks NVML
    GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    # a worker's share of the cores, so that torch's own threads do not wait for each other
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
    os.environ["MRV2_TEST_WORKERS_PER_GPU"] = str(-(-int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) // len(GPUS)))
    if len(GPUS) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = GPUS[int(WORKER.removeprefix("gw")) % len(GPUS)]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
