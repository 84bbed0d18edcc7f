"""Does what scripts do with processes, pickles and exits, and prints one line for each thing that works."""

import argparse
import atexit
import multiprocessing
import os
import pickle
import sys
import threading
import time
import warnings

import sibling
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")


class Squares(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index**2)


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def double(x: int) -> int:
    return 2 * x


def say(*words: object) -> None:
    print(*words)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    say("args", parser.parse_args().steps, parser.prog)
    say("sibling", sibling.VALUE)
    with open(os.path.join(os.path.dirname(__file__), "data.txt")) as file:
        say("data", file.read().strip())
    dist.init_process_group("gloo")
    box = [Point(dist.get_rank() + 5)]
    dist.broadcast_object_list(box, src=0)
    say("object", box[0].x, type(box[0]).__module__, pickle.loads(pickle.dumps(box[0])).x)
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=3, num_workers=1, multiprocessing_context=method)
        say("loader", method, [batch.tolist() for batch in loader])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        say("pool", pool.map(double, [1, 2]))
    x = torch.ones(300, 300, requires_grad=True)
    (x @ x).sum().backward()
    say("backward", x.grad is not None)
    dist.destroy_process_group()
    atexit.register(say, "atexit")
    threading.Thread(target=lambda: (time.sleep(0.3), say("thread"))).start()
    print("to stderr", file=sys.stderr)


if __name__ == "__main__":
    main()
