"""Runs an embedded engine until it is told to stop."""

from __future__ import annotations

import torch
import uvicorn

from agentrl.engine.app import build_app
from agentrl.engine.options import EngineOptions
from agentrl.process.parent import die_with_parent


def run_engine(options: EngineOptions, attended: bool) -> None:
    """Load the model and serve it, only as long as the parent process lives if `attended`.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    if attended:
        die_with_parent()
    torch.set_num_threads(options.threads)
    app = build_app(options)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning", timeout_keep_alive=600)
