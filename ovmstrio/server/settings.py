"""Every setting of ``ovms serve``: its name, type, bounds, default and meaning, in one place.

The command line is made from these fields.  Names and defaults are those of OVMS's model server parameters where
OVMS has the option; those that mean nothing on trio are accepted and named in :data:`IGNORED`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["GROUPS", "IGNORED", "MODEL", "TEXT", "ServerSettings"]

EVERYWHERE: Final = "0.0.0.0"  # noqa: S104 - OVMS's default
SERVER: Final = "Server"
MODEL: Final = "One model"
TEXT: Final = "One model of text"
LIMITS: Final = "Limits and draining"
SECURITY: Final = "Security"
OBSERVABILITY: Final = "Logs and metrics"
PROJECT: Final = "Handler projects"
IGNORED_GROUP: Final = "Accepted for compatibility"
GROUPS: Final = (SERVER, MODEL, TEXT, PROJECT, LIMITS, SECURITY, OBSERVABILITY, IGNORED_GROUP)

IGNORED: Final = {
    "grpc_workers": "one event loop serves every connection",
    "rest_workers": "one event loop serves every connection",
    "grpc_max_threads": "calls are tasks, not threads",
    "grpc_channel_arguments": "they are settings of another implementation of gRPC",
    "cpu_extension": "custom operations are not loaded by this version",
    "custom_node_resources_cleaner_interval_seconds": "a custom node is given back as soon as nothing holds it",
}
"""OVMS's options that have no meaning here, with the reason; giving one is warned about."""


def _setting(default: Any, group: str, help_text: str, **bounds: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"group": group}, **bounds)


def _auto_as_zero(value: Any) -> Any:
    return 0 if value == "auto" else value


Port = Annotated[int, Field(ge=0, le=65_535)]


