"""The hub of `datasets`: what cannot be reached fails at once, what fails for a while is retried.

A server of this test's own, or a port where none listens, stands for the hub.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from slayformer.config import SourceConfig
from slayformer.data import hub
from slayformer.data.corpus import open_source
from slayformer.errors import DataError


class Busy(BaseHTTPRequestHandler):
    """Answers everything with 503, as a hub that is overloaded."""

    def do_HEAD(self) -> None:
        self.send_response(503)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def close(server: ThreadingHTTPServer) -> None:
    """End `server`, so that nothing listens on its port; until it has shut down, something does."""
    server.shutdown()
    server.server_close()


@pytest.fixture
def waits_s(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Make `server` the hub, and return how long the packages have waited to try again."""
    waits_s: list[float] = []
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits_s.append)
    monkeypatch.setattr(hub, "_reached", False)
    return waits_s


def failure(path: str, streaming: bool, **options: str) -> str:
    config = SourceConfig(kind="huggingface", path=path, streaming=streaming, **options)
    with pytest.raises(DataError) as caught:
        next(iter(open_source(config).documents()))
    return str(caught.value)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_out_of_reach_is_told_at_once(
    server: ThreadingHTTPServer, waits_s: list[float], streaming: bool
) -> None:
    close(server)
    for path in ("someone/texts", "texts"):
        told = failure(path, streaming)
        assert told.startswith(f"data.source.path={path} split=train: the dataset cannot be read: ")
        assert f"http://127.0.0.1:{server.server_port} cannot be reached (" in told
        assert "refused" in told
        assert "give a folder" in told
    assert "name=part split=" in failure("someone/texts", streaming, name="part")
    assert waits_s == []
    # only while it was asked
    assert not huggingface_hub.is_offline_mode()


def test_a_hub_that_answers_or_has_answered_is_tried_again(
    server: ThreadingHTTPServer, waits_s: list[float]
) -> None:
    failure("someone/texts", True)
    assert len(waits_s) >= 3
    waits_s.clear()
    # lost on the way, as in the middle of a long preparation
    close(server)
    failure("someone/texts", True)
    assert len(waits_s) >= 3


def test_without_a_network_the_cache_still_serves(
    server: ThreadingHTTPServer, waits_s: list[float], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    made = tmp_path / "texts"
    made.mkdir()
    (made / "train.jsonl").write_text('{"text": "kept"}\n')
    datasets.load_dataset(str(made), split="train", cache_dir=str(cache))
    # as the package files what it has downloaded
    (cache / "texts").rename(cache / "someone___texts")
    close(server)
    config = SourceConfig(kind="huggingface", path="someone/texts", streaming=False)
    assert [document.text for document in open_source(config).documents()] == ["kept"]
    assert waits_s == []
