"""The process that holds the ranks' meeting store on one machine, in the place of torchrun's agent."""

from __future__ import annotations

import datetime
import os
import socket

import torch.distributed as dist


def host_store(channel_file: int, listening_file: int, world_size: int) -> None:
    """Serves the store on an already listening socket until the launcher closes the channel.

    A byte on the channel asks for an empty store, answered by a byte: the ranks of a new attempt must not find the
    addresses of those that have ended.
    """
    port = socket.socket(fileno=os.dup(listening_file)).getsockname()[1]
    while True:
        store = dist.TCPStore(
            "localhost",
            port,
            world_size,
            is_master=True,
            timeout=datetime.timedelta(seconds=60),
            wait_for_workers=False,
            master_listen_fd=os.dup(listening_file),
        )
        if os.read(channel_file, 1) == b"":
            os._exit(0)  # nothing of this process is worth a clean-up
        del store
        os.write(channel_file, b".")
