"""A Hugging Face transformers model, trained on texts of unequal length with a loss that is right per token.

    instep run -n 2 examples/03_finetune.py

Needs transformers. The model is made from a config, so nothing is downloaded; with
`AutoModelForCausalLM.from_pretrained` in its place, and that model's tokenizer, the same loop fine-tunes. The texts
are the docstrings of Python's standard library.

Micro-batches hold unequal numbers of tokens. A mean per micro-batch, averaged over processes, would count the tokens
of short texts for more; `weight=` makes each token of the global batch count the same, however the texts fall.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import instep

START, PADDING, LONGEST = 256, 257, 96  # tokens are bytes, and these
IGNORED = -100  # a target that does not count


def docstrings(most: int) -> list[torch.Tensor]:
    """Docstrings of modules, classes and functions as bytes behind START, shortened to LONGEST."""
    texts: list[torch.Tensor] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                texts.append(torch.tensor([START, *text.encode()[: LONGEST - 1]]))
        if len(texts) >= most:
            break
    return texts[:most]


def pad(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A micro-batch as the model takes it, as long as its longest text."""
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PADDING)
    return {"input_ids": tokens, "attention_mask": (tokens != PADDING).long()}


def token_losses(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the real tokens of a batch, and how many they are."""
    logits = model(**batch).logits[:, :-1]  # (texts, length - 1, vocabulary)
    targets = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, IGNORED)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="Docstrings with a transformers model.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--dir", default=None, help="where metrics and checkpoints go; nowhere by default")
    args = parser.parse_args()

    texts = docstrings(args.texts)
    held_out, train_set = texts[::10], [text for index, text in enumerate(texts) if index % 10]
    with instep.Run(global_batch=32, micro_batch=8, clip_norm=1.0, seed=0, dir=args.dir) as run:
        config = LlamaConfig(
            vocab_size=258,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=LONGEST,
            bos_token_id=START,
            eos_token_id=PADDING,
            pad_token_id=PADDING,
        )
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        run.prepare(model, optimizer)
        train, test = run.loader(train_set, shuffle=True, collate_fn=pad), run.loader(held_out, collate_fn=pad)
        run.restore()

        for step in run.steps(train, steps=args.steps):
            for batch in step:
                loss, num_tokens = token_losses(model, batch)
                step.backward(loss, weight=num_tokens)
            step.update()
            if step.index % 20 == 19:
                run.print(f"step {step.index + 1}: loss {step.loss:.4f} per token")

        losses = [token_losses(model, batch) for batch in run.evaluate(test)]
        count = sum(int(num_tokens) for _, num_tokens in losses)
        mean = sum(float(loss) * int(num_tokens) for loss, num_tokens in losses) / max(count, 1)
        run.print(f"held-out loss {run.mean(mean, count):.4f} per token")


if __name__ == "__main__":
    main()
