"""Whole runs of `mpidist train` on data with bad records (R42, R43)."""

import http.server
import json
import struct
import sys
import threading

import numpy as np
import pytest
from again import best_of_three

from mpidist.launch.launchers import launch

BAD = (5, 41)


@pytest.fixture
def job(tmp_path):
    """100 images, two of which have a label that no class of the model has."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 100)
    images = (rng.integers(0, 50, (100, 4, 4)) + 20 * labels[:, None, None]).astype(np.uint8)
    labels[list(BAD)] = 200
    for name, array in (("images", images), ("labels", labels.astype(np.uint8))):
        head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / name).write_bytes(head + array.tobytes())
    path = tmp_path / "job.toml"
    path.write_text(
        f"""
global_batch = 10
epochs = 2
max_bad = 0.05
watch_seconds = 60
out = "{tmp_path}/run"
[data]
name = "idx"
images_path = "{tmp_path}/images"
labels_path = "{tmp_path}/labels"
train = 80
[model]
name = "logistic"
inputs = [1, 4, 4]
classes = 10
[optimizer]
name = "sgd"
lr = 0.1
"""
    )
    return path


def command(job, *settings):
    words = [word for text in settings for word in ("--set", text)]
    return [sys.executable, "-m", "mpidist", "train", str(job), *words]


def train(job, *settings):
    return launch(2, command(job, *settings), timeout=150)


def test_bad_records_of_a_job(job):
    """Skipped, counted in summary.json, listed in quarantine.jsonl, and said at the end."""
    done = train(job)
    assert done.returncode == 0, done.stderr
    folder = job.parent / "run"
    assert json.loads((folder / "summary.json").read_text())["skipped_records"] == 4
    lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert {line["index"] for line in lines} == set(BAD)
    assert all("labels run from 200 to 200, expected 0 to 9" in line["reason"] for line in lines)
    assert "bad records were skipped 4 times; they are listed in" in done.stdout


def test_the_first_line_says_data_and_model(job):
    """R1: the name of the data, and the bytes of the model's parameters: 108,010 of 4 bytes."""
    model = 'model={name="mlp", sizes=[[1, 4, 4], 4000, 10]}'
    done = train(job, model, "steps=1", "max_bad=0.1").check()
    first = done.stdout.splitlines()[0]
    assert first.startswith("mpidist "), done.stdout
    assert ": 2 ranks on 1 host (" in first
    assert first.endswith(", data idx, model mlp 0.43 MB")


def test_too_many_bad_records_of_a_job(job):
    """One line and a checkpoint; allowed more, or mended, the same command goes on."""
    failed = train(job, "max_bad=0.02")
    assert failed.returncode == 1
    lines = [line for line in failed.stderr.splitlines() if line.startswith("mpidist: error:")]
    assert len(lines) == 1
    assert "2 of the 80 records of ArraySource are bad, and max_bad=0.02 allows 1" in lines[0]
    assert "the state was saved as step" in lines[0]
    done = train(job)
    assert done.returncode == 0, done.stderr
    summary = json.loads((job.parent / "run" / "summary.json").read_text())
    assert summary["resumed_at"] > 0
    assert summary["skipped_records"] == 4


def test_bad_settings_of_loading(job, many):
    cases = {
        "loading.prefetsh=1": "did you mean 'prefetch'?",
        "loading.bandwidth=0": "bandwidth is 0, expected a number above 0",
        "max_bad=2": "max_bad=2: expected a share from 0 to 1",
        "shuffle=by-size": "shuffle='by-size'; expected 'permutation', 'bijection', 'none'",
    }
    ends = many(2, {setting: command(job, setting)[1:] for setting in cases})
    for setting, message in cases.items():
        failed = ends[setting]
        assert failed.returncode == 2, failed.stderr
        assert failed.stderr.count(message) == 1


@pytest.mark.exhaustive
def test_bench_loader(tmp_path):
    """Rows that fit each other; R130: the loader's flow is measured; nothing is left behind."""
    words = ["bench", "loader", "--size", "1", "--rounds", "2", "--folder", ".", "--json", "r.json"]
    done = launch(2, [sys.executable, "-m", "mpidist", *words], cwd=tmp_path, timeout=150).check()
    rows = json.loads((tmp_path / "r.json").read_text())
    names = {(row["source"], row["order"], row["pages"]) for row in rows}
    assert len(names) == len(rows) == 12
    for row in rows:
        assert 0 < row["low"] <= row["ratio"] <= row["high"]
        assert row["bytes"] > 1_000_000
        assert row["samples_per_s"] > 0
        assert row["cpu_us"] > 0
    assert done.stdout.count("tfrecord") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_what_came_in_and_what_was_sent(job):
    """R130: both flows are in the events, per rank."""
    train(job).check()
    for rank in range(2):
        lines = (job.parent / "run" / "events" / f"rank-{rank}.jsonl").read_text().splitlines()
        flows = [event for event in map(json.loads, lines) if event["event"] == "loader"]
        assert len(flows) == 1
        assert flows[0]["bytes"] > 1000
        assert {"seconds", "waited", "sent_bytes"} <= flows[0].keys()


@pytest.fixture
def web(tmp_path):
    """A web server for the files in a folder; what it was asked for is in its `asked`."""
    (tmp_path / "web").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path / "web"))

        def do_GET(self):
            server.asked.append(self.path)
            super().do_GET()

        def log_message(self, *_):
            """Nothing on stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_job_on_data_of_the_web(job, web, tmp_path):
    """R2: URLs in the data table; one fetch for both ranks, none by the next run."""
    port = web.server_address[1]
    for name in ("images", "labels"):
        (tmp_path / name).rename(tmp_path / "web" / name)
    cache = tmp_path / "cache"
    settings = [
        f"data.images_path=http://127.0.0.1:{port}/images?key=secret",
        f"data.labels_path=file://{tmp_path}/web/labels",
        f"data.cache={cache}",
    ]
    for run in ("out=" + str(tmp_path / "one"), "out=" + str(tmp_path / "two")):
        done = train(job, *settings, run)
        assert done.returncode == 0, done.stderr
    # The second run only asks how long the file is.
    assert web.asked == ["/images?key=secret"] * 2
    assert sorted(path.name[17:] for path in cache.iterdir()) == ["images", "labels"]
    one, two = (json.loads((tmp_path / k / "summary.json").read_text()) for k in ("one", "two"))
    assert one["parameters_sha256"] == two["parameters_sha256"]
    assert one["skipped_records"] == 4
    events = (tmp_path / "one" / "events" / "rank-0.jsonl").read_text()
    assert "secret" not in events
    assert done.stderr.count("secret") == 0


def test_a_job_on_data_that_are_not_there(job, web, tmp_path):
    """One rank tells why, in one line; nobody waits for the others."""

    def fail():
        done = train(job, f"data.images_path=http://127.0.0.1:{web.server_address[1]}/none")
        assert done.returncode == 1
        return done.stderr

    def check(said):
        assert said.count("mpidist: error: ") == 1, said
        assert "/none: HTTPError: HTTP Error 404: File not found; tried once" in said

    # Of the cause and who only heard of it, both may speak where one is held up.
    best_of_three(check, fail)
