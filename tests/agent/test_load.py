import asyncio
import json

from kvpilot.agent.demo.load import LoadRun, Status
from kvpilot.agent.demo.traffic import PHASES, Session, Turn, make_sessions

TURN = Turn(text="How do I fix it?", answer_tokens=4, think_seconds=0.0)


def chat(num_turns: int = 2, number: int = 0, start: float = 0.0) -> Session:
    return Session(
        number=number, phase="calm", start_seconds=start, system="Be brief.", turns=(TURN,) * num_turns
    )


def drive(engine, sessions, end=60.0, drain=5.0) -> LoadRun:
    load = LoadRun(url=engine.url, model="fake", end_seconds=end)
    asyncio.run(load.drive(sessions, drain))
    return load


def test_a_chat_sends_its_turns_in_order_with_the_answers(engine):
    load = drive(engine, [chat()])
    first, second = engine.chats
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "w0 w1 w2 w3 "
    assert first["max_tokens"] == 4
    assert [result.status for result in load.results] == [Status.DONE] * 2
    result = load.results[0]
    assert (result.answer_tokens, result.prompt_tokens, result.cached_tokens) == (4, 40, 32)
    assert result.first_token is not None
    assert result.end is not None
    assert result.sent <= result.first_token <= result.end


def test_a_refused_request_is_sent_again_and_counted(engine):
    engine.refuse = 2
    load = drive(engine, [chat(1)])
    assert load.counts()["done"] == 1
    assert load.results[0].refusals == 2


def test_a_request_refused_for_good_is_accounted_for(engine):
    engine.refuse = 1000
    load = drive(engine, [chat(2)])
    assert [result.status for result in load.results] == [Status.REFUSED]


def test_a_broken_stream_and_a_dead_server_are_failures(engine):
    engine.break_stream = True
    load = drive(engine, [chat(2)])
    assert [result.status for result in load.results] == [Status.FAILED]
    engine.stop()
    load = drive(engine, [chat(1), chat(1, number=1)])
    assert load.counts() == {"done": 0, "refused": 0, "failed": 2, "cut off": 0}


def test_an_error_within_a_stream_is_a_failure_and_said(engine):
    engine.chat_events = lambda body: [json.dumps({"error": {"message": "out of memory"}})]
    load = drive(engine, [chat(2)])
    assert [result.status for result in load.results] == [Status.FAILED]
    assert "out of memory" in (load.results[0].error or "")


def test_no_turn_starts_after_the_end(engine):
    load = drive(engine, [chat(1, start=0.2)], end=0.0)
    assert load.results == []
    assert engine.chats == []


def test_what_is_under_way_at_the_end_is_cut_off_and_counted(engine):
    engine.refuse = 1000
    load = drive(engine, [chat(1)], end=0.1, drain=0.1)
    assert load.counts()["cut off"] == 1


def test_the_same_seed_gives_the_same_traffic():
    sessions = make_sessions(PHASES, 18.0, seed=3)
    assert sessions == make_sessions(PHASES, 18.0, seed=3)
    assert sessions != make_sessions(PHASES, 18.0, seed=4)
    assert [s.start_seconds for s in sessions] == sorted(s.start_seconds for s in sessions)
    assert [s.number for s in sessions] == list(range(len(sessions)))


def test_every_phase_has_its_sessions_within_its_time():
    for session in make_sessions(PHASES, 10.0, seed=0):
        index = [phase.name for phase in PHASES].index(session.phase)
        assert index * 10.0 <= session.start_seconds < (index + 1) * 10.0
