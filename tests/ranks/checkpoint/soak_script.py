"""Trains a small model with everything that a checkpoint has to bring back: order of samples in the middle of an epoch,
dropout, batch norm, AdamW, a schedule and user state. In double precision, so that another number of ranks differs by
1e-12 and a lost or repeated sample by far more.

usage: soak_script.py DIR STEPS CHECKPOINT_EVERY [WIDTH]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import instep

SAMPLES, FEATURES = 100, 16


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return inputs + 0.01 * torch.randn(FEATURES, dtype=torch.float64), inputs.sum()


def main(folder: Path, steps: int, every: int, width: int) -> None:
    with instep.Run(global_batch=24, micro_batch=2, seed=3, dir=folder / "run", checkpoint_every=every, keep=3) as run:
        (folder / "pids").mkdir(exist_ok=True, parents=True)
        (folder / "pids" / f"{run.rank}").write_text(str(os.getpid()))
        model = nn.Sequential(
            nn.Linear(FEATURES, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, 1),
        ).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        model, optimizer, schedule = run.prepare(model, optimizer, schedule)
        loader = run.loader(Samples(), shuffle=True)
        run.state["losses"] = []
        resumed = run.restore()
        if run.is_main:
            with open(folder / "resumes.jsonl", "a") as file:
                print(
                    json.dumps({"ranks": run.world_size, "step": len(run.state["losses"]) if resumed else 0}), file=file
                )
        for step in run.steps(loader, steps=steps):
            for inputs, targets in step:
                step.backward((model(inputs).squeeze(-1) - targets).square().mean())
            step.update()
            run.state["losses"].append(step.loss)
            time.sleep(0.002)
        if run.is_main:
            whole = {"model": model.state_dict(), "losses": torch.tensor(run.state["losses"], dtype=torch.float64)}
            torch.save(whole, folder / "final.partial")
            os.replace(folder / "final.partial", folder / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 64)
