import io
import itertools

from instep.train.observe.progress import Mark, Position, Progress, progress_text


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_steps(progress: Progress, clock: Clock, steps: range, seconds: float, loss: float = 2.0) -> None:
    for index in steps:
        clock.now += seconds
        progress.advance(index, 0, loss, 64.0, False)


def test_a_line_holds_loss_rate_and_time_left():
    text = progress_text(Position(120, 1000, 1, 2.34512, 0), Mark(0, 0, 0), Mark(10, 20, 1280), 880)
    assert text == "step 120/1000 | epoch 1 | loss 2.3451 | 128 samples/s | 7 min 20 s left"


def test_a_line_leaves_out_what_is_unknown_and_counts_skipped_steps():
    same = Mark(1, 1, 8)
    assert progress_text(Position(1, None, 0, None, 2), same, same, None) == "step 1 | epoch 0 | 2 skipped"


def test_very_small_and_very_large_losses_stay_readable():
    same = Mark(0, 0, 0)
    assert "loss 1.23e-05" in progress_text(Position(1, None, 0, 1.234e-5, 0), same, same, None)
    assert "loss nan" in progress_text(Position(1, None, 0, float("nan"), 0), same, same, None)


def test_a_log_has_the_first_step_then_fewer_and_the_last():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    progress.plan(1000, 0)
    run_steps(progress, clock, range(1000), 0.125)
    progress.close()
    steps = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert steps[0] == 1 and steps[-1] == 1000
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert gaps[:4] == [16, 32, 64, 128]
    assert len(steps) < 10


def test_the_rate_leaves_out_the_first_step_which_pays_for_start_up():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    progress.plan(100, 0)
    clock.now += 50
    run_steps(progress, clock, range(1), 0.0)
    run_steps(progress, clock, range(1, 100), 0.5)
    lines = stream.getvalue().splitlines()
    assert "samples/s" not in lines[0]
    assert "| 128 samples/s | 47.5 s left" in lines[1]
    assert lines[-1].startswith("step 100/100 |")


def test_a_stopped_loop_without_a_known_end_shows_its_last_step_when_closed():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    progress.plan(None, 0)
    run_steps(progress, clock, range(7), 0.01)
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1", "7"]


def test_a_resumed_loop_counts_what_was_done_before():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    progress.plan(1000, done=400)
    run_steps(progress, clock, range(400, 402), 3.0)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["401/1000", "402/1000"]
    assert "29 min 54 s left" in stream.getvalue()


def test_a_second_loop_goes_on_counting_steps():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock)
    for first in (0, 10):
        progress.plan(10, 0)
        run_steps(progress, clock, range(first, first + 10), 0.1)
    progress.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/10", "10/10", "20/20"]


def test_a_terminal_is_redrawn_at_most_five_times_a_second_and_keeps_the_last_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    clock, stream = Clock(), Terminal()
    progress = Progress(stream, clock)
    progress.plan(1000, 0)
    run_steps(progress, clock, range(1000), 0.01)
    drawn = stream.getvalue().count("step ")
    assert 40 <= drawn <= 52
    progress.say("a line of its own")
    progress.close()
    assert "\x1b[2Kstep 1000/1000 | epoch 0 | loss 2.0000 | 6,400 samples/s\n" in stream.getvalue()
    assert "a line of its own\n" in stream.getvalue()


def test_a_live_line_leaves_streams_and_cursor_as_they_were(monkeypatch):
    import sys

    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout, sys.stderr
    clock, stream = Clock(), Terminal()
    progress = Progress(stream, clock)
    run_steps(progress, clock, range(3), 1.0)
    progress.close()
    assert (sys.stdout, sys.stderr) == before
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_by_way_of_the_launcher_the_line_is_a_state_that_is_written_over():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream, clock, piped_to_terminal=True)
    progress.plan(4, 0)
    run_steps(progress, clock, range(2), 1.0)
    progress.say("a line of its own")
    run_steps(progress, clock, range(2, 4), 1.0)
    progress.close()
    states = stream.getvalue().replace("\n", "\r").split("\r")
    assert [state.split(" | ")[0] for state in states] == [
        *("step 1/4", "step 2/4", "a line of its own", "step 3/4", "step 4/4", "step 4/4", "")
    ]
    assert stream.getvalue().count("\n") == 2 and stream.getvalue().endswith("samples/s\n")
