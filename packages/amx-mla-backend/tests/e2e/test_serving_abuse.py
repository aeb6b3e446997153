# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` abused: many clients, cancelled streams, prompts as long as the model allows, a token budget of 32, a
cache too small for the load, and SIGTERM amid streams. Whatever is answered is what the same prompt gets alone.

Our kernels give a request the same bits whatever its company. vLLM's matrix products do not, and the company decides
into which chunks a prompt is cut; so log-probabilities move a little (0.035 at most was seen in 11,000 tokens), and a
text may take another turn where two tokens are as good as equally likely. Nowhere else: see `same_answer`.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mla_testing import agreement, checkpoints, corpus

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # nox -s abuse

MAX_MODEL_LEN = 512
ANSWER = 24
LONG_ANSWER, LONG_PROMPTS = 200, 8
"""So many tokens that a fast machine too is amid them when SIGTERM comes; of the first, shorter prompts."""
CLIENTS = 64
BLOCKS = 10
"""Of 64 tokens, little more than the longest request needs. The token budget lets some six requests run at a time;
prompts that fit their blocks outgrow them while they are answered, so vLLM has to preempt, ten times a crowd."""

PROMPTS = corpus.prompts(11, [5, 17, 33, 60, 62, 63, 124, 126, 300, MAX_MODEL_LEN - ANSWER, 61, 127])
TOO_LONG = corpus.prompts(13, [MAX_MODEL_LEN])[0]


@dataclass
class Server:
    """A running `vllm serve`, its address and its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    alone: dict[int, agreement.Served] = field(default_factory=dict)
    reference: agreement.Reference = field(default_factory=lambda: agreement.Reference(checkpoints.make("yarn")))

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

    def judge(self, answers: list[agreement.Served]) -> None:
        """Every token is transformers' likeliest, or its second by less than the agreement's margin."""
        found = agreement.compare_with_transformers(self.reference, answers)
        print(found)
        found.check(median=agreement.TINY_MEDIAN, p99=agreement.TINY_P99)

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
        "logprobs": 1,
        "return_token_ids": True,
        "stream": stream,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    port, log = free_port(), folder / "log.txt"
    command = [
        sys.executable, "-m", "amx_mla_backend", "serve", str(checkpoints.make("yarn")),
        "--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "32", "--max-num-seqs", "32",
        "--num-gpu-blocks-override", str(BLOCKS), "--block-size", "64", "--no-enable-prefix-caching", *options,
    ]  # fmt: skip
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_AMX_MLA_BACKEND": "on", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    server = Server(process, port, log)
    try:
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
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve")) as server:
        yield server


def tokens_of(choice: dict[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    assert ids is not None, f"the server returns no token ids: {choice}"
    return list(ids)


def served(which: int, choices: list[dict[str, Any]]) -> agreement.Served:
    """The answer to a prompt, from its one choice or from the pieces of it."""
    tokens = [token for choice in choices for token in tokens_of(choice)]
    logprobs = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return agreement.Served(PROMPTS[which], tokens, logprobs, name=f"prompt {which} of {len(PROMPTS[which])} tokens")


def same_answer(answer: agreement.Served, alone: agreement.Served) -> bool:
    """Whether an answer is the one its prompt gets alone: False where the text takes another turn.

    Up to there each log-probability is the same within the limit to which 99 % of them agree with transformers; at the
    turn the two tokens are equally likely within it, in both runs. (Of two runs that move each log-probability by at
    most d, one prefers a, the other b: then what the one says of a and the other of b is within d.)

    Raises:
        AssertionError: a difference that company does not explain.
    """
    pairs = list(zip(answer.tokens, alone.tokens, strict=False))  # a cut off answer as far as it goes
    turn = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    for i in range(min(turn + 1, len(pairs))):
        ours, theirs = answer.token_logprobs[i], alone.token_logprobs[i]
        assert abs(ours - theirs) <= agreement.TINY_P99, (
            f"{answer.name}: token {i} is {answer.tokens[i]} ({ours:.4f}), alone {alone.tokens[i]} ({theirs:.4f})"
        )
    return turn == len(pairs)


async def stream(
    server: Server,
    which: int,
    stop_after: int | None = None,
    choices: list[dict[str, Any]] | None = None,
    max_tokens: int = ANSWER,
) -> agreement.Served | None:
    """One streamed completion over a raw connection; closed after `stop_after` tokens (then None). Its pieces are
    also found in `choices`, whatever happens."""
    choices = [] if choices is None else choices
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**22)
    body = json.dumps(request_body(PROMPTS[which], max_tokens, stream=True)).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )
    await writer.drain()
    try:
        if stop_after == 0:
            return None
        async for line in reader:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            choices += event["choices"]
            if stop_after is not None and sum(len(tokens_of(c)) for c in choices) >= stop_after:
                return None
        return served(which, choices)
    finally:
        writer.close()


async def crowd(server: Server, seed: int) -> tuple[Counter[str], list[agreement.Served]]:
    """64 clients at once: a third leave early. What happened to them, and what was answered in full."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    answers = []

    async def client() -> None:
        await asyncio.sleep(rng.random())
        which = rng.randrange(len(PROMPTS))
        answer = await stream(server, which, rng.choice((None, None, rng.randrange(ANSWER))))
        if answer is None:
            seen["cancelled"] += 1
        else:
            assert len(answer.tokens) == ANSWER
            seen["same" if same_answer(answer, server.alone[which]) else "another turn"] += 1
            answers.append(answer)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen, answers


