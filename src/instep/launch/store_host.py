"""The process that holds the ranks' meeting store on one machine, in the place of torchrun's agent."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist


def host_store(channel_file: int, listening_file: int, world_size: int) -> None:
    """Serves the store on an already listening socket until the launcher closes the channel."""
    port = socket.socket(fileno=os.dup(listening_file)).getsockname()[1]
    store = dist.TCPStore(
        "localhost",
        port,
        world_size,
        is_master=True,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listening_file,
    )
    os.read(channel_file, 1)
    del store
    os._exit(0)  # nothing of this process is worth a clean-up
