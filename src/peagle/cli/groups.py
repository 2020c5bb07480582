"""The options that commands share, by groups; each is declared here and nowhere else."""

from __future__ import annotations

from pathlib import Path

from peagle.cli import values
from peagle.cli.flags import Flag, group

MODEL = group(
    "Model",
    Flag(
        "target",
        str,
        "The target: a folder in Hugging Face format, a hub id, or bundled.",
        metavar="MODEL",
        default="the bundled code model, with its P-EAGLE head",
    ),
    Flag(
        "revision",
        str,
        "Branch, tag or commit of the target on the hub; owner/name@revision does the same.",
        default="main",
    ),
    Flag(
        "speculative.model",
        str,
        "The draft head, P-EAGLE or EAGLE-3: a folder, a hub id, bundled or bundled-eagle3.",
        "--draft",
        metavar="MODEL",
        default="none with a target of your own",
    ),
    Flag(
        "speculative.revision",
        str,
        "Branch, tag or commit of the head on the hub.",
        "--draft-revision",
        default="main",
    ),
)

SPECULATION = group(
    "Speculation",
    Flag(
        "speculative.num_speculative_tokens",
        int,
        "Number of draft tokens in a step, K.",
        short="-k",
        default="what the head was trained for, at most 7; 7 if the head does not name it",
    ),
    Flag("no_speculation", bool, "Decode without drafts."),
    Flag(
        "speculative.method",
        str,
        "Source of drafts: eagle3 (a head of either kind) or ngram (prompt lookup).",
        default="eagle3 with a head",
    ),
    Flag(
        "speculative.draft_sampling",
        str,
        "Drafts at a temperature above 0: argmax or probabilistic.",
    ),
    Flag(
        "speculative.max_model_len",
        int,
        "Length in tokens up to which a head drafts; longer texts go on without drafts.",
        "--draft-max-len",
        default="the length that the head was trained for",
    ),
    Flag(
        "speculative.draft_window",
        int,
        "Number of tokens that a head attends to when it drafts; 0 is all of them.",
        default="the longest training text if the head names it, else all",
    ),
    Flag(
        "speculative_config",
        str,
        "Speculative configuration in vLLM's form, in place of the options above.",
        metavar="JSON",
    ),
)

SAMPLING = group(
    "Sampling",
    Flag(
        "sampling.max_tokens",
        int,
        "Largest number of tokens to generate for a prompt.",
        "--max-new-tokens",
    ),
    Flag("sampling.temperature", float, "Temperature of sampling; 0 is greedy."),
    Flag("sampling.top_k", int, "Number of most likely tokens to keep; 0 keeps every token."),
    Flag("sampling.top_p", float, "Probability mass of the tokens to keep; 1 keeps every token."),
    Flag(
        "sampling.min_p",
        float,
        "Lowest probability to keep, as a share of the highest one; 0 keeps every token.",
    ),
    Flag(
        "sampling.seed",
        int,
        "Seed of every prompt; the same seed gives the same output, alone or in a batch.",
        default="one for each prompt, the same in every run",
    ),
    Flag(
        "sampling.stop",
        list[str],
        "Text that ends the output and is left out of it; may be given several times.",
    ),
)

FINER_SAMPLING = group(
    "Finer sampling",
    Flag(
        "sampling.typical_p",
        float,
        "Probability mass of the tokens of most typical surprise to keep; 1 keeps every token.",
    ),
    Flag(
        "sampling.repetition_penalty",
        float,
        "Penalty on tokens of the prompt and the output; 1 is none.",
    ),
    Flag("sampling.presence_penalty", float, "Penalty on tokens of the output, from -2 to 2."),
    Flag(
        "sampling.frequency_penalty",
        float,
        "Penalty on tokens of the output for each time that they came, from -2 to 2.",
    ),
    Flag(
        "sampling.logit_bias",
        str,
        'Numbers to add to the logits of token ids, like \'{"42": -5}\'; "-inf" forbids one.',
        metavar="JSON",
        read=values.read_logit_bias,
    ),
    Flag(
        "sampling.bad_words",
        list[str],
        "Text that the output may not contain; may be given several times.",
        "--bad-word",
    ),
    Flag(
        "sampling.allowed_token_ids",
        list[int],
        "Token id that the output may contain, and no other; may be given several times.",
        "--allowed-token-id",
        default="all",
    ),
    Flag("sampling.min_tokens", int, "Number of tokens before which the output does not end."),
    Flag(
        "sampling.stop_token_ids",
        list[int],
        "Token id that ends the output; may be given several times.",
        "--stop-token-id",
    ),
    Flag("sampling.ignore_eos", bool, "Generate on past the model's own end of text."),
)

