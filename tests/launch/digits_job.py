"""The job file of the tests in this folder: a small model that any machine trains quickly."""

import json

TEXT = """
global_batch = 60
out = "run"
[data]
name = "digits"
[model]
name = "mlp"
sizes = [[1, 8, 8], 16, 10]
[optimizer]
name = "momentum"
lr = 0.02
"""


def write_job(folder, tables="", **settings):
    """Write job.toml with more settings on top and more tables below; return the folder."""
    top = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (folder / "job.toml").write_text(top + TEXT + tables)
    return folder
