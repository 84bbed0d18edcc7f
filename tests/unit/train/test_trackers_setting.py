"""The setting `trackers` reaches instep.Run."""

from __future__ import annotations

from pathlib import Path

import pytest

import instep


def test_an_unknown_tracker_is_refused_when_the_run_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTEP_TRACKERS", "tensorbord")
    with pytest.raises(instep.UsageError) as caught, instep.Run(global_batch=8, dir=tmp_path):
        pass
    assert str(caught.value) == "the tracker 'tensorbord' is not known; there are mlflow, tensorboard, wandb."
