"""`paceline serve`: a model behind OpenAI's API."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.output import note
from paceline.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from paceline.serve.spans import Spans


def serve(
    model: options.Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; better given as PACELINE_API_KEY.", envvar="PACELINE_API_KEY"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be given repeatedly. Default: MODEL.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Choices that run at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; beyond them clients get 429.")] = 256,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a request ends with what it has; default: never.")
    ] = None,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that running requests have once it is stopped.")] = 30.0,
    max_body_size: Annotated[str, typer.Option(help="Largest request, such as 4M.", metavar="BYTES")] = "4M",
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="A line on stderr for each request.")
    ] = True,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry spans there, such as http://localhost:4318.", metavar="URL")
    ] = None,
    config_file: options.ConfigFile = None,
    speculation: options.Speculation = options.DEFAULT_SPECULATION,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.DType = "auto",
    quantization: options.Quantization = None,
    kv_cache_memory: options.KVCacheMemory = None,
    kv_cache_dtype: options.KVCacheDType = "auto",
    threads: options.Threads = None,
    max_model_len: options.MaxModelLen = None,
) -> int:
    """Serve a model over HTTP as OpenAI's API does: chat and text completions, streamed or not (docs/serving.md).

    It listens on this machine alone unless --host says more. SIGTERM or Ctrl-C lets running requests finish; a second
    one does not.
    """
    try:
        from paceline.serve.app import create_app
        from paceline.serve.server import Server, is_loopback, listen
        from paceline.serve.service import ServerSettings
    except ImportError as error:
        raise MissingDependencyError(
            f"the server needs {error.name}, which is not installed: pip install 'paceline[serve]'."
        ) from error
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise ConfigError("--api-key must be printable ASCII characters: take letters and digits.")
    for option, seconds in (("--request-timeout", request_timeout), ("--drain-timeout", drain_timeout)):
        if seconds is not None and not 0 <= seconds < 1e9:
            raise ConfigError(f"{option} must be a number of seconds; got {seconds!r}: try 60.")
    config = options.engine_config(
        engine=engine,
        device=device,
        dtype=dtype,
        quantization=quantization,
        speculation=speculation,
        kv_cache_memory=kv_cache_memory,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    settings = ServerSettings(
        model_names=tuple(served_model_name or (model,)),
        api_key=api_key,
        max_waiting=max_waiting,
        request_seconds=request_timeout,
        drain_seconds=drain_timeout,
        max_body_bytes=options.parse_bytes(max_body_size, option="--max-body-size"),
        log_requests=log_requests,
    )
    socket = listen(host, port)  # before the model: that takes long to load

    from paceline.llm import LLM

    with socket, LLM(model, config=config, progress=True, step_details=True) as llm:
        note(llm.model_card)
        if api_key is None and not is_loopback(host):
            note(f"warning: without --api-key, everybody who reaches {host} can use this server.")
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        logging.getLogger("paceline.serve").setLevel(logging.INFO)
        spans = None if otlp_endpoint is None else _spans(otlp_endpoint, settings.model_names[0])
        server = Server(create_app(llm.engine, settings, spans=spans))
        socket.listen(server.config.backlog)  # so that the next line is true when it is read
        url = f"http://{_shown(host)}:{socket.getsockname()[1]}"
        note(f"playground at {url}/")
        note(f"serving {settings.model_names[0]} at {url}/v1")
        server.run(sockets=[socket])
        note("stopped")
    return 0


def _spans(endpoint: str, model: str) -> Spans:
    try:
        from paceline.serve.spans import Spans
    except ImportError as error:
        raise MissingDependencyError("--otlp-endpoint needs OpenTelemetry: pip install 'paceline[otel]'.") from error
    return Spans.to(endpoint, model=model)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
