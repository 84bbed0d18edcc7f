"""The plain transport: an asynchronous all-reduce of the process group."""

from __future__ import annotations

import torch.distributed as dist

from instep.train.reduce.bucket import Bucket, Handle, forget_nothing, plain_zeros


class GroupSum:
    allocate = staticmethod(plain_zeros)
    rescale = staticmethod(forget_nothing)

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, bucket: Bucket) -> Handle:
        handle = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        assert handle is not None
        return handle

    def close(self) -> None:
        """Nothing to give up: the group ends with its world."""
