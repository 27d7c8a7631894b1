"""Settings that nothing else would miss: each changes what it should."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from flows import sft, train
from flows.engine import by_step
from flows.tracking import Tracker
from relax.errors import ConfigError
from relax.flags import load_config
from relax.store import Run, rows
from relax.trainer.actor import Actor
from tasks.stage import perform

pytestmark = pytest.mark.integration


@pytest.fixture
def evaluated(settings, max3, tmp_path):
    """A run of two steps: answers sampled at next to no temperature, of at most two tokens."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(max3.held_out.read_text().splitlines(keepends=True)[:8]))
    own = {"eval_prompt_data": str(few), "eval_temperature": 1e-4, "eval_max_response_len": 2}
    train.run(load_config(None, {**settings, **own}), perform)
    return Run.open(settings["run_dir"])


def test_an_evaluation_has_a_temperature_and_a_length_of_its_own(evaluated):
    evals = rows(evaluated.table(0, "evaluate", "evals"))
    assert set(evals.response_len.tolist()) == {2}
    answers = {"sampled": {}, "greedy": {}}
    for decoding, prompt_id, text in zip(
        evals.decoding, evals.prompt_id.tolist(), evals.response, strict=True
    ):
        answers[decoding][prompt_id] = text
    assert len(answers["greedy"]) == 8
    assert answers["sampled"] == answers["greedy"]
    rollout = rows(evaluated.table(0, "rollout", "responses"))
    assert max(rollout.response_len.tolist()) == 4


def test_the_table_artifact_has_the_metrics_by_step(evaluated):
    found = by_step(evaluated.root)
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row.keys() == found[0].keys() for row in found)
    assert {"reward", "train/loss", "train/grad_norm", "train/lr"} <= found[0].keys()
    assert found[0]["train/lr"] == pytest.approx(1e-3)
    (greedy,) = [name for name in found[0] if name.startswith("eval/held_out/greedy/")]
    assert [row[greedy] is None for row in found] == [False, True, False]
    assert found[2]["reward"] is None and found[1]["responses"] == 4


def test_sft_batch_size_is_the_pairs_of_a_step(settings, monkeypatch):
    sizes, train_step = [], Actor.train_step

    def counted(self, batch, *given, **more):
        sizes.append(len(batch))
        return train_step(self, batch, *given, **more)

    monkeypatch.setattr(Actor, "train_step", counted)
    own = {"num_rollout": 1, "sft_steps": 2, "sft_batch_size": 3}
    sft.run(load_config(None, {**settings, **own}), perform)
    assert sizes == [3, 3]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, {"project": "relax", "name": "my-run"}),
        ({"wandb_project": "p", "wandb_name": "n"}, {"project": "p", "name": "n"}),
    ],
)
def test_project_and_name_are_what_wandb_is_told(tmp_path, monkeypatch, given, asked):
    told = {}

    def init(**words):
        told.update(words)
        return SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda *_, **__: None)

    fake = SimpleNamespace(init=init, Settings=lambda **_: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = load_config(None, {"use_wandb": True, **given}).wandb
    with Tracker(settings, tmp_path / "my-run", "update"):
        assert {name: told[name] for name in asked} == asked


class Refusing(BaseHTTPRequestHandler):
    """Answers 403, and remembers who asked."""

    server: "Server"

    def do_GET(self):
        self.server.keys.add(self.headers["Authorization"])
        self.send_error(403)

    do_POST = do_GET

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    keys: set


def test_servers_are_shown_the_key_that_the_variable_holds(settings, monkeypatch):
    server = Server(("127.0.0.1", 0), Refusing)
    server.keys = set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MY_KEY", "secret")
    settings |= {
        "rollout_engine": "external",
        "rollout_external_engine_addrs": [f"127.0.0.1:{server.server_address[1]}"],
    }
    for more, key in (({}, None), ({"rollout_api_key_variable": "MY_KEY"}, "Bearer secret")):
        server.keys.clear()
        with pytest.raises(ConfigError, match="HTTP 403"):
            train.run(load_config(None, {**settings, **more}), perform)
        assert server.keys == {key}
    server.shutdown()
    server.server_close()
