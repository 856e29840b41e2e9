"""The HTTP server: OpenAI's API over one loaded model."""

from lfm2serve.server.app import create_app
from lfm2serve.server.run import run

__all__ = ["create_app", "run"]
