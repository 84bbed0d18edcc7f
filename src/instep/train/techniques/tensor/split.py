"""Layers shared out over the ranks of the tensor axis (Megatron-LM, Shoeybi et al., 2019)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from instep.errors import UsageError
from instep.records.parallel import Parallel
from instep.train.arguments import Arguments
from instep.train.reduce.local_part import is_cut
from instep.train.techniques.tensor.attention import Heads
from instep.train.techniques.tensor.plan import Plan, declared_plans, find_plan, says_all
from instep.train.techniques.tensor.regions import Region, guard_region
from instep.train.techniques.tensor.sequence import find_stacks, plan_sequence, spread_sequences
from instep.train.techniques.tensor.styles import (
    Columns,
    Features,
    Rows,
    Split,
    Vocabulary,
    Whole,
    is_linear,
    num_inputs,
    num_outputs,
)

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "n_kv_heads", "heads")
HEAD_WIDTHS = ("head_dim", "head_width", "head_size", "attention_head_size")
PACKED_WIDTHS = ("split_size", "all_head_size")  # of queries, keys and values where they lie in one layer
Ties = list[list[tuple[nn.Module, str]]]


def split_layers(model: nn.Module, mesh: DeviceMesh, parallel: Parallel, say: Callable[[str], None]) -> None:
    """Splits the layers that the plan names, in place. mesh: of the tensor axis. Every rank must call it.

    Raises UsageError, before anything is changed, for layers and heads that cannot be divided.
    """
    degree = mesh.size()
    ties = find_ties(model)
    plan = settle_ties(model, find_plan(model, parallel.plan, degree), ties, parallel.plan, degree)
    owners = split_owners(model, plan)
    for name, style in plan.items():
        check_divides(name, model.get_submodule(name), style, degree)
    for name in owners:
        check_heads(name, model.get_submodule(name), plan, degree)
        check_partner(name, plan)
    stacks = find_stacks(model, plan) if parallel.sequence else []
    plan_sequence(model, plan, stacks)
    if parallel.split_loss:
        find_head(model, plan, parallel.split_loss).spread = True
    region = Region(mesh.get_local_rank(), degree)
    for name, style in plan.items():
        if isinstance(style, Split):
            style.region = region
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=None)
    for name in owners:
        share_heads(model.get_submodule(name), degree)
        guard_region(model.get_submodule(name), region)
    spread_sequences(model, stacks, owners, mesh, region)
    tie_again(ties)
    leave_fast_paths(model)
    is_given = parallel.plan is not None and says_all(parallel.plan)
    say(describe(model, plan, degree, was_recognised=not is_given and not declared_plans(model)))


def check_splittable(arguments: Arguments) -> None:
    """Raises UsageError for arguments of Run that the tensor axis cannot keep."""
    if arguments.exact:
        raise UsageError(
            "exact=True adds gradients in an order of its own and goes with 'ddp' and 'zero1' only. Leave one of them out."
        )
    if arguments.compress == "powersgd":
        raise UsageError(
            "compress='powersgd' looks at whole matrices of gradients, of which tensor= leaves each rank a part. Take 'bf16' or "
            "'fp16', or leave one of them out."
        )


def find_head(model: nn.Module, plan: Plan, given: bool | str) -> Columns:
    """The layer whose outputs are the model's: what is given, what a transformers model says, or the last linear one.
    Raises UsageError where it is not split by outputs."""
    ask = getattr(model, "get_output_embeddings", None)
    own = ask() if callable(ask) else None
    names = [name for name, module in model.named_modules() if module is own or (own is None and is_linear(module))]
    name = given if isinstance(given, str) else names[-1] if names else ""
    style = plan.get(name)
    if not isinstance(style, Columns) or not style.gathered:
        raise UsageError(
            f"split_loss={given!r} wants the model's last layer split by outputs, and {name or type(model).__name__} is not: there "
            "is no such linear layer, the degree does not divide its outputs, or the plan says otherwise. Name another layer, "
            "as split_loss='head', or leave it out."
        )
    return style


def split_owners(model: nn.Module, plan: Plan) -> list[str]:
    """The modules whose forward works on shares: those around layers that are split by outputs and not gathered."""
    found: dict[str, None] = {}
    for name, style in plan.items():
        if isinstance(style, Columns) and not style.gathered:
            found[name.rpartition(".")[0]] = None
    return list(found)


def check_partner(owner: str, plan: Plan) -> None:
    """Shares have to come together again: in a layer of the same module, or of one beside it."""
    around = f"{owner.rpartition('.')[0]}.".lstrip(".")
    takes_shares = (Rows, RowwiseParallel)
    if any(isinstance(style, takes_shares) and name.startswith(around) for name, style in plan.items()):
        return
    layers = [name for name, style in plan.items() if isinstance(style, Columns) and name.rpartition(".")[0] == owner]
    raise UsageError(
        f"the plan splits {' and '.join(layers)} by outputs and leaves each rank its share, and no layer near takes shares. "
        "Name the one that does as 'rowwise', or take 'colwise_gather_output'."
    )


def check_divides(name: str, layer: nn.Module, style: ParallelStyle, degree: int) -> None:
    if isinstance(style, Heads):
        assert isinstance(layer, nn.MultiheadAttention)
        _check_count(name, "num_heads", layer.num_heads, degree)
    elif isinstance(style, Columns):
        _check_size(name, "outputs", num_outputs(layer) // style.parts, degree)
    elif isinstance(style, Rows):
        _check_size(name, "inputs", num_inputs(layer), degree)
    elif isinstance(style, Vocabulary):
        _check_size(name, "rows", getattr(layer, "num_embeddings", 0), degree)
    elif isinstance(style, Features):
        _check_size(name, "columns", getattr(layer, "embedding_dim", 0), degree)


def _check_size(name: str, what: str, size: int, degree: int) -> None:
    if size % degree:
        raise UsageError(
            f"{name} has {size} {what}, which tensor={degree} does not divide. {_nearest(size, degree)}Keep it whole with "
            f"Parallel(tensor={degree}, plan={{..., {name!r}: 'whole'}}), or give it a multiple of {degree} {what}."
        )


def check_heads(name: str, module: nn.Module, plan: Plan, degree: int) -> None:
    """Attention heads are never cut in two."""
    width = next((found for name in HEAD_WIDTHS if isinstance(found := getattr(module, name, None), int)), None)
    for attribute in HEAD_COUNTS:
        count = getattr(module, attribute, None)
        if (
            count is None and width is not None
        ):  # where queries, keys and values lie together, their layer tells nothing
            count = getattr(getattr(module, "config", None), attribute, None)
        if isinstance(count, int) and not isinstance(count, bool):
            _check_count(name, attribute, count, degree)
    for child, layer in module.named_children():
        style = plan.get(f"{name}.{child}")
        if isinstance(width, int) and isinstance(style, Columns) and num_outputs(layer) % (style.parts * width) == 0:
            _check_count(f"{name}.{child}", "heads", num_outputs(layer) // (style.parts * width), degree)


def _check_count(name: str, attribute: str, count: int, degree: int) -> None:
    if count % degree:
        raise UsageError(
            f"{name} has {attribute}={count}, which tensor={degree} does not divide: a head cannot be cut in two. "
            f"{_nearest(count, degree)}'zero3' and pipeline= share a model out without cutting its layers; with a multiple of "
            f"{degree} heads it can be cut."
        )


def _nearest(count: int, degree: int) -> str:
    """A sentence, or nothing where only degrees far from the one asked for divide the count; 1 would be no split."""
    divisors = sorted((n for n in range(2, 4 * degree + 1) if count % n == 0), key=lambda n: (abs(n - degree), n))
    return f"Nearest that fit: {', '.join(f'tensor={n}' for n in sorted(divisors[:3]))}. " if divisors else ""


def share_heads(module: nn.Module, degree: int) -> None:
    """What the module's forward reads as its number of heads is that of this rank."""
    for attribute in (*HEAD_COUNTS, *PACKED_WIDTHS):
        count = vars(module).get(attribute)
        if isinstance(count, int) and not isinstance(count, bool):
            setattr(module, attribute, count // degree)


# -- parameters that several modules share


def find_ties(model: nn.Module) -> Ties:
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append((module, key))
    return [found for found in owners.values() if len(found) > 1]


def settle_ties(model: nn.Module, plan: Plan, ties: Ties, given: Mapping[str, Any] | None, degree: int) -> Plan:
    """The plan in which layers that share a weight stay whole, unless all of them cut it in the same way.

    given: the user's plan; where it parts them, that is an error. Raises UsageError.
    """
    names = {id(module): name for name, module in model.named_modules()}
    whole = dict(given or {})
    while parted := [shared for tie in ties if _is_parted(shared := [names[id(module)] for module, _ in tie], plan)]:
        if given is not None and says_all(given):
            raise UsageError(
                f"{' and '.join(parted[0])} share one weight, and Parallel(plan=...) splits it in different ways: "
                f"{', '.join(repr(plan.get(name, 'whole')) for name in parted[0])}. Split all of them by the same dim, as "
                "'embedding_rowwise' and 'colwise_gather_output', or none."
            )
        whole.update(dict.fromkeys(filter(None, parted[0]), "whole"))
        plan = find_plan(model, whole, degree)  # with their partners; and the next tie may have been parted by this one
    return plan


def _is_parted(shared: list[str], plan: Plan) -> bool:
    return len({_cut(plan.get(name)) for name in shared}) > 1


def _cut(style: Any) -> str:
    if style is None or isinstance(style, Whole):
        return "whole"
    return str(style.weight) if isinstance(style, Split) else repr(style)


def tie_again(ties: Ties) -> None:
    for (first, key), *others in ties:
        for module, other in others:
            module.register_parameter(other, first._parameters[key])


def leave_fast_paths(model: nn.Module) -> None:
    """In evaluation PyTorch's encoders take kernels that know no split layers, and pack padded batches for them."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.enable_nested_tensor = module.use_nested_tensor = False
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # which only the choice of the kernel reads


def describe(model: nn.Module, plan: Plan, degree: int, *, was_recognised: bool) -> str:
    """One line: how much of the model is split, and how many layers work alone because nobody said more about them."""
    total = sum(p.numel() for p in model.parameters())
    cut = sum(p.numel() for p in model.parameters() if is_cut(p))
    alone = [name for name, style in plan.items() if isinstance(style, Columns) and style.gathered]
    split = sum(not isinstance(style, Whole) for style in plan.values())
    line = f"tensor={degree}: {split} layers split, with {cut / max(total, 1):.0%} of the parameters"
    if alone and was_recognised:
        line += f"; outputs gathered after {len(alone)} of them, whose neighbours are not known (Parallel(plan=...) says more)"
    return line
