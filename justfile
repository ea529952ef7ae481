# Development commands, the same locally and in CI.

python := env("PYTHON", "python3")
bin := justfile_directory() / ".venv" / "bin"

# List the commands.
default:
    @just --list

# Create the environment for unit tests, service tests and lint.
setup:
    {{ python }} -m venv .venv
    {{ bin }}/pip install -q -e '.[dev]'

# Create the environment for all tests, including system tests.
setup-system:
    {{ python }} -m venv .venv
    {{ bin }}/pip install -q -e '.[dev-system]'

# Serve the embedded samples and call them.
demo *args:
    {{ bin }}/ovms demo {{ args }}

# Run unit and service tests on all cores; for a part: `just test tests/unit/core` or `just test FILE::TEST`.
test *args:
    {{ bin }}/pytest {{ args }}

# Run system tests: commands, workers, engines, signals and third-party programs.
system *args:
    {{ bin }}/pytest tests/system {{ args }}

# Run all tests, including slow ones, image builds, Ray, a million fuzzed messages and twenty minutes of chaos.
thorough:
    OVMSTRIO_TRY_IMAGE=1 {{ bin }}/pytest tests/unit tests/service tests/system --thorough
    {{ bin }}/python -m tests.fuzz
    {{ bin }}/python -m tests.chaos

# Run all checks that a change must pass, in fresh environments.
ci:
    .ci/run

# Run the default tests 20 times in a row, then 5 times under CPU load; for less: `just stress --quiet-rounds 3 tests/unit`.
stress *args:
    {{ bin }}/python -m tests.stress {{ args }}

# Build the container image without Docker, and run it. Requires root and Debian's buildah, mmdebstrap and bubblewrap.
image:
    OVMSTRIO_TRY_IMAGE=1 {{ bin }}/pytest tests/system/deploy/test_image.py --thorough

# Check formatting, lint rules, types and import layers.
lint:
    {{ bin }}/ruff format --check .
    {{ bin }}/ruff check .
    {{ bin }}/mypy ovmstrio tests benchmarks
    {{ bin }}/lint-imports

# Format the code and apply lint fixes.
fmt:
    {{ bin }}/ruff format .
    {{ bin }}/ruff check --fix .

# Run the benchmarks of RESULTS.md: `just bench --quick`, `just bench calls`, `just bench matrix`, `just bench peers`, or one by name.
bench *args:
    {{ bin }}/python -m benchmarks {{ args }}

# Compare two saved runs and show changes above 10 %. Exit code 1 on a regression.
compare before after:
    {{ bin }}/python -m benchmarks compare {{ before }} {{ after }}

# Run attacks on servers, and measure their effect on other clients.
attacks:
    {{ bin }}/python -m benchmarks attacks

# Send a million nearly valid messages over all interfaces; for a part: `just fuzz --count 10000 --first 5000`.
fuzz *args:
    {{ bin }}/python -m tests.fuzz {{ args }}

# Inject faults into servers for twenty minutes while clients call them; for less: `just chaos --minutes 1`.
chaos *args:
    {{ bin }}/python -m tests.chaos {{ args }}

# Run third-party client programs and write docs/clients.md. Arguments: Python interpreters of environments that have them.
clients *pythons:
    {{ bin }}/python -m tests.clients.node_packages
    {{ bin }}/python -m tests.clients.catalogue {{ pythons }}

# Regenerate the message classes from protos/.
protos:
    {{ bin }}/python protos/generate.py

# Check the workflow of GitHub Actions. `just setup-system` installs the tools of this recipe and the next two.
actions:
    {{ bin }}/zizmor --offline --no-progress .github

# Build the source archive and the wheel in build/dist, and check their metadata.
build:
    rm -rf build/dist
    {{ bin }}/python -m build --outdir build/dist
    {{ bin }}/twine check --strict build/dist/*

# Write a bill of materials of a plain installation, build/sbom.json, in CycloneDX's format.
sbom:
    {{ python }} -m venv --clear build/sbom
    build/sbom/bin/pip install -q .
    build/sbom/bin/pip uninstall -q --yes pip setuptools
    {{ bin }}/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.json build/sbom/bin/python

# Write the licences of a plain installation's packages, docs/licences.md.
licences:
    {{ bin }}/python -m tests.support.licences

# Write the references docs/cli.md, docs/config_keys.md, docs/config.schema.json and docs/openai_fields.md, and build the
# documentation site in build/site. `just setup-system` installs its tools.
docs:
    {{ bin }}/python -m ovmstrio.cli.reference docs/cli.md
    {{ bin }}/python -m ovmstrio.cli.config_reference docs
    {{ bin }}/python -m ovmstrio.cli.field_reference docs/openai_fields.md
    {{ bin }}/python -m ovmstrio.cli.field_tables docs
    {{ bin }}/mkdocs build
