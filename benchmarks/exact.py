"""What does `exact=True` cost? Step time against the default mode and DistributedDataParallel, plain and fused.

    python benchmarks/exact.py                          # on the loopback interface; about ten minutes
    python benchmarks/exact.py --rate 1gbit             # two network namespaces with 1 Gbit between them (root)

The options are those of throughput.py. Bytes on the wire: each rank sends its pieces of the other ranks' shards and
its own sum to all of them, 2 (N - 1) / N of the gradients, which is what a ring all-reduce sends. Memory: log2(slots
per rank) copies of the gradients; none here, with one slot per rank.
"""

from __future__ import annotations

import sys

from throughput import main

if __name__ == "__main__":
    main(["--exact", *sys.argv[1:]])
