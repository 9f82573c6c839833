import kvpilot.engine  # noqa: F401  it decides whether compiled modules may be used
