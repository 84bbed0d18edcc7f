import argparse

import torch.distributed as dist


def parse():
    p = argparse.ArgumentParser("train")
    p.add_argument("--local_rank", type=int, required=True)
    p.add_argument("--lr", type=float, default=0.1)
    return p.parse_args()


args = parse()
dist.init_process_group("gloo")
dist.destroy_process_group()
