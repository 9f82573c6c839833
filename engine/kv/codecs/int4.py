"""int4 for sealed pages: K asymmetric per channel over the page, V asymmetric per (token, head)."""

import torch
from torch import Tensor

from kvpilot.engine.kv.codecs.base import Codec, NonFiniteError
from kvpilot.engine.kv.formats import Int4Record

LARGEST_CODE = 15
TINY = torch.finfo(torch.float32).tiny


class Int4Codec(Codec):
    """value = code * scale + min, with codes 0..15.

    K scales (u8) and mins (s8) of a (page, head) stand under two fp16 units. Mins round down and scales
    up, so that no value is clipped: clipping costs more KL than the wider steps do.
    """

    name = "int4"

    def encode(self, k_LHPD: Tensor, v_LHPD: Tensor, payload: Tensor, scales: Tensor) -> None:
        k, v = k_LHPD.float(), v_LHPD.float()
        k_scales, k_mins, k_units = _channel_parameters(k)
        v_scale, v_min = _token_parameters(v)
        if not (k_units.isfinite().all() and v_scale.isfinite().all() and v_min.isfinite().all()):
            raise NonFiniteError(self.name)
        k_scale, k_min = _channel_values(k_scales, k_mins, k_units)
        k_codes = _codes(k, k_scale[:, :, None], k_min[:, :, None])
        v_codes = _codes(v, v_scale.float()[..., None], v_min.float()[..., None])
        low, high = torch.stack((k_codes, v_codes), dim=1).chunk(2, dim=-1)
        self._rows(payload, self.shape.head_dim // 2).copy_(low | (high << 4))
        record = self._record(scales)
        record.k_scales.copy_(k_scales)
        record.k_mins.copy_(k_mins)
        record.k_units.copy_(k_units)
        record.v_scales.copy_(v_scale)
        record.v_mins.copy_(v_min)

    def decode(self, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        packed = self._rows(payload, self.shape.head_dim // 2)
        k_codes, v_codes = torch.cat((packed & 15, packed >> 4), dim=-1).float().unbind(1)
        record = self._record(scales)
        k_scale, k_min = _channel_values(record.k_scales, record.k_mins, record.k_units)
        k_LHPD = k_codes * k_scale[:, :, None] + k_min[:, :, None]
        v_LHPD = v_codes * record.v_scales.float()[..., None] + record.v_mins.float()[..., None]
        return k_LHPD, v_LHPD

    def _record(self, scales: Tensor) -> "_RecordViews":
        return _RecordViews(scales, Int4Record.of(self.shape), self.shape.num_kv_heads)


class _RecordViews:
    """The fields of the scale records, as views [L, H, ...] into the cell."""

    def __init__(self, scales: Tensor, record: Int4Record, num_kv_heads: int) -> None:
        bytes_LHR = scales.view(-1, num_kv_heads, record.num_bytes)

        def field(start: int, end: int, dtype: torch.dtype) -> Tensor:
            return bytes_LHR[..., start:end].view(dtype)

        self.k_scales = field(0, record.k_mins, torch.uint8)
        self.k_mins = field(record.k_mins, record.k_units, torch.int8)
        self.k_units = field(record.k_units, record.v_scales, torch.float16)
        self.v_scales = field(record.v_scales, record.v_mins, torch.float16)
        self.v_mins = field(record.v_mins, record.num_bytes, torch.float16)


def _channel_parameters(k_LHPD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scales u8 [L, H, D], mins s8 [L, H, D], (scale unit, min unit) fp16 [L, H, 2])."""
    low, high = k_LHPD.aminmax(dim=2)
    min_unit = _half_up(low.abs().amax(-1) / 127)
    mins = (low / _divisor(min_unit)).floor_().clamp_(-127, 127)
    scale = (high - mins * min_unit.float()[..., None]).clamp_min_(0) / LARGEST_CODE
    scale_unit = _half_up(scale.amax(-1) / 255)
    scales = (scale / _divisor(scale_unit)).ceil_().clamp_(0, 255)
    return scales.to(torch.uint8), mins.to(torch.int8), torch.stack((scale_unit, min_unit), dim=-1)


def _channel_values(scales: Tensor, mins: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    scale_unit, min_unit = units.float()[..., None].unbind(-2)
    return scales.float() * scale_unit, mins.float() * min_unit


def _token_parameters(v_LHPD: Tensor) -> tuple[Tensor, Tensor]:
    """(scale, min) fp16 [L, H, P]."""
    low, high = v_LHPD.aminmax(dim=-1)
    v_min = -_half_up(-low)
    return _half_up((high - v_min.float()) / LARGEST_CODE), v_min


def _codes(x: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return ((x - low) / scale.clamp_min(TINY)).round_().clamp_(0, LARGEST_CODE).to(torch.uint8)


def _divisor(unit: Tensor) -> Tensor:
    return unit.float().clamp_min(TINY)[..., None]


def _half_up(x: Tensor) -> Tensor:
    """x in fp16, rounded up: half a unit in the last place is added before rounding to nearest."""
    return (x + x.abs() * 2**-11).half()
