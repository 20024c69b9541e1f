"""Nothing is lost: small storms over a real server. ``benchmarks/reliability.py`` makes large ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import storm
from serving import Served, Servers, processes
from storm import Outcome, Question


@pytest.fixture(scope="module")
def asked() -> list[Question]:
    return storm.questions()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Those of this file, which others have no use for when it is done: storms end them."""
    own = Servers()
    yield own
    own.close()


@pytest.fixture
def shared(servers: Servers) -> Served:
    return servers.get(*storm.SERVER_OPTIONS)


@pytest.fixture
def impatient(servers: Servers) -> Served:
    limits = ("--client-timeout", "2", "--engine-iteration-timeout", "4")
    return servers.get(*storm.SERVER_OPTIONS, *limits, "--max-num-seqs", "32", "--max-waiting", "100")


@pytest.fixture
def narrow(servers: Servers) -> Served:
    return servers.get(*storm.SERVER_OPTIONS, "--max-num-seqs", "4", "--max-waiting", "8", "--drain-timeout", "0.2")


@pytest.fixture
def two(servers: Servers) -> Served:
    """Two API processes."""
    return servers.get(*storm.SERVER_OPTIONS, "--api-server-count", "2")


def test_clients_who_leave(asked: list[Question], shared: Served) -> None:
    tally = storm.run(storm.clients_disconnecting(asked, 120, shared=shared))
    assert min(tally.counts[Outcome.LEFT], tally.counts[Outcome.RIGHT]) > 20


def test_slow_readers_are_answered_and_silent_ones_dropped(asked: list[Question], impatient: Served) -> None:
    storm.run(storm.slow_and_silent_readers(asked, slow=4, silent=1, others=30, shared=impatient))


def test_all_wait_their_turn(asked: list[Question], impatient: Served) -> None:
    tally = storm.run(storm.many_connections(asked, 100, shared=impatient))
    tally.assert_only(Outcome.RIGHT)


def test_past_the_queue_requests_are_refused_at_once(asked: list[Question], narrow: Served) -> None:
    assert storm.run(storm.overload(asked, 100, shared=narrow)).slowest < 20, (
        "far from the two minutes after which one counts as lost"
    )


def test_a_killed_engine_is_told_at_once_and_comes_back(asked: list[Question], impatient: Served) -> None:
    assert storm.run(storm.engine_killed(asked, 30, times=1, shared=impatient)).failed_before_restart, (
        "before its successor is ready"
    )


def test_greedy_clients_do_not_hold_up_others(asked: list[Question], shared: Served) -> None:
    tally = storm.run(storm.greedy_clients(asked, 2, n=50, shared=shared))
    assert max(tally.slowest_live, tally.longest_gap) < 20, (
        tally
    )  # nobody waits until all is over; seconds are for the test below


@pytest.mark.thorough
def test_greedy_clients_do_not_hold_up_others_for_a_moment(asked: list[Question]) -> None:
    """Contract: on an idle machine ``/live`` within 100 ms, no gap beyond 500 ms, no event loop held for 50 ms."""
    tally = storm.run(storm.greedy_clients(asked, 12, max_block=0.05))
    assert (tally.slowest_live <= 0.1, tally.longest_gap <= 0.5) == (True, True), tally


def test_pipelined_requests_do_not_hold_up_others(asked: list[Question], shared: Served) -> None:
    storm.run(storm.pipelined_requests(asked, 2000, shared=shared))


def test_an_engine_that_hangs_is_killed(asked: list[Question], impatient: Served) -> None:
    assert storm.run(storm.engine_hung(asked, 10, shared=impatient)).slowest < 50, "the default is a minute"


def test_a_killed_api_process_takes_only_its_own_connections_with_it(asked: list[Question], two: Served) -> None:
    tally = storm.run(storm.api_killed(asked, 30, shared=two))
    assert tally.counts[Outcome.RIGHT] >= 30


def test_an_api_process_that_stood_still_tells_its_clients(asked: list[Question], shared: Served) -> None:
    tally = storm.run(storm.api_stopped(asked, 40, shared=shared))
    assert tally.counts[Outcome.FAILED] > 0


def test_sigterm_lets_requests_come_to_their_end(asked: list[Question], two: Served) -> None:
    tally = storm.run(storm.sigterm(asked, 30, shared=two))
    assert tally.counts[Outcome.REFUSED] > 0


def test_a_signal_to_the_whole_group_is_one_to_the_server() -> None:
    """As systemd sends it."""
    with Served("--num-gpu-blocks-override", "200", "--tensor-parallel-size", "2") as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        asked: Any = {"model": "penstock-demo", "prompt": "The story of a fox:", "max_tokens": 400, "temperature": 0}
        whole = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
        stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        first = next(iter(stream)).choices[0].text
        for pid in processes(served.pid):
            os.kill(pid, signal.SIGTERM)
        assert first + "".join(chunk.choices[0].text for chunk in stream) == whole
        assert served.ended() == 0
        assert not [line for line in served.lines if "ERROR" in line or "WARNING" in line]


def test_what_has_no_time_to_end_is_told(asked: list[Question], narrow: Served) -> None:
    assert storm.run(storm.sigterm_drain_timeout(asked, 4, shared=narrow)).slowest < 20, "the default is half a minute"


def test_an_engine_that_cannot_live_ends_the_server(asked: list[Question], shared: Served) -> None:
    storm.run(storm.engine_killed_repeatedly(asked, 10, shared=shared))


def test_nothing_outlives_the_supervisor(asked: list[Question], impatient: Served) -> None:
    storm.run(storm.supervisor_killed(asked, 10, shared=impatient))
