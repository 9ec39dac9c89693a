"""The memory by which data-loader workers hand features over: whether it is there, and giving it back early.

Each piece of it is an open file, in the worker and in the process that trains.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cache.errors import ResourceError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where the kernel keeps it)
OPEN_FILES = 1 << 16  # an image is one


def require_room(ahead: Sequence[tuple[int, int]], *, processes: int) -> None:
    """Check that the steps which workers prepare ahead fit. A worker that finds no room dies of SIGBUS, unexplained.

    Args:
        ahead: of each loader of a process, how many steps, and bytes of the largest one's features.
        processes: of this node, which share its memory; all of them ask before any has a worker.

    Raises:
        ResourceError: they do not fit.
    """
    needed = processes * sum(steps * step_bytes for steps, step_bytes in ahead)
    if not needed or not SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed <= free:
        return
    steps, largest = sum(count for count, _ in ahead), max(step_bytes for _, step_bytes in ahead)
    others = f" in each of {processes} processes" if processes > 1 else ""
    raise ResourceError(
        f"{steps} steps of up to {largest / 1e9:.2f} GB of features are prepared ahead{others}, which takes "
        f"{needed / 1e9:.2f} GB of shared memory; {free / 1e9:.2f} GB are free",
        where=str(SHARED_MEMORY),
        do="give the container more (docker run --shm-size, or --ipc=host), lower train.dataloader_num_workers or "
        "train.dataloader_prefetch_factor, or set train.dataloader_num_workers: 0",
    )


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as it may, for itself and the workers that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back(tensor: torch.Tensor) -> None:
    """Free the pages behind a tensor that a worker handed over and nobody reads again; it then reads as zeros.

    Unmapping does the same, but under the interpreter's lock: some 10 ms for an image of 40 MiB, in which the thread
    that drives the GPU stands still. Here the lock is let go. Memory that is not shared is left alone.
    """
    storage = tensor.untyped_storage()
    if not sys.platform.startswith("linux") or not storage.is_shared():
        return
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        # If the kernel refuses, the pages go when they are unmapped, as they would have without this.
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_REMOVE)


_libc = ctypes.CDLL(None)  # calls through it let go of the interpreter's lock
