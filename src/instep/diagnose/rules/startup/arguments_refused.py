"""The script did not accept its arguments.

## What it sees
What argparse said before it ended the rank, and the line that parses.

## Why it matters
The rank ends before it meets the others.

## What to do
Put the script's arguments after its name: `instep run -n 2 train.py --lr 0.1`. An argument `--local_rank` was passed by
torch.distributed.launch; torchrun and `instep run` pass the variable LOCAL_RANK instead.

## When it is wrong
A script that parses on purpose what it expects to be refused, and ends for another reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.diagnose.arguments import find_local_rank_argument
from instep.diagnose.naming import name_ranks, short
from instep.diagnose.run_view import RunView
from instep.records.finding import Finding


def check(run: RunView) -> Iterator[Finding]:
    found = [
        (view, event) for view in run.ranks if view.failure is not None and (event := view.last("arguments-refused"))
    ]
    found = [(view, event) for view, event in found if not (view.failure or {}).get("error")]
    if not found:
        return
    view, event = found[0]
    parsed = view.site(event["site"])
    argument = find_local_rank_argument(parsed) if "local" in event["message"] else None
    ranks = tuple(one.rank for one, _ in found)
    some = f" on {name_ranks(ranks)}" if len(ranks) < run.world_size else ""
    message = event["message"].splitlines()[0][:200] if event["message"] else ""
    yield Finding(
        id="startup/arguments-refused",
        title=f"the script does not accept its arguments{some}: {message}",
        cause=f"`{argument.source}` wants what torch.distributed.launch used to pass; LOCAL_RANK in the environment took its place."
        if argument
        else f"{short(parsed)} parses what was given after the script's name.",
        fix=(
            f"read int(os.environ['LOCAL_RANK']) instead of the argument at {short(argument)}"
            if argument
            else "give the arguments after the script: instep run -n 2 train.py --name value",
        ),
        evidence=(view.cite(f"argparse: {message}"),),
        certainty="certain",
        ranks=ranks if some else (),
        where=argument or parsed,
        explains=("crash/*", "hang/*"),
    )
