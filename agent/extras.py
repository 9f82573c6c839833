"""What a command needs beyond a bare `pip install kvpilot`: a missing package is said by the extra that brings it."""

NEEDED = {  # command: extras of pyproject.toml
    "audit": "control",
    "bench": "serve",
    "calibrate": "env",
    "demo": "serve,control",
    "evaluate": "train",
    "knobs": "control",
    "operator": "k8s",
    "replay": "env",
    "run": "control",
    "safe-mode": "control",
    "sensitivity": "env",
    "serve": "serve",
    "trace": "env",
    "train": "train",
    "tune": "train",
}


def missing_package(module: str, arguments: list[str]) -> str:
    """One line for `autotune ARGUMENTS`, which could not import `module`."""
    command = next((word for word in arguments if word in NEEDED), None)
    if command is None:
        return f"{module} is not installed, though kvpilot needs it: pip install kvpilot"
    return f"`autotune {command}` needs {module}, which is not installed: pip install 'kvpilot[{NEEDED[command]}]'"
