"""Configuration of `autotune run`: flags over environment (KVPILOT_*) over a file over defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    JsonConfigSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from kvpilot.agent.control.nouns import Mode
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.server.token import DEFAULT_TOKEN_FILE
from kvpilot.k8s.control_source import ACCOUNT_FOLDER

FILES = {
    ".yaml": YamlConfigSettingsSource,
    ".yml": YamlConfigSettingsSource,
    ".toml": TomlConfigSettingsSource,
    ".json": JsonConfigSettingsSource,
}
SECRETS = {"admin_token", "bearer_token", "headers"}  # settings whose values are never shown
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def _of_a_knob(name: str) -> str:
    if name not in KNOB_NAMES:
        raise ValueError(f"expected one of {', '.join(KNOB_NAMES)}")
    return name


KnobName = Annotated[str, AfterValidator(_of_a_knob)]


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _can_be_sent(name: str, value: str) -> bool:
    """As an HTTP header."""
    return all(text.isascii() and text.isprintable() and text.strip() == text != "" for text in (name, value))


class SloSettings(Part):
    """null: no limit of this kind."""

    ttft_p99_seconds: Seconds | None = 5.0  # arrival to first token
    inter_token_p99_seconds: Seconds | None = None
    queue_p99_seconds: Seconds | None = None  # arrival to admission
    violation_share: Share | None = None  # of requests beyond the limits above


class GuardSettings(Part):
    """What `GuardLimits` says, as far as an operator should have to know it."""

    min_change_seconds: Annotated[float, Field(ge=0, le=86_400)] = 30.0  # between two changes of a knob
    budget_steps_per_minute: Annotated[float, Field(gt=0, le=1000)] = 2.0  # per knob, in its steps
    max_flips: Annotated[int, Field(ge=0, le=100)] = 2  # changes of direction within flip_seconds
    flip_seconds: Seconds = 600.0
    settle_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0  # before a change is judged
    reuse_seconds: Seconds = 120.0  # the same after what drops cached pages, where the engine does not tell
    blame_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0  # a violation this late still leads back
    max_reverts_per_hour: Annotated[int, Field(ge=0, le=100)] = 3  # one more latches safe mode
    freeze_seconds: Annotated[float, Field(ge=0, le=86_400)] = 300.0  # after someone else changed the knobs
    quality_loss_budget: Annotated[float, Field(ge=0)] | None = None  # KL in nats per token
    max_failures: Annotated[int, Field(ge=1, le=100)] = 3  # in a row, before the circuit breaker opens
    breaker_seconds: Seconds = 300.0


class PrometheusSettings(Part):
    url: str = "http://127.0.0.1:9090"
    selector: dict[str, str] = Field(default_factory=dict)  # labels of the one engine, e.g. {pod: chat-0}
    headers: dict[str, SecretStr] = Field(default_factory=dict)  # of every query, e.g. X-Scope-OrgID
    bearer_token: SecretStr | None = None  # KVPILOT_PROMETHEUS__BEARER_TOKEN
    bearer_token_file: Path | None = None  # instead; read for every query, as tokens are renewed

    @model_validator(mode="after")
    def _one_authorization(self) -> "PrometheusSettings":
        given = [
            name for name in ("bearer_token", "bearer_token_file") if getattr(self, name) is not None
        ] + [f"headers.{name}" for name in self.headers if name.lower() == "authorization"]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: expected one")
        for name, value in {"bearer_token": self.bearer_token, **self.headers}.items():
            if value is not None and not _can_be_sent(name, value.get_secret_value()):
                raise ValueError(f"{name} cannot be sent in a header: expected printable ASCII in one line")
        return self


class CounterfactualSettings(Part):
    """What the proposed knobs would have given, simulated beside the live traffic. Neither `trace` nor `statistics`:
    off."""

    trace: Path | None = None  # what `autotune serve --record` appends to
    statistics: bool = False  # where none is recorded: traffic drawn from what the metrics tell, an estimate
    profile: str = "cpu-smollm2"  # latency profile of the engine
    pool_bytes: Annotated[int, Field(gt=0)] | None = None  # null: what the engine says
    window_seconds: Seconds = 600.0  # of the traffic, up to now
    every_seconds: Seconds = 300.0
    timeout_seconds: Seconds = 120.0

    @model_validator(mode="after")
    def _one_traffic(self) -> "CounterfactualSettings":
        if self.trace is not None and self.statistics:
            raise ValueError("trace and statistics exclude each other: a recording tells more")
        return self


class RunSettings(BaseSettings):
    """One sidecar. Names, units and defaults are those of the configuration file."""

    model_config = SettingsConfigDict(
        env_prefix="KVPILOT_", env_nested_delimiter="__", frozen=True, extra="forbid", allow_inf_nan=False
    )

    target: Literal["kvpilot", "vllm", "sglang"] = "kvpilot"
    url: str = "http://127.0.0.1:8000"  # of the public API: /metrics is read there
    admin_url: str = "http://127.0.0.1:8001"
    token_file: Path = DEFAULT_TOKEN_FILE
    admin_token: SecretStr | None = None  # instead of the file
    started_with: dict[KnobName, float] = Field(default_factory=dict)  # what vLLM or SGLang was started with
    timeout_seconds: Annotated[float, Field(ge=0.1, le=60)] = 5.0  # of each request to the engine
    source: Literal["scrape", "prometheus"] = "scrape"
    prometheus: PrometheusSettings = PrometheusSettings()

    mode: Mode = Mode.ADVISORY
    policy: str = "threshold"  # as `load_policy` takes it
    outside: Literal["hold", "threshold"] = "hold"  # beyond the policy's training envelope
    interval_seconds: Annotated[float, Field(ge=0.1, le=3600)] = 15.0  # between two observations
    # Between two decisions; None: the interval that the policy was trained on, else in_force.DECISION_SECONDS.
    decision_seconds: Annotated[float, Field(ge=0.1, le=86_400)] | None = None
    deadline_seconds: Annotated[float, Field(ge=0.01, le=600)] = 5.0  # of the policy
    bounds: dict[KnobName, tuple[float | None, float | None]] = Field(default_factory=dict)  # low, high
    slo: SloSettings = SloSettings()
    guard: GuardSettings = GuardSettings()

    audit: Path = Path("autotune-audit.jsonl")
    state: Path = Path("autotune-state.json")  # safe mode, which outlives the process
    kill_file: Path | None = None  # while it exists nothing is decided
    control_file: Path | None = None  # the operator's control document
    control_config_map: str | None = None  # the same, watched through the Kubernetes API
    control_account: Path = ACCOUNT_FOLDER  # token and ca.crt of the service account that may read it
    pod_name: str | None = None  # in it
    listen: str | None = None  # HOST:PORT of /metrics and /healthz
    log_format: Literal["text", "json"] = "text"
    counterfactual: CounterfactualSettings = CounterfactualSettings()

    @field_validator("mode", mode="before")
    @classmethod
    def _unquoted_off(cls, mode: object) -> object:
        return "off" if mode is False else mode  # what YAML 1.1 makes of it

    @model_validator(mode="after")
    def _fit_together(self) -> "RunSettings":
        if self.decision_seconds is not None and self.decision_seconds < self.interval_seconds:
            raise ValueError(
                f"decision_seconds={self.decision_seconds:g} is invalid: expected at least "
                f"interval_seconds={self.interval_seconds:g}"
            )
        if self.mode is Mode.CANARY and self.control_file is None and self.control_config_map is None:
            raise ValueError(
                "mode='canary' needs a control_file: which pods act and which are the baseline stands there, "
                "and the gates are judged by the operator"
            )
        for name, (low, high) in self.bounds.items():
            if low is not None and high is not None and low > high:
                raise ValueError(f"bounds.{name}=({low:g}, {high:g}) is invalid: expected low <= high")
        if self.listen is not None:
            parse_listen(self.listen)
        return self


def load_settings(flags: Mapping[str, Any], path: Path | None = None) -> RunSettings:
    """Flags that were given, environment, file, defaults. Raises ConfigError that names field, value and remedy."""
    kind = None if path is None else FILES.get(path.suffix)
    if path is not None and kind is None:
        raise ConfigError(f"config={str(path)!r} is invalid: expected a name that ends in {', '.join(FILES)}")
    if path is not None and not path.is_file():
        raise ConfigError(f"config={str(path)!r} cannot be read: there is no such file")

    class Loaded(RunSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            from_file = () if kind is None else (kind(settings_cls, path),)
            return (init_settings, env_settings, *from_file)

    try:
        return Loaded(**flags)
    except ValidationError as error:
        raise ConfigError(_first(error)) from error
    except (SettingsError, YAMLError, ValueError, TypeError, OSError) as error:
        where = "the environment" if path is None else f"config={str(path)!r}"
        raise ConfigError(f"{where} is not understood: {' '.join(str(error).split())}") from error


def _first(error: ValidationError) -> str:
    """One line for the first thing that is wrong."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = ".".join(str(part) for part in first["loc"])
    given = repr(_without_secrets(first["input"], *first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{name}={given:.80} is invalid: there is no such setting"
    return f"{name}={given:.80} is invalid: {message[:1].lower()}{message[1:]}"


def _without_secrets(value: object, *names: object) -> object:
    """As given, but for what stands under a secret's name."""
    if SECRETS & {str(name) for name in names}:
        return "***"
    if isinstance(value, Mapping):
        return {name: _without_secrets(entry, name) for name, entry in value.items()}
    return value


def parse_listen(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"listen={address!r} is invalid: expected HOST:PORT, e.g. 127.0.0.1:9464")
    return host.strip("[]"), int(port)
