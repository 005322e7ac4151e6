"""Execute one run on all ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tcil.foundation import ranks
from tcil.foundation.errors import invalid


@contextmanager
def torchrun(device: str) -> Iterator[str]:
    """Under torchrun, share one run among all ranks, with NCCL (one GPU each) or gloo. Yields the rank's device."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield device
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise invalid("nproc-per-node", f"rank {local}", f"at most {torch.cuda.device_count()}, one rank per GPU")
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        with ranks.sharded():
            yield device
    finally:
        dist.destroy_process_group()
