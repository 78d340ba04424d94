"""One contract, three places to run the engine; and how each of them dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frontend.fake_core import CRASH_TOKEN, EXIT_TOKEN, INTERRUPT_TOKEN, broken_core, fake_core
from mrv2 import ConfigError, EngineConfig, EngineDeadError, RequestError, SamplingParams
from mrv2.engine.client import EngineClient, InprocClient
from mrv2.engine.connect import make_client
from mrv2.engine.messages import EngineOutput, EngineRequest
from mrv2.engine.process_client import ProcessClient
from mrv2.engine.remote_client import ThreadClient
from mrv2.instrument import context

CONFIG = EngineConfig(model="fake", max_model_len=100)
PLACES = ["inproc", "thread", "process"]


def request(req_id: str, prompt: list[int], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(req_id=req_id, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def collect(
    client: EngineClient, until: Callable[[list[EngineOutput]], bool], seconds: float = 20
) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    end = time.monotonic() + seconds
    while not until(outputs):
        assert time.monotonic() < end, f"nothing more came after {outputs}"
        outputs += client.poll(0.1)
    return outputs


def num_finished(outputs: list[EngineOutput]) -> int:
    return sum(output.finish_reason is not None for output in outputs)


@pytest.fixture(scope="module", params=PLACES)
def shared_client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with make_client(CONFIG, request.param, fake_core) as made:
        yield made


@pytest.fixture
def client(shared_client: EngineClient) -> Iterator[EngineClient]:
    """An idle engine that the test leaves alive; what it left running is aborted."""
    yield shared_client
    shared_client.set(runner="v2")
    shared_client.abort(["a", "b", "c", "d"])
    while shared_client.poll(0.05) or shared_client.snapshot().num_running:
        pass


@pytest.fixture(params=PLACES)
def doomed_client(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with make_client(CONFIG, request.param, fake_core) as made:
        yield made


def test_requests_are_served(client: EngineClient) -> None:
    assert client.info.config == CONFIG
    assert client.info.max_model_len == 100 and client.info.model_config.vocab_size == 512
    client.submit([request("a", [1, 2, 3]), request("b", [7], max_tokens=2)])
    outputs = collect(client, lambda found: num_finished(found) == 2)
    assert [t for o in outputs if o.req_id == "a" for t in o.new_token_ids] == [1, 2, 3, 1, 2]
    assert [t for o in outputs if o.req_id == "b" for t in o.new_token_ids] == [7, 7]
    assert client.poll(0.01) == []


def test_a_refused_batch_leaves_nothing_behind(client: EngineClient) -> None:
    with pytest.raises(RequestError, match="request b: too long"):
        client.submit([request("a", [1]), request("b", [1] * 100), request("c", [1])])
    assert client.snapshot().num_running == 0
    client.submit([request("d", [4], max_tokens=1)])
    outputs = collect(client, lambda found: any(o.req_id == "d" for o in found))
    assert [o.new_token_ids for o in outputs if o.req_id == "d"] == [[4]]


def test_abort(client: EngineClient) -> None:
    client.submit([request("a", [1], max_tokens=10**9)])
    collect(client, lambda found: len(found) > 3)
    client.abort(["a", "unknown"])
    outputs = collect(client, lambda found: num_finished(found) == 1)
    assert outputs[-1].finish_reason == "abort"


def test_knobs_change_while_requests_run(client: EngineClient) -> None:
    client.submit([request("a", [1], max_tokens=10**9)])
    assert client.set(runner="v1").runner == "v1"
    with pytest.raises(ConfigError, match="unknown knob 'runer'; did you mean 'runner'"):
        client.set(runer="v2")
    picture = client.snapshot()
    assert picture.num_running == 1 and picture.knobs["runner"] == "v1"


def test_recording(client: EngineClient) -> None:
    assert client.record(False) == []
    assert client.record(True) == []
    client.submit([request("a", [1], max_tokens=3)])
    collect(client, lambda found: num_finished(found) == 1)
    assert isinstance(client.record(False), list)
    assert context.recorder is None


def test_a_crash_reaches_every_caller_with_its_text(doomed_client: EngineClient) -> None:
    client = doomed_client
    client.submit([request("a", [CRASH_TOKEN])])
    with pytest.raises(EngineDeadError, match="scripted crash"):
        collect(client, lambda found: False)
    for call in (client.snapshot, client.poll, lambda: client.submit([]), lambda: client.set(runner="v1")):
        with pytest.raises(EngineDeadError, match="scripted crash"):
            call()


@pytest.mark.parametrize("place", ["inproc", "thread"])
def test_a_closed_engine_says_so(place: str) -> None:
    client = make_client(CONFIG, place, fake_core)
    client.close()
    client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        client.snapshot()


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_failure_while_loading_reaches_the_caller(place: str) -> None:
    with pytest.raises(EngineDeadError, match="scripted failure while loading"):
        make_client(CONFIG, place, broken_core)


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'thread'"):
        make_client(CONFIG, "threads", fake_core)


def test_a_thread_that_waits_is_woken_by_the_crash() -> None:
    with ThreadClient(CONFIG, fake_core) as client:
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                client.poll()
            except EngineDeadError as error:
                caught.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        client.submit([request("a", [CRASH_TOKEN])])
        waiter.join(10)
        assert not waiter.is_alive() and len(caught) == 1


def test_a_process_that_exits_or_is_killed_is_reported() -> None:
    with ProcessClient(CONFIG, fake_core) as client:
        client.submit([request("a", [EXIT_TOKEN])])
        with pytest.raises(EngineDeadError, match="exit code 7"):
            collect(client, lambda found: False)
    client.close()
    with pytest.raises(EngineDeadError, match="exit code 7"):
        client.snapshot()
    with ProcessClient(CONFIG, fake_core) as client:
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.poll(20)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            client.snapshot()


def test_a_dropped_client_stops_its_thread() -> None:
    client = ThreadClient(CONFIG, fake_core)
    thread = next(t for t in threading.enumerate() if t.name == "engine" and t.is_alive())
    gone = weakref.ref(client)
    del client
    gc.collect()
    thread.join(10)
    assert gone() is None and not thread.is_alive()


ORPHAN = """
import os, signal, sys
from frontend.fake_core import fake_core
from mrv2 import EngineConfig
from mrv2.engine.process_client import ProcessClient

if __name__ == "__main__":
    client = ProcessClient(EngineConfig(model="fake"), fake_core)
    print(client.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, timeout=60)
    pid = int(found.stdout)
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text(encoding="utf-8"):
        assert time.monotonic() < end, f"the engine process {pid} outlived its parent"
        time.sleep(0.05)


def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    """Ctrl-C inside a step: the step ends, its outputs are kept, the engine goes on."""
    with InprocClient(CONFIG, fake_core) as client:
        client.submit([request("a", [INTERRUPT_TOKEN], max_tokens=1)])
        with pytest.raises(KeyboardInterrupt):
            client.poll()
        assert [o.new_token_ids for o in client.poll()] == [[INTERRUPT_TOKEN]]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
