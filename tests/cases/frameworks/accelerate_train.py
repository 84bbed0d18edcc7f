"""Accelerate: accumulation, scheduler, clipping, metrics gathered over ranks, state saved and continued."""

import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long())


def evaluate(accelerator, model, loader):
    model.eval()
    hits = total = 0
    for x, y in loader:
        with torch.no_grad():
            guess = model(x).argmax(1)
        gather = accelerator.gather if HOW == "gather_all" else accelerator.gather_for_metrics
        guess, y = gather((guess, y))
        hits += (guess == y).sum().item()
        total += len(y)
    return hits / total


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(make_data(518, 0), batch_size=16, shuffle=True)
    test = DataLoader(make_data(101, 1), batch_size=16)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    if HOW == "unprepared":
        model, optimizer, test, scheduler = accelerator.prepare(model, optimizer, test, scheduler)
    else:
        model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    folder = tempfile.mkdtemp()
    for epoch in range(3):
        model.train()
        for step, (x, y) in enumerate(train):
            with accelerator.accumulate(model):
                net = accelerator.unwrap_model(model) if HOW == "unwrapped" else model
                loss = F.cross_entropy(net(x), y)
                if HOW == "nan" and epoch == 1 and step == 5:
                    loss = loss + torch.log(loss * 0)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if HOW == "early" and accelerator.process_index == 1 and epoch == 1 and step == 4:
                break
            if HOW == "raise" and accelerator.process_index == 1 and epoch == 1 and step == 4:
                raise ValueError("cannot read sample 77")
        if HOW == "main_only" and not accelerator.is_main_process:
            pass
        else:
            accelerator.print("epoch", epoch, "accuracy", round(evaluate(accelerator, model, test), 3))
        if HOW == "save_main":
            if accelerator.is_main_process:
                accelerator.save_state("state")
        else:
            accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
