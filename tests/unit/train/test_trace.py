"""Stages of a model, one after the other in one process: together they are the model."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import instep
from instep.train.seeds import set_generators
from instep.train.techniques.pipeline.cut import Cuts, cut_model
from instep.train.techniques.pipeline.generators import read_states, write_states
from instep.train.techniques.pipeline.pieces import Pieces
from instep.train.techniques.pipeline.trace import StageRun, Tracer, run_stage

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.drop(torch.tanh(self.layer(x)))
        return x if mask is None else x * mask


class Model(nn.Module):
    """A parameter of its own, a mask from the inputs, and a head in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4))
        self.table = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        mask = (tokens > 0)[..., None]
        x = self.table(tokens) + self.shift
        for block in self.blocks:
            x = block(x, mask=mask)
        return {"logits": self.finish(x), "mask": mask}

    def finish(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class ShakyBlock(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * random.random() + numpy.random.randn()


class Shaky(Model):
    """Draws from every generator, in blocks and before them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ShakyBlock() for _ in range(3)])

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return super().forward((tokens + random.randint(0, 9)) % 10)


class Reads(Model):
    """Takes a parameter of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 4)
        blocks: Any = self._modules.pop("blocks")
        self.blocks = blocks  # registered after, as forward uses them
        self.norm, self.head = self._modules.pop("norm"), self._modules.pop("head")

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return {"logits": self.finish(x), "mask": tokens > 0}


class Memory(Model):
    """Gives what an encoder found to each layer of a decoder, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        for name in ("blocks", "norm", "head"):
            module: Any = self._modules.pop(name)
            setattr(self, name, module)  # registered after, as forward uses them

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        memory = self.encoder(self.table(tokens))
        x = self.shift.expand_as(memory)
        for block in self.blocks:
            x = block(x, mask=memory)
        return {"logits": self.finish(x), "mask": memory}


class TiedByUse(Model):
    def finish(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.table.weight)


class Skips(Model):
    def finish(self, x: Tensor) -> Tensor:
        return super().finish(x + self.first)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.first = self.table(tokens)
        return super().forward(tokens)


class Decides(Model):
    def finish(self, x: Tensor) -> Tensor:
        return super().finish(x)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens)
        if x.sum() > 0:
            x = -x
        return {"logits": self.finish(self.blocks[1](self.blocks[0](x)))}


class Backward(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.table(tokens))
        return {"logits": self.finish(self.blocks[0](self.blocks[1](x)))}


class Shows(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.blocks[0](self.table(tokens))
        assert f"{x.sum():.2f}"
        return {"logits": self.finish(self.blocks[1](x))}


class Exports(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.blocks[0](self.table(tokens))
        assert len(x.detach().numpy())
        return {"logits": self.finish(self.blocks[1](x))}


@torch.library.custom_op("instep_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


class Foreign(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.blocks[0](self.table(tokens)).detach()
        x = unknown(x)
        return {"logits": self.finish(self.blocks[1](x))}


class Returns(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        first = 2 * self.table(tokens)
        return {"logits": self.finish(self.blocks[1](self.blocks[0](first + 1))), "first": first}


class Twice(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.blocks[1](self.blocks[0](self.table(tokens)))
        x = self.blocks[1](x)
        return {"logits": self.finish(x)}


class Forgets(Model):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.blocks[0](self.table(tokens))
        x = self.blocks[1](torch.ones(2, 5, 4))
        return {"logits": self.finish(x)}


def run_stages(model: nn.Module, cuts: Cuts, *args: Any) -> Any:
    tracer = Tracer(model, cuts, CPU)
    pieces = Pieces(model, cuts, frozenset(range(cuts.count)))
    try:
        plan = tracer.plan(args, {})
        output: Any = []
        for stage in range(cuts.count):
            states = read_states(plan.draws, CPU) if plan.draws else torch.zeros(0)
            run = StageRun(plan, stage, output, partial(write_states, plan.draws, states))
            if stage:
                set_generators(1)  # as each stage begins
            output = run_stage(pieces, model.forward, run, plan, args, {})
        return output, plan
    finally:
        pieces.close()


@pytest.mark.parametrize("cut", [["blocks.1"], ["blocks.0", "blocks.2", "head"], ["norm"]])
@pytest.mark.parametrize("kind", [Model, Reads])
def test_the_stages_together_are_the_model(kind: type[Model], cut: list[str]) -> None:
    torch.manual_seed(0)
    model, tokens = kind().eval(), torch.randint(0, 10, (2, 5))
    output, plan = run_stages(model, cut_model(model, len(cut) + 1, cut, ""), tokens)
    assert torch.equal(output["logits"], model(tokens)["logits"])
    assert torch.equal(output["mask"], model(tokens)["mask"])
    assert [len(boundary.carried) for boundary in plan.boundaries] == [1] * len(cut)
    assert not plan.draws


@pytest.mark.parametrize("cut", [["blocks.0"], ["blocks.0", "blocks.1"], ["blocks.0", "blocks.1", "blocks.2"]])
def test_what_every_layer_is_given_goes_along(cut: list[str]) -> None:
    torch.manual_seed(0)
    model, tokens = Memory().eval(), torch.randint(0, 10, (2, 5))
    output, _ = run_stages(model, cut_model(model, len(cut) + 1, cut, ""), tokens)
    expected = model(tokens)
    assert torch.equal(output["logits"], expected["logits"])
    assert torch.equal(output["mask"], expected["mask"])


@pytest.mark.parametrize("kind", [Model, Shaky])
def test_dropout_draws_what_one_process_does(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model, tokens = kind(), torch.randint(0, 10, (2, 5))
    set_generators(1)
    expected = model(tokens)["logits"]
    set_generators(1)
    output, plan = run_stages(model, cut_model(model, 3, None, ""), tokens)
    assert torch.equal(output["logits"], expected)
    assert plan.draws == (("torch",) if kind is Model else ("torch", "python", "numpy"))


def test_shapes_are_planned_once_each_and_follow_autocast() -> None:
    model = Model().eval()
    tracer = Tracer(model, cut_model(model, 2, ["blocks.1"], ""), CPU)
    tokens = torch.randint(0, 10, (2, 5))
    plan = tracer.plan((tokens,), {})
    assert tracer.plan((tokens + 1,), {}) is plan
    assert plan.boundaries[0].carried[0].shape == (2, 5, 4)
    assert tracer.plan((tokens[:1],), {}).boundaries[0].carried[0].shape == (1, 5, 4)
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = Tracer(chain, cut_model(chain, 2, None, ""), CPU)
    with torch.autocast("cpu", torch.bfloat16):
        found = other.plan((torch.randn(2, 4),), {})
    assert found.boundaries[0].carried[0].dtype == torch.bfloat16


def test_a_plan_knows_what_is_frozen_and_follows_what_trains() -> None:
    tokens = torch.randint(0, 10, (2, 5))
    for frozen in (False, True):
        model = Model().requires_grad_(not frozen)
        tracer = Tracer(model, cut_model(model, 2, ["blocks.1"], ""), CPU)
        first = tracer.plan((tokens,), {})
        assert first.boundaries[0].carried[0].requires_grad is not frozen
        model.eval()
        tracer.follow(model)
        assert (first.draws, tracer.plan((tokens,), {}).draws) == (("torch",), ())


@pytest.mark.parametrize(
    ("kind", "cut", "text"),
    [
        (
            Skips,
            ["blocks.1"],
            "Skips cannot be cut before 'blocks.1': something of one stage is used in a later one at {line} (return "
            "super().finish(x + self.first)) without being an argument of the module that begins it.",
        ),
        (
            TiedByUse,
            ["blocks.1"],
            "TiedByUse cannot be cut before 'blocks.1': something of one stage is used in a later one at {line} (return "
            "nn.functional.linear(self.norm(x), self.table.weight)) without being an argument of the module that begins it. Pass it "
            "on as an argument, give a weight that both use to a module of each (tied weights are kept), or name other cut points",
        ),
        (
            Decides,
            ["blocks.1"],
            "Decides cannot be cut before 'blocks.1': its forward needs the values of what another stage computes at {line} (if "
            "x.sum() > 0:), which are not there. Name cut points behind that place, as Parallel(cut=['layers.4']).",
        ),
        (
            Shows,
            ["blocks.1"],
            "Shows cannot be cut before 'blocks.1': its forward needs the values of what another stage computes at {line} "
            '(assert f"{x.sum():.2f}"), which are not there.',
        ),
        (
            Exports,
            ["blocks.1"],
            "Exports cannot be cut before 'blocks.1': its forward needs the values of what another stage computes at {line} "
            "(assert len(x.detach().numpy())), which are not there.",
        ),
        (
            Foreign,
            ["blocks.1"],
            "Foreign cannot be cut before 'blocks.1': forward calls an operator at {line} (x = unknown(x)) of which torch does not "
            "know what shapes it gives (There was no fake impl registered for",
        ),
        (
            Returns,
            ["blocks.1"],
            "Returns cannot be cut before 'blocks.1': forward returns what stage 0 computes and no later stage is given. Leave it "
            "out of what forward returns, pass it on",
        ),
        (
            Twice,
            ["blocks.1"],
            "Twice cannot be cut before 'blocks.1': forward calls blocks.1 twice at {line} (x = self.blocks[1](x)). Name other cut "
            "points, or take 'zero3', which cuts no model.",
        ),
        (
            Forgets,
            ["blocks.1"],
            "Forgets cannot be cut before 'blocks.1': nothing that an earlier stage computes is an argument of blocks.1 at {line} "
            "(x = self.blocks[1](torch.ones(2, 5, 4))). Give it what the modules before it have computed",
        ),
        (
            Backward,
            ["blocks.1"],
            "Backward cannot be cut before 'blocks.1': norm is registered in stage 1 and runs in stage 0 at {line} (x = "
            "self.norm(self.table(tokens))). Create the model's modules in the order in which forward uses them",
        ),
        (Model, ["blocks.1", "drop"], "Parallel(cut=['blocks.1', 'drop']): Model has no module 'drop'."),
        (Decides, ["blocks.2"], "Decides cannot be cut before 'blocks.2': "),
    ],
)
def test_a_forward_that_cannot_be_cut_is_explained(kind: type[Model], cut: list[str], text: str) -> None:
    model = kind()
    before, *after = text.split("{line}")
    pattern = "^" + re.escape(before) + "".join(r"test_trace\.py:\d+" + re.escape(part) for part in after)
    with pytest.raises(instep.UsageError, match=pattern):
        run_stages(model, cut_model(model, len(cut) + 1, cut, ""), torch.randint(0, 10, (2, 5)))


def test_a_part_that_this_rank_lacks_is_named_when_it_is_called() -> None:
    model = Model()
    pieces = Pieces(model, cut_model(model, 2, ["blocks.1"], ""), frozenset({0}))
    model.blocks[0](torch.randn(1, 1, 4))
    with pytest.raises(
        instep.UsageError,
        match=r"^blocks\.2 is called at test_trace\.py:\d+ \(model\.blocks\[2\]\(torch\.randn\(1, 1, 4\)\)\), and it is in stage 1 of ",
    ):
        model.blocks[2](torch.randn(1, 1, 4))
    pieces.close()
    assert "forward" not in model.blocks[2].__dict__
