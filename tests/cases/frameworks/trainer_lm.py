"""transformers' Trainer with a causal language model, a scheduler of its own and a subclass that computes the loss."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 64, (120, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Smooth(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss + 1e-4 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss


def main():
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=40, use_cpu=True, report_to=[],
        logging_steps=10, disable_tqdm=True, save_strategy="no", gradient_checkpointing=True, dataloader_num_workers=1,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    model = GPT2LMHeadModel(config)
    Smooth(model=model, args=args, train_dataset=Text()).train()


if __name__ == "__main__":
    main()