def until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{otherwise} after {seconds:.0f} s"
        time.sleep(0.2)


def running(pids: list[int]) -> set[int]:
    """Those that have not ended; one that waits to be reaped has."""
    alive = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                alive.add(pid)
    return alive


def shared_memory(pids: list[int]) -> set[Path]:
    """Files in /dev/shm that the processes have mapped."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def drained(server: Server) -> None:
    """Nothing runs, nothing waits, no cache block is held: also what cancelled requests held is free again."""
    deadline = time.monotonic() + 60
    while server.metric("num_requests_running") or server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline, "cancelled requests still run"
        time.sleep(0.5)
    assert server.metric("kv_cache_usage_perc") == 0.0


def test_answers_alone(server: Server) -> None:
    """The yardstick: one request at a time, twice the same bits, and what transformers says."""
    for which, prompt in enumerate(PROMPTS):
        once, again = (served(which, server.complete(prompt)["choices"]) for _ in range(2))
        assert len(once.tokens) == ANSWER
        assert once == again
        server.alone[which] = once
    server.judge(list(server.alone.values()))
    assert "Attention backend AMX_MLA" in server.log.read_text(errors="replace"), "another backend served"


def test_a_crowd_with_cancelled_streams_gets_right_answers(server: Server) -> None:
    """Three crowds: after the first nothing may grow, neither cache in use nor memory."""
    preempted, before = server.metric("num_preemptions_total"), 0
    seen: Counter[str] = Counter()
    answers = []
    for seed in (1, 2, 3):
        happened, complete = asyncio.run(crowd(server, seed))
        seen += happened
        answers += complete
        drained(server)
        before = before or server.resident()
    print(dict(seen), f"{server.metric('num_preemptions_total') - preempted:.0f} preemptions")
    server.judge(answers)
    assert len(answers) > 60 and seen["cancelled"] > 20
    assert seen["another turn"] <= len(answers) * (1 - agreement.GREEDY_MATCH)
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


class Ending:
    """What a server consists of, and whether all of it has ended and left nothing behind."""

    def __init__(self, server: Server) -> None:
        self.server, self.family = server, server.family()
        self.held = shared_memory(self.family)
        self.engine = [pid for pid in self.family if b"VLLM::" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert self.engine and server.process.pid not in self.engine

    def check(self, seconds: float) -> None:
        assert self.server.process.wait(timeout=seconds) == 0, self.server.tail()
        until(lambda: not running(self.family), 10, "processes outlive the server")
        left = [path for path in self.held if path.exists()]
        assert not left, f"shared memory outlives the server: {left}"
        log = self.server.log.read_text(errors="replace")
        for sign in ("Segmentation fault", "SIGSEGV", "SIGILL", "core dumped"):
            assert sign not in log, self.server.tail()


def test_sigterm_amid_streams_ends_cleanly(server: Server) -> None:
    """The engine ends at once, the front end with its last client; nothing crashed before or on the way.

    vLLM's front end (0.32.0, whoever does the attention) does not tell its clients that the engine is gone: it waits,
    deaf to further signals, until they have left.
    """
    ending = Ending(server)
    pieces: list[list[dict[str, Any]]] = [[] for _ in range(32)]

    async def interrupted() -> None:
        clients = [
            asyncio.create_task(stream(server, i % LONG_PROMPTS, None, p, LONG_ANSWER)) for i, p in enumerate(pieces)
        ]
        await asyncio.to_thread(until, lambda: sum(map(bool, pieces)) >= 4, 60, "streams have not begun")
        os.kill(server.process.pid, signal.SIGTERM)
        await asyncio.to_thread(until, lambda: not running(ending.engine), 20, "the engine goes on")
        for client in clients:
            client.cancel()  # which closes its connection
        await asyncio.gather(*clients, return_exceptions=True)

    asyncio.run(interrupted())
    ending.check(30)
    answers = [served(i % LONG_PROMPTS, choices) for i, choices in enumerate(pieces)]
    cut_off = [answer for answer in answers if 0 < len(answer.tokens) < LONG_ANSWER]
    assert cut_off, "no stream was cut off: the test tests nothing"
    for i, answer in enumerate(answers):
        same_answer(answer, server.alone[i % LONG_PROMPTS])


def test_with_a_shutdown_timeout_every_stream_comes_to_its_end(server: Server, tmp_path: Path) -> None:
    """`--shutdown-timeout`: SIGTERM lets what was begun be finished."""
    alone, begun = server.alone, range(4)
    pieces: list[list[dict[str, Any]]] = [[] for _ in begun]

    async def interrupted(server: Server) -> list[Any]:
        clients = [asyncio.create_task(stream(server, i, None, pieces[i], LONG_ANSWER)) for i in begun]
        await asyncio.to_thread(until, lambda: all(pieces), 60, "streams have not begun")
        assert not all(client.done() for client in clients), "nothing is left to be finished: the test tests nothing"
        os.kill(server.process.pid, signal.SIGTERM)
        return await asyncio.gather(*clients)

    with serving(tmp_path, "--shutdown-timeout", "120") as server:
        ending = Ending(server)
        answers = asyncio.run(interrupted(server))
        ending.check(60)
    for i, answer in zip(begun, answers, strict=True):
        assert len(answer.tokens) == LONG_ANSWER
        same_answer(answer, alone[i])