STRUCTURE = group(
    "Structured output (at most one)",
    Flag(
        "sampling.structured_output",
        bool,
        "Any JSON object.",
        "--json-object",
        read=values.structure("json"),
    ),
    Flag(
        "sampling.structured_output",
        str,
        "JSON that fits a schema: its text, or a file.",
        "--json-schema",
        metavar="JSON|FILE",
        default="",
        read=values.structure("json_schema"),
    ),
    Flag(
        "sampling.structured_output",
        str,
        "Text that a regular expression matches as a whole.",
        "--regex",
        metavar="EXPRESSION",
        default="",
        read=values.structure("regex"),
    ),
    Flag(
        "sampling.structured_output",
        str,
        "Text of a grammar in GBNF notation, rule root.",
        "--ebnf",
        metavar="FILE",
        default="",
        read=values.structure("ebnf"),
    ),
)

RESULTS = group(
    "Results",
    Flag("sampling.n", int, "Number of outputs of each prompt; more than one needs a temperature."),
    Flag(
        "sampling.logprobs",
        int,
        "Print log-probabilities of the output and of this many likeliest tokens; in JSON only.",
        default="none",
    ),
    Flag(
        "sampling.prompt_logprobs",
        int,
        "Print log-probabilities of the prompt and of this many likeliest tokens.",
        default="none",
    ),
)

ENGINE = group(
    "Engine",
    Flag(
        "engine.dtype",
        str,
        "Type of weights and cache: auto (float32 on a CPU, bfloat16 on a GPU), float32, float64, "
        "bfloat16 or float16.",
    ),
    Flag("engine.device", str, "Device: auto (the GPU if there is one), cpu or cuda."),
    Flag(
        "engine.max_model_len",
        int,
        "Largest number of tokens of a prompt and its output together.",
        default="the model's",
    ),
    Flag("engine.max_num_seqs", int, "Largest number of sequences decoded together."),
    Flag(
        "engine.max_num_batched_tokens",
        int,
        "Largest number of prompt tokens in a step; longer prompts go in chunks.",
    ),
    Flag(
        "engine.kv_cache_gib",
        float,
        "Size of the KV cache in GiB.",
        default="2 on a CPU, all that --gpu-memory-utilization leaves on a GPU",
    ),
    Flag(
        "engine.gpu_memory_utilization",
        float,
        "Share of the GPU's memory that may be in use in all, by this engine and others.",
    ),
    Flag(
        "engine.enable_prefix_caching",
        bool,
        "Compute every prompt anew, also where it shares a prefix with an earlier one.",
        "--no-prefix-caching",
        read=lambda _: False,
    ),
    Flag(
        "threads",
        int,
        "Number of CPU threads.",
        default="1 for a small model, else up to one a core",
    ),
)

SERVER = group(
    "Server",
    Flag("server.host", str, "Address to listen on."),
    Flag("server.port", int, "Port to listen on; 0 takes a free one."),
    Flag(
        "server.served_model_name",
        str,
        "Name of the model for clients.",
        metavar="NAME",
        default="the folder's name, or the hub id",
    ),
    Flag(
        "server.data_parallel_size",
        int,
        "Number of engine processes behind the port, each on a GPU of its own; the least loaded "
        "one takes a request.",
    ),
    Flag(
        "server.on_engine_failure",
        str,
        "What the server does when an engine process dies: restart it, or exit with status 1.",
    ),
    Flag(
        "server.hang_timeout_s",
        float,
        "Seconds without a sign of life after which the server kills an engine process, or 20 "
        "times its slowest step where that is longer; 0 is never.",
        "--hang-timeout",
    ),
    Flag(
        "server.request_timeout_s",
        float,
        "Seconds that a request may take in all before the server answers 504; 0 is for ever.",
        "--request-timeout",
    ),
    Flag(
        "server.max_queue",
        int,
        "Number of outputs that may wait; the server answers further ones with 429.",
    ),
    Flag(
        "server.ignore_priority", bool, "Accept the field priority of requests without an effect."
    ),
    Flag(
        "server.drain_timeout_s",
        float,
        "Seconds that running requests have to finish after SIGTERM.",
        "--drain-timeout",
    ),
    Flag(
        "server.chat_template",
        str,
        "Chat template: a Jinja file, or the name of one of the model's.",
    ),
    Flag(
        "server.tool_call_parser",
        str,
        "Form of tool calls in outputs: hermes, llama3_json, mistral, none, or auto (by the "
        "template).",
    ),
    Flag(
        "server.playground",
        bool,
        "Serve no page at /.",
        "--no-playground",
        read=lambda _: False,
    ),
)

