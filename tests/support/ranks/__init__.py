"""Runs a check in new processes that form a process group."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

RANKS = 2


def run_on_ranks(
    check: Callable[..., None], folder: Path, *args: Any, backend: str = "gloo", ranks: int = RANKS
) -> None:
    """Call `check(rank, *args)`, a module-level function, in `ranks` processes. Fail if any call raises an error.

    The processes form a group through a file in `folder`. With `nccl`, rank i uses GPU i. With `gloo`, all ranks use
    the first GPU.
    """
    # Ranks start faster because they are forked from a server that has imported the package.
    multiprocessing.set_forkserver_preload(["mglu_ops.nn"])
    arguments = ranks, f"file://{folder / 'store'}", backend, check, args
    torch.multiprocessing.start_processes(_run_rank, arguments, nprocs=ranks, start_method="forkserver")


def _run_rank(
    rank: int, ranks: int, store: str, backend: str, check: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = str(rank)  # Transformers chooses the GPU by LOCAL_RANK
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    check(rank, *args)
    dist.destroy_process_group()
