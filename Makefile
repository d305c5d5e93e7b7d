# Launches things; knows nothing else. `make` lists the targets and these variables:
#: RECIPE=NAME             the recipe (run, sweep, new, image-run, bench); without it, make run lists all recipes
#: ARGS="..."              more options for the program that the target starts; ARGS=--help lists them
#: FROM=images             begin with an example: images or text (new)
#: OVER="--lr 0.1 0.03"    options and values, of which each combination is a run (sweep)
#: NPROC=N                 processes on this machine (run, sweep, image-run, evaluate, doctor)
#: NNODES= NODE_RANK= MASTER_ADDR= MASTER_PORT=    several hosts (run, image-run): docs/several-hosts.md
#: RUN=DIR                 a finished run (predict, evaluate, export, reproduce, runs)
#: TO=FILE                 model.pt2, model.onnx or model.safetensors (export)
#: INPUT="FILE DIR ..."    images, and folders of images (predict)
#: AGAINST=DIR             a second finished run, to compare with RUN (reproduce)
#: DATA=DIR OUT=DIR        a folder of images, and where its packed copy goes (pack)
#: SUITE=slow              other tests (test): slow (each recipe to its end, each fault once), slurm (a real
#:                         cluster, started here), image (a real container engine), by_hand (too long for CI),
#:                         faults (each in every recipe; renews their JSON), soak (runs killed at random)
#: ROUNDS=N                rounds of SUITE=soak (test; default 50)
#: WHAT="step peers"       what to measure (bench): step, input, snapshots, network, learning, peers, host
#: STACK=cu130             versions of CUDA and torch, from docker/stacks.json (default cu132)
#: TARGET=development      an image with the tests and a C compiler (image, image-run)
#: IMAGE=NAME              name of the image (image, image-run)
#: BUILD="..."             more options of docker build (image)
#: GPUS=device=0           docker's --gpus (image-run; default: all, if there are any)
#: RUNS=DIR                folder on this machine that is mounted as runs/ (image-run; default runs)
#: DOCKER_ARGS="..."       more options of docker run (image-run)
#: DOCKER=PROGRAM          the container engine (image, image-run; default docker)
#: PYTHON=python3          an interpreter that already has torch; nothing is installed
STACK ?= cu132
LOCK := docker/stacks/$(STACK).txt
STACKS = $(shell python3 -c 'import json; print(*json.load(open("docker/stacks.json")))')
VENV := $(if $(filter cu132,$(STACK)),.venv,.venv-$(STACK))
ifdef PYTHON  # an interpreter that already has torch: nothing is installed
INSTALLED := packages
INSTALLED_DEV := packages-dev
INSTALLED_PEERS := packages-peers
else
# Not by the link's name: a run imports from the same folder until its end, whatever `make venv` does.
PYTHON = $(shell readlink $(VENV) || echo $(VENV))/bin/python
INSTALLED := venv
INSTALLED_DEV := venv-dev
INSTALLED_PEERS := venv-peers
endif
IMAGE ?= torch-recipes:$(STACK)$(if $(filter development,$(TARGET)),-development)
DOCKER ?= docker
RUNS ?= $(CURDIR)/runs
GPUS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),all)
export PYTHONHASHSEED ?= 0
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

LAUNCH = $(if $(NPROC),--nproc $(NPROC)) $(if $(NNODES),--nnodes $(NNODES)) \
	$(if $(NODE_RANK),--node-rank $(NODE_RANK)) $(if $(MASTER_ADDR),--master-addr $(MASTER_ADDR)) \
	$(if $(MASTER_PORT),--master-port $(MASTER_PORT))

# Before anything is installed or started: a mistyped variable would start something else.
GIVEN := $(strip $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),'$(name)')))
ifneq ($(GIVEN),)
ifneq ($(shell ! command -v python3 >/dev/null || \
	python3 tools/make_variables.py $(firstword $(MAKEFILE_LIST)) '$(MAKECMDGOALS)' $(GIVEN) || echo no),)
$(error nothing was started)
endif
endif

