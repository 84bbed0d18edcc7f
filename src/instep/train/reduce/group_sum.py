"""The plain transport: an asynchronous all-reduce of the process group."""

from __future__ import annotations

import torch.distributed as dist

from instep.train.reduce.bucket import Bucket, Handle


class GroupSum:
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, bucket: Bucket) -> Handle:
        handle = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        assert handle is not None
        return handle
