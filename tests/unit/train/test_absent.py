"""Parameters of other ranks: what needs their numbers is refused by name, what needs their shape works."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instep
from instep.train.absent import Absent, Origin, is_absent, show_gradients
from instep.train.call_arguments import check_sendable, read_number
from instep.train.observe.observer import check_loggable
from instep.train.techniques.pipeline.last_stage import weigh_loss

NO_JOB: Any = None


def model_of_two() -> nn.Sequential:
    """The second layer is on rank 3."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name, parameter in list(model[1].named_parameters()):
        model[1]._parameters[name] = Absent.of(parameter, Origin(f"1.{name}", holder=3, rank=0))
    return model


def read_all(model: nn.Module) -> Any:
    return torch.stack([p.norm() for p in model.parameters()]).norm().item()


def average_by_hand(model: nn.Module) -> Any:
    for kept, now in zip(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).parameters(), model.parameters()):
        kept.data.mul_(0.9).add_(now.detach(), alpha=0.1)  # torch leaves `kept` as it is


def average_by_lists(model: nn.Module) -> Any:
    kept = [torch.zeros_like(p, device="cpu") for p in model.parameters()]
    torch._foreach_add_(kept, list(model.parameters()))


def add_into(model: nn.Module) -> Any:
    torch.add(torch.zeros(2), model.get_parameter("1.bias"), out=torch.zeros(2))


READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda model: model[1].bias.sum().item(),
    "float": lambda model: float(model[1].bias.detach().max()),
    "bool": lambda model: bool((model[1].bias > 0).any()),
    "format": lambda model: f"{model[1].bias.mean():.3f}",
    "numpy": lambda model: model[1].bias.detach().numpy(),
    "list": lambda model: model[1].bias.tolist(),
    "equal": lambda model: torch.equal(model[0].bias, model[1].bias),
    "cpu": lambda model: {key: value.cpu() for key, value in model.state_dict().items()},
    "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "pickle": lambda model: pickle.dumps(model),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).sum().item(),
    "stack": read_all,
    "average": average_by_hand,
    "lists": average_by_lists,
    "out": add_into,
    "log": lambda model: check_loggable("norm", model[1].bias.norm()),
    "send": lambda model: check_sendable("run.gather", [model[1].bias]),
    "number": lambda model: read_number("run.schedule", model[1].bias.sum(), "a number"),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_names_the_parameter_and_who_holds_it(name: str) -> None:
    with pytest.raises(instep.UsageError) as error:
        READS[name](model_of_two())
    told = str(error.value)
    assert told.startswith(("1.bias is read at test_absent.py:", "1.weight is read at test_absent.py:"))
    assert told.endswith(
        "), and rank 3 holds it: rank 0 has other parts of the pipeline. run.export(path), called by every rank, writes all "
        "weights to one file; parameters that this rank holds itself have is_meta=False."
    )


def test_the_line_is_the_one_that_computed_from_it() -> None:
    norms = [p.norm() for p in model_of_two().parameters()]
    with pytest.raises(instep.UsageError, match=r"\(norms = \[p.norm\(\) for p in model_of_two\(\).parameters\(\)\]\)"):
        sum(norm.item() for norm in norms)


def test_moving_it_is_said_as_such() -> None:
    with pytest.raises(
        instep.UsageError, match=r"1.weight is moved at test_absent.py:\d+ \(model_of_two\(\).to\(\"cpu\"\)\)"
    ):
        model_of_two().to("cpu")


def test_a_loss_with_it_is_refused_with_what_to_do_instead() -> None:
    penalty = 0.1 * sum(p.square().sum() for p in model_of_two().parameters())
    with pytest.raises(instep.UsageError) as error:
        weigh_loss((torch.ones(()) + penalty, 4), NO_JOB, list)
    assert "1.weight is read by the loss at test_absent.py:" in str(error.value)
    assert "Compute with it inside the forward of 1. A penalty on weights is the optimizer's weight_decay" in str(
        error.value
    )


def test_errors_that_have_another_reason_stay() -> None:
    with pytest.raises(RuntimeError, match="size"):
        model_of_two()[1].weight.view(3)


def test_shapes_and_writes_work() -> None:
    model = model_of_two()
    layer: Any = model[1]
    assert sum(p.numel() for p in model.parameters()) == 12
    assert layer.weight.shape == (2, 2) and layer.weight.is_meta and layer.weight.requires_grad and layer.weight.is_leaf
    assert "device='meta'" in repr(layer.weight)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).clamp_(-1, 1)
        layer.weight.copy_(torch.ones(2, 2))
        torch._foreach_mul_(list(model.parameters()), 2.0)
    assert torch.zeros_like(layer.weight, device="cpu").sum() == 0


def test_a_copy_averages_what_is_here() -> None:
    """A copy made after the model was cut has the same stand-ins."""
    model = model_of_two()
    kept = copy.deepcopy(model)
    assert [is_absent(p) for p in kept.parameters()] == [False, False, True, True]
    assert all(isinstance(p, nn.Parameter) for p in kept.parameters())
    with torch.no_grad():
        for average, now in zip(kept.parameters(), model.parameters()):
            average.mul_(0.5).add_(now, alpha=0.5)
        torch._foreach_lerp_(list(kept.parameters()), list(model.parameters()), 0.5)
    assert torch.allclose(kept[0].weight, model[0].weight)
    with pytest.raises(instep.UsageError, match=r"1\.weight is read"):
        kept[1].weight.sum().item()


def test_a_gradient_of_another_rank_can_be_changed_and_not_read() -> None:
    model = model_of_two()
    for parameter in model[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    assert all(p.grad is None for p in model[1].parameters())
    show_gradients(model.parameters(), are_final=True)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach().sign(), alpha=0.1)
    with pytest.raises(instep.UsageError) as error:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert str(error.value).startswith("1.weight.grad is read at test_absent.py:")
    assert "Run(clip_norm=...) clips by the norm over all ranks, which is step.grad_norm after the update" in str(
        error.value
    )
    show_gradients(model.parameters(), are_final=False)
    assert all(p.grad is None for p in model[1].parameters())