.DEFAULT_GOAL := help
.PHONY: run sweep runs pack predict evaluate export new reproduce doctor tensorboard diff-ddp check format test gpu-check bench \
	image image-run image-repro image-aarch64 sbom \
	slurm-check venv lock audit clean help venv-dev venv-peers packages packages-dev packages-peers \
	need-run need-input need-to need-suite

## Run

run: $(INSTALLED) ## Train: make run RECIPE=ddp_launch [NPROC=2] [ARGS="--epochs 3"]
	@$(if $(RECIPE),$(PYTHON) -m recipes $(RECIPE) $(LAUNCH) $(ARGS), \
		$(PYTHON) -m recipes; echo "error: no recipe given: make run RECIPE=NAME" >&2; exit 2)

sweep: $(INSTALLED) ## A run for each combination of values: make sweep RECIPE=ddp_launch OVER="--lr 0.1 0.03 --seed 0 1"
	@$(PYTHON) -m recipes sweep $(RECIPE) $(if $(OVER),--over "$(OVER)") $(if $(NPROC),--nproc $(NPROC)) $(ARGS)

predict: need-run need-input $(INSTALLED) ## Show the classes of images: make predict RUN=runs/ddp_launch/... INPUT=photos
	@$(PYTHON) -m recipes predict $(RUN) $(INPUT) $(ARGS)

evaluate: need-run $(INSTALLED) ## Evaluate a finished run again, or on other photos [NPROC=2] [ARGS="--data-path DIR"]
	@$(PYTHON) -m recipes evaluate $(RUN) $(if $(NPROC),--nproc $(NPROC)) $(ARGS)

export: need-run need-to $(INSTALLED) ## Write the model for other programs, and check it: make export RUN=... TO=model.pt2
	@$(PYTHON) -m recipes export $(RUN) $(TO) $(ARGS)

EXAMPLE := $(if $(filter command,$(firstword $(origin FROM))),$(FROM))
new: ## Begin a recipe of your own, as a copy of ddp_launch: make new RECIPE=NAME [FROM=images|text] (docs/bring-your-own.md)
	@expr "$(RECIPE)" : '[a-z][a-z0-9_]*$$' >/dev/null || \
		{ echo "error: RECIPE=$(RECIPE) is no name: give small letters, digits and _" >&2; exit 2; }
	@test ! -e tools/$(RECIPE).py && python3 -c 'import keyword; exit(keyword.iskeyword("$(RECIPE)"))' || \
		{ echo "error: RECIPE=$(RECIPE) is a tool of this project or a word of Python: give another" >&2; exit 2; }
	@$(if $(filter-out images text,$(EXAMPLE)),echo "error: FROM: give images or text" >&2; exit 2)
	@mkdir recipes/$(RECIPE) 2>/dev/null || { echo "error: recipes/$(RECIPE) exists: give another RECIPE" >&2; exit 2; }
	@for file in __init__ train; do \
		sed 's/ddp_launch/$(RECIPE)/g' recipes/ddp_launch/$$file.py >recipes/$(RECIPE)/$$file.py; done
	@sed -i '1s/.*/"""A copy of ddp_launch, yours to change: say here what it trains./' recipes/$(RECIPE)/train.py
	@$(if $(EXAMPLE),cp docs/bring-your-own/$(EXAMPLE)_yours.py recipes/$(RECIPE)/yours.py; \
	sed 's|recipes\([/.]\)mine|recipes\1$(RECIPE)|' docs/bring-your-own/$(EXAMPLE)_train.diff | git apply || \
		{ rm -r recipes/$(RECIPE); echo "error: the example is a change of another ddp_launch/train.py" >&2; exit 2; })
	@echo "recipes/$(RECIPE)/train.py is yours to change: docs/bring-your-own.md shows how"

pack: $(INSTALLED) ## Pack photos into a few large files: make pack DATA=photos OUT=photos.packed [ARGS=--help]
	@$(PYTHON) -m recipes pack $(DATA) $(OUT) $(ARGS)

reproduce: need-run $(INSTALLED) ## Repeat a recorded run and compare the bits: make reproduce RUN=runs/ddp_launch/...
	@$(PYTHON) -m recipes reproduce $(RUN) $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

