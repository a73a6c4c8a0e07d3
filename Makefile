# `make demo` and `make test` set up everything they need in .venv, from requirements.lock, and then run.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NUMERICAL := geometry attention encodings adapters generate paper train/test_objective.py train/test_streams.py
WIDE_BOUNDS := gradcheck or gradients_are_exact or gradients_reach_the_content or orthogonal_in_degenerate \
	or orthogonal_for_any or taxonomy or trilemma or growth or compile
NO_NUMBERS := (refus and not right_or_refused) or geometry_is_finite or steer_the_clips or begins_with_the_frames \
	or analyse_families or parameters_of_the_real_models

# Bytecode of tests is kept: other processes, and `make test-strangers-cpu` after `make test`, need not compile it again.
unexport PYTHONDONTWRITEBYTECODE

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
# wide bounds, those that compare no numbers, and heads of 192 channels, whose products are those of 128.
test-strangers-cpu: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --strangers-cpu -k "not ($(WIDE_BOUNDS) or $(NO_NUMBERS) or 192)" $(addprefix tests/,$(NUMERICAL))

# On a machine with a CUDA GPU; without one, of the Hopper kernels alone. PYTEST="python3 -m pytest" takes another
# interpreter. Needs torch, Triton and pytest only.
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
