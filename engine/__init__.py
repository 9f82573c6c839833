from kvpilot.engine.compiled import choose

choose()
