"""Settings of ``ovms serve``: names, types, bounds, defaults and help texts.

The command line is generated from these fields.  Names and defaults are OVMS's where OVMS has the option; options
without effect are listed in :data:`IGNORED`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ovmstrio.util.deprecation import rename_settings

ALL_INTERFACES: Final = "0.0.0.0"  # noqa: S104 - OVMS's default
SERVER: Final = "Server"
MODEL: Final = "Single model"
TEXT: Final = "Text models (LLM, embeddings, rerank, speech, images)"
SEQUENCES: Final = "Sequences of stateful models"
WORKERS: Final = "Worker processes"
PROJECT: Final = "Handler projects"
LIMITS: Final = "Limits and draining"
SECURITY: Final = "Security"
OBSERVABILITY: Final = "Logs and metrics"
IGNORED_GROUP: Final = "Accepted for compatibility with OVMS, without effect"
GROUPS: Final = {
    "server": SERVER,
    "model": MODEL,
    "text": TEXT,
    "sequences": SEQUENCES,
    "workers": WORKERS,
    "project": PROJECT,
    "limits": LIMITS,
    "security": SECURITY,
    "observability": OBSERVABILITY,
    "compatibility": IGNORED_GROUP,
}
"""Titles of the groups of settings by the topics of ``ovms help``."""

IGNORED: Final = {
    "grpc_workers": "one event loop serves all connections",
    "rest_workers": "one event loop serves all connections",
    "grpc_max_threads": "calls are tasks, not threads",
    "grpc_channel_arguments": "the gRPC implementation has no channel arguments",
    "cpu_extension": "custom operations are not supported",
    "custom_node_resources_cleaner_interval_seconds": "custom nodes are released as soon as they are unused",
}
"""OVMS options without effect, with the reason; using one logs a warning."""


def option_name(setting: str) -> str:
    """Return the option of a setting, or of a key in its value, as messages show it."""
    name, dot, key = setting.partition(".")
    return f"--{name.replace('_', '-')}{dot}{key}"


def _setting(default: Any, group: str, help_text: str, **bounds: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"group": group}, **bounds)


def _auto_as_zero(value: Any) -> Any:
    return 0 if value == "auto" else value


def _again_as_retry(value: Any) -> Any:
    return "retry" if value == "again" else value  # the name of earlier releases


def _refuse_empty(value: Any) -> Any:
    # The path of an empty text is the current folder, as of an unset variable of a shell.
    if value == "":
        raise ValueError("a path that is not empty")
    return value


Port = Annotated[int, Field(ge=0, le=65_535)]
GivenPath = Annotated[Path, BeforeValidator(_refuse_empty)]


class ServerSettings(BaseModel):
    """Settings of one server; times in seconds, sizes in bytes.

    Options of a single model are texts; ``ovmstrio.server.command_line`` converts them to a ``ServerSpec``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), defer_build=True)

    port: Port = _setting(9000, SERVER, "gRPC port; 0 disables gRPC.")
    rest_port: Port = _setting(8000, SERVER, "REST port; 0 disables REST.")
    grpc_bind_address: str = _setting(
        ALL_INTERFACES, SERVER, "gRPC listen addresses; comma separated, unix:/path for a Unix socket."
    )
    rest_bind_address: str = _setting(
        ALL_INTERFACES, SERVER, "REST listen addresses; comma separated, unix:/path for a Unix socket."
    )
    config_path: GivenPath | None = _setting(None, SERVER, "File config.json, or a folder of models.")
    file_system_poll_wait_seconds: Annotated[float, Field(ge=0)] = _setting(
        1, SERVER, "Poll interval in seconds for configuration and model versions; 0 disables polling."
    )
    store_poll_seconds: Annotated[float, Field(ge=0)] = _setting(
        60, SERVER, "Poll interval in seconds for models in remote stores (s3://, hf://, ...); 0 downloads them once."
    )
    download_cache_gb: Annotated[float, Field(ge=0)] = _setting(
        0, SERVER, "Size in GB above which downloads of models that no server uses are removed; 0 keeps all."
    )
    model_control: Literal["none", "explicit"] = _setting(
        "none",
        SERVER,
        "Model control mode: none loads all configured models and watches for changes; explicit loads and "
        "unloads only on request (KServe repository extension).",
    )
    load_model: str | None = _setting(
        None, SERVER, "Models loaded at start with --model-control explicit, comma separated; * for all."
    )
    console: Literal["off", "local", "on"] = _setting(
        "local",
        SERVER,
        "Web console at /console: off, local (this machine only) or on. With authentication, viewing requires "
        "the read scope and changes require the admin scope.",
    )
    console_body_bytes: Annotated[int, Field(ge=0, le=2**16)] = _setting(
        0,
        SERVER,
        "How many bytes of a failed request's body the console shows (secrets redacted; 0 = none). Requires "
        "the admin scope, or without authentication the right to change the server.",
    )
    server_name: str = _setting(
        "OpenVINO Model Server", SERVER, "Server name in metadata responses; some Triton clients require triton."
    )
    cache_dir: GivenPath | None = _setting(None, SERVER, "Cache directory for compiled models.")
    compile_cache_gb: Annotated[float, Field(ge=0, le=1_000_000)] = _setting(
        2, SERVER, "Size in GB of the per-user cache of compiled models, used without --cache-dir; 0 disables it."
    )
    cpu_pinning: Literal["auto", "off"] = _setting(
        "auto",
        SERVER,
        "CPU pinning: auto pins a model's threads only while it is the only busy model (plugin_config has "
        "precedence); off leaves pinning to OpenVINO.",
    )
    crash_probe: Annotated[Literal["auto", "off", "retry"], BeforeValidator(_again_as_retry)] = _setting(
        "auto",
        SERVER,
        "Crash probe: auto loads models that never ran on this machine in a subprocess first; off never does; "
        "retry also retries models that crashed.",
    )
    sequence_cleaner_poll_wait_minutes: Annotated[int, Field(ge=0, le=2**32 - 1)] = _setting(
        5,
        SEQUENCES,
        "Cleanup interval in minutes for sequences; a sequence idle for two intervals is removed. 0 disables cleanup.",
    )
    sequence_store: GivenPath | None = _setting(None, SEQUENCES, "Directory where sequences are saved across restarts.")
    sequence_flush_seconds: Annotated[float, Field(ge=0, le=86_400)] = _setting(
        5,
        SEQUENCES,
        "Flush interval in seconds of --sequence-store: at most this much is lost if the server is killed. 0 "
        "writes only on shutdown.",
    )
    ready_requires: Literal["all", "started", "none"] = _setting(
        "all",
        SERVER,
        "Services that readiness requires: all at start and those that were available later; started only those that "
        'were available; none not even at start. "required": false exempts an entry.',
    )
    sequence_restore: Literal["strict", "continue"] = _setting(
        "strict",
        SEQUENCES,
        "Next step of a sequence restored after a crash: strict refuses it once with the number of restored steps, "
        "so that the client can send the others again; continue answers it with that number.",
    )
    allow_empty: bool = _setting(False, SERVER, "Report ready without any configured model.")
    workers: Annotated[int, Field(ge=0, le=256), BeforeValidator(_auto_as_zero)] = _setting(
        1, WORKERS, "Number of worker processes; auto (0) measures the models and decides."
    )
    worker_wait_seconds: Annotated[float, Field(gt=0)] = _setting(
        5, WORKERS, "Longest wait in seconds for a restarting worker that owns a sequence or text engine; then 503."
    )

    model_name: str | None = _setting(None, MODEL, "Name of the model or graph.")
    model_path: GivenPath | None = _setting(
        None,
        MODEL,
        "Model directory or file; a directory may have version directories; for a graph its directory or graph.pbtxt; "
        "for a text model its directory or .gguf file.",
    )
    batch_size: str | None = _setting(None, MODEL, "Batch size: 8, auto, -1 or 2:8.")
    batching: str | None = _setting(
        None, MODEL, 'Dynamic batching: {"max_batch_size":16,"batch_timeout_ms":5}; also "max_queue_size", "eager".'
    )
    shape: str | None = _setting(None, MODEL, 'Input shape: "(1,3,224,224)", auto, or {"input":"(1,10)"}.')
    shape_buckets: str | None = _setting(
        None, MODEL, 'Padding buckets: {"batch":[1,4,16],"words":{"sizes":[32,64],"inputs":{"ids":1}}}.'
    )
    layout: str | None = _setting(None, MODEL, 'Layout: NHWC, NHWC:NCHW, or {"input":"NHWC"}.')
    model_version_policy: str | None = _setting(
        None, MODEL, 'Served versions: {"latest":{"num_versions":2}}, {"all":{}} or {"specific":{"versions":[1,3]}}.'
    )
    nireq: Annotated[int, Field(ge=0, le=100_000)] = _setting(
        0, MODEL, "Size of the infer-request pool; 0 lets OpenVINO choose."
    )
    target_device: str = _setting("CPU", MODEL, "OpenVINO device.")
    plugin_config: str | None = _setting(None, MODEL, 'OpenVINO device properties: {"NUM_STREAMS":"2"}.')
    mean: str | None = _setting(
        None, MODEL, "Mean subtracted from the input: 127.5, or a list with one value per channel; requires --layout."
    )
    scale: str | None = _setting(
        None, MODEL, "Divisor of the input: 127.5, or a list with one value per channel; requires --layout."
    )
    color_format: str | None = _setting(None, MODEL, "Color format of the input: BGR or BGR:RGB; requires --layout.")
    precision: str | None = _setting(
        None, MODEL, "Element type of the input: FP32, input:FP32 or UINT8:FP32; requires --layout."
    )
    stateful: bool = _setting(False, MODEL, "Serve a stateful model with sequences.")
    idle_sequence_cleanup: bool | None = _setting(None, MODEL, "Remove idle sequences; requires --stateful.")
    low_latency_transformation: bool | None = _setting(
        None, MODEL, "Apply the LowLatency2 transformation; requires --stateful."
    )
    max_sequence_number: int | None = _setting(
        None, MODEL, "Maximum number of concurrent sequences; requires --stateful."
    )
    sequence_migration: bool | None = _setting(
        None, MODEL, "Keep sequences when the model is reloaded; requires --stateful."
    )

    task: str | None = _setting(
        None,
        TEXT,
        "Task of a text model, by default detected from its files; text_generation, embeddings, rerank, "
        "speech2text, text2speech or image_generation.",
    )
    cache_size: float | None = _setting(None, TEXT, "KV-cache size in GB; 0 uses a quarter of the free memory.")
    max_num_seqs: int | None = _setting(None, TEXT, "Maximum sequences per engine step; default 256.")
    max_num_batched_tokens: int | None = _setting(None, TEXT, "Maximum tokens per engine step; default 256.")
    dynamic_split_fuse: bool | None = _setting(
        None, TEXT, "Split the prefill of long prompts over several steps; default on."
    )
    enable_prefix_caching: bool | None = _setting(
        None, TEXT, "Reuse the KV cache of common prompt prefixes; default on."
    )
    kv_cache_precision: str | None = _setting(None, TEXT, "KV-cache element type: u8, f16 or bf16.")
    kv_overcommit: float | None = _setting(
        None, TEXT, "KV-cache overcommit factor. 1.0 (default) admits a request only if its worst case fits."
    )
    best_of_limit: int | None = _setting(None, TEXT, "Maximum best_of and n of a request; default 20.")
    max_tokens_limit: int | None = _setting(
        None, TEXT, "Maximum completion tokens of a request; by default limited by the context length."
    )
    max_model_len: int | None = _setting(
        None, TEXT, "Maximum tokens of prompt and completion; by default detected from the model's files."
    )
    tool_parser: str | None = _setting(
        None, TEXT, "Tool-call parser, such as hermes3, or none; by default detected from the chat template."
    )
    reasoning_parser: str | None = _setting(
        None, TEXT, "Reasoning parser, such as qwen3, or none; by default detected from the chat template."
    )
    enable_tool_guided_generation: bool | None = _setting(
        None, TEXT, "Constrain tool calls to the JSON schemas of their parameters."
    )
    chat_template_mode: str | None = _setting(
        None, TEXT, "Chat-template renderer: JINJA (default) or MINJA (openvino-genai's own)."
    )
    pipeline_type: str | None = _setting(None, TEXT, "Pipeline type: AUTO, LM_CB, LM, VLM_CB or VLM; no effect.")
    idle_unload_seconds: float | None = _setting(
        None, TEXT, "Idle time in seconds after which the model is unloaded until the next request; 0 never unloads."
    )
    reload: str | None = _setting(
        None,
        TEXT,
        "Reload strategy: swap loads the new version next to the old one, retire_first unloads the old one "
        "first, auto decides by free memory.",
    )
    draft_models_path: str | None = _setting(
        None, TEXT, "Draft model for speculative decoding; must have the vocabulary of the main model."
    )
    draft_device: str | None = _setting(None, TEXT, "Device of the draft model; by default that of the main model.")
    draft_eagle3_mode: bool | None = _setting(
        None, TEXT, "The draft model is one of EAGLE-3; by default detected from its files."
    )
    prompt_lookup: bool | None = _setting(
        None, TEXT, "Speculative decoding without draft model: propose tokens from the earlier text."
    )
    num_assistant_tokens: int | None = _setting(
        None, TEXT, "Tokens that the draft model or prompt lookup proposes per step; default 5."
    )
    lora_adapters: str | None = _setting(
        None, TEXT, "LoRA adapters to serve as further models: NAME=PATH,..., or a JSON list with name, path and alpha."
    )
    pooling: str | None = _setting(
        None, TEXT, "Embedding pooling: CLS, LAST or MEAN; by default detected from the model's files."
    )
    normalize: bool | None = _setting(
        None, TEXT, "Normalize embeddings to unit length; by default detected from the model's files."
    )
    default_prompt_name: str | None = _setting(
        None, TEXT, "Prompt that precedes texts to embed, by its name in config_sentence_transformers.json."
    )
    truncate: bool | None = _setting(None, TEXT, "Truncate over-long embedding inputs instead of rejecting them.")
    max_inputs: int | None = _setting(
        None, TEXT, "Maximum texts of an embedding request, or documents of a rerank request; default 2048."
    )
    max_allowed_chunks: int | None = _setting(None, TEXT, "Maximum document chunks of a rerank request; default 10000.")
    enable_word_timestamps: bool | None = _setting(None, TEXT, "Compute word timestamps of transcripts; slower.")
    speed_min: float | None = _setting(None, TEXT, "Minimum speech speed of a request; default 0.25.")
    speed_max: float | None = _setting(None, TEXT, "Maximum speech speed of a request; default 4.")
    max_resolution: str | None = _setting(
        None, TEXT, "Maximum width and height of images, sent or generated; default 4096x4096."
    )
    default_resolution: str | None = _setting(
        None, TEXT, "Resolution of images whose request has none, such as 512x512; by default that of the model."
    )
    max_num_images_per_prompt: int | None = _setting(None, TEXT, "Maximum images of a request; default 10.")
    default_num_inference_steps: int | None = _setting(
        None, TEXT, "Denoising steps of image requests that have none; default 50."
    )
    max_num_inference_steps: int | None = _setting(None, TEXT, "Maximum denoising steps of a request; default 100.")
    resolution: str | None = _setting(
        None, TEXT, "Only resolutions of images, separated by spaces; a single one is compiled into the model."
    )
    num_images_per_prompt: int | None = _setting(
        None, TEXT, "Images of each request, compiled into the model; requires a single --resolution."
    )
    guidance_scale: float | None = _setting(
        None, TEXT, "Guidance scale of each request, compiled into the model; requires a single --resolution."
    )

    readiness_file: GivenPath | None = _setting(
        None, PROJECT, "File that exists while the project is ready; default /run/workspace/api_readiness.txt."
    )
    debug: bool = _setting(False, PROJECT, "Include handler exceptions in error responses.")

    max_message_size: Annotated[int, Field(ge=1024, le=2**31 - 1)] = _setting(
        64 * 2**20, LIMITS, "Maximum message size in bytes, both directions and both protocols."
    )
    max_pending_response_bytes: Annotated[int, Field(ge=1024)] = _setting(
        64 * 2**20, LIMITS, "Send buffer limit in bytes per client; further calls of the client wait."
    )
    grpc_memory_quota: Annotated[int, Field(ge=1024)] | None = _setting(
        None, LIMITS, "Send buffer limit in bytes of all clients together; default a quarter of the memory limit."
    )
    client_stall_timeout: Annotated[float, Field(ge=0)] = _setting(
        60,
        LIMITS,
        "Send stall timeout in seconds: clients that read no data for this long are disconnected. 0 disables it.",
    )
    request_read_timeout: Annotated[float, Field(gt=0)] = _setting(
        120, LIMITS, "HTTP request read timeout in seconds, from first to last byte."
    )
    max_concurrency: Annotated[int, Field(ge=0)] = _setting(
        0, LIMITS, "Maximum concurrent calls of all services; further calls are queued. 0 is unlimited."
    )
    max_queue: Annotated[int, Field(ge=0)] = _setting(
        1000, LIMITS, "Queue length of --max-concurrency, and of each text model waiting for KV cache (default 256)."
    )
    max_queue_time: Annotated[float, Field(ge=0)] | None = _setting(
        None,
        LIMITS,
        "Longest wait in seconds of a call in the queue of a service or of --max-concurrency; a call that cannot start "
        "within it is refused at once. Unset waits until the deadline.",
    )
    queue_timeout: Annotated[float, Field(ge=0)] = _setting(
        0, LIMITS, "Queue timeout in seconds of handler calls waiting for a thread; 0 waits without limit."
    )
    drain_delay: Annotated[float, Field(ge=0)] = _setting(
        0, LIMITS, "Delay in seconds between not ready and closing the listeners on shutdown."
    )
    drain_seconds: Annotated[float, Field(ge=0)] = _setting(
        30, LIMITS, "Drain timeout in seconds; calls still running after it are cancelled."
    )
    tls_cert: GivenPath | None = _setting(None, SECURITY, "TLS certificate chain (PEM) of both protocols.")
    tls_key: GivenPath | None = _setting(None, SECURITY, "TLS private key (PEM).")
    client_ca: GivenPath | None = _setting(
        None, SECURITY, "CA certificate (PEM); clients must present a certificate of this CA (mutual TLS)."
    )
    api_key_file: GivenPath | None = _setting(
        None,
        SECURITY,
        "File with the API key of the text-generation endpoints (also: environment variable API_KEY). Other "
        "endpoints stay open unless --keys-file or tokens are configured.",
    )
    keys_file: GivenPath | None = _setting(
        None,
        SECURITY,
        "File of callers (ovms keys); all endpoints except health require a key, client certificate or token.",
    )
    jwks_file: GivenPath | None = _setting(
        None, SECURITY, "JSON Web Key Set file for JWT authentication: all endpoints except health require a token."
    )
    oidc_issuer: str | None = _setting(
        None, SECURITY, "Required token issuer; without --jwks-file its keys are fetched from there."
    )
    jwt_audience: str | None = _setting(None, SECURITY, "Required token audience.")
    jwt_leeway_seconds: Annotated[int, Field(ge=0, le=3600)] = _setting(
        60, SECURITY, "Clock skew tolerance in seconds for tokens."
    )
    probe_port: Port = _setting(
        0,
        SECURITY,
        "Port for /v2/health/live and /v2/health/ready only, without TLS, for probes without certificates; 0 "
        "disables it.",
    )
    allow_remote_admin: bool = _setting(
        False,
        SECURITY,
        "Allow admin changes (load, unload, reload, shared memory, log settings) from other machines; default "
        "this machine only. With authentication, the admin scope decides instead.",
    )
    trusted_proxies: str = _setting(
        "",
        SECURITY,
        "Trusted proxies (X-Forwarded-For, Forwarded): addresses and networks such as 10.0.0.0/8, comma "
        "separated; unix for peers at Unix sockets. Clients of trusted proxies are never local.",
    )
    allow_shared_memory: bool = _setting(
        False, SECURITY, "Allow local clients to register shared memory for tensors; trusted clients only."
    )
    hide_errors: bool = _setting(
        False, SECURITY, "Hide the text of exceptions in graph Python code; clients get the type only."
    )
    python_isolation: Literal["none", "process"] = _setting(
        "none", WORKERS, "Default isolation of Python code of graphs and handlers."
    )
    python_memory_limit: Annotated[int, Field(ge=0)] = _setting(
        0, WORKERS, "Default memory limit in bytes of each Python worker process; 0 is unlimited."
    )
    custom_node_isolation: Literal["none", "process"] = _setting(
        "none", WORKERS, "Isolation of custom nodes (shared libraries)."
    )
    openai_errors: Literal["openai", "ovms"] = _setting(
        "openai",
        SERVER,
        "Error format of the OpenAI API: openai, or the texts and statuses of ovms, which ignores unknown fields.",
    )
    sse_keep_alive_interval: Annotated[float, Field(ge=0, le=3600)] = _setting(
        0, SERVER, "Seconds without an event after which a text stream sends a comment, for proxies; 0 sends none."
    )
    response_store_bytes: Annotated[int, Field(ge=0)] = _setting(
        64 * 2**20,
        LIMITS,
        "Memory in bytes of each worker for stored responses (previous_response_id, background); 0 stores none.",
    )
    response_store_seconds: Annotated[float, Field(gt=0)] = _setting(
        86_400, LIMITS, "Time in seconds for which responses are stored."
    )
    file_store: GivenPath | None = _setting(
        None, SERVER, "Folder of files and batches of the OpenAI API; unset refuses both."
    )
    file_store_bytes: Annotated[int, Field(gt=0)] = _setting(
        10 * 2**30, LIMITS, "Maximum bytes of all stored files and batches."
    )
    file_store_files: Annotated[int, Field(gt=0)] = _setting(
        10_000, LIMITS, "Maximum number of stored files and batches."
    )
    file_store_seconds: Annotated[float, Field(gt=0)] = _setting(
        30 * 86_400, LIMITS, "Time in seconds after which stored files and batches are removed."
    )
    allowed_media_domains: str | None = _setting(
        None,
        SECURITY,
        "Hosts of image URLs in messages, comma separated, or all; only public addresses. Disabled by default.",
    )
    allowed_local_media_path: GivenPath | None = _setting(
        None, SECURITY, "Folder of local image files that messages may name; disabled by default."
    )
    allowed_origins: str | None = _setting(
        None, SECURITY, "CORS allowed origins, comma separated, or *; CORS is disabled by default."
    )
    allowed_methods: str = _setting("*", SECURITY, "CORS allowed methods.")
    allowed_headers: str = _setting("*", SECURITY, "CORS allowed headers.")
    allow_credentials: bool = _setting(False, SECURITY, "CORS allow credentials.")

    log_level: Literal["TRACE", "DEBUG", "INFO", "WARNING", "ERROR"] = _setting(
        "INFO", OBSERVABILITY, "Minimum log level."
    )
    log_levels: str | None = _setting(
        None,
        OBSERVABILITY,
        "Log levels by logger, such as ovmstrio.ops=debug,ovmstrio.serving=error; a name includes all loggers "
        "below it.",
    )
    access_log: Literal["off", "combined", "json"] = _setting(
        "off", OBSERVABILITY, "Access log on standard output: off, combined (Apache format) or json."
    )
    log_path: GivenPath | None = _setting(None, OBSERVABILITY, "Log file, in addition to standard error.")
    log_format: Literal["pretty", "json"] = _setting("pretty", OBSERVABILITY, "Log format.")
    log_failures_per_second: Annotated[int, Field(ge=1)] = _setting(
        20, OBSERVABILITY, "Warnings and errors per second that the calls of a service may log."
    )
    trace_failures_per_second: Annotated[int, Field(ge=0)] = _setting(
        20, OBSERVABILITY, "Failed calls per second that are recorded although they are not sampled."
    )
    metrics_enable: bool = _setting(True, OBSERVABILITY, "Serve /metrics on the REST port.")
    metrics_list: str | None = _setting(
        None, OBSERVABILITY, "Metric families that replace the default OVMS families, comma separated."
    )
    metrics_families: str | None = _setting(
        None,
        OBSERVABILITY,
        "Metric families, ovmstrio_* included, comma separated with * wildcards: ovms_requests_*,ovmstrio_ready.",
    )
    llm_metrics: Literal["own", "vllm"] = _setting(
        "own",
        OBSERVABILITY,
        "Names of text-model metrics: own, or vllm for vLLM aliases (vllm:num_requests_running) in addition.",
    )

    grpc_workers: int | None = _setting(None, IGNORED_GROUP, "Ignored; one event loop serves all connections.")
    rest_workers: int | None = _setting(None, IGNORED_GROUP, "Ignored; one event loop serves all connections.")
    grpc_max_threads: int | None = _setting(None, IGNORED_GROUP, "Ignored; calls are tasks.")
    grpc_channel_arguments: str | None = _setting(None, IGNORED_GROUP, "Ignored.")
    cpu_extension: str | None = _setting(None, IGNORED_GROUP, "Ignored.")
    custom_node_resources_cleaner_interval_seconds: int | None = _setting(None, IGNORED_GROUP, "Ignored.")

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        return rename_settings(given) if isinstance(given, dict) else given
