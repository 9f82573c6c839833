# `make demo` and `make test` work in a fresh clone: the first target that needs .venv makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMP := $(VENV)/.installed
# One version, in reach of the bound in pyproject.toml: a range may pull gigabytes of CUDA libraries onto a CPU machine.
TORCH ?= torch==2.13.0

.PHONY: demo test test-all e2e dashboards check types lint layers compiled bench clean

demo: $(STAMP)  ## about three minutes once set up, with a live table
	$(BIN)/autotune demo

test: $(STAMP)  ## fast: no model, no child processes
	$(BIN)/pytest -m "not model and not gpu and not e2e"

test-all: $(STAMP)  ## fetches the embedded model on first use
	$(BIN)/pytest -m "not gpu"

e2e: $(STAMP)  ## engine, Prometheus, the loop and traffic, all real: about four minutes
	.ci/install-prometheus
	KVPILOT_REQUIRE_PROMETHEUS=1 $(BIN)/pytest -m e2e tests/e2e tests/exporter tests/dashboards

dashboards: $(STAMP)  ## dashboards and rules, anew
	cd / && $(BIN)/python -m kvpilot.dashboards

check: lint types layers test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## whatever the checkout is called: show pyright the root as <tmp>/kvpilot
	d=$$(mktemp -d) && ln -s "$(CURDIR)" $$d/kvpilot \
	  && $(BIN)/pyright --pythonpath $(BIN)/python --project $$d/kvpilot; status=$$?; rm -rf $$d; exit $$status

layers: $(STAMP)
	$(BIN)/lint-imports --no-logo

compiled: $(STAMP)  ## after an edit, the modules that setup.py compiles; until then their sources run
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@cd / && $(BIN)/python -c "from kvpilot.engine import compiled; compiled.is_in_use() \
	  or exit('the sources run, not what was compiled: mypyc refused an edit; see the output of pip install -v -e .')"

bench: $(STAMP)  ## benchmarks/README.md says what each one measures and what it needs
	$(BIN)/python -P benchmarks/cpu_throughput.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f engine/*.so engine/kv/*.so engine/kernels/*.so env/simulator/*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf $(VENV)

# A half-made .venv has no stamp, so that the next call goes on where this one stopped.
$(STAMP): pyproject.toml setup.py $(wildcard engine/kernels/*.cpp engine/kernels/*.h)
	@echo 'Setting up $(VENV), once: three to ten minutes, more on a busy machine, half of it downloads (2 GB on disk).'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '1/2 $(TORCH)'
	@$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)'
	@echo '2/2 everything else, and the C++ kernels and the bookkeeping compiled, without a word: a few minutes, up to ten on a busy machine'
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[serve,control,env,train,k8s,otel,dashboards,dev]'
	@touch $@
	@echo 'Set up.'
