# SPDX-License-Identifier: Apache-2.0
"""What can be done with this repository: `nox -l` lists it, `nox -s NAME` does it.

Sessions share one virtual environment per vLLM version (ci/environments.py); nothing needs to be installed but nox.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / "ci"))

import environments as envs

ROOT = envs.ROOT
REPORTS = ROOT / "reports"
KERNELS = "packages/amx-kernels"
TESTING = "packages/mla-testing"
PATCHES = "packages/vllm-mla-patches"
BACKEND = "packages/amx-mla-backend"

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "test"]
nox.options.default_venv_backend = "none"


def ready(session: nox.Session, *args: str, **kwargs: object) -> envs.Environment:
    """An environment with vLLM and our packages installed."""
    environment = envs.vllm(session, *args, **kwargs)
    envs.install_packages(environment)
    REPORTS.mkdir(exist_ok=True)
    return environment


def pytest(environment: envs.Environment, *args: str, **kwargs: object) -> None:
    """Runs pytest from the repository's root on the installed packages."""
    build = next(iter(sorted((ROOT / KERNELS / "build").glob("cp*"))), ROOT / KERNELS / "build")
    env = {"AMX_KERNELS_BUILD": str(build), "WHEEL_DIR": str(ROOT / "dist"), **kwargs.pop("env", {})}
    environment.run("-m", "pytest", "--import-mode=importlib", *args, env=env, **kwargs)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels of all four packages, in dist/."""
    for wheel in envs.build_wheels(envs.vllm(session)):
        session.log(f"dist/{wheel.name}")


@nox.session
def test(session: nox.Session) -> None:
    """All tests: kernels on every tier, tools, patches, the backend end to end. Arguments go to pytest instead."""
    environment = ready(session)
    if session.posargs:
        pytest(environment, *session.posargs)
        return
    fast = ("-m", "not slow and not e2e", "--durations=15")
    pytest(environment, f"{KERNELS}/tests", *fast)
    pytest(environment, f"{TESTING}/tests", *fast)
    pytest(environment, f"{PATCHES}/tests", *fast)
    pytest(environment, f"{BACKEND}/tests", *fast)
    pytest(environment, f"{BACKEND}/tests", "-m", "e2e and not slow", "--durations=15")
    patched(session, "--smoke")


@nox.session
def emulated(session: nox.Session) -> None:
    """The AMX tier of the whole kernel suite under the emulator, on a machine with AMX too."""
    pytest(ready(session), f"{KERNELS}/tests", "--amx=emulated", "-k", "amxbf16 or counts", "-m", "not e2e")


def with_zentorch(session: nox.Session) -> envs.Environment:
    """The default environment with zentorch, beside the one without."""
    return ready(session, extra=(f"zentorch=={envs.VERSIONS['zentorch']['version']}", "deprecated", "wrapt"))


@nox.session
def test_zen(session: nox.Session) -> None:
    """Our backend on vLLM's ZenCpuPlatform, with zentorch installed for real, in an environment of its own."""
    pytest(with_zentorch(session), f"{BACKEND}/tests/e2e/test_serving.py", "-k", "zen")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, and the repository's own rules (who may import whom, licences, versions)."""
    environment = envs.tools(session, "lint", "ruff", "mypy", "tomli")
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")
    for check in sorted((ROOT / "ci" / "checks").glob("*.py")):
        environment.run(str(check), "--check")


@nox.session
def doctor(session: nox.Session) -> None:
    """What this machine can run, and why. Arguments: --json."""
    ready(session).run("-m", "amx_kernels", "doctor", *session.posargs, success_codes=[0, 1])


@nox.session
def demo(session: nox.Session) -> None:
    """A real `vllm serve` with our backend, every answer compared with transformers. Writes reports/demo.json."""
    ready(session).run("ci/demo.py", *session.posargs)


@nox.session
def serve(session: nox.Session) -> None:
    """Serves your model: nox -s serve -- MODEL [vllm options]."""
    if not session.posargs:
        session.error("name a model: nox -s serve -- MODEL [vllm options]")
    ready(session).run("ci/serving.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Ours beside peers: nox -s bench [-- decode|prefill|bmm|cache|step|e2e] [--quick]. Writes reports/bench_*.json."""
    ready(session).run("-m", "mla_testing.bench", *session.posargs, "--out", str(REPORTS))


@nox.session
def bench_zen(session: nox.Session) -> None:
    """The same beside zentorch, in an environment of its own. Writes reports/zen/bench_*.json."""
    with_zentorch(session).run("-m", "mla_testing.bench", *session.posargs, "--out", str(REPORTS / "zen"))


def patched(session: nox.Session, *args: str) -> None:
    """The patch series on the release they mend, in its own environment."""
    environment = ready(session, "0.28.0")
    environment.run(f"{PATCHES}/tools/session.py", "--report", str(REPORTS / "patches.json"), *args)


@nox.session
def patches(session: nox.Session) -> None:
    """vLLM 0.28.0: what is broken, what each patch mends, and that it serves. Writes reports/patches.json."""
    patched(session, *session.posargs)


@nox.session
def conformance(session: nox.Session) -> None:
    """vLLM's own tests of its AMX MLA ops, unchanged, on our kernels; our overrides against every supported vLLM."""
    environment = ready(session)
    environment.run("ci/vllm_sources.py")
    sources = {"VLLM_SOURCES": str(ROOT / ".nox" / "sources")}
    tests = (f"{BACKEND}/tests/test_conformance.py", f"{BACKEND}/tests/test_signatures.py")
    pytest(environment, *tests, *session.posargs, env=sources)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Property tests of every op and tier, and a coverage-guided fuzzer of the C API. Writes reports/fuzz.json."""
    ready(session).run(f"{KERNELS}/tests/fuzz/run.py", *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Kernels and bindings under ASan, UBSan and TSan. Writes reports/sanitize.json."""
    ready(session).run(f"{KERNELS}/tests/sanitize/run.py", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Threads, forks, affinity masks, thousands of steps: same results, no growth. Writes reports/soak.json."""
    ready(session).run(f"{KERNELS}/tests/soak/run.py", *session.posargs)


@nox.session
def abuse(session: nox.Session) -> None:
    """A server under hostile clients."""
    pytest(ready(session), f"{BACKEND}/tests/e2e/test_serving_abuse.py", "-m", "slow or not slow", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Breaks the kernels one line at a time and shows that the suite notices."""
    ready(session).run(f"{KERNELS}/tests/mutants/run.py", *session.posargs)


@nox.session
def qemu(session: nox.Session) -> None:
    """CPUs this machine is not: x86 without AVX-512 or AVX2, and aarch64. Needs Debian's qemu-user."""
    ready(session).run(f"{KERNELS}/tests/qemu/run.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Writes the generated pages: support matrix, fault classes, benchmark tables."""
    environment = ready(session)
    for check in sorted((ROOT / "ci" / "checks").glob("*.py")):
        if "--write" in check.read_text():
            environment.run(str(check), "--write")
