"""A progress bar of a rank on the launcher's terminal: drawn in place, and out of the way of lines."""

from instep.launch.output import LineAssembler, fit_to_terminal


def test_a_bar_on_a_terminal_is_held_and_ends_as_one_line():
    lines = LineAssembler(b"[0] ", holds_bars=True)
    assert lines.feed(b"step 1\r", now=0.0) == b"" and lines.bar == b"step 1"
    assert lines.feed(b"step 2\r", now=100.0) == b"" and lines.bar == b"step 2"
    assert lines.idle(now=200.0) == b""
    assert lines.feed(b"a warning\n", now=200.0) == b"[0] a warning\n"
    assert lines.bar == b""
    assert lines.feed(b"step 3\r", now=201.0) == b""
    assert lines.close() == b"[0] step 3\n"


def test_a_state_fits_the_terminal_and_moves_no_cursor():
    assert fit_to_terminal(b"\x1b[1A\x1b[32m50%\x1b[0m \xe2\x96\x88|\x07", 80) == "50% █|".encode()
    assert fit_to_terminal(b"0123456789", 6) == b"01234"
    assert fit_to_terminal(b"0123456789", 0) == b""
