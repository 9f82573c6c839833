"""Every codec keeps the same promises: one class of tests, one fixture per codec."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.engine.kv.codecs import Codec, NonFiniteError, make_codec
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import Cell, Conversion
from kvpilot.engine.kv.torch_storage import TorchStorage


class Tolerance(NamedTuple):
    value: float  # of a value, relative to the largest magnitude in the page
    attention: float  # absolute error of attention over one page of standard normal V


def encode(codec: Codec, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    payload = torch.full((codec.payload_bytes,), 0xA5, dtype=torch.uint8)
    scales = torch.full((codec.scale_bytes,), 0xA5, dtype=torch.uint8)
    codec.encode(k, v, payload, scales)
    return payload, scales


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


class CodecConformance(ABC):
    """Subclass it with `name` and `tolerance`."""

    @pytest.fixture
    @abstractmethod
    def name(self) -> str: ...

    @pytest.fixture
    @abstractmethod
    def tolerance(self) -> Tolerance: ...

    @pytest.fixture
    def codec(self, name, shape) -> Codec:
        return make_codec(name, shape)

    @pytest.mark.parametrize("head_dim", [64, 80, 128])
    def test_round_trip_is_within_tolerance(self, name, head_dim, random_page, tolerance):
        shape = PageShape(num_layers=2, num_kv_heads=3, head_dim=head_dim, page_size=16)
        codec = make_codec(name, shape)
        k, v = random_page(shape, 1)
        for original, decoded in zip((k, v), codec.decode(*encode(codec, k, v)), strict=True):
            assert decoded.dtype == torch.float32
            assert decoded.shape == original.shape
            assert (decoded - original).abs().max() <= tolerance.value * original.abs().max()

    def test_attention_over_decoded_pages_is_close_to_the_original(
        self, codec, shape, random_page, tolerance
    ):
        k, v = random_page(shape, 2)
        q = torch.randn(shape.num_layers, shape.num_kv_heads, 5, shape.head_dim)
        decoded = codec.decode(*encode(codec, k, v))
        error = attention(q, *decoded) - attention(q, k, v)
        assert error.abs().max() <= tolerance.attention

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", [0, 1])
    def test_non_finite_values_are_refused_and_nothing_is_written(
        self, codec, shape, random_page, bad, which
    ):
        page = random_page(shape, 3)
        page[which][1, 2, 7, 5] = bad
        payload = torch.full((codec.payload_bytes,), 0xA5, dtype=torch.uint8)
        scales = torch.full((codec.scale_bytes,), 0xA5, dtype=torch.uint8)
        with pytest.raises(NonFiniteError, match=codec.name):
            codec.encode(*page, payload, scales)
        assert (payload == 0xA5).all()
        assert (scales == 0xA5).all()
        assert issubclass(NonFiniteError, KVPilotError)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("which", [0, 1])
    def test_storage_refuses_to_convert_non_finite_pages(self, name, shape, random_page, bad, which):
        storage = TorchStorage(shape, ("fp32", name), 4 << 20)
        k, v = page = random_page(shape, 3)
        page[which][0, 1, 3, 9] = bad
        size = storage.codecs[0].payload_bytes
        values = torch.stack((k, v), dim=1).contiguous()
        storage.pool[:size].copy_(values.view(torch.uint8).flatten())
        before = storage.pool[:size].clone()
        with pytest.raises(NonFiniteError, match=name):
            storage.convert([Conversion(Cell(0, -1), 0, Cell(2 << 20, 3 << 20), 1)])
        assert torch.equal(storage.pool[:size], before)

    def test_zero_pages_stay_zero(self, codec, shape):
        size = (shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim)
        for decoded in codec.decode(*encode(codec, torch.zeros(size), torch.zeros(size))):
            assert (decoded == 0).all()

    def test_constant_channels_and_tokens_survive(self, codec, shape, tolerance):
        size = (shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim)
        k = torch.linspace(-3, 3, shape.head_dim).expand(size).contiguous()
        v = torch.linspace(1, 2, shape.page_size)[:, None].expand(size).contiguous()
        for original, decoded in zip((k, v), codec.decode(*encode(codec, k, v)), strict=True):
            assert (decoded - original).abs().max() <= tolerance.value * original.abs().max()

    def test_layers_can_be_decoded_alone(self, codec, shape, random_page):
        payload, scales = encode(codec, *random_page(shape, 4))
        whole = codec.decode(payload, scales)
        last = codec.decode(payload.chunk(2)[1], scales.chunk(2)[1])
        for a, b in zip(whole, last, strict=True):
            assert torch.equal(a[1:], b)


TOLERANCES = {
    "fp32": Tolerance(value=0, attention=1e-12),
    "bf16": Tolerance(value=2**-8, attention=0.02),
    "int8": Tolerance(value=0.51 / 127, attention=0.02),
    "fp8": Tolerance(value=2**-4, attention=0.1),
    "int4": Tolerance(value=0.11, attention=0.3),
}


def conforms(codec_name: str) -> type[CodecConformance]:
    """The suite for one codec."""

    class Conformance(CodecConformance):
        @pytest.fixture
        def name(self) -> str:
            return codec_name

        @pytest.fixture
        def tolerance(self) -> Tolerance:
            return TOLERANCES[codec_name]

    return Conformance


TestFP32 = conforms("fp32")
TestBF16 = conforms("bf16")
TestInt8 = conforms("int8")
TestFP8 = conforms("fp8")
TestInt4 = conforms("int4")


@pytest.mark.parametrize("name", TOLERANCES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-6, 10), outlier=st.floats(1, 100))
def test_any_magnitude_round_trips(name, seed, exponent, outlier):
    shape = PageShape(num_layers=1, num_kv_heads=2, head_dim=16, page_size=4)
    codec = make_codec(name, shape)
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(1, 2, 4, 16, generator=generator) * 2.0**exponent for _ in range(2))
    k[..., 3] *= outlier
    for original, decoded in zip((k, v), codec.decode(*encode(codec, k, v)), strict=True):
        assert (decoded - original).abs().max() <= TOLERANCES[name].value * original.abs().max()


def test_stepping_down_twice_is_close_to_stepping_down_once(shape, random_page):
    storage = TorchStorage(shape, ("bf16", "int8", "int4"), 8 << 20)
    k, v = random_page(shape, 5)
    full, middle, direct, chained = (
        Cell(0, -1),
        Cell(1 << 20, 2 << 20),
        Cell(3 << 20, 4 << 20),
        Cell(5 << 20, 6 << 20),
    )
    storage.write_page(0, *full, k, v)
    storage.convert(
        [
            Conversion(full, 0, middle, 1),
            Conversion(middle, 1, chained, 2),
            Conversion(full, 0, direct, 2),
        ]
    )
    for original, one, two in zip(
        (k, v), storage.read_page(2, *direct), storage.read_page(2, *chained), strict=True
    ):
        once, twice = ((x - original).pow(2).mean().sqrt() for x in (one, two))
        assert twice <= 1.05 * once


def test_an_unknown_codec_is_refused_with_the_known_ones(shape):
    with pytest.raises(ConfigError, match=r"codec='int5'.*int4"):
        make_codec("int5", shape)


def test_int4_handles_a_key_channel_with_a_large_bias(shape, random_page):
    k, v = random_page(shape, 6)
    k[..., 0] += 50  # as the key biases of some models
    codec = make_codec("int4", shape)
    decoded, _ = codec.decode(*encode(codec, k, v))
    error = (decoded - k).abs().amax(2)[..., 1:]
    spread = (k.amax(2) - k.amin(2))[..., 1:]
    assert (error <= 0.6 * spread / 15 + 50 / 127).all()
