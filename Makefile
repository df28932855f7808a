# One-word commands. Each sets itself up on a fresh machine that has Python 3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check warm bench lock clean

demo: .venv/ready            ## the whole job on the built-in phantom
	$(BIN)/mirto demo demo

test: .venv/ready            ## every test; those on real MRI skip where it is absent
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: .venv/ready           ## style, types and the one-way imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports

warm: .venv/ready            ## compile every kernel once, so that two test processes need not both
	$(BIN)/python -m pytest -q tests/end_to_end/test_hypotheses.py

bench: .venv/ready           ## ratios against peers and slow twins, in one run; without the peers it says so
	-$(MAKE) -s .venv-bench/ready
	OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m pytest tests/benchmarks -o python_files="bench_*.py" \
	  -o python_functions="bench_*" --benchmark-only --benchmark-columns=min,median,rounds -s

lock:                        ## pin every requirement with its hashes (needs uv)
	uv pip compile pyproject.toml --extra notebook --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate -q -o requirements/run.txt
	uv pip compile pyproject.toml --extra notebook --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate -q -c requirements/run.txt -o requirements/dev.txt

.venv/ready: pyproject.toml requirements/dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

.venv-bench/ready: requirements/bench.txt
	$(PYTHON) -m venv --clear .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip install -q --require-hashes -r requirements/bench.txt
	touch $@

clean:
	rm -rf .venv .venv-bench demo build dist .pytest_cache .ruff_cache .hypothesis
