"""A pattern that backtracks for ever on one rank's lines: compiled code that keeps the interpreter lock."""

import re

import torch
import torch.distributed as dist

WORDS = re.compile(r"^(\w+\s?)*$")


def clean(line):
    return WORDS.match(line) is not None


def main():
    dist.init_process_group("gloo")
    kept = torch.zeros(1)
    for number in range(30):
        line = "lines that end as they should"
        if number == 17 and dist.get_rank() == 1:
            line = "a line of many words without any end to it and then a sign at its end that is no word!"
        kept += clean(line)  # of this rank
        dist.all_reduce(kept)
    dist.destroy_process_group()


main()