VLLM = group(
    "vLLM (needs --engine vllm)",
    Flag(
        "engine_name",
        str,
        "Engine: peagle, or vllm (installed beside it, for several GPUs and nodes).",
        "--engine",
        default="peagle",
        read=values.one_of("peagle", "vllm"),
    ),
    Flag(
        "vllm_python",
        Path,
        "Python of the environment that has vLLM.",
        metavar="FILE",
        default="PEAGLE_VLLM_PYTHON, this one, or .venv-vllm/bin/python",
    ),
    Flag("tensor_parallel_size", int, "Number of GPUs that share each layer.", default="1"),
    Flag(
        "pipeline_parallel_size",
        int,
        "Number of groups of GPUs that share the layers out.",
        default="1",
    ),
    Flag("print_command", bool, "Print the command that starts vLLM, and start nothing."),
)

# Options of the engine for tuning a server.
TUNING = group(
    "Tuning",
    Flag("engine.seed", int, "Source of the seeds of requests without a seed."),
    Flag("engine.block_size", int, "Number of token slots in a KV block."),
    Flag(
        "engine.num_kv_blocks",
        int,
        "Number of KV blocks.",
        default="what memory and --max-num-seqs allow",
    ),
    Flag(
        "engine.enforce_eager",
        bool,
        "Launch every kernel by itself, without CUDA graphs; on a GPU only.",
    ),
)

SAFETY = group(
    "Safety",
    Flag(
        "api_key_file",
        Path,
        "File of API keys, one a line, that open all routes; /live, /health and /ping need none. "
        "The variable PEAGLE_API_KEY may hold keys too, separated by commas.",
        metavar="FILE",
        default="none: everybody who reaches the port is served",
    ),
    Flag(
        "server.allowed_hosts",
        list[str],
        "Host name of the server; may be given several times, * is any.",
        "--allowed-host",
        default="localhost on a loopback address, else any",
    ),
    Flag(
        "server.allowed_origins",
        list[str],
        "Origin of web pages that may call the server, like https://chat.example.com; may be given "
        "several times.",
        "--allowed-origin",
        default="none",
    ),
    Flag(
        "server.key_requests_per_minute",
        int,
        "Number of requests of each API key a minute; the server answers further ones with 429.",
        default="no limit",
    ),
    Flag(
        "server.key_tokens_per_minute",
        int,
        "Number of prompt and output tokens of each API key a minute. A request counts with its "
        "max_tokens until it ends, then with its length.",
        default="no limit",
    ),
    Flag(
        "server.key_concurrency",
        int,
        "Number of requests of each API key at a time.",
        default="no limit",
    ),
    Flag("server.max_body_bytes", int, "Largest body of a request, in bytes."),
    Flag(
        "server.max_connections",
        int,
        "Number of connections at a time; one more closes the connection that has been silent for "
        "longest.",
        default="what the limit of open files allows, at most 4096",
    ),
    Flag(
        "server.head_timeout_s",
        float,
        "Seconds that a client has for the head of a request.",
        "--head-timeout",
    ),
    Flag("server.compile_timeout_s", float, "Seconds that a grammar or a schema may compile."),
    Flag(
        "server.grammar_budget_s",
        float,
        "Processor seconds that the grammar of a request may take in a step; beyond that the "
        "request ends with an error. 0 sets no limit.",
        "--grammar-budget",
    ),
    Flag(
        "server.user_grammars",
        bool,
        "Refuse regular expressions and grammars in requests; schemas, choices and tools stay.",
        "--no-user-grammars",
        read=lambda _: False,
    ),
)

OBSERVATION = group(
    "Logs and traces",
    Flag("server.log_format", str, "Form of the log on standard error: text or json."),
    Flag("server.log_prompts", bool, "Write outputs into the log."),
    Flag(
        "server.otlp_endpoint",
        str,
        "Address of the OpenTelemetry collector for spans, like http://localhost:4318.",
        metavar="URL",
        default="nowhere",
    ),
    Flag(
        "server.cloudwatch_interval_s",
        float,
        "Seconds between two lines of acceptance metrics for CloudWatch on standard output; 0 "
        "writes none.",
        "--cloudwatch-interval",
        default="0, in a SageMaker container 60",
    ),
)

SETTINGS = group(
    "Settings",
    Flag(
        "config",
        Path,
        "TOML file of settings: format_version, target, revision, and the tables engine, "
        "speculative, sampling and server. Variables (PEAGLE_DTYPE, PEAGLE_SPECULATIVE_CONFIG, "
        "PEAGLE_SAMPLING, ...) override the file, flags override both.",
        metavar="FILE",
    ),
    Flag(
        "show_config",
        bool,
        "Print the merged settings as JSON, and do nothing else.",
    ),
    Flag(
        "show_memory",
        bool,
        "Print the memory plan to standard error: what takes memory, and the context and number of "
        "requests that fit. On a GPU it is always printed.",
    ),
)
