# Everything runs in .venv, which is created on first use. Nothing is installed outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
WORKERS ?= 2
SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo install lint format types imports docs unit test mutation hostile benchmark figures notebooks performance experiments results clean

help: ## list all targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(DEMO_STAMP) ## run the paper's experiment on a small corpus, and one on state tracking (minutes on two cores)
	LOGDEPTH_CACHE=$(CURDIR)/demo/cache $(BIN)/logdepth reproduce pydocs --out demo
	$(BIN)/logdepth reproduce groups --tasks s3 --models grc-dropout rope --seeds 0 --longest 1024 --lanes 2 \
		--config experiments/groups-quick.json --out demo/groups

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[report,sweep]'
	touch $(DEMO_STAMP)

install: $(STAMP) ## create .venv with the package and all dependencies of its checks

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,data,report,sweep,serve,hf,eval,onnx,docs,mutation]'
	touch $(STAMP) $(DEMO_STAMP)

lint: $(STAMP) ## check style and formatting without changing files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## check types with mypy in strict mode
	$(BIN)/mypy

imports: $(STAMP) ## check imports against the layers of docs/architecture.md
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation in site/; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(STAMP) ## run only the tests
	$(BIN)/pytest -n $(WORKERS)

test: lint types imports docs unit ## run all checks and tests, as CI does

mutation: $(STAMP) ## run mutation tests of the index planning (minutes); docs/mutants.md explains the survivors
	$(BIN)/mutmut run
	$(BIN)/mutmut results

hostile: $(STAMP) ## try to break the library: damaged files, edits, commands, corpora, kills, requests, ranks (about an hour); exits with 1 if it does
	@failed=""; for program in flips edits commands corpora kills requests ranks; do \
		$(BIN)/python -m tests.hostile.$$program --seed $(SEED) || failed="$$failed $$program"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

benchmark: $(STAMP) ## measure time and memory of the scan and of training on the CPU
	$(BIN)/python benchmarks/scan.py --out results/scan-cpu.json
	$(BIN)/python benchmarks/train.py --device cpu --out results/train-cpu.json

figures: $(STAMP) ## draw the README's figures from results/
	$(BIN)/python docs/figures/draw_scan.py
	$(BIN)/python docs/figures/draw_benchmark.py
	$(BIN)/python docs/figures/draw_demo.py

notebooks: $(STAMP) ## execute docs/notebooks and store what they print and draw (a minute on one core)
	$(BIN)/python docs/figures/notebooks.py

performance: $(STAMP) ## write docs/performance.md and its figures from results/speed-*.json
	$(BIN)/python docs/figures/draw_speed.py

experiments: $(STAMP) ## run the studies of docs/results.md that are missing in results/ (hours on a GPU; can be interrupted and resumed)
	$(BIN)/python experiments/run.py

results: $(STAMP) ## write docs/results.md, its figures and the README's table from results/
	$(BIN)/python docs/figures/draw_results.py

clean: ## remove .venv and caches
	rm -rf $(VENV) site mutants .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
