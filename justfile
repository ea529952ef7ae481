# Every verb of the project, the same here and in CI.

python := env("PYTHON", "python3")
bin := justfile_directory() / ".venv" / "bin"

# List the verbs.
default:
    @just --list

# Make the environment for unit tests, service tests and lint.
setup:
    {{ python }} -m venv .venv
    {{ bin }}/pip install -q -e '.[dev]'

# Make the environment for system tests, too.
setup-system:
    {{ python }} -m venv .venv
    {{ bin }}/pip install -q -e '.[dev-system]'

# Serve the embedded samples and call them.
demo *args:
    {{ bin }}/ovms demo {{ args }}

# Run unit and service tests on all cores; `just test tests/unit/core` or `just test FILE::TEST` for some.
test *args:
    {{ bin }}/pytest {{ args }}

# Run system tests: commands, workers, engines, signals and the programs of other projects.
system *args:
    {{ bin }}/pytest tests/system {{ args }}

# Run everything: all tiers with slow tests, builds of images, Ray, a million fuzzed messages and twenty minutes of chaos.
thorough:
    OVMSTRIO_TRY_IMAGE=1 {{ bin }}/pytest tests/unit tests/service tests/system --thorough
    {{ bin }}/python -m tests.fuzz
    {{ bin }}/python -m tests.chaos

# Run every check that a change must pass, in fresh environments.
ci:
    .ci/run

# Run the default tests 20 times in a row, then 5 times beside busy loops; `just stress --quiet-rounds 3 tests/unit` for less.
stress *args:
    {{ bin }}/python -m tests.stress {{ args }}

# Build the container's image without Docker, and run it: needs Debian's buildah, mmdebstrap and bubblewrap, and root.
image:
    OVMSTRIO_TRY_IMAGE=1 {{ bin }}/pytest tests/system/deploy/test_image.py --thorough

# Check form, types and the direction of imports.
lint:
    {{ bin }}/ruff format --check .
    {{ bin }}/ruff check .
    {{ bin }}/mypy ovmstrio cli/ovms_cli cli/ovmstrio_conformance compat samples/ovmstrio_samples tests benchmarks
    {{ bin }}/lint-imports

# Put the code into form.
fmt:
    {{ bin }}/ruff format .
    {{ bin }}/ruff check --fix .

# Measure what RESULTS.md records: `just bench --quick`, `just bench calls`, `just bench matrix`, `just bench peers`, or single questions.
bench *args:
    {{ bin }}/python -m benchmarks {{ args }}

# Show what became better or worse by more than a tenth between two saved runs; exits with 1 if anything became worse.
compare before after:
    {{ bin }}/python -m benchmarks compare {{ before }} {{ after }}

# Attack servers, and measure what a neighbour notices.
attacks:
    {{ bin }}/python -m benchmarks attacks

# Send a million messages that are nearly right over all doors; `just fuzz --count 10000 --first 5000` for some.
fuzz *args:
    {{ bin }}/python -m tests.fuzz {{ args }}

# Disturb servers in every way for twenty minutes while clients call them; `just chaos --minutes 1` for a start.
chaos *args:
    {{ bin }}/python -m tests.chaos {{ args }}

# Run the programs of other packages' clients, and write docs/clients.md; `just clients PYTHON ...` names environments that have them.
clients *pythons:
    {{ bin }}/python -m tests.clients.node_packages
    {{ bin }}/python -m tests.clients.catalogue {{ pythons }}

# Generate the message classes from protos/ again.
protos:
    {{ bin }}/python protos/generate.py

# Print the command line's reference, as docs/cli.md holds it.
docs:
    {{ bin }}/python -m ovms_cli.reference docs/cli.md