class ServerSettings(BaseModel):
    """The settings of one server, as given on the command line; times are seconds, sizes bytes.

    Settings of one model are texts here; ``ovmstrio.server.command_line`` makes a ``ServerSpec`` of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    port: Port = _setting(9000, SERVER, "Port of gRPC; 0 turns it off.")
    rest_port: Port = _setting(8000, SERVER, "Port of REST; 0 turns it off.")
    grpc_bind_address: str = _setting(
        EVERYWHERE, SERVER, "Addresses for gRPC, comma separated; unix:/path for a socket file."
    )
    rest_bind_address: str = _setting(
        EVERYWHERE, SERVER, "Addresses for REST, comma separated; unix:/path for a socket file."
    )
    config_path: Path | None = _setting(None, SERVER, "Configuration file (config.json) of all models.")
    file_system_poll_wait_seconds: Annotated[float, Field(ge=0)] = _setting(
        1, SERVER, "How often the configuration and version directories are looked at; 0 never."
    )
    model_control: Literal["none", "explicit"] = _setting(
        "none",
        SERVER,
        "explicit: nothing of what is configured is loaded before a client asks for it by name (KServe's repository "
        "extension), and nothing changes unless it is asked for.",
    )
    load_model: str | None = _setting(
        None, SERVER, "Names that --model_control explicit loads at the start, comma separated; * for all."
    )
    console: Literal["off", "local", "on"] = _setting(
        "local",
        SERVER,
        "Page at /console that shows what the server does: to callers of this machine, to all (on), or to nobody; "
        "where callers have to be known it takes read, and admin for what changes the server.",
    )
    console_bodies: Annotated[int, Field(ge=0, le=2**16)] = _setting(
        0,
        SERVER,
        "Bytes of what each failed request has sent that the console shows, without what looks like a secret; 0 none. "
        "Seen by who has admin, or where nobody has to be known by who may change the server.",
    )
    server_name: str = _setting(
        "OpenVINO Model Server", SERVER, "Name that clients are told; some of those for Triton insist on triton."
    )
    cache_dir: Path | None = _setting(None, SERVER, "Folder where OpenVINO keeps compiled models.")
    compiled_gb: Annotated[float, Field(ge=0)] = _setting(
        2,
        SERVER,
        "GB of compiled models that are kept in the user's folder for caches, for servers without --cache_dir; 0 none.",
    )
    core_sharing: Literal["auto", "off"] = _setting(
        "auto",
        SERVER,
        "Bind threads of a model to cores only while it has the machine for itself, unless its plugin_config says; "
        "off leaves it to OpenVINO, which binds those of each model as if there were no other.",
    )
    trial_load: Literal["auto", "off", "again"] = _setting(
        "auto",
        SERVER,
        "Run models that were never seen to run on this machine in a process of their own first, so that a crash is "
        "theirs; again also tries those that crashed.",
    )
    sequence_cleaner_poll_wait_minutes: Annotated[int, Field(ge=0, le=2**32 - 1)] = _setting(
        5, SERVER, "How often sequences are looked at; one that is idle twice in a row is removed. 0 never."
    )
    sequence_store: Path | None = _setting(
        None, SERVER, "Folder where sequences are kept from the end of the server to its next start."
    )
    sequence_store_seconds: Annotated[float, Field(ge=0, le=86_400)] = _setting(
        5, SERVER, "Time of which steps may be missing there when the server is killed; 0 writes only at its end."
    )
    allow_empty: bool = _setting(False, SERVER, "Be ready with no model configured.")
    workers: Annotated[int, Field(ge=0, le=256), BeforeValidator(_auto_as_zero)] = _setting(
        1, SERVER, "Processes that serve everything together; auto (0) decides by what is served."
    )

    model_name: str | None = _setting(None, MODEL, "Name of the model or graph.")
    model_path: Path | None = _setting(
        None,
        MODEL,
        "Its folder of version folders, or its file; of a graph the folder with graph.pbtxt, or that file; of a model "
        "of text its folder, or its .gguf.",
    )
    batch_size: str | None = _setting(None, MODEL, "Batch size: 8, auto, -1 or 2:8.")
    batching: str | None = _setting(
        None, MODEL, 'Join requests: {"max_batch_size":16,"batch_timeout_ms":5}; also "max_queue_size", "eager".'
    )
    shape: str | None = _setting(None, MODEL, 'Shape: "(1,3,224,224)", auto, or {"input":"(1,10)"}.')
    shape_buckets: str | None = _setting(
        None, MODEL, 'Pad requests up to sizes: {"batch":[1,4,16],"words":{"sizes":[32,64],"inputs":{"ids":1}}}.'
    )
    layout: str | None = _setting(None, MODEL, 'Layout: NHWC, NHWC:NCHW, or {"input":"NHWC"}.')
    model_version_policy: str | None = _setting(
        None, MODEL, 'Versions: {"latest":{"num_versions":2}}, {"all":{}} or {"specific":{"versions":[1,3]}}.'
    )
    nireq: Annotated[int, Field(ge=0, le=100_000)] = _setting(
        0, MODEL, "Infer requests in the pool; 0 lets OpenVINO choose."
    )
    target_device: str = _setting("CPU", MODEL, "Device.")
    plugin_config: str | None = _setting(None, MODEL, 'Device settings: {"NUM_STREAMS":"2"}.')
    mean: str | None = _setting(
        None, MODEL, "Subtracted from the input: 127.5, or a list with one a channel; needs --layout."
    )
    scale: str | None = _setting(None, MODEL, "Divides the input: 127.5, or a list with one a channel; needs --layout.")
    color_format: str | None = _setting(None, MODEL, "Colour format of the input: BGR or BGR:RGB; needs --layout.")
    precision: str | None = _setting(
        None, MODEL, "Element type of the input: FP32, input:FP32 or UINT8:FP32; needs --layout."
    )
    stateful: bool = _setting(False, MODEL, "Serve sequences.")
    idle_sequence_cleanup: bool | None = _setting(None, MODEL, "Remove idle sequences; needs --stateful.")
    low_latency_transformation: bool | None = _setting(None, MODEL, "Apply LowLatency2; needs --stateful.")
    max_sequence_number: int | None = _setting(None, MODEL, "Sequences at once; needs --stateful.")
    sequence_migration: bool | None = _setting(
        None, MODEL, "Let sequences go on when the model is loaded again; needs --stateful."
    )

    task: str | None = _setting(
        None,
        TEXT,
        "What the model does: text_generation, embeddings, rerank, speech2text, text2speech; by default what its files "
        "tell.",
    )
    cache_size: float | None = _setting(
        None, TEXT, "GB of the cache of keys and values; 0 is a quarter of the free memory."
    )
    max_num_seqs: int | None = _setting(None, TEXT, "Texts made in one step at most; 256 by default.")
    max_num_batched_tokens: int | None = _setting(None, TEXT, "Tokens of one step at most; 256 by default.")
    dynamic_split_fuse: bool | None = _setting(None, TEXT, "Cut long prompts into several steps; on by default.")
    enable_prefix_caching: bool | None = _setting(
        None, TEXT, "Compute what prompts have in common once; on by default."
    )
    kv_cache_precision: str | None = _setting(None, TEXT, "Element type of that cache: u8, f16, bf16.")
    kv_overcommit: float | None = _setting(
        None, TEXT, "How often that cache is promised to requests; 1.0 by default, so that each finds its room."
    )
    best_of_limit: int | None = _setting(None, TEXT, "Beams and texts that a request may ask for; 20 by default.")
    max_tokens_limit: int | None = _setting(
        None, TEXT, "Tokens that an answer may have; by default what the model's context leaves."
    )
    tool_parser: str | None = _setting(
        None, TEXT, "Form of tool calls in the text, such as hermes3; by default what the chat template tells; none."
    )
    reasoning_parser: str | None = _setting(
        None, TEXT, "Form of reasoning in the text, such as qwen3; by default what the chat template tells; none."
    )
    enable_tool_guided_generation: bool | None = _setting(
        None, TEXT, "Make tool calls fit the schemas of their parameters."
    )
    chat_template_mode: str | None = _setting(
        None, TEXT, "What renders chat templates: JINJA (default), or MINJA, which is the library's own."
    )
    pipeline_type: str | None = _setting(None, TEXT, "AUTO, LM_CB or LM, which are the same here.")
    idle_unload_seconds: float | None = _setting(
        None,
        TEXT,
        "Give the model's memory back after so long without a request; the next one loads it again. 0 never.",
    )
    reload: str | None = _setting(
        None,
        TEXT,
        "Load a new version beside the old one (swap), or after that has given its memory back (retire_first); auto "
        "decides by the memory that is free.",
    )
    draft_models_path: str | None = _setting(
        None, TEXT, "A smaller model of the same vocabulary, which proposes tokens for the first one to check."
    )
    draft_device: str | None = _setting(None, TEXT, "Where that model runs; by default where the first one does.")
    pooling: str | None = _setting(None, TEXT, "What makes one vector of a text's: CLS (default), LAST, MEAN.")
    normalize: bool | None = _setting(None, TEXT, "Give embeddings the length 1; on by default.")
    truncate: bool | None = _setting(None, TEXT, "Cut texts that are too long for embeddings, rather than refuse them.")
    max_allowed_chunks: int | None = _setting(
        None, TEXT, "Pieces of documents that a call of rerank may have; 10000 by default."
    )
    enable_word_timestamps: bool | None = _setting(
        None, TEXT, "Tell when each word of a recording was spoken, which takes longer."
    )
    speed_min: float | None = _setting(None, TEXT, "How slow a request may have a text spoken; 0.25 by default.")
    speed_max: float | None = _setting(None, TEXT, "How fast a request may have a text spoken; 4 by default.")

    readiness_file: Path | None = _setting(
        None, PROJECT, "File that exists while the project can be called; /run/workspace/api_readiness.txt by default."
    )
    debug: bool = _setting(False, PROJECT, "Tell callers what a handler's code raised.")

    max_message_size: Annotated[int, Field(ge=1024, le=2**31 - 1)] = _setting(
        64 * 2**20, LIMITS, "Largest message, both ways and for both protocols."
    )
    max_pending_response_bytes: Annotated[int, Field(ge=1024)] = _setting(
        64 * 2**20,
        LIMITS,
        "Bytes of answers that may wait for one client, over both protocols; beyond it its calls wait before they run.",
    )
    grpc_memory_quota: Annotated[int, Field(ge=1024)] | None = _setting(
        None,
        LIMITS,
        "The same for all clients together; by default a quarter of the memory that the process may have.",
    )
    stalled_client_seconds: Annotated[float, Field(ge=0)] = _setting(
        60, LIMITS, "A client that takes nothing for so long of what waits for it is cut off; 0 never."
    )
    request_receive_seconds: Annotated[float, Field(gt=0)] = _setting(
        120, LIMITS, "Time that a request over HTTP may take to come, from its first byte to its last."
    )
    max_concurrency: Annotated[int, Field(ge=0)] = _setting(
        0, LIMITS, "Calls under way at once, of all services together; 0 for any number. Those beyond wait."
    )
    max_queue: Annotated[int, Field(ge=0)] = _setting(
        1000, LIMITS, "Calls that may wait for --max_concurrency, or for room in the cache of one model of text (256)."
    )
    queue_timeout: Annotated[float, Field(ge=0)] = _setting(
        0, LIMITS, "Seconds that a call of a handler may wait for a thread before it is refused; 0 for any time."
    )
    drain_delay: Annotated[float, Field(ge=0)] = _setting(
        0, LIMITS, "Time between turning not ready and closing the listeners."
    )
    drain_seconds: Annotated[float, Field(ge=0)] = _setting(
        30, LIMITS, "Time that calls in flight get when the server stops."
    )
    tls_cert: Path | None = _setting(None, SECURITY, "Certificate chain (PEM) of both protocols.")
    tls_key: Path | None = _setting(None, SECURITY, "Private key (PEM) of the certificate.")
    client_ca: Path | None = _setting(None, SECURITY, "Clients must show a certificate of this CA (PEM).")
    api_key_file: Path | None = _setting(
        None,
        SECURITY,
        "File with the one key that endpoints of text generation ask for, also the variable API_KEY; other endpoints "
        "ask for none unless --keys_file or tokens guard them.",
    )
    keys_file: Path | None = _setting(
        None,
        SECURITY,
        "File of callers (ovms keys): everything but health then needs a key, a client certificate or a token.",
    )
    jwks_file: Path | None = _setting(
        None, SECURITY, "Public keys (JWKS) whose JSON Web Tokens name callers; everything but health needs one then."
    )
    oidc_issuer: str | None = _setting(
        None, SECURITY, "Issuer that tokens must be of; without --jwks_file its keys are fetched from there."
    )
    jwt_audience: str | None = _setting(None, SECURITY, "Audience that tokens must be for.")
    jwt_leeway_seconds: Annotated[int, Field(ge=0, le=3600)] = _setting(
        60, SECURITY, "By how much the clocks of token issuers may differ."
    )
    probe_port: Port = _setting(
        0,
        SECURITY,
        "Port of /v2/health/live and /v2/health/ready alone, without TLS, for probes that have no certificate; 0 none.",
    )
    allow_remote_admin: bool = _setting(
        False,
        SECURITY,
        "Let other machines change the server (reloads, loads and unloads, regions of shared memory, what is logged); "
        "otherwise only this one may. Where callers have to be known, those with the scope admin may, and nobody else.",
    )
    trusted_proxies: str = _setting(
        "",
        SECURITY,
        "Proxies whose X-Forwarded-For or Forwarded names the client: addresses and networks such as 10.0.0.0/8, "
        "comma separated; unix for proxies at Unix sockets. No client behind these is local.",
    )
    allow_shared_memory: bool = _setting(
        False,
        SECURITY,
        "Let clients on this machine register shared memory that tensors are taken from and written to; "
        "for clients that are trusted.",
    )
    hide_errors: bool = _setting(
        False, SECURITY, "Tell clients only the type of an error in a graph's Python code, not its text."
    )
    python_isolation: Literal["none", "process"] = _setting(
        "none",
        SECURITY,
        "Run the Python code of graphs and handlers in processes of its own, where an entry does not say.",
    )
    python_memory_limit: Annotated[int, Field(ge=0)] = _setting(
        0,
        LIMITS,
        "Bytes of memory that each process of Python code may have, where an entry does not say; 0 any number.",
    )
    custom_node_isolation: Literal["none", "process"] = _setting(
        "none", SECURITY, "Run each custom node that is a shared library in a process of its own."
    )
    openai_errors: Literal["openai", "ovms"] = _setting(
        "openai",
        SERVER,
        "Form of errors of OpenAI's API: as OpenAI's clients read them, or OVMS's texts and statuses.",
    )
    allowed_origins: str | None = _setting(None, SECURITY, "CORS: origins, comma separated, or *; off unless given.")
    allowed_methods: str = _setting("*", SECURITY, "CORS: methods.")
    allowed_headers: str = _setting("*", SECURITY, "CORS: headers.")
    allow_credentials: bool = _setting(False, SECURITY, "CORS: allow credentials.")

    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = _setting(
        "INFO", OBSERVABILITY, "Least level that is logged."
    )
    log_levels: str | None = _setting(
        None,
        OBSERVABILITY,
        "Levels of parts of the log, such as ovmstrio.ops=debug,ovmstrio.serving=error; a name includes all below.",
    )
    access_log: Literal["off", "combined", "json"] = _setting(
        "off", OBSERVABILITY, "Line for each request on standard output, as web servers write it or with more as JSON."
    )
    log_path: Path | None = _setting(None, OBSERVABILITY, "File that gets the log as well.")
    log_format: Literal["pretty", "json"] = _setting("pretty", OBSERVABILITY, "Form of log lines.")
    metrics_enable: bool = _setting(True, OBSERVABILITY, "Serve /metrics on the REST port.")
    metrics_list: str | None = _setting(
        None, OBSERVABILITY, "Metric families to serve in place of the default set, comma separated."
    )
    metrics_families: str | None = _setting(
        None,
        OBSERVABILITY,
        "The same with the server's own families among them, and with * for anything: ovms_requests_*,ovmstrio_ready.",
    )
    llm_metrics: Literal["own", "vllm"] = _setting(
        "own",
        OBSERVABILITY,
        "Tell figures of models of text under vLLM's names (vllm:num_requests_running), too: vllm.",
    )

    grpc_workers: int | None = _setting(None, IGNORED_GROUP, "Accepted; one event loop serves every connection.")
    rest_workers: int | None = _setting(None, IGNORED_GROUP, "Accepted; one event loop serves every connection.")
    grpc_max_threads: int | None = _setting(None, IGNORED_GROUP, "Accepted; calls are tasks.")
    grpc_channel_arguments: str | None = _setting(None, IGNORED_GROUP, "Accepted.")
    cpu_extension: str | None = _setting(None, IGNORED_GROUP, "Accepted.")
    custom_node_resources_cleaner_interval_seconds: int | None = _setting(None, IGNORED_GROUP, "Accepted.")
