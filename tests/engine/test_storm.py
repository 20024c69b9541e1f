"""Small load scenarios on a real server: no request is lost. ``benchmarks/reliability.py`` runs larger ones."""

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
def questions() -> list[Question]:
    return storm.questions()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Servers that are not shared with other test files, because the scenarios end them."""
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def shared(servers: Servers) -> Served:
    return servers.get(*storm.SERVER_OPTIONS)


@pytest.fixture
def short_timeouts(servers: Servers) -> Served:
    limits = ("--client-timeout", "2", "--engine-iteration-timeout", "4")
    return servers.get(*storm.SERVER_OPTIONS, *limits, "--max-num-seqs", "32", "--max-waiting", "100")


@pytest.fixture
def short_queue(servers: Servers) -> Served:
    return servers.get(*storm.SERVER_OPTIONS, "--max-num-seqs", "4", "--max-waiting", "8", "--drain-timeout", "0.2")


@pytest.fixture
def two_api_processes(servers: Servers) -> Served:
    return servers.get(*storm.SERVER_OPTIONS, "--api-server-count", "2")


@pytest.mark.slow
def test_disconnecting_clients_leak_no_resources(questions: list[Question], shared: Served) -> None:
    tally = storm.run(storm.clients_disconnecting(questions, 120, shared=shared))
    assert min(tally.counts[Outcome.LEFT], tally.counts[Outcome.RIGHT]) > 20


@pytest.mark.slow
def test_slow_readers_are_answered_and_silent_readers_dropped(
    questions: list[Question], short_timeouts: Served
) -> None:
    storm.run(storm.slow_and_silent_readers(questions, slow=4, silent=1, others=30, shared=short_timeouts))


@pytest.mark.slow
def test_requests_of_many_connections_are_all_answered(questions: list[Question], short_timeouts: Served) -> None:
    tally = storm.run(storm.many_connections(questions, 100, shared=short_timeouts))
    tally.assert_only(Outcome.RIGHT)


@pytest.mark.slow
def test_requests_beyond_queue_are_refused_at_once(questions: list[Question], short_queue: Served) -> None:
    assert storm.run(storm.overload(questions, 100, shared=short_queue)).slowest < 20, (
        "a request counts as lost after two minutes"
    )


def test_requests_of_killed_engine_continue_in_next_engine(questions: list[Question], short_timeouts: Served) -> None:
    storm.run(storm.engine_killed(questions, 30, times=1, shared=short_timeouts))


def test_streams_continue_when_engine_is_replaced(questions: list[Question], shared: Served) -> None:
    storm.run(storm.engine_replaced(questions, 30, shared=shared))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--data-parallel-size", "2"),
        ("--engine-address", "127.0.0.1:0"),  # the old process has to end first
        ("--api-server-count", "2", "--no-resume"),
    ],
)
def test_no_request_fails_when_engines_are_replaced(questions: list[Question], options: tuple[str, ...]) -> None:
    storm.run(storm.engine_replaced(questions, 20, *options))


@pytest.mark.slow
def test_requests_of_killed_rank_continue(questions: list[Question]) -> None:
    storm.run(storm.worker_killed(questions, 20))


@pytest.mark.slow
def test_greedy_clients_do_not_block_others(questions: list[Question], shared: Served) -> None:
    tally = storm.run(storm.greedy_clients(questions, 2, n=50, shared=shared))
    # no client waits for the greedy requests to end; the next test checks the limits of the contract
    assert max(tally.slowest_live, tally.longest_pause) < 20, tally


@pytest.mark.thorough
def test_greedy_clients_delay_others_within_contract(questions: list[Question]) -> None:
    """Contract on an idle machine: ``/live`` within 100 ms, chunks within 500 ms, no event loop blocked for 50 ms."""
    tally = storm.run(storm.greedy_clients(questions, 12, max_block=0.05))
    assert (tally.slowest_live <= 0.1, tally.longest_pause <= 0.5) == (True, True), tally


def test_pipelined_requests_do_not_block_others(questions: list[Question], shared: Served) -> None:
    storm.run(storm.pipelined_requests(questions, 2000, shared=shared))


@pytest.mark.slow
def test_hanging_engine_is_killed_and_its_requests_continue(questions: list[Question], short_timeouts: Served) -> None:
    assert storm.run(storm.engine_hung(questions, 10, shared=short_timeouts)).slowest < 50, "the default is 60 s"


@pytest.mark.slow
def test_killed_api_process_breaks_only_its_connections(questions: list[Question], two_api_processes: Served) -> None:
    tally = storm.run(storm.api_killed(questions, 30, shared=two_api_processes))
    assert tally.counts[Outcome.RIGHT] >= 30


@pytest.mark.slow
def test_stopped_api_process_fails_its_requests_with_error(questions: list[Question], shared: Served) -> None:
    tally = storm.run(storm.api_stopped(questions, 40, shared=shared))
    assert tally.counts[Outcome.FAILED] > 0


def test_sigterm_completes_open_requests(questions: list[Question], two_api_processes: Served) -> None:
    tally = storm.run(storm.sigterm(questions, 30, shared=two_api_processes))
    assert tally.counts[Outcome.REFUSED] > 0


@pytest.mark.slow
def test_sigterm_to_process_group_completes_open_requests() -> None:
    """systemd sends SIGTERM to all processes of the group."""
    with Served("--num-gpu-blocks-override", "200", "--tensor-parallel-size", "2") as served:
        client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
        request: Any = {"model": "penstock-demo", "prompt": "The story of a fox:", "max_tokens": 400, "temperature": 0}
        expected = client.completions.create(**request, extra_body={"ignore_eos": True}).choices[0].text
        stream = client.completions.create(**request, stream=True, extra_body={"ignore_eos": True})
        first = next(iter(stream)).choices[0].text
        for pid in processes(served.pid):
            os.kill(pid, signal.SIGTERM)
        assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
        assert served.ended() == 0
        assert not [line for line in served.lines if "ERROR" in line or "WARNING" in line]


def test_requests_open_at_drain_timeout_get_error(questions: list[Question], short_queue: Served) -> None:
    assert storm.run(storm.sigterm_drain_timeout(questions, 4, shared=short_queue)).slowest < 20, (
        "the default drain timeout is half a minute"
    )


@pytest.mark.slow
def test_repeatedly_killed_engine_ends_the_server(questions: list[Question], shared: Served) -> None:
    storm.run(storm.engine_killed_repeatedly(questions, 10, shared=shared))


def test_no_process_outlives_the_supervisor(questions: list[Question], short_timeouts: Served) -> None:
    storm.run(storm.supervisor_killed(questions, 10, shared=short_timeouts))
