import threading
from datetime import timedelta

import pytest
import torch

from instep.train.reduce.bucket import Bucket
from instep.train.reduce.courier import Courier, choose_courier


def bucket(index: int) -> Bucket:
    return Bucket(index, torch.zeros(1))


def test_runs_buckets_one_after_another_off_the_main_thread():
    seen: list[tuple[int, bool]] = []
    courier = Courier(lambda b: seen.append((b.index, threading.current_thread() is threading.main_thread())))
    tickets = [courier.start(bucket(index)) for index in range(20)]
    for ticket in tickets:
        ticket.wait()
    courier.close()
    assert seen == [(index, False) for index in range(20)]


def test_an_error_comes_out_of_wait_and_ends_what_follows():
    ran: list[int] = []

    def run(b: Bucket) -> None:
        ran.append(b.index)
        if b.index == 1:
            raise ValueError("the peer has gone")

    courier = Courier(run)
    tickets = [courier.start(bucket(index)) for index in range(3)]
    tickets[0].wait()
    for ticket in tickets[1:]:
        with pytest.raises(ValueError, match=r"^the peer has gone$"):
            ticket.wait()
    courier.close()
    assert ran == [0, 1]


def test_waiting_can_be_given_up():
    release = threading.Event()
    courier = Courier(lambda b: (release.wait(), None)[1])
    ticket = courier.start(bucket(4))
    with pytest.raises(RuntimeError, match=r"^bucket 4 timed out: not summed after 0:00:00\.010000$"):
        ticket.wait(timedelta(milliseconds=10))
    assert not ticket.is_completed()
    release.set()
    ticket.wait(timedelta(seconds=10))
    assert ticket.is_completed()
    courier.close()


def test_can_be_started_again_after_it_was_closed():
    seen: list[int] = []
    courier = choose_courier(lambda b: seen.append(b.index), torch.device("cpu"))
    for index in range(2):
        courier.start(bucket(index)).wait()
        courier.close()
    courier.close()
    assert seen == [0, 1]
