"""What a rank's progress looks like on the terminal that `instep run` was started from."""

from __future__ import annotations

import os
import pty

from launching import Launcher

BAR = """
import os, pathlib, sys, time

def say(name):
    pathlib.Path(name).touch()

def hear(name):
    while not os.path.exists(name):
        time.sleep(0.01)

if os.environ["RANK"] == "1":
    hear("drawn")
    print("hello", flush=True)
    time.sleep(0.5)
    say("printed")
else:
    for state in range(4):
        sys.stderr.write(f"step {state}\\r")
        sys.stderr.flush()
        time.sleep(0.5)
        if state == 2:
            say("drawn")
            hear("printed")
    print("live:", os.environ.get("INSTEP_LIVE"))
    sys.stderr.write("step 4\\n")
"""


def test_a_progress_line_is_redrawn_in_place_below_all_lines(launch: Launcher) -> None:
    script = launch.script(BAR)
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w") as terminal:
            process = launch.begin("-n", "2", script, into=terminal, TERM="xterm")
        shown = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the last process that had the terminal has ended
                break
            if not data:
                break
            shown += data
    finally:
        process.wait(60)
        os.close(ours)
    text = shown.decode().replace("\r\n", "\n")
    assert process.returncode == 0, text
    assert "\r\x1b[K[0] step 1\r\x1b[K[0] step 2\r\x1b[K" in text  # in place
    assert "\r\x1b[K[1] hello\n\r\x1b[K[0] step 2\r" in text  # away for a line, and back
    assert "[0] live: 1\n" in text and "[0] step 4\n" in text
    assert text.count("step 4") == 1
