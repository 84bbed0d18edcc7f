"""transformers' Trainer: evaluation, accumulation, callbacks, checkpoints, the best model loaded at the end."""

import os
import sys
import time

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

HOW = sys.argv[1] if len(sys.argv) > 1 else ""


class Words(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 90, (n, 12), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        if HOW == "raise" and os.environ.get("RANK") == "1" and i % 37 == 5 and len(self) > 100:
            raise KeyError(f"no word {i}")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > 45)}


class Meter(TrainerCallback):
    def __init__(self):
        self.started = time.time()

    def on_step_end(self, args, state, control, **kwargs):
        if HOW == "local_stop" and args.process_index == 1 and state.global_step >= 9:
            control.should_training_stop = True

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if HOW == "barrier_main" and state.is_world_process_zero:
            torch.distributed.barrier()


def compute_metrics(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main():
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        num_train_epochs=2,
        learning_rate=5e-4,
        warmup_steps=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=5,
        load_best_model_at_end=HOW == "",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Words(202, 0),
        eval_dataset=Words(37, 1),
        compute_metrics=compute_metrics,
        callbacks=[Meter()],
    )
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
