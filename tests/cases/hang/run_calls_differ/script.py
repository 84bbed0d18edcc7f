import torch
from torch.utils.data import TensorDataset

import instep


def main():
    data = TensorDataset(torch.arange(320.0).view(64, 5) / 320, torch.arange(64.0).view(64, 1) / 64)
    with instep.Run(global_batch=16, seed=0) as run:
        model = torch.nn.Linear(5, 1)
        model, _opt = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(data, shuffle=True)
        for step in run.steps(loader, epochs=3):
            for x, y in step:
                loss = torch.nn.functional.mse_loss(model(x), y)
                step.backward(loss)
            step.update()
            if step.index == 6 and run.is_main:
                print("mean", run.mean(torch.tensor(step.loss), 1))


main()