# What ARGS begins with can be the run; ARGS=--help needs none.
IN_ARGS = $(filter -h --help,$(ARGS))$(filter-out -%,$(firstword $(ARGS)))

need-run:
	@$(if $(RUN)$(IN_ARGS),,echo "error: no run given: make $(firstword $(MAKECMDGOALS)) \
	RUN=runs/ddp_launch/... needs the folder of a finished run" >&2; exit 2)

need-input:
	@$(if $(INPUT)$(IN_ARGS),,echo "error: no images given: make predict RUN=$(or $(RUN),runs/...) \
	INPUT=photos needs a file or a folder" >&2; exit 2)

need-to:
	@$(if $(TO)$(IN_ARGS),,echo "error: no file given: make export RUN=$(or $(RUN),runs/...) \
	TO=model.pt2 needs its name" >&2; exit 2)

## Look

doctor: $(filter venv,$(INSTALLED)) ## Say what on this machine would stop a run [NPROC=4 adds a real all-reduce]
	@$(PYTHON) -m recipes doctor $(if $(NPROC),--nproc $(NPROC)) $(ARGS)

runs: $(INSTALLED) ## List all runs, or compare two [RUN="runs/A runs/B"] [ARGS="--sort val_accuracy --only WORD"]
	@$(PYTHON) -m recipes runs $(RUN) $(ARGS)

tensorboard: $(INSTALLED) ## Show the curves of all runs in a browser
	@$(PYTHON) -m tensorboard.main --logdir runs $(ARGS)

diff-ddp: ## Show how little ddp_launch and ddp_spawn differ
	@diff -U1 recipes/ddp_launch/train.py recipes/ddp_spawn/train.py || true

## Test

check: $(INSTALLED_DEV) ## Check style, formatting and types
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@PATH="$(dir $(PYTHON)):$$PATH" hadolint docker/Dockerfile

format: $(INSTALLED_DEV) ## Format the code and fix what the linter can fix
	@$(PYTHON) -m ruff format .
	@$(PYTHON) -m ruff check --fix .

test: need-suite $(INSTALLED_DEV) ## Run the tests (minutes), or those of SUITE=slow, slurm, image, by_hand, faults or soak
	@case "$(SUITE)" in \
	"") $(PYTHON) -m pytest -n logical --maxprocesses 2 --dist loadfile $(ARGS) ;; \
	slow) $(PYTHON) -m pytest -m "slow and not slurm and not image and not by_hand" $(ARGS) ;; \
	by_hand) $(PYTHON) -m pytest -m by_hand --ignore=tests/faults $(ARGS) ;; \
	slurm) $(PYTHON) -m pytest -m slurm tests/doors/slurm $(ARGS) ;; \
	image) $(PYTHON) -m pytest -m image tests/doors/image $(ARGS) ;; \
	faults) FAULTS_JSON=$(CURDIR)/tests/faults/results/matrix.json \
		$(PYTHON) -m pytest -m slow tests/faults/test_matrix.py ;; \
	soak) $(PYTHON) -m tests.faults.soak $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS) ;; \
	esac

need-suite:
	@case "$(SUITE)" in ""|slow|slurm|image|by_hand|faults|soak) ;; *) \
	echo "error: no suite $(SUITE): SUITE is slow, slurm, image, by_hand, faults or soak" >&2; exit 2 ;; esac

gpu-check: $(INSTALLED) ## Check what needs a GPU (minutes): ARGS="--only use"; writes tests/results/gpu_check
	@$(PYTHON) -m tests.gpu_check $(ARGS)

## Measure

bench: $(if $(filter peers host,$(WHAT)),$(INSTALLED_PEERS),$(INSTALLED_DEV)) ## Measure speed, a recipe (RECIPE=NAME), or ddp_launch beside other libraries (WHAT=peers)
	@$(PYTHON) -m tools.bench $(RECIPE) $(WHAT) $(ARGS)

## Images and clusters

