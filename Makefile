# Two commands matter: `make demo` and `make test`. Both set up what they need in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO_ARGS ?=
TEST_ARGS ?=
CHAOS_ARGS ?=
MUTATION_ARGS ?=
N ?= 1
DIST ?= dist
# Recorded telemetry of real jobs with labels beside it, which is not part of the repository.
REAL_DATA ?= ../shared/data

# Tests start some hundred processes. Without .pyc files each would compile what it imports: the four of a service for 6 s
# of CPU time more than they need.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test ci first check torch unit integration alone more integrations-latest up bench soak faults chaos adoption \
  mutations long release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One stamp for each set of packages, so that a change of what is installed installs again.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[torch,gpu,service,kafka,postgres,replay]' --group dev
	@touch $@

demo: $(VENV)/.installed ## train with 4 real ranks, inject faults, watch them found and recovered (DEMO_ARGS="--no-faults")
	$(BIN)/rankwatch demo $(DEMO_ARGS)

PYTEST := $(BIN)/pytest -q --durations=30 --durations-min=1
ONE_PROCESS := not integration and not browser and not ci
# What imports torch. One process runs it, beside mypy: in each process torch and the frameworks take 8 s of CPU to import.
TORCH_TESTS = tests/collectors/torch_probe tests/collectors/integrations \
  $(shell grep -rlE '^ *(import|from) torch\b' tests --include='test_*.py')
# Files with tests of several processes or of the pages: no others are imported for these.
PROCESS_TESTS = $(shell grep -rlE 'mark\.(integration|browser)' tests --include='test_*.py')

test: first unit integration alone ## everything that must pass before a commit

ci: test more ## what CI runs: test, and what it leaves out

first: $(VENV)/.installed ## check, and torch beside it
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check torch

check: $(VENV)/.installed ## format, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

torch: $(VENV)/.installed ## tests of one process each that import torch
	$(PYTEST) -m '$(ONE_PROCESS)' $(TEST_ARGS) $(TORCH_TESTS)

unit: $(VENV)/.installed ## all other tests of one process each, on all cores
	$(PYTEST) -n auto -m '$(ONE_PROCESS)' $(TEST_ARGS) $(addprefix --ignore=,$(TORCH_TESTS) tests/integration tests/browser)

# Four at a time on two cores: these tests wait more than they compute. Their long files come first (tests/conftest.py).
integration: $(VENV)/.installed ## tests of several real processes, and the browser tests
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m '(integration or browser) and not ci and not alone' \
	  $(TEST_ARGS) $(PROCESS_TESTS)

alone: $(VENV)/.installed ## the demo, which measures time
	$(PYTEST) -m 'alone and not ci' $(TEST_ARGS) tests/integration/test_demo.py

more: $(VENV)/.installed ## what `make test` leaves out: more ways for several processes to fail, the adoption scripts, more rows of matrices
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m 'ci and not alone' $(TEST_ARGS)
	$(PYTEST) -m 'ci and alone' $(TEST_ARGS) tests/adoption tests/integration/test_demo.py

# A venv of its own that sees the packages of the other one, and has newer frameworks before them; torch stays as it is.
LATEST := $(VENV)-latest
FRAMEWORKS := transformers tokenizers huggingface-hub accelerate deepspeed lightning pytorch-lightning torchmetrics \
  trl datasets

integrations-latest: $(VENV)/.installed ## the tests of the integrations with the newest versions of the frameworks
	"$(PYTHON)" -m venv --clear $(LATEST)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
	  > "$$($(LATEST)/bin/python -c 'import site; print(*site.getsitepackages())')/tested.pth"
	grep -E '^torch==' constraints.txt > $(LATEST)/torch.txt
	$(LATEST)/bin/python -m pip install --quiet --upgrade -c $(LATEST)/torch.txt $(FRAMEWORKS)
	$(LATEST)/bin/python -m pytest -q tests/collectors/integrations tests/integration/test_integrations.py $(TEST_ARGS)

up: $(VENV)/.installed ## run the service here: API, stream, notifier, dashboard
	$(BIN)/rankwatch up

bench: $(VENV)/.installed ## every benchmark, one table each
	@for bench in benchmarks/*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

soak: $(VENV)/.installed ## ten clean demo jobs in a row, also with two CPU burners, 50 command trials, 20 minutes of four ranks beside bursts of load, and 20 jobs on full cores
	$(BIN)/python -m tests.soak

faults: $(VENV)/.installed ## every fault on every form it applies to, N times in a row (make faults N=10)
	@for n in $$(seq $(N)); do echo "== $$n of $(N)"; \
	  RANKWATCH_FAULT_TRIALS=all $(BIN)/pytest -q tests/faults $(TEST_ARGS) || exit 1; done

chaos: $(VENV)/.installed ## ten minutes of 1,024 simulated ranks while something is killed every 20 s (CHAOS_ARGS="--seed 1")
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

adoption: $(VENV)/.installed ## the training scripts of tests/adoption with every fault, N times in a row (TEST_ARGS="-k gan")
	@for n in $$(seq $(N)); do echo "== $$n of $(N)"; \
	  ADOPTION=all $(BIN)/pytest -q tests/adoption $(TEST_ARGS) || exit 1; done

mutations: $(VENV)/.installed ## 60 small bugs, each of which a test must catch (MUTATION_ARGS="--area stream --jobs 2")
	$(BIN)/python -m tests.mutations $(MUTATION_ARGS)

long: faults adoption chaos soak mutations ## all that takes hours: matrices, floods and soaks, the labelled suite with five seeds, ten clean job-weeks of 16,384 ranks, and recordings of real jobs where there are any
	RANKWATCH_FAULT_TRIALS=all $(BIN)/pytest -q tests/attacks tests/detectors tests/integration tests/service/job \
	  tests/service/api/test_openapi.py tests/service/notify tests/service/orders tests/service/series \
	  tests/packaging/test_installed.py $(TEST_ARGS)
	$(BIN)/python benchmarks/detection.py --seeds 5
	$(BIN)/python benchmarks/detection.py --beside --seeds 5
	$(BIN)/python benchmarks/detection.py --generator cluster --seeds 5
	$(BIN)/python benchmarks/detection.py --clean 16384=10
	@if [ -d "$(REAL_DATA)" ]; then $(BIN)/python benchmarks/real_data.py "$(REAL_DATA)" --list; \
	  else echo "benchmarks/real_data.py skipped: no folder $(REAL_DATA); name one with REAL_DATA=FOLDER"; fi

release: $(VENV)/.installed ## wheel and sdist into dist/, with their SHA-256
	rm -f "$(DIST)"/rankwatch-* "$(DIST)/SHA256SUMS"
	"$(BIN)/python" -m build --outdir "$(DIST)"
	cd "$(DIST)" && sha256sum rankwatch-* > SHA256SUMS

clean: ## remove what the targets made
	rm -rf $(VENV) $(LATEST) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
