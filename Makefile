# `make demo` and `make test` set up everything they need in .venv, from requirements.lock, and then run.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NUMERICAL := geometry attention encodings adapters generate paper train/test_objective.py train/test_streams.py
NOT_AGAIN := not gradcheck and not compile and not taxonomy and not trilemma and not growth and (right_or_refused or not refus) and not 192

.PHONY: demo pictures test test-strangers-cpu test-gpu lint clean

demo: $(STAMP)
	$(BIN)/merope demo

# The poster and the animation at the top of README.md.
pictures: demo
	cp outputs/demo/poster.png docs/images/demo.png
	cp outputs/demo/demo.webp docs/images/demo.webp

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Numerical tests again, with sums in the order of another CPU (tests/strangers_cpu.py). Left out are slow tests with
# wide bounds, refusals, which compare no numbers, and heads of 192 channels, whose products are those of 128.
test-strangers-cpu: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --strangers-cpu -k "$(NOT_AGAIN)" $(addprefix tests/,$(NUMERICAL))

# On a machine with a CUDA GPU; PYTEST="python3 -m pytest" takes another interpreter. Needs torch, Triton and pytest only.
PYTEST ?= $(BIN)/python -m pytest
test-gpu:
	$(PYTEST) tests/gpu -rs --confcutdir=tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
