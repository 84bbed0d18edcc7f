"""What capture gives, restore puts back: in other orders, other types, tied, loose and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep.errors import CheckpointError, UsageError
from instep.train.checkpoint.state import apply, capture


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


class WithExtra(nn.Module):
    def __init__(self, note: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for index in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([index, 1, 2])).square().sum().backward()
        optimizer.step()


def flat(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value.clone() if isinstance(value, torch.Tensor) else value
        for parameter, entry in optimizer.state.items()
        for key, value in entry.items()
    }


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    lambda p: torch.optim.Adafactor(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(make: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = make(list(model.parameters()))
    train(model, optimizer)
    tensors, values = capture({"net": model}, {"opt": optimizer})
    tensors = copies(tensors)
    train(model, optimizer)

    torch.manual_seed(5)
    again = Tied()
    reversed_order = make(list(again.parameters())[::-1])
    apply(tensors, values, {"net": again}, {"opt": reversed_order})
    train(again, reversed_order)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    ours, theirs = flat(reversed_order, again), flat(optimizer, model)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


def test_lbfgs_history_survives() -> None:
    def closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def inner() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(torch.ones(1, 3)) - 2).square().sum()
            loss.backward()
            return loss

        return inner

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    optimizer.step(closure(model, optimizer))
    tensors, values = capture({"net": model}, {"opt": optimizer})
    tensors = copies(tensors)
    again = nn.Linear(3, 2)
    other = torch.optim.LBFGS(again.parameters(), max_iter=2)
    apply(tensors, values, {"net": again}, {"opt": other})
    for m, o in ((model, optimizer), (again, other)):
        o.step(closure(m, o))
    assert torch.equal(model.weight, again.weight)


def test_tied_weights_are_kept_once_and_buffers_that_do_not_persist_are_not() -> None:
    tensors, values = capture({"net": Tied()}, {})
    assert sorted(tensors) == [
        "model/net/embed.weight",
        "model/net/norm.bias",
        "model/net/norm.num_batches_tracked",
        "model/net/norm.running_mean",
        "model/net/norm.running_var",
        "model/net/norm.weight",
    ]
    assert values["models"]["net"]["same"] == {"head.weight": "embed.weight"}


def test_weights_tied_then_and_not_now_are_both_filled() -> None:
    model = Tied()
    tensors, values = capture({"net": model}, {})
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(7, 4))
    apply(copies(tensors), values, {"net": untied}, {})
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert torch.equal(untied.embed.weight, model.embed.weight)
    tensors, values = capture({"net": untied}, {})
    with pytest.raises(CheckpointError, match=r"head.weight and embed.weight are one tensor here and two there"):
        apply(copies(tensors), values, {"net": model}, {})


def test_state_in_fp32_of_a_bf16_parameter_stays_in_fp32() -> None:
    parameter = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = torch.optim.SGD(parameter.parameters(), lr=0.1, momentum=0.9)
    moments = torch.tensor([[1.0001, 2.0002, 3.0003]] * 3)
    optimizer.state[parameter.weight]["momentum_buffer"] = moments.clone()
    tensors, values = capture({"net": parameter}, {"opt": optimizer})
    fresh = nn.Linear(3, 3).to(torch.bfloat16)
    other = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    apply(copies(tensors), values, {"net": fresh}, {"opt": other})
    assert torch.equal(other.state[fresh.weight]["momentum_buffer"], moments)


def test_hyperparameters_come_back_by_group_and_the_implementation_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}]
    tensors, values = capture({"net": model}, {"opt": torch.optim.AdamW(groups, weight_decay=0.125, fused=True)})
    groups = [{"params": model[1].parameters()}, {"params": model[0].parameters()}]
    other = torch.optim.AdamW(groups, lr=9.0, foreach=True)
    apply(copies(tensors), values, {"net": model}, {"opt": other})
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.25, 0.125), (0.5, 0.125)]
    assert all(group["foreach"] and not group["fused"] for group in other.param_groups)


def test_a_parameter_outside_every_model_is_kept_with_its_value() -> None:
    model, alpha = nn.Linear(2, 2), nn.Parameter(torch.tensor(0.3))
    optimizer = torch.optim.Adam([alpha], lr=0.1)
    alpha.grad = torch.tensor(1.0)
    optimizer.step()
    tensors, values = capture({"net": model}, {"alpha": optimizer})
    tensors = copies(tensors)
    fresh = nn.Parameter(torch.tensor(9.0))
    other = torch.optim.Adam([fresh], lr=0.1)
    apply(tensors, values, {"net": model}, {"alpha": other})
    assert torch.equal(fresh.detach(), alpha.detach())
    assert torch.equal(other.state[fresh]["exp_avg"], optimizer.state[alpha]["exp_avg"])


def test_extra_state_of_modules_is_kept() -> None:
    tensors, values = capture({"net": WithExtra({"seen": (1, 2), "mean": torch.arange(3.0)})}, {})
    fresh = WithExtra(None)
    apply(copies(tensors), values, {"net": fresh}, {})
    note: Any = fresh.note
    assert note["seen"] == (1, 2)
    assert torch.equal(note["mean"], torch.arange(3.0))


def test_names_are_plain_whatever_wraps_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    tensors, _ = capture({"net": wrapped}, {})
    assert sorted(tensors) == ["model/net/0.bias", "model/net/0.weight"]


def test_all_differences_are_said_at_once_and_nothing_is_changed() -> None:
    saved = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "t": nn.Linear(2, 2)})
    tensors, values = capture({"net": saved}, {"opt": torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)})
    here = nn.ModuleDict({"a": nn.Linear(2, 4), "c": nn.Linear(2, 2), "t": nn.Linear(2, 2).double()})
    before = {key: value.clone() for key, value in here.state_dict().items()}
    optimizer = torch.optim.SGD(here.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        apply(copies(tensors), values, {"net": here}, {"opt": optimizer})
    assert str(caught.value) == (
        "the checkpoint does not fit. model 'net': missing there: 2 (c.bias, c.weight); not known here: 2 (b.bias, "
        "b.weight); of another shape or type: 4 (a.weight is 3x2 there and 4x2 here, a.bias is 3 there and 4 here, "
        "t.weight is float32 there and float64 here, t.bias is float32 there and float64 here). optimizer 'opt': "
        "missing there: 2 (net/c.weight, net/c.bias); not known here: 2 (net/b.weight, net/b.bias). Build the same "
        "models and optimizers as when it was saved, or take only what fits with "
        "run.load_weights(path, strict=False)."
    )
    assert all(torch.equal(value, before[key]) for key, value in here.state_dict().items())


def test_other_names_of_models_are_said() -> None:
    tensors, values = capture({"net": nn.Linear(1, 1)}, {})
    with pytest.raises(CheckpointError, match=r"models: missing there: 1 \(actor\); not known here: 1 \(net\)"):
        apply(tensors, values, {"actor": nn.Linear(1, 1)}, {})


def test_other_groups_are_said() -> None:
    model = nn.Linear(2, 2)
    tensors, values = capture({"net": model}, {"opt": torch.optim.SGD(model.parameters(), lr=0.1)})
    split = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(CheckpointError, match="its 1 groups of parameters are not these 2"):
        apply(tensors, values, {"net": model}, {"opt": split})


def test_sparse_and_meta_tensors_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("index", torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match=r"model/net/index is a sparse_coo tensor, which a checkpoint cannot hold"):
        capture({"net": model}, {})
    with pytest.raises(UsageError, match=r"model/net/weight has no numbers yet \(device meta\)"):
        capture({"net": nn.Linear(2, 2, device="meta")}, {})
    wide = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(UsageError, match=r"model/net/weight has type torch.complex128, which a checkpoint cannot hold"):
        capture({"net": wide}, {})
