"""Small trainings, each a function of nothing but `instep.Run`, to be run on any number of ranks.

Each returns what has to be equal for every number of ranks: losses, gradient norms and final values, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import instep

SAMPLES, FEATURES, CLASSES = 83, 6, 4  # 83: the last step of an epoch is short


def data(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return TensorDataset(x, y)


def even_data() -> TensorDataset:
    return data(84)  # no micro-batch of one sample, which batch norm refuses


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), *middle, nn.Tanh(), nn.Linear(16, CLASSES)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def whole(value: Any) -> Tensor:
    """Of a sharded tensor all of it; every rank calls it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def result(run: instep.Run, history: list[Any], *models: nn.Module) -> dict[str, Any]:
    state = {f"{i}.{k}": whole(v).detach().clone() for i, m in enumerate(models) for k, v in m.state_dict().items()}
    return {"history": history, "state": state, "ranks_agree": len({str(h) for h in run.gather(history)}) == 1}


def supervised(
    model_of: Callable[[], nn.Module] = mlp,
    loss_of: Callable[[Any, nn.Module, Tensor, Tensor], None] | None = None,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    scheduler_of: Callable[[torch.optim.Optimizer], Any] | None = None,
    source_of: Callable[[], Any] = data,
    epochs: int = 2,
    prepare: dict[str, Any] | None = None,
    loader: dict[str, Any] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    with instep.Run(**{"global_batch": 16, "micro_batch": 2, **arguments}) as run:
        model = model_of()
        optimizer = optimizer_of(model)
        scheduler = scheduler_of(optimizer) if scheduler_of else None
        run.prepare(model, optimizer, scheduler, **(prepare or {}))
        train = run.loader(source_of(), **{"shuffle": True, **(loader or {})})
        history: list[Any] = []
        for step in run.steps(train, epochs=epochs):
            for x, y in step:
                if loss_of is not None:
                    loss_of(step, model, x, y)
                else:
                    step.backward(F.cross_entropy(model(x), y))
            step.update()
            history.append((step.index, step.loss, step.grad_norm, step.skipped, optimizer.param_groups[0]["lr"]))
        return result(run, history, model)


# -- variations of the loss


def token_mean(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    mask = y > 0  # some micro-batches have many of these, some few, some none
    loss = F.cross_entropy(model(x)[mask], y[mask])  # NaN when there is none
    step.backward(loss, weight=int(mask.sum()))


def token_mean_in_tensor(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    mask = y > 0
    step.backward(F.cross_entropy(model(x)[mask], y[mask]), weight=mask.sum())


def two_calls(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    step.backward(F.cross_entropy(out, y), weight=None)
    mask = y == 1
    step.backward((model(x)[mask] ** 2).mean(), weight=int(mask.sum()))
    if y[0] > 1:
        step.backward(model(2 * x).abs().mean(), weight=0.5)


def some_left_out(step: Any, model: nn.Module, x: Tensor, y: Tensor) -> None:
    if y[0] == 2:
        return
    step.backward(F.cross_entropy(model(x), y))


class Branches(nn.Module):
    """Uses one branch by the data, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x[0, 0] > 0.8 else self.second(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.again = self.inner
        self.out = nn.Linear(FEATURES, CLASSES)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(torch.tanh(self.inner(self.frozen(x)))))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES * 8, FEATURES, sparse=True)
        self.out = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs() * 7).long().clamp(max=CLASSES * 8 - 1)
        return self.out(self.table(rows).mean(1))


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.SGD([{"params": rest, "lr": 0.3}, {"params": weights}], lr=0.1, momentum=0.9)


class Stream(IterableDataset[Any]):
    """Splits by get_worker_info, so that the streams have different lengths."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        rows = list(zip(*data().tensors))
        return iter(rows if info is None else rows[info.id :: info.num_workers])


class Noisy(Dataset[Any]):
    """Augments at random."""

    def __init__(self) -> None:
        self.rows = data()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        return x + 0.1 * torch.randn(FEATURES, dtype=torch.float64), y


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


# -- the other loops


def gan(**arguments: Any) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        generator, critic = (
            mlp(nn.Dropout(0.2)),
            nn.Sequential(nn.Linear(CLASSES, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        )
        opt_g, opt_d = adam(generator), adam(critic)
        run.prepare(generator, opt_g)
        run.prepare(critic, opt_d)
        train = run.loader(data(), shuffle=True)
        history: list[Any] = []
        for step in run.steps(train, epochs=2):
            for x, _ in step:
                step.backward(critic(generator(x).detach()).mean() - critic(x[:, :CLASSES]).mean(), optimizer=opt_d)
            step.update(opt_d)
            losses = [step.loss]
            for x, _ in step:
                step.backward(-critic(generator(x)).mean())  # reaches the critic too; no update takes that
            step.update(opt_g)
            history.append((step.index, losses[0], step.loss, step.grad_norm))
        return result(run, history, generator, critic)


def policy(**arguments: Any) -> dict[str, Any]:
    """Data come from the model; four updates per rollout."""
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        model = mlp()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        run.prepare(model, optimizer, scheduler)
        history: list[Any] = []
        for step in run.steps(steps=4):
            rollout = {}
            for slot in step:
                with torch.no_grad():
                    x = torch.randn(2, FEATURES, dtype=torch.float64)
                    rollout[slot] = x, torch.distributions.Categorical(logits=model(x)).sample()
            for _ in range(4):
                for slot in step:
                    x, action = rollout[slot]
                    step.backward(F.cross_entropy(model(x), action))
                step.update()
            history.append((step.index, step.loss, step.grad_norm, optimizer.param_groups[0]["lr"]))
        return result(run, history, model)


def contrastive(*middle: nn.Module, **arguments: Any) -> dict[str, Any]:
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        model = mlp(*middle or (nn.Dropout(0.3),))
        model.register_parameter("scale", nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))
        run.prepare(model, optimizer := sgd(model) if middle else adam(model))
        train = run.loader(even_data() if middle else data(), shuffle=True)
        history: list[Any] = []
        for step in run.steps(train, epochs=2):
            rows, targets = step.all_rows(lambda x, y: (model(x), y))
            similarity = model.scale * rows @ rows.T
            same = (targets[:, None] == targets[None, :]).double()
            step.backward(F.binary_cross_entropy_with_logits(similarity, same))
            step.update()
            history.append((step.index, step.loss, step.grad_norm, optimizer.param_groups[0]["lr"]))
        return result(run, history, model)


def two_towers(**arguments: Any) -> dict[str, Any]:
    """A loss over two calls of all_rows that share a model, with one optimizer of two named."""
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        shared, left, right = mlp(nn.Dropout(0.3)), nn.Linear(CLASSES, 4).double(), nn.Linear(CLASSES, 4).double()
        model = nn.ModuleList([shared, left, right])
        run.prepare(model, optimizer := adam(model))
        unused = nn.Linear(2, 1)
        run.prepare(unused, adam(unused))
        history: list[Any] = []
        for step in run.steps(run.loader(data(), shuffle=True), epochs=2):
            one, two = step.all_rows(lambda x, y: left(shared(x))), step.all_rows(lambda x, y: right(shared(x)))
            loss = F.cross_entropy(one @ two.T, torch.arange(len(one)))
            step.backward(loss, optimizer=optimizer)
            step.update(optimizer)
            history.append((step.index, step.loss, step.grad_norm))
        return result(run, history, model)


def accumulated_passes(**arguments: Any) -> dict[str, Any]:
    """Every third step adds two passes up, which the pattern of updates did not foretell."""
    with instep.Run(global_batch=16, micro_batch=2, **arguments) as run:
        model = mlp()
        run.prepare(model, adam(model))
        history: list[Any] = []
        for step in run.steps(run.loader(data(), shuffle=True), epochs=2):
            for _ in range(1 + step.index % 3 // 2):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y))
            step.update()
            history.append((step.index, step.loss, step.grad_norm))
        return result(run, history, model)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": supervised,
    "dropout": lambda: supervised(lambda: mlp(nn.Dropout(0.3))),
    "batch norm": lambda: supervised(lambda: mlp(nn.BatchNorm1d(16)), None, sgd, source_of=even_data),
    "batch norm, cumulative": lambda: supervised(
        lambda: mlp(nn.BatchNorm1d(16, momentum=None)), None, sgd, source_of=even_data
    ),
    "clipped by norm": lambda: supervised(clip_norm=0.1),
    "clipped by value": lambda: supervised(clip_value=0.01),
    "token mean": lambda: supervised(loss_of=token_mean),
    "token mean, tensor": lambda: supervised(loss_of=token_mean_in_tensor),
    "several calls": lambda: supervised(loss_of=two_calls),
    "left out": lambda: supervised(loss_of=some_left_out),
    "unused parameters": lambda: supervised(Branches, micro_batch=1),
    "tied and frozen": lambda: supervised(Tied),
    "sparse": lambda: supervised(Embedded, optimizer_of=sgd),
    "two groups": lambda: supervised(optimizer_of=two_groups),
    "scheduler": lambda: supervised(scheduler_of=one_cycle),
    "scheduler per epoch": lambda: supervised(scheduler_of=step_lr, prepare={"schedule_every": "epoch"}),
    "drop last": lambda: supervised(loader={"drop_last": True}),
    "stream": lambda: supervised(source_of=Stream, loader={"shuffle": None}),
    "augmentation": lambda: supervised(source_of=Noisy),
    "augmentation in workers": lambda: supervised(source_of=Noisy, loader={"num_workers": 1}, epochs=1),
    "odd slots": lambda: supervised(global_batch=15, micro_batch=3),
    "gan": gan,
    "policy": policy,
    "contrastive": contrastive,
    "contrastive, batch norm": lambda: contrastive(nn.BatchNorm1d(16).double()),
    "two towers": two_towers,
    "accumulated passes": accumulated_passes,
}
