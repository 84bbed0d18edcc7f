"""The script asks for a device that this machine, or this process, does not have.

## What it sees
What CUDA or NCCL said, and the line that asked.

## Why it matters
The rank ends before the first step, and the others wait for it or end with it.

## What to do
Choose by what is there: `device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")`, and
`"nccl" if torch.cuda.is_available() else "gloo"`. Start at most as many ranks per machine as it has devices.

## When it is wrong
A driver that was away for a moment, or devices hidden by CUDA_VISIBLE_DEVICES on purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from instep.diagnose.frames import source_line
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import CallSite, Finding

_NONE = re.compile(
    r"not compiled with CUDA|no NVIDIA (driver|GPU)|no CUDA GPUs are available|No CUDA-capable device|No HIP GPUs"
    r"|only supported with GPUs, no GPUs found|doesn't have NCCL built in|invalid device ordinal|invalid device id"
    r"|_cuda_\w+|cuda\.is_available\(\) is False",
    re.IGNORECASE,
)


def check(run: RunView) -> Iterator[Finding]:
    hit = [(view, error) for view in run.ranks if (error := view.error) is not None and _NONE.search(error["message"])]
    if not hit:
        return
    view, error = hit[0]
    frame = error["frames"][0] if error["frames"] else None
    where = CallSite(frame["file"], frame["line"], source_line(frame["file"], frame["line"])) if frame else None
    ranks = tuple(one.rank for one, _ in hit)
    some = f" for {name_ranks(ranks)}" if len(ranks) < run.world_size else ""
    first = " ".join(error["message"].split())[:160]
    is_backend = "nccl" in error["message"].lower()
    yield Finding(
        id="startup/no-device",
        title=f"{short(where)} asks for {'the NCCL backend' if is_backend else 'a GPU'}, but there is no such GPU{some}: {first}",
        cause="The line asks for a GPU without looking whether there is one for this rank.",
        fix=(
            'use "nccl" if torch.cuda.is_available() else "gloo"'
            if is_backend
            else "use the CPU where torch.cuda.is_available() is False; elsewhere start no more ranks than there are GPUs",
        ),
        evidence=(view.cite(f"{error['type']}: {first}", "failure.json"),),
        certainty="certain",
        ranks=ranks if some else (),
        where=where,
        explains=("crash/*", "hang/*"),
    )
