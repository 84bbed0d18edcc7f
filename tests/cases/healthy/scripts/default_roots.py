import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    r, w = dist.get_rank(), dist.get_world_size()
    for i in range(10):
        t = torch.ones(4) * r
        if r == 0:
            dist.gather(t, [torch.empty(4) for _ in range(w)])
        else:
            dist.gather(t, dst=0)
        dist.reduce(t, 0) if r else dist.reduce(t, dst=0, op=dist.ReduceOp.SUM)
        dist.broadcast(t, group_src=0) if r else dist.broadcast(t, src=0)
        o = [{"i": i}] if r == 0 else [None]
        dist.broadcast_object_list(o, src=0)
    dist.destroy_process_group()


main()