COMMIT = $(or $(shell git rev-parse HEAD 2>/dev/null),unknown)
DIRTY = $(if $(shell git status --porcelain common docker recipes tools 2>/dev/null),-dirty)
# Without credentials, and not a path on this machine.
SOURCE = $(shell git remote get-url origin 2>/dev/null | \
	sed -nE 's/[?].*//; s,^(https?|ssh|git)://(.*@)?,\1://,p; t; s,^.*@([^/:]+:),\1,p')
IN_IMAGE = common docker recipes tools $(if $(filter development,$(TARGET)),benchmarks docs slurm tests)
NEW_FILES = $(shell git ls-files --others -- $(IN_IMAGE) 2>/dev/null | grep -vE '(^|/)(\.|__pycache__/)')

image: ## Build the image of a stack: make image [STACK=cu130] [TARGET=development]
	@test -f $(LOCK) || { echo "error: no stack $(STACK): STACK is one of $(STACKS)" >&2; exit 2; }
	@$(if $(NEW_FILES),echo 'files that are not in git go into the image: $(NEW_FILES)' >&2)
	@$(DOCKER) build --file docker/Dockerfile --target $(or $(TARGET),runtime) --tag $(IMAGE) \
		--build-arg STACK=$(STACK) --build-arg COMMIT=$(COMMIT)$(DIRTY) \
		--build-arg SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct || echo 0) \
		--label org.opencontainers.image.revision=$(COMMIT)$(DIRTY) \
		$(if $(SOURCE),--label "org.opencontainers.image.source=$(SOURCE)") \
		--label torch-recipes.lock-sha256=$$(sha256sum $(LOCK) | cut -d' ' -f1) $(BUILD) .

image-run: ## Train in the image: make image-run RECIPE=ddp_launch [NPROC=2] [ARGS="..."]
	@$(if $(RECIPE),,echo "error: no recipe given: make image-run RECIPE=NAME" >&2; exit 2)
	@$(DOCKER) version >/dev/null || exit 2
	@$(DOCKER) image inspect $(IMAGE) >/dev/null 2>&1 || \
		{ echo "error: no image $(IMAGE): make image STACK=$(STACK)" >&2; exit 2; }
	@mkdir -p "$(RUNS)"
	@$(DOCKER) run --rm $$(test -t 0 && test -t 1 && echo --interactive --tty) --shm-size=8g \
		$(if $(GPUS),--gpus '$(GPUS)') $(if $(NNODES),--network host) \
		--user $$(id -u):$$(id -g) $$(printf -- '--group-add %s ' $$(id -G)) \
		--volume "$$(realpath "$(RUNS)")":/workspace/runs \
		--env RECIPES_IMAGE_DIGEST=$$($(DOCKER) image inspect --format '{{.Id}}' $(IMAGE)) \
		$(DOCKER_ARGS) $(IMAGE) $(RECIPE) $(LAUNCH) $(ARGS)

sbom: $(INSTALLED_DEV) ## Write the bill of materials of a stack's image: sbom-STACK.json, from the lock
	@$(PYTHON) -m uv tool run --from cyclonedx-bom==7.5.0 cyclonedx-py requirements \
		--pyproject pyproject.toml --output-reproducible --output-file sbom-$(STACK).json $(ARGS) $(LOCK)

image-repro: $(INSTALLED_DEV) ## Build the image twice, compare the bytes; renews docker/results/repro.json
	@$(PYTHON) -m tests.doors.image.repro $(ARGS)

image-aarch64: $(INSTALLED_DEV) ## Build the image for ARM under emulation, train and test in it (hours, as root)
	@$(PYTHON) -m tests.doors.image.aarch64 $(ARGS)

slurm-check: $(INSTALLED) ## Check a Slurm site before a long run: directives, network and clocks of two nodes
	@PYTHON=$(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON)) slurm/check.sh $(ARGS)

## Housekeeping

