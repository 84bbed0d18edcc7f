"""The depth of a model shared out over ranks, on torch.distributed.pipelining."""
