import threading
import time

import pytest
import torch

from instep.train.reduce.futex import Futex, has_futex

pytestmark = pytest.mark.skipif(not has_futex(), reason="needs Linux on x86-64")


def test_a_sleeper_is_woken_by_a_change():
    number, futex = torch.zeros(1, dtype=torch.int64), Futex()
    woken_after: list[float] = []

    def sleep() -> None:
        started = time.monotonic()
        while number[0] == 0:
            futex.wait(number.data_ptr(), 0, 20.0)
        woken_after.append(time.monotonic() - started)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    time.sleep(0.1)
    number[0] = 1
    futex.wake(number.data_ptr())
    sleeper.join(10)
    assert len(woken_after) == 1 and woken_after[0] < 10


def test_does_not_sleep_when_the_number_is_another_already():
    number, started = torch.full((1,), 5), time.monotonic()
    Futex().wait(number.data_ptr(), 4, 20.0)
    assert time.monotonic() - started < 10


def test_wakes_by_itself_when_the_time_is_over():
    number, started = torch.zeros(1, dtype=torch.int64), time.monotonic()
    Futex().wait(number.data_ptr(), 0, 0.05)
    assert 0.04 < time.monotonic() - started < 10
