"""Lines of ranks: whole, named, bars kept readable, nothing lost."""

from __future__ import annotations

from instep.launch.output import UNFINISHED_SECONDS, LineAssembler, make_prefix


def test_prefixes_every_line() -> None:
    lines = LineAssembler(b"[1] ")
    assert lines.feed(b"one\ntwo\n", 0.0) == b"[1] one\n[1] two\n"


def test_never_prints_half_a_line() -> None:
    lines = LineAssembler(b"[1] ")
    assert lines.feed(b"begin", 0.0) == b""
    assert lines.feed(b" end\nnext", 0.0) == b"[1] begin end\n"
    assert lines.close() == b"[1] next\n"


def test_shows_an_unfinished_line_after_a_silence() -> None:
    lines = LineAssembler(b"[0] ")
    lines.feed(b"loading ...", 10.0)
    assert lines.idle(10.0 + UNFINISHED_SECONDS / 2) == b""
    assert lines.idle(10.0 + UNFINISHED_SECONDS) == b"[0] loading ...\n"
    assert lines.feed(b" done\n", 20.0) == b"[0]  done\n"


def test_keeps_binary_and_empty_lines() -> None:
    lines = LineAssembler(b"> ")
    assert lines.feed(b"\xff\x00\xfe\n\n\x80", 0.0) == b"> \xff\x00\xfe\n> \n"
    assert lines.close() == b"> \x80\n"


def test_windows_line_ends_are_line_ends() -> None:
    lines = LineAssembler(b"> ")
    assert lines.feed(b"a\r\nb\r\n", 0.0) == b"> a\n> b\n"


def test_shows_a_bar_now_and_then_and_its_end() -> None:
    lines = LineAssembler(b"[0] ", progress_seconds=10.0)
    out = b"".join(lines.feed(b"\r%d%%" % percent, percent * 0.1) for percent in range(101))
    out += lines.feed(b"\r100% done\n", 10.2)
    assert out.splitlines() == [b"[0] 0%", b"[0] 100%", b"[0] 100% done"]


def test_a_bar_that_ends_its_states_with_carriage_returns() -> None:
    lines = LineAssembler(b"", progress_seconds=10.0)
    out = lines.feed(b"10%\r20%\r", 0.0) + lines.feed(b"30%\r40%\r", 1.0)
    assert out + lines.close() == b"20%\n40%\n"


def test_the_end_of_a_line_whose_last_state_is_shown_adds_nothing() -> None:
    """A print without buffer writes the text and the end of its line apart, and Windows' line ends can be cut in two."""
    lines = LineAssembler(b"> ")
    assert lines.feed(b"1\r2", 0.0) == b"> 2\n"
    assert lines.idle(UNFINISHED_SECONDS) == b""
    assert lines.feed(b"\nnext\r", 3.0) == b""
    assert lines.feed(b"\n", 3.1) == b"> next\n"
    assert lines.feed(b"\rend", 20.0) == b"> end\n"
    assert lines.close() == b""


def test_text_after_a_bar_is_whole() -> None:
    lines = LineAssembler(b"")
    out = lines.feed(b"\r50%\r100%\nepoch 1\n", 0.0)
    assert out == b"100%\nepoch 1\n"


def test_a_bar_that_was_cut_in_the_middle() -> None:
    lines = LineAssembler(b"", progress_seconds=100.0)
    out = b"".join(lines.feed(part, 0.5) for part in (b"\r 1", b"0%", b"\r 2", b"0%\n"))
    assert out.splitlines()[-1] == b" 20%"


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = LineAssembler(b"")
    out = b"".join(lines.feed(b"x" * 65536, 0.0) for _ in range(64))
    assert len(lines.pending) <= 1 << 20
    assert out.count(b"x") + lines.pending.count(b"x") == 64 * 65536


def test_one_rank_needs_no_name() -> None:
    assert [make_prefix(0, 1), make_prefix(3, 4), make_prefix(3, 16)] == [b"", b"[3] ", b"[ 3] "]
