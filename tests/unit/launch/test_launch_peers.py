"""When a node counts as lost."""

from __future__ import annotations

from instep.launch.peers import LOST_SECONDS, find_lost


def test_a_silent_node_is_lost() -> None:
    now = LOST_SECONDS + 1
    assert find_lost({1: 0.0, 2: 20.0}, now, now) == "node 1 (by group rank) has not been heard of for 30 s; it is lost"


def test_nodes_that_beat_are_not() -> None:
    assert find_lost({1: 10.0, 2: 20.0}, 25.0, 10.0 + LOST_SECONDS) == ""


def test_without_the_store_nobody_else_is_blamed() -> None:
    text = find_lost({1: 0.0, 2: 0.0}, 0.0, LOST_SECONDS + 5)
    assert text == "the node that holds the rendezvous has not answered for 35 s; it is lost"
