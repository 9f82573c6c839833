"""A file per command, or group of commands: its flags become a config, and one function is called with it.

Typer wants a parameter per flag, which makes these functions long. What a command needs is imported when it runs, so
that `autotune --help` is quick and a command that needs no torch does not load it.
"""
