"""How a server is reached, guarded and kept alive."""

from dataclasses import dataclass
from typing import Literal

from peagle.config.checks import FieldCheck, check_fields, choice_of, number_check, whole

OnFailure = Literal["restart", "exit"]
LogFormat = Literal["text", "json"]
TOOL_PARSERS = (
    *("auto", "gemma4", "hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "none"),
)

_LIMITS = ("max_connections", "key_requests_per_minute", "key_tokens_per_minute", "key_concurrency")
_CHECKS = {
    "host": FieldCheck(bool, "an address or a name, like 127.0.0.1"),
    "port": whole(0, 65535),
    "max_body_bytes": whole(1),
    "data_parallel_size": whole(1),
    "max_queue": whole(0),
    **dict.fromkeys(_LIMITS, whole(1, optional=True)),
    **dict.fromkeys(
        ("compile_timeout_s", "drain_timeout_s", "head_timeout_s"),
        number_check(lambda s: s > 0, "a number of seconds above 0"),
    ),
    **dict.fromkeys(
        ("cloudwatch_interval_s", "request_timeout_s", "grammar_budget_s"),
        number_check(lambda s: s >= 0, "a number of seconds, or 0 for none"),
    ),
    "hang_timeout_s": number_check(
        lambda s: s == 0 or s >= 1, "a number of seconds of at least 1, or 0 for none"
    ),
    "record_share": number_check(lambda share: 0 < share <= 1, "a share above 0, at most 1"),
    **dict.fromkeys(
        ("record_max_gib", "record_days"), number_check(lambda n: n > 0, "a number above 0")
    ),
    "on_engine_failure": choice_of("restart", "exit"),
    "log_format": choice_of("text", "json"),
    "tool_call_parser": choice_of(*TOOL_PARSERS),
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server is reached, guarded and kept alive.

    Attributes:
        host, port: the address of the server; port 0 takes a free one.
        served_model_name: the clients' name for the model; None takes the folder's name.
        allowed_hosts: Host headers that are served; None derives them from `host`.
        allowed_origins: origins of web pages elsewhere that may call the server.
        max_body_bytes: largest body of a request.
        max_connections: connections at once; None derives it from the limit of open files.
        head_timeout_s: seconds that a client may take for the head of a request.
        max_queue: outputs that may wait beyond the ones that the engines decode; more get 429.
        key_requests_per_minute, key_tokens_per_minute, key_concurrency: limits of each API key:
            requests, tokens of prompts and outputs, requests under way; None sets no limit.
        ignore_priority: `priority` of a request has no effect.
        compile_timeout_s: processor seconds that a grammar may take to compile.
        grammar_budget_s: processor seconds that a request's grammar may take in one step before
            that request ends with an error; 0 sets no limit.
        user_grammars: whether requests may bring regular expressions and grammars.
        drain_timeout_s: seconds that running requests may take to finish after SIGTERM.
        request_timeout_s: seconds that a request may take in all, before it gets 504; 0 sets no
            limit.
        hang_timeout_s: seconds that an engine may give no sign of life before it is killed; 20
            times its slowest step where that is longer; 0 sets no limit.
        on_engine_failure: "restart" the engine process, or "exit" with status 1.
        data_parallel_size: number of engine processes.
        chat_template: file or name of a template; None takes the model's.
        parse_special_tokens: whether the messages and tools of a chat may spell special tokens.
        tool_call_parser: how tool calls are recognised; "auto" decides by the template.
        log_format: format of the log.
        log_prompts: whether the log has prompts and outputs.
        otlp_endpoint: URL of the collector of spans; None sends none.
        cloudwatch_interval_s: seconds between two lines about acceptance on standard output, in
            CloudWatch's embedded metric format; 0 writes none.
        playground: whether the server has the page at /.
        allow_heads: folders from which a running server may take another head.
        record: folder for records of requests and answers; None records nothing.
        record_for: SHA-256 of the API keys that are recorded, in hexadecimal digits.
        record_all: every request is recorded that does not say no.
        record_share: share of the requests that is recorded.
        record_max_gib, record_days: size and age above which the oldest records are deleted.
        record_key_file: file of the key that encrypts records; None writes them plainly.

    Raises:
        UserError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_connections: int | None = None
    head_timeout_s: float = 15.0
    max_queue: int = 512
    key_requests_per_minute: int | None = None
    key_tokens_per_minute: int | None = None
    key_concurrency: int | None = None
    ignore_priority: bool = False
    compile_timeout_s: float = 10.0
    grammar_budget_s: float = 5.0
    user_grammars: bool = True
    drain_timeout_s: float = 60.0
    request_timeout_s: float = 1800.0
    hang_timeout_s: float = 10.0
    on_engine_failure: OnFailure = "restart"
    data_parallel_size: int = 1
    chat_template: str | None = None
    parse_special_tokens: bool = False
    tool_call_parser: str = "auto"
    log_format: LogFormat = "text"
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    cloudwatch_interval_s: float = 0.0
    playground: bool = True
    allow_heads: tuple[str, ...] = ()
    record: str | None = None
    record_for: tuple[str, ...] = ()
    record_all: bool = False
    record_share: float = 1.0
    record_max_gib: float = 10.0
    record_days: float = 30.0
    record_key_file: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)
