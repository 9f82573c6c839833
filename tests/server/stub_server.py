"""The real engine over a runner that invents tokens; as a script, a whole server to send signals to."""

import logging
import sys
import time
from collections.abc import Callable

import tokenizers
from prometheus_client import CollectorRegistry

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import NoStorage
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.request import SampledToken, ScheduledRequest, TokenLogprobs
from kvpilot.engine.server.run import ServerConfig, serve
from kvpilot.exporter.collector import EngineCollector, metrics_source

TOKEN = "a-token-for-tests-only"
MODEL = "stub"
SHAPE = PageShape(num_layers=1, num_kv_heads=1, head_dim=32, page_size=4)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """One token per byte, and an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer(backend, eos_ids=[len(alphabet)], chat_template=CHAT_TEMPLATE)


class StubRunner:
    """Writes the alphabet, over and over; a prompt that ends in "!" gets three letters and the end token."""

    def __init__(self, tokenizer: Tokenizer, *, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.before_step: Callable[[list[ScheduledRequest]], None] = lambda batch: None
        self.letters = [tokenizer.encode(letter)[0] for letter in ALPHABET]
        self.bang = tokenizer.encode("!")[0]
        self.end = min(tokenizer.eos_ids)

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        self.before_step(batch)
        time.sleep(self.step_seconds)
        return [self._sample(entry) if entry.samples else None for entry in batch]

    def _sample(self, entry: ScheduledRequest) -> SampledToken:
        request = entry.request
        assert request.tokens is not None
        assert request.sampling is not None
        position = request.num_output_tokens
        ends = position >= 3 and request.tokens[request.num_prompt_tokens - 1] == self.bang
        token = self.end if ends else self.letters[position % len(self.letters)]
        if request.sampling.logprobs is None:
            return SampledToken(token)
        other = self.letters[(position + 1) % len(self.letters)]
        return SampledToken(token, TokenLogprobs(-0.5, [(token, -0.5), (other, -float("inf"))]))


def make_engine(runner: StubRunner, **changes: object) -> Engine:
    config = EngineConfig(
        pool_bytes=1 << 20, page_size=SHAPE.page_size, max_model_len=512, knobs=Knobs(max_batch=16)
    ).with_(**changes)
    return Engine(config, SHAPE, runner, NoStorage())


def make_metrics(engine: Engine) -> Callable[[], tuple[bytes, str]]:
    registry = CollectorRegistry()
    EngineCollector(engine.snapshot, model_name=MODEL, info={"version": "0"}, registry=registry)
    return metrics_source(registry)


def main(port: int, step_seconds: float, drain_seconds: float) -> int:
    logging.basicConfig(level=logging.INFO)
    tokenizer = make_tokenizer()
    engine = make_engine(StubRunner(tokenizer, step_seconds=step_seconds))
    config = ServerConfig(
        model_name=MODEL, admin_token=TOKEN, port=port, admin_port=0, drain_seconds=drain_seconds
    )
    return serve(engine, tokenizer, make_metrics(engine), config)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
