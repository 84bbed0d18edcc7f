"""Modules whose forward is known, with the styles of the layers inside: PyTorch's own, sequences, and those of
transformers that bring no plan of their own (GPT-2, BERT and its kind, T5, ViT).

What transformers holds is told by the names of a module's children: all of them have to be accounted for, so that nothing
unknown lies between the layers of a pair.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from instep.train.techniques.tensor.attention import Heads, check_attention
from instep.train.techniques.tensor.styles import (
    Columns,
    Features,
    Rows,
    is_linear,
    is_transposed,
    num_inputs,
    num_outputs,
)

Styles = dict[str, ParallelStyle]
ELEMENTWISE = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.ReLU6, nn.SELU, nn.CELU, nn.Identity, nn.Dropout),
)
# By outputs, then by inputs. Attention: queries, keys, values, and what brings the heads together.
ATTENTION = (
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q", "k", "v"), "o"),
    (("self.query", "self.key", "self.value"), "output.dense"),
)
FEED_FORWARD = (
    (("fc1",), "fc2"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("intermediate.dense",), "output.dense"),
)
BIAS = "relative_attention_bias"  # a number per head, of T5


def known_styles(name: str, module: nn.Module, degree: int) -> Styles:
    """Styles for the layers inside a module whose forward is known; none for others."""
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return {"linear1": Columns(), "linear2": Rows()} if module.linear1.out_features % degree == 0 else {}
    if isinstance(module, nn.MultiheadAttention):
        check_attention(name, module)
        return {"": Heads()}
    if isinstance(module, nn.Sequential):
        return dict(_pairs(module, degree))
    if is_transposed(getattr(module, "c_proj", None) or module):  # GPT-2
        return _gpt2(module, degree)
    return _of_transformers(module, degree) if is_of_transformers(module) else {}


def is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _gpt2(module: nn.Module, degree: int) -> Styles:
    if hasattr(module, "c_attn") and hasattr(module, "split_size") and not hasattr(module, "q_attn"):
        return {"c_attn": Columns(3), "c_proj": Rows()}
    c_fc = getattr(module, "c_fc", None)
    return {"c_fc": Columns(), "c_proj": Rows()} if c_fc is not None and num_outputs(c_fc) % degree == 0 else {}


def _pairs(sequence: nn.Sequential, degree: int) -> Iterator[tuple[str, ParallelStyle]]:
    """Linear, what works on each element alone, Linear: split by outputs, then by inputs."""
    first: str | None = None
    for key, layer in sequence.named_children():
        if isinstance(layer, nn.Linear):
            if first is not None and num_inputs(layer) % degree == 0:
                yield from ((first, Columns()), (key, Rows()))
                first = None
            else:
                first = key
        elif not isinstance(layer, ELEMENTWISE):
            first = None


def _of_transformers(module: nn.Module, degree: int) -> Styles:
    for names, last in ATTENTION:
        if _holds(module, names, last):
            return {**{name: Columns() for name in names}, last: Rows(), **_bias(module)}
    for names, last in FEED_FORWARD:
        if _holds(module, names, last) and num_inputs(module.get_submodule(last)) % degree == 0:
            return {**{name: Columns() for name in names}, last: Rows()}
    return {}


def _holds(module: nn.Module, names: tuple[str, ...], last: str) -> bool:
    """Whether these layers are there, and beside the first of them only what is known."""
    layers = [_find(module, name) for name in (*names, last)]
    around = _find(module, names[0].rpartition(".")[0])
    if around is None or not all(layer is not None and is_linear(layer) for layer in layers):
        return False
    return all(any(child is each for each in layers) or _is_small(key, child) for key, child in around.named_children())


def _find(module: nn.Module, name: str) -> nn.Module | None:
    found: nn.Module | None = module
    for part in filter(None, name.split(".")):
        found = None if found is None else found._modules.get(part)
    return found


def _is_small(key: str, module: nn.Module) -> bool:
    is_activation = type(module).__module__ == "transformers.activations"
    return is_activation or isinstance(module, ELEMENTWISE) or (key == BIAS and isinstance(module, nn.Embedding))


def _bias(module: nn.Module) -> Styles:
    return {BIAS: Features()} if isinstance(_find(module, BIAS), nn.Embedding) else {}
