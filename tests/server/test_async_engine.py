"""The engine thread and its hand-over, without HTTP."""

import asyncio
from contextlib import closing

import pytest

from kvpilot.engine.async_engine import AsyncEngine
from kvpilot.engine.errors import EngineClosedError, EngineFullError, RequestError
from kvpilot.engine.generation import Generation
from kvpilot.engine.kv.page import PageState
from kvpilot.engine.request import FinishReason, SamplingParams

PROMPT = [5, 6, 7]


def run(stub, scenario, **changes):
    """Runs `scenario(async_engine, runner)` in an event loop of its own; checks that it leaves nothing behind."""
    tokenizer = stub.make_tokenizer()
    runner = stub.StubRunner(tokenizer)
    engine = stub.make_engine(runner, **changes)

    async def main():
        async_engine = AsyncEngine(engine, tokenizer)
        async_engine.start()
        try:
            await asyncio.wait_for(scenario(async_engine, runner), 30)
        finally:
            await async_engine.close()
        assert not engine.has_work()
        assert engine.pool.num_pages(PageState.LIVE) == 0
        engine.check_integrity()

    asyncio.run(main())


async def text_of(generation):
    return "".join([delta.text async for deltas in generation for delta in deltas])


def test_deltas_tokens_and_finish(stub):
    async def scenario(engine, runner):
        generation = await engine.generate(PROMPT, SamplingParams(max_tokens=4))
        deltas = [delta async for some in generation for delta in some]
        assert "".join(d.text for d in deltas) == "abcd"
        assert [t.token for d in deltas for t in d.tokens] == runner.letters[:4]
        assert [d.finish_reason for d in deltas][-1] is FinishReason.LENGTH
        assert generation.request.num_output_tokens == 4

    run(stub, scenario)


def test_one_hand_over_per_step_for_all_requests(stub, monkeypatch):
    async def scenario(engine, runner):
        sampling = SamplingParams(max_tokens=20)
        runner.step_seconds = 0.05  # so that all are admitted by the second step
        generations = [await engine.generate(PROMPT, sampling) for _ in range(8)]
        loop = asyncio.get_running_loop()
        calls = 0
        original = loop.call_soon_threadsafe

        def counted(*args, **kwargs):
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        steps = engine.engine.snapshot().value("steps")
        runner.step_seconds = 0.001
        assert await asyncio.gather(*map(text_of, generations)) == [stub.ALPHABET[:20]] * 8
        monkeypatch.undo()
        # a step that is under way at either end may be counted on one side only
        assert calls <= engine.engine.snapshot().value("steps") - steps + 2

    run(stub, scenario)


def test_closing_the_iterator_aborts(stub):
    async def scenario(engine, runner):
        runner.step_seconds = 0.01
        generation = await engine.generate(PROMPT, SamplingParams(max_tokens=400))
        with closing(generation):
            async for _ in generation:
                break
        assert generation.finish_reason is FinishReason.ABORT
        await engine.call(lambda: None)  # the abort is before this in the queue
        assert not engine.engine.has_work()
        generation.close()  # again does nothing
        assert engine.engine.snapshot().value("requests_finished", "abort") == 1

    run(stub, scenario)


def test_cancelled_while_being_added_leaves_nothing(stub):
    async def scenario(engine, runner):
        runner.step_seconds = 0.05
        running = await engine.generate(PROMPT, SamplingParams(max_tokens=400))
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=400)))
        await asyncio.sleep(0)  # the command is queued, the engine is in a step
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        running.close()
        await engine.call(lambda: None)
        assert not engine.engine.has_work()

    run(stub, scenario)


def test_errors_of_the_engine_reach_the_caller(stub):
    async def scenario(engine, runner):
        with pytest.raises(RequestError, match="prompt"):
            await engine.generate([5] * 600, SamplingParams())
        runner.step_seconds = 0.02
        engine.engine.patch_knobs({"max_batch": 1}, None)
        await engine.generate(PROMPT, SamplingParams(max_tokens=400))
        more = [engine.generate(PROMPT, SamplingParams(max_tokens=400)) for _ in range(5)]
        outcomes = await asyncio.gather(*more, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {Generation, EngineFullError}
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        assert engine.state == "ok"

    run(stub, scenario, max_waiting=2)


def test_drain_waits_for_what_was_accepted_and_refuses_the_rest(stub):
    async def scenario(engine, runner):
        runner.step_seconds = 0.01
        generations = [await engine.generate(PROMPT, SamplingParams(max_tokens=20)) for _ in range(4)]
        texts = asyncio.gather(*map(text_of, generations))
        draining = asyncio.create_task(engine.drain(20))
        await asyncio.sleep(0)
        assert engine.state == "draining"
        with pytest.raises(EngineClosedError, match="draining"):
            await engine.generate(PROMPT, SamplingParams())
        assert await draining == 0
        assert await texts == [stub.ALPHABET[:20]] * 4

    run(stub, scenario)


def test_drain_that_takes_too_long_aborts(stub):
    async def scenario(engine, runner):
        runner.step_seconds = 0.05
        generation = await engine.generate(PROMPT, SamplingParams(max_tokens=400))
        assert await engine.drain(0.1) == 1
        assert generation.finish_reason is FinishReason.ABORT

    run(stub, scenario)


def test_idle_engine_still_lets_retained_pages_expire(stub):
    async def scenario(engine, runner):
        engine.engine.patch_knobs({"ttl_seconds": 0.5, "size_factor": 1.0}, None)
        await text_of(await engine.generate(PROMPT * 10, SamplingParams(max_tokens=4)))
        while engine.engine.snapshot().value("pages_expired") == 0:
            await asyncio.sleep(0.05)

    run(stub, scenario)


def test_only_requests_of_the_failed_step_are_lost(stub):
    async def scenario(engine, runner):
        def fail_once(batch):
            runner.before_step = lambda batch: None
            raise RuntimeError("the runner broke")

        engine.engine.patch_knobs({"max_batch": 1}, None)
        runner.step_seconds = 0.02
        first, second = [await engine.generate(PROMPT, SamplingParams(max_tokens=8)) for _ in range(2)]
        runner.before_step = fail_once
        await text_of(first)
        assert first.finish_reason is FinishReason.ERROR
        assert await text_of(second) == "abcdefgh"
        assert engine.state == "ok"

    run(stub, scenario)
