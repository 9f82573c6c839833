"""`autotune run`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from kvpilot.engine.errors import ConfigError

ENGINE, LOOP, SIDECAR = "The engine", "The loop", "The sidecar"


def register(app: typer.Typer) -> None:
    app.command()(run)


# Long: a parameter per flag, without defaults: what is not given is for the environment or the file to say.
def run(
    config: Annotated[
        Path | None, Option(help="YAML, TOML or JSON; flags and KVPILOT_* variables win over it.")
    ] = None,
    mode: Annotated[
        str | None,
        Option(
            help="off: observe; advisory: say what would be done; canary: as the control document says; "
            "auto: do it. [default: advisory]",
            rich_help_panel=LOOP,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        Option(
            help="What proposes changes: a name, static:FILE, hysteresis:FILE, or an exported policy. "
            "[default: threshold]",
            rich_help_panel=LOOP,
        ),
    ] = None,
    outside: Annotated[
        str | None,
        Option(
            help="Beyond the policy's training envelope: hold or threshold. [default: hold]",
            rich_help_panel=LOOP,
        ),
    ] = None,
    interval: Annotated[
        float | None, Option(help="Seconds between two observations. [default: 15]", rich_help_panel=LOOP)
    ] = None,
    decision: Annotated[
        float | None,
        Option(
            help="Seconds between two decisions. [default: 60, or what a trained policy was trained on]",
            rich_help_panel=LOOP,
        ),
    ] = None,
    min_change_seconds: Annotated[
        float | None,
        Option(help="Shortest time between two changes of a knob. [default: 30]", rich_help_panel=LOOP),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        Option(help="SLO: p99 of seconds to the first token. [default: 5]", rich_help_panel=LOOP),
    ] = None,
    slo_itl: Annotated[
        float | None,
        Option(help="SLO: p99 of seconds between two tokens. [default: none]", rich_help_panel=LOOP),
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="kvpilot, or vllm or sglang: these are only watched, and what would have to be restarted with which "
            "flag is proposed. [default: kvpilot]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    started_with: Annotated[
        list[str] | None,
        Option(
            metavar="KNOB=VALUE",
            help="What vllm or sglang was started with: max_batch and kv_level (0: as the model, 1: fp8); repeated.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    url: Annotated[
        str | None,
        Option(
            help="The public API: /metrics is read there. [default: http://127.0.0.1:8000]",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    admin_url: Annotated[
        str | None, Option(help="The admin API. [default: http://127.0.0.1:8001]", rich_help_panel=ENGINE)
    ] = None,
    token_file: Annotated[
        Path | None,
        Option(help="Holds the admin token. [default: ~/.kvpilot/admin.token]", rich_help_panel=ENGINE),
    ] = None,
    source: Annotated[
        str | None,
        Option(help="Of observations: scrape or prometheus. [default: scrape]", rich_help_panel=ENGINE),
    ] = None,
    prometheus_url: Annotated[
        str | None,
        Option(help="The Prometheus server. [default: http://127.0.0.1:9090]", rich_help_panel=ENGINE),
    ] = None,
    selector: Annotated[
        list[str] | None,
        Option(metavar="LABEL=VALUE", help="Which engine there; may be repeated.", rich_help_panel=ENGINE),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(help="Seconds that a request to the engine may take. [default: 5]", rich_help_panel=ENGINE),
    ] = None,
    audit: Annotated[
        Path | None,
        Option(
            help="Append-only log of every decision; if it cannot be written, nothing is done. "
            "[default: autotune-audit.jsonl]",
            rich_help_panel=SIDECAR,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        Option(help="Where safe mode is remembered. [default: autotune-state.json]", rich_help_panel=SIDECAR),
    ] = None,
    kill_file: Annotated[
        Path | None, Option(help="While this file exists, nothing is decided.", rich_help_panel=SIDECAR)
    ] = None,
    control_file: Annotated[
        Path | None,
        Option(help="The operator's control document; read again when it changes.", rich_help_panel=SIDECAR),
    ] = None,
    pod_name: Annotated[str | None, Option(help="This pod's name in it.", rich_help_panel=SIDECAR)] = None,
    listen: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT", help="Own /metrics and /healthz. [default: none]", rich_help_panel=SIDECAR
        ),
    ] = None,
    log_format: Annotated[
        str | None, Option(help="text or json. [default: text]", rich_help_panel=SIDECAR)
    ] = None,
    counterfactual: Annotated[
        str | None,
        Option(
            metavar="TRACE | statistics",
            help="Simulate beside it what the proposed knobs would give: over what `autotune serve --record` writes, "
            "or, as an estimate, over traffic drawn from the metrics.",
            rich_help_panel=SIDECAR,
        ),
    ] = None,
) -> None:
    """Run the loop beside an engine: observe, propose, constrain, apply, verify.

    Nothing is written unless the mode is auto. However the loop ends, the knobs stay where they are. docs/operate.md
    leads from advisory to auto and back; there are more settings in a file: `agent/control/config.py` lists them.

        autotune run

        autotune run --mode auto --listen 127.0.0.1:9464 --kill-file /run/autotune.kill

        autotune run --target vllm --started-with max_batch=256 --started-with kv_level=0
    """
    from kvpilot.agent.control.config import load_settings
    from kvpilot.agent.control.run import run_loop

    flags: dict[str, Any] = {
        "mode": mode,
        "policy": policy,
        "outside": outside,
        "interval_seconds": interval,
        "decision_seconds": decision,
        "guard": _given(min_change_seconds=min_change_seconds),
        "slo": _given(ttft_p99_seconds=slo_ttft, inter_token_p99_seconds=slo_itl),
        "target": target,
        "started_with": _labels(started_with, "started_with", "KNOB=VALUE"),
        "url": url,
        "admin_url": admin_url,
        "token_file": token_file,
        "source": source,
        "prometheus": _given(url=prometheus_url, selector=_labels(selector)),
        "timeout_seconds": timeout,
        "audit": audit,
        "state": state,
        "kill_file": kill_file,
        "control_file": control_file,
        "pod_name": pod_name,
        "listen": listen,
        "log_format": log_format,
        "counterfactual": _traffic(counterfactual),
    }
    raise typer.Exit(run_loop(load_settings(_given(**flags), config)))


def _given(**flags: Any) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value not in (None, {}, [])}


def _traffic(counterfactual: str | None) -> dict[str, Any]:
    return {"statistics": True} if counterfactual == "statistics" else _given(trace=counterfactual)


def _labels(pairs: list[str] | None, option: str = "selector", form: str = "LABEL=VALUE") -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}={pair!r} is invalid: expected {form}")
        labels[name] = value
    return labels
