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
        "Branch, tag or commit of the target's hub id; owner/name@revision does the same.",
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
        "Branch, tag or commit of the head's hub id.",
        "--draft-revision",
        default="main",
    ),
)

SPECULATION = group(
    "Speculation",
    Flag(
        "speculative.num_speculative_tokens",
        int,
        "K: draft tokens per step.",
        short="-k",
        default="what the head was trained for, at most 7; 7 if it does not tell",
    ),
    Flag("no_speculation", bool, "Decode plainly, with no draft."),
    Flag(
        "speculative.method",
        str,
        "eagle3 (a head; its kind is read from it) or ngram (prompt lookup).",
        default="eagle3 with a head",
    ),
    Flag(
        "speculative.draft_sampling",
        str,
        "argmax or probabilistic drafts, where the temperature is not 0.",
    ),
    Flag(
        "speculative.max_model_len",
        int,
        "Tokens up to which a head drafts; longer texts go on without drafts.",
        "--draft-max-len",
        default="the length that the head was trained for",
    ),
    Flag(
        "speculative.draft_window",
        int,
        "Tokens that a head looks back over when it drafts; 0: all.",
        default="the longest text that the head was trained on, if it tells; else all",
    ),
    Flag(
        "speculative_config",
        str,
        "All of the above in vLLM's form, in place of the options above.",
        metavar="JSON",
    ),
)

SAMPLING = group(
    "Sampling",
    Flag("sampling.max_tokens", int, "Most tokens to generate per prompt.", "--max-new-tokens"),
    Flag("sampling.temperature", float, "0 is greedy."),
    Flag("sampling.top_k", int, "0 keeps every token."),
    Flag("sampling.top_p", float, "1 keeps every token."),
    Flag(
        "sampling.min_p",
        float,
        "Keep tokens of at least this share of the highest probability; 0 keeps every token.",
    ),
    Flag(
        "sampling.seed",
        int,
        "Of every prompt: alone or batched, the same seed gives the same output.",
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
        "Keep the tokens of most typical surprise, up to this mass; 1 keeps every token.",
    ),
    Flag("sampling.repetition_penalty", float, "On tokens of prompt and output; 1 is none."),
    Flag("sampling.presence_penalty", float, "On tokens of the output, -2 to 2."),
    Flag("sampling.frequency_penalty", float, "The same, times how often they came."),
    Flag(
        "sampling.logit_bias",
        str,
        'Added to the logits of token ids, like \'{"42": -5}\'; "-inf" forbids one.',
        metavar="JSON",
        read=values.read_logit_bias,
    ),
    Flag(
        "sampling.bad_words",
        list[str],
        "Text that may not come; may be given several times.",
        "--bad-word",
    ),
    Flag(
        "sampling.allowed_token_ids",
        list[int],
        "The only token ids that may come; may be given several times.",
        "--allowed-token-id",
        default="all",
    ),
    Flag("sampling.min_tokens", int, "No end of text before so many tokens."),
    Flag(
        "sampling.stop_token_ids",
        list[int],
        "A token id that ends the output; may be given several times.",
        "--stop-token-id",
    ),
    Flag("sampling.ignore_eos", bool, "Go on past the model's own end of text."),
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
    Flag("sampling.n", int, "Outputs of each prompt; more than one needs a temperature."),
    Flag(
        "sampling.logprobs",
        int,
        "Log-probabilities of the output and of this many likeliest tokens; in JSON only.",
        default="none",
    ),
    Flag("sampling.prompt_logprobs", int, "The same of the prompt's tokens.", default="none"),
)

ENGINE = group(
    "Engine",
    Flag(
        "engine.dtype",
        str,
        "auto (float32 on a CPU, bfloat16 on a GPU), float32, float64, bfloat16 or float16.",
    ),
    Flag("engine.device", str, "auto (the GPU if there is one), cpu or cuda."),
    Flag(
        "engine.max_model_len",
        int,
        "Most tokens of a prompt and its output.",
        default="the model's",
    ),
    Flag("engine.max_num_seqs", int, "Most prompts decoded together."),
    Flag(
        "engine.max_num_batched_tokens",
        int,
        "Most prompt tokens of one step; longer prompts go in chunks.",
    ),
    Flag(
        "engine.kv_cache_gib",
        float,
        "Memory bound of the KV cache in GiB.",
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
        "Compute every prompt anew, also where it begins like an earlier one.",
        "--no-prefix-caching",
        read=lambda _: False,
    ),
    Flag("threads", int, "CPU threads.", default="1 for a small model, else up to one a core"),
)

