"""Running the app: bind, serve, and end cleanly on SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from lfm2serve.errors import Lfm2Error
from lfm2serve.server.answer import ServerState

KEEP_ALIVE_S = 75  # of idle connections; longer than clients keep theirs, so that they never write to a closed one
SERVING = "lfm2serve-http"  # the thread of `serving`
LAST_WORDS_S = 5  # for replies that were cut short to reach their clients
NEW_OBJECTS = 20_000  # that the garbage collector waits for; a burst of events is some thousand


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Lfm2Error: the address is taken, unknown or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if not 0 <= port <= 65535:
        raise Lfm2Error(f"can't listen on {host}:{port}: a port is between 0 and 65535")
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Lfm2Error(f"can't listen on {host}:{port}: {error.strerror or error}") from None


class _Server(uvicorn.Server):
    """uvicorn, with a bound on the drain after which replies end with an error rather than a broken connection."""

    def __init__(self, config: uvicorn.Config, state: ServerState, drain_s: float) -> None:
        super().__init__(config)
        self._state = state
        self._drain_s = drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.drain()
        bound = asyncio.get_running_loop().call_later(self._drain_s, self._state.stop)
        try:
            await super().shutdown(sockets)
        finally:
            bound.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server and aren't raised again afterwards: the caller still has a runtime to close."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Keep the garbage collector, which stops every thread, from what lives as long as the process (a look at all of it
    takes some 100 ms), and from looking at events that are gone before they could be garbage."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def run(
    app: Starlette,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_s: float = 30.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve `app` until SIGTERM or Ctrl-C; then accept nothing new, let replies finish for up to drain_s seconds, end
    the rest with an error, and return. A second Ctrl-C doesn't wait.

    port 0 takes a free one; on_ready is called with the base URL once connections are accepted.
    """
    listener = listen(host, port)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="on",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s) + LAST_WORDS_S,
    )
    server = _Server(config, app.state.server, drain_s)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}"

    async def serve() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started and on_ready is not None:
            on_ready(url)
        await serving

    with rare_collections():
        asyncio.run(serve())


@contextmanager
def serving(app: Starlette, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve `app` on a free port, on a thread, while the block runs; gives the base URL."""
    config = uvicorn.Config(
        app, access_log=False, log_config=None, lifespan="on", ws="none", timeout_graceful_shutdown=5
    )
    listener = listen(host, 0)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=SERVING)
    with rare_collections():
        thread.start()
        try:
            yield f"http://{host}:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