# A link of the user's leads out of this folder: what is there is not ours to change.
OURS = case "$$(readlink $(VENV))" in */*) echo "error: $(VENV) is a link to $$(readlink $(VENV)), which has not \
	the packages of $(1): remove the link, or give PYTHON=$(VENV)/bin/python" >&2; exit 2;; esac

venv: ## Make or renew the Python environment (other targets do this by themselves)
	@cmp -s $(LOCK) $(VENV)/lock.txt || { set -e; $(call OURS,$(LOCK)); \
	test "$$(uname -s)" != Darwin || { echo "error: this is macOS, and the recipes need Linux: use the container \
	(docker/README.md)" >&2; exit 2; }; \
	test -f $(LOCK) || { echo "error: no stack $(STACK): STACK is one of $(STACKS)" >&2; exit 2; }; \
	python3 -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "error: python3 is $$(python3 --version): 3.11 to 3.13 is needed" >&2; exit 2; }; \
	python3 -c 'import ensurepip, venv' 2>/dev/null || { echo "error: python3 cannot make environments: \
	apt install python3-venv, or your distribution's package of the modules venv and ensurepip" >&2; exit 2; }; \
	echo "making $(VENV) from $(LOCK): some minutes and 6 GB, once"; \
	new=$(VENV)-$$(sha256sum $(LOCK) | cut -c1-8); old=$$(readlink $(VENV) || true); \
	cmp -s $(LOCK) $$new/lock.txt || { python3 -m venv --clear $$new; \
	$$new/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $(LOCK); \
	cp $(LOCK) $$new/lock.txt; }; \
	test -L $(VENV) || test ! -d $(VENV) || { old=$(VENV)-old; mv -T $(VENV) $$old; }; \
	ln -sfn $$new $(VENV).new; mv -T $(VENV).new $(VENV); \
	test -z "$$old" || echo "$$old is left for the runs that use it: delete it after them"; }

packages packages-dev packages-peers:
	@$(PYTHON) tools/packages.py $(patsubst packages-%,%,$(filter-out packages,$@))

venv-dev venv-peers: venv-%: venv
	@cmp -s docker/stacks/$*.txt $(VENV)/lock-$*.txt || { set -e; $(call OURS,docker/stacks/$*.txt); \
	echo "adding docker/stacks/$*.txt to $(VENV)"; \
	$(VENV)/bin/python -m pip install -q --disable-pip-version-check --require-hashes \
		-r $(LOCK) -r docker/stacks/$*.txt; \
	cp docker/stacks/$*.txt $(VENV)/lock-$*.txt; }

UV_LOCK = $(PYTHON) -m uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	--generate-hashes --no-annotate --no-header --no-emit-index-url --no-emit-find-links

lock: $(INSTALLED_DEV) ## Renew the lock files under docker/stacks
	@for stack in $(STACKS); do echo "locking $$stack"; \
	$(PYTHON) docker/verify.py constraints $$stack >.constraints.txt && \
	$(UV_LOCK) pyproject.toml -c .constraints.txt -o docker/stacks/$$stack.txt || exit; done
	@echo "locking dev"; $(UV_LOCK) --group dev $(STACKS:%=-c docker/stacks/%.txt) \
		-o docker/stacks/dev.txt
	@echo "locking peers"; echo torch >.constraints.txt; $(UV_LOCK) --group peers \
		--excludes .constraints.txt $(STACKS:%=-c docker/stacks/%.txt) -c docker/stacks/dev.txt \
		-o docker/stacks/peers.txt  # without torch, of which each stack pins its own
	@rm .constraints.txt

audit: $(INSTALLED_DEV) ## Look up known vulnerabilities of the locked packages at PyPI (ARGS="-s osv": at OSV)
	@for lock in docker/stacks/*.txt; do echo "$$lock"; $(PYTHON) -m uv tool run pip-audit==2.10.1 \
		--strict --disable-pip --no-deps --requirement $$lock $(ARGS) || exit; done

clean: ## Remove the environments and caches; runs/ stays
	rm -rf .venv .venv-* .engine .mypy_cache .pytest_cache .ruff_cache .hypothesis

help: ## Show this list
	@awk -F ':.*## ' '/^## / {print "\n" substr($$0, 4)} /^#: / {variables = variables "\n  " substr($$0, 4)} \
		/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2} END {print "\nVariables" variables}' \
		$(MAKEFILE_LIST)