SERVER = group(
    "Server",
    Flag("server.host", str, "Address to listen on."),
    Flag("server.port", int, "Port to listen on; 0 takes a free one."),
    Flag(
        "server.served_model_name",
        str,
        "What clients call the model.",
        metavar="NAME",
        default="the folder's name, or the hub id",
    ),
    Flag(
        "server.data_parallel_size",
        int,
        "Engine processes behind the one port, on a GPU each; the least loaded takes a request.",
    ),
    Flag(
        "server.on_engine_failure",
        str,
        "restart an engine process that died, or exit with status 1.",
    ),
    Flag(
        "server.hang_timeout_s",
        float,
        "Seconds without a sign of life after which an engine process is killed; 20 times its "
        "slowest step where that is longer; 0 never.",
        "--hang-timeout",
    ),
    Flag(
        "server.request_timeout_s",
        float,
        "Seconds that a request may take in all, before it is answered with status 504; 0: for "
        "ever.",
        "--request-timeout",
    ),
    Flag("server.max_queue", int, "Outputs that may wait; more are answered with status 429."),
    Flag("server.ignore_priority", bool, "Take priority of requests without an effect."),
    Flag("server.drain_timeout_s", float, "Seconds to finish after SIGTERM.", "--drain-timeout"),
    Flag("server.chat_template", str, "Jinja template, or the name of one of the model's."),
    Flag(
        "server.tool_call_parser",
        str,
        "How tool calls are recognised: hermes, llama3_json, mistral, none, or auto (by the "
        "template).",
    ),
    Flag(
        "server.playground",
        bool,
        "No page at /.",
        "--no-playground",
        read=lambda _: False,
    ),
)

VLLM = group(
    "vLLM (needs --engine vllm)",
    Flag(
        "engine_name",
        str,
        "peagle, or vllm: another engine, for several GPUs and nodes, installed beside it.",
        "--engine",
        default="peagle",
        read=values.one_of("peagle", "vllm"),
    ),
    Flag(
        "vllm_python",
        Path,
        "The python of the environment that has vLLM.",
        metavar="FILE",
        default="PEAGLE_VLLM_PYTHON, this one, or .venv-vllm/bin/python",
    ),
    Flag("tensor_parallel_size", int, "GPUs that share each layer.", default="1"),
    Flag("pipeline_parallel_size", int, "Groups of GPUs that share the layers out.", default="1"),
    Flag("print_command", bool, "Print how vLLM would be started, and start nothing."),
)

# Of the engine, for those who tune a server.
TUNING = group(
    "Tuning",
    Flag("engine.seed", int, "Source of the seeds of requests that bring none."),
    Flag("engine.block_size", int, "Token slots of a KV block."),
    Flag("engine.num_kv_blocks", int, "KV blocks.", default="what memory and --max-num-seqs allow"),
    Flag("engine.enforce_eager", bool, "No CUDA graphs; a GPU only."),
)

SAFETY = group(
    "Safety",
    Flag(
        "api_key_file",
        Path,
        "API keys, one a line, that open all routes but /live, /health and /ping; the variable "
        "PEAGLE_API_KEY may hold them too, separated by commas.",
        metavar="FILE",
        default="none: everybody who reaches the port is served",
    ),
    Flag(
        "server.allowed_hosts",
        list[str],
        "Name under which clients reach the server; may be given several times, * is any.",
        "--allowed-host",
        default="localhost on a loopback address, else any",
    ),
    Flag(
        "server.allowed_origins",
        list[str],
        "Web page elsewhere that may call the server, like https://chat.example.com; may be given "
        "several times.",
        "--allowed-origin",
        default="none",
    ),
    Flag(
        "server.key_requests_per_minute",
        int,
        "Requests that each API key may send a minute; more are answered with status 429.",
        default="no limit",
    ),
    Flag(
        "server.key_tokens_per_minute",
        int,
        "Tokens of prompts and outputs that each API key may use a minute. max_tokens counts until "
        "an answer ends, then its length.",
        default="no limit",
    ),
    Flag(
        "server.key_concurrency",
        int,
        "Requests of each API key that may be under way.",
        default="no limit",
    ),
    Flag("server.max_body_bytes", int, "Largest request."),
    Flag(
        "server.max_connections",
        int,
        "Most connections at once; one more closes the one that has waited longest for a request.",
        default="what the limit of open files allows, at most 4096",
    ),
    Flag(
        "server.head_timeout_s",
        float,
        "Seconds that a client may take for the head of a request.",
        "--head-timeout",
    ),
    Flag("server.compile_timeout_s", float, "Seconds that a schema may compile."),
    Flag(
        "server.grammar_budget_s",
        float,
        "Processor seconds that a request's grammar may take in one step; a request that takes "
        "more ends with an error. 0 sets no limit.",
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
    Flag("server.log_format", str, "text or json, to standard error."),
    Flag("server.log_prompts", bool, "Put outputs into the log."),
    Flag(
        "server.otlp_endpoint",
        str,
        "Where OpenTelemetry spans go, like http://localhost:4318.",
        metavar="URL",
        default="nowhere",
    ),
    Flag(
        "server.cloudwatch_interval_s",
        float,
        "Seconds between two lines about acceptance on standard output, in CloudWatch's embedded "
        "metric format; 0 writes none.",
        "--cloudwatch-interval",
        default="0, in a SageMaker container 60",
    ),
)

SETTINGS = group(
    "Settings",
    Flag(
        "config",
        Path,
        "TOML file: format_version, target, revision, and the tables engine, speculative, "
        "sampling and server. Variables (PEAGLE_DTYPE, PEAGLE_SPECULATIVE_CONFIG, PEAGLE_SAMPLING, "
        "...) go over it, flags over both.",
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
        "Print where the memory goes, how long a context and how many requests it allows, to "
        "standard error; on a GPU that is always printed.",
    ),
)
