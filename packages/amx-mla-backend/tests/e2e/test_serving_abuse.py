# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` abused: many clients, cancelled streams, prompts as long as the model allows, a token budget of 32, a
cache too small for the load, and SIGTERM amid streams. Whatever is answered is what the same prompt gets alone.

The checkpoint recites its text with margins that bfloat16 does not cross, so answers are compared token for token.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mla_testing import checkpoints, corpus

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # nox -s abuse

MAX_MODEL_LEN = 512
ANSWER = 24
CLIENTS = 64
BLOCKS = 24
"""Of 64 tokens, for 64 clients of which 32 may run: prompts that fit their blocks outgrow them while they are answered,
so vLLM has to preempt."""

PROMPTS = corpus.prompts(11, [5, 17, 33, 60, 62, 63, 124, 126, 300, MAX_MODEL_LEN - ANSWER, 61, 127])
TOO_LONG = corpus.prompts(13, [MAX_MODEL_LEN])[0]


@dataclass
class Server:
    """A running `vllm serve`, its address and its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    solo: dict[int, list[int]] = field(default_factory=dict)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url(path), timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """Sum of a counter or gauge over its labels."""
        values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? ([-+.\deE]+)$", self.get("/metrics"), re.MULTILINE)
        assert values, f"the server has no metric vllm:{name}"
        return sum(map(float, values))

    def complete(self, prompt: list[int], max_tokens: int = ANSWER) -> dict[str, Any]:
        body = json.dumps(request_body(prompt, max_tokens, stream=False)).encode()
        call = urllib.request.Request(self.url("/v1/completions"), body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(call, timeout=300) as answer:
            return json.load(answer)

    def family(self) -> list[int]:
        """The server's process and its descendants."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int(re.sub(r"^.*\) ", "", (entry / "stat").read_text()).split()[1])
                except OSError:
                    continue
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def resident(self) -> int:
        pages = 0
        for pid in self.family():
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * os.sysconf("SC_PAGESIZE")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


def request_body(prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("serve"), free_port()
    log = folder / "log.txt"
    command = [
        sys.executable, "-m", "amx_mla_backend", "serve", str(checkpoints.make("yarn")),
        "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "32", "--max-num-seqs", "32",
        "--num-gpu-blocks-override", str(BLOCKS), "--block-size", "64", "--no-enable-prefix-caching",
    ]  # fmt: skip
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_AMX_MLA_BACKEND": "on", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    server = Server(process, port, log)
    deadline = time.monotonic() + 600
    while True:
        try:
            server.get("/health")
            break
        except (urllib.error.URLError, OSError):
            assert process.poll() is None, server.tail()
            assert time.monotonic() < deadline, server.tail()
            time.sleep(1)
    yield server
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tokens_of(choice: dict[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    assert ids is not None, f"the server returns no token ids: {choice}"
    return list(ids)


async def stream(server: Server, prompt: list[int], stop_after: int | None) -> list[int] | None:
    """One streamed completion over a raw connection; closed after `stop_after` tokens (then None)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**22)
    body = json.dumps(request_body(prompt, ANSWER, stream=True)).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    await writer.drain()
    received: list[int] = []
    try:
        if stop_after == 0:
            return None
        async for line in reader:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                received += tokens_of(choice)
            if stop_after is not None and len(received) >= stop_after:
                return None
        return received
    finally:
        writer.close()


async def crowd(server: Server, seed: int) -> Counter[str]:
    """64 clients at once: a third leave early. What was answered in full must be what each prompt gets alone."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()

    async def client() -> None:
        await asyncio.sleep(rng.random())
        which = rng.randrange(len(PROMPTS))
        stop = rng.choice((None, None, rng.randrange(ANSWER)))
        received = await stream(server, PROMPTS[which], stop)
        if received is None:
            seen["cancelled"] += 1
        elif received == server.solo[which]:
            seen["right"] += 1
        else:
            seen[f"wrong: prompt {which} of {len(PROMPTS[which])} tokens: {received} for {server.solo[which]}"] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


def drained(server: Server) -> None:
    """Nothing runs, nothing waits, no cache block is held: also what cancelled requests held is free again."""
    deadline = time.monotonic() + 60
    while server.metric("num_requests_running") or server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline, "cancelled requests still run"
        time.sleep(0.5)
    assert server.metric("kv_cache_usage_perc") == 0.0


def test_answers_alone(server: Server) -> None:
    """The yardstick: one request at a time, twice, the same tokens."""
    for which, prompt in enumerate(PROMPTS):
        server.solo[which] = tokens_of(server.complete(prompt)["choices"][0])
        assert len(server.solo[which]) == ANSWER
        assert tokens_of(server.complete(prompt)["choices"][0]) == server.solo[which]
    assert "AMX_MLA" in server.log.read_text(errors="replace"), "another backend served"


def test_a_crowd_with_cancelled_streams_gets_right_answers(server: Server) -> None:
    """Twice: the second time nothing may have grown, neither cache in use nor memory."""
    preempted = server.metric("num_preemptions_total")
    seen = asyncio.run(crowd(server, 1))
    drained(server)
    before = server.resident()
    for seed in (2, 3):
        seen += asyncio.run(crowd(server, seed))
        drained(server)
    assert set(seen) == {"right", "cancelled"}, seen
    assert seen["right"] > 60
    assert server.metric("num_preemptions_total") > preempted, "the cache was never exhausted: the test tests nothing"
    assert server.resident() - before < 64 << 20


@pytest.mark.parametrize("excess", [1, 5000])
def test_a_prompt_that_does_not_fit_is_refused(server: Server, excess: int) -> None:
    prompt = (TOO_LONG * 20)[: MAX_MODEL_LEN + excess]
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.complete(prompt)
    assert refusal.value.code == 400
    assert str(MAX_MODEL_LEN) in refusal.value.read().decode()


def test_a_prompt_that_fills_the_context_is_answered(server: Server) -> None:
    prompt = corpus.prompts(12, [MAX_MODEL_LEN - 1])[0]
    answer = server.complete(prompt, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 1
    assert len(tokens_of(answer["choices"][0])) == 1


def test_sigterm_amid_streams_ends_cleanly(server: Server) -> None:
    """Last: the server and all it started end in time; nothing crashed before or on the way."""

    async def interrupted() -> None:
        async def client(which: int) -> None:
            try:
                received = await stream(server, PROMPTS[which], None)
            except (OSError, asyncio.IncompleteReadError, AssertionError, ValueError):
                return  # cut off or told so
            assert received is not None
            assert received == server.solo[which][: len(received)], "wrong tokens before the end"

        clients = [asyncio.create_task(client(i % len(PROMPTS))) for i in range(32)]
        await asyncio.sleep(2)
        os.kill(server.process.pid, signal.SIGTERM)
        await asyncio.gather(*clients)

    family = server.family()
    asyncio.run(interrupted())
    code = server.process.wait(timeout=60)
    assert code in (0, -signal.SIGTERM, 128 + signal.SIGTERM), server.tail()
    deadline = time.monotonic() + 30
    while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} outlive the server"
        time.sleep(0.5)
    log = server.log.read_text(errors="replace")
    for sign in ("Segmentation fault", "SIGSEGV", "SIGILL", "core dumped", "EngineDeadError"):
        assert sign not in log, server.tail()
