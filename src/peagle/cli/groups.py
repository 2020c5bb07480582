"""The options that commands share, in groups, and types of single parameters."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.flags import group
from peagle.cli.settings import (
    one_of,
    read_drawn_from,
    read_logit_bias,
    read_pairs,
    read_trees,
    structure,
)

# Keys of single options, for commands that look at them.
DRAFT_SAMPLING = "speculative.draft_sampling"
DRAFT_WINDOW = "speculative.draft_window"
DRAWN_FROM = "speculative.drawn_chains_from"
TREES = "speculative.parallel_drafting_spec"
PROMPT_LOOKUP = "speculative.prompt_lookup"

MODEL = group(
    "Model",
    """
    --target MODEL = target
        The target: a folder in Hugging Face format, a GGUF file, a hub id, bundled or smollm2.
        [default: the bundled code model, with its P-EAGLE head]
    --revision TEXT = revision
        Branch, tag or commit of the target on the hub; owner/name@revision does the same.
        [default: main]
    --draft MODEL = speculative.model
        The draft head, P-EAGLE or EAGLE-3: a folder, a hub id, bundled, smollm2, or one of
        these with -eagle3.
        [default: none with a target of your own]
    --draft-revision TEXT = speculative.revision
        Branch, tag or commit of the head on the hub. [default: main]
    """,
    section="speculative",
)

SPECULATION = group(
    "Speculation",
    """
    -k, --num-speculative-tokens INT
        Number of draft tokens in a step, K. [default: what the head was trained for, at
        most 7, or 7 if the head does not name it; where one engine generates or serves on a
        GPU, K follows the load up to that]
    --no-speculation = no_speculation
        Decode without drafts.
    --method TEXT
        Source of drafts: eagle3 (a head of either kind) or ngram (prompt lookup). [default:
        eagle3 with a head]
    --parallel-drafting-spec JSON
        Shape of candidate trees, in place of chains, like '{"num_parallel_trees": 8,
        "prediction_depth": 7, "max_nodes": 16}'; each key may be left out, and '{}' takes all
        defaults. The nodes that a step verifies follow the load as K does. auto takes the default
        shape on a GPU, and chains elsewhere; commands that measure need a shape. [default: auto
        where one engine generates or serves and nothing gives K, else chains]
    --no-prompt-lookup = speculative.prompt_lookup
        With candidate trees: draft with the head alone, without what the text goes on with where
        the same tokens stood before.
    --draft-sampling TEXT
        Drafts at a temperature above 0: argmax or probabilistic.
    --drawn-chains-from TEMPERATURE
        With candidate trees: the temperature from which a chain of drawn drafts leads the trees of
        sampled requests without a seed, a structured output or a prediction, or never. P-EAGLE
        heads only. [default: 0.6]
    --draft-quantization TEXT = speculative.quantization
        Type that the weights of the head's layers get when they are loaded: fp8, int8 or
        int4. [default: as stored]
    --draft-max-len INT = speculative.max_model_len
        Length in tokens up to which a head drafts; longer texts go on without drafts.
        [default: the length that the head was trained for]
    --draft-window INT
        Number of tokens that a head attends to when it drafts; 0 is all of them. [default:
        the windows of its config.json, else the longest training text if the head names it,
        else all]
    --no-correction = speculative.correction
        Draft without the correction that lies beside the head.
    --speculative-config JSON = speculative_config
        Speculative configuration in vLLM's form, in place of the options above.
    """,
    section="speculative",
    read={"--parallel-drafting-spec": read_trees, "--drawn-chains-from": read_drawn_from},
)

SAMPLING = group(
    "Sampling",
    """
    --max-new-tokens INT = sampling.max_tokens
        Largest number of tokens to generate for a prompt.
    --temperature FLOAT
        Temperature of sampling; 0 is greedy.
    --top-k INT
        Number of most likely tokens to keep; 0 keeps every token.
    --top-p FLOAT
        Probability mass of the tokens to keep; 1 keeps every token.
    --min-p FLOAT
        Lowest probability to keep, as a share of the highest one; 0 keeps every token.
    --seed INT
        Seed of every prompt; the same seed gives the same output, alone or in a batch.
        [default: one for each prompt, the same in every run]
    --stop TEXT ...
        Text that ends the output and is left out of it; may be given several times.
    """,
    section="sampling",
)

FINER_SAMPLING = group(
    "Finer sampling",
    """
    --typical-p FLOAT
        Probability mass of the tokens of most typical surprise to keep; 1 keeps every
        token.
    --repetition-penalty FLOAT
        Penalty on tokens of the prompt and the output; 1 is none.
    --presence-penalty FLOAT
        Penalty on tokens of the output, from -2 to 2.
    --frequency-penalty FLOAT
        Penalty on tokens of the output for each time that they came, from -2 to 2.
    --logit-bias JSON
        Numbers to add to the logits of token ids, like '{"42": -5}'; "-inf" forbids one.
    --bad-word TEXT ... = sampling.bad_words
        Text that the output may not contain; may be given several times.
    --allowed-token-id INT ... = sampling.allowed_token_ids
        Token id that the output may contain, and no other; may be given several times.
        [default: all]
    --min-tokens INT
        Number of tokens before which the output does not end.
    --stop-token-id INT ... = sampling.stop_token_ids
        Token id that ends the output; may be given several times.
    --ignore-eos
        Generate on past the model's own end of text.
    """,
    section="sampling",
    read={"--logit-bias": read_logit_bias},
)

STRUCTURE = group(
    "Structured output (at most one)",
    """
    --json-object = sampling.structured_output
        Any JSON object.
    --json-schema JSON|FILE = sampling.structured_output
        JSON that fits a schema: its text, or a file.
    --regex EXPRESSION = sampling.structured_output
        Text that a regular expression matches as a whole.
    --ebnf FILE = sampling.structured_output
        Text of a grammar in GBNF notation, rule root.
    """,
    section="sampling",
    read={
        "--json-object": structure("json"),
        "--json-schema": structure("json_schema"),
        "--regex": structure("regex"),
        "--ebnf": structure("ebnf"),
    },
)

RESULTS = group(
    "Results",
    """
    --n INT
        Number of outputs of each prompt; more than one needs a temperature.
    --logprobs INT
        Print log-probabilities of the output and of this many likeliest tokens; in JSON
        only. [default: none]
    --prompt-logprobs INT
        Print log-probabilities of the prompt and of this many likeliest tokens. [default:
        none]
    """,
    section="sampling",
)

ENGINE = group(
    "Engine",
    """
    --dtype TEXT
        Type of weights and activations: auto (float32 on a CPU, bfloat16 on a GPU), float32,
        float64, bfloat16 or float16.
    --quantization TEXT
        Type that the weights of the target's layers get when they are loaded: fp8, int8 or
        int4. A target that is stored quantised needs no option. [default: as stored]
    --fp8-activations TEXT
        Products of FP8 activations with the weights of an FP8 target: auto (in linear layers
        and experts that were made for it, on a GPU of compute capability 9.0) or off. Such
        linear layers have their weights in memory twice.
    --kv-cache-dtype TEXT
        Type of the KV cache of the target: auto (that of the activations) or fp8, which takes
        half the memory of bfloat16.
    --device TEXT
        Device: auto (the GPU if there is one), cpu or cuda.
    --max-model-len INT
        Largest number of tokens of a prompt and its output together. [default: the model's]
    --max-num-seqs INT
        Largest number of sequences decoded together.
    --max-num-batched-tokens INT
        Largest number of prompt tokens in a step; longer prompts go in chunks.
    --kv-cache-gib FLOAT
        Size of the KV cache in GiB. [default: 2 on a CPU, all that --gpu-memory-utilization
        leaves on a GPU]
    --gpu-memory-utilization FLOAT
        Share of the GPU's memory that may be in use in all, by this engine and others.
    --no-prefix-caching = engine.enable_prefix_caching
        Compute every prompt anew, also where it shares a prefix with an earlier one.
    --threads INT = threads
        Number of CPU threads. Set it where other programs start and end while this one runs.
        [default: 1 for a small model, else up to one for each core that other programs leave
        free while the model loads]
    """,
    section="engine",
)

SERVER = group(
    "Server",
    """
    --host TEXT
        Address to listen on.
    --port INT
        Port to listen on; 0 takes a free one.
    --served-model-name NAME
        Name of the model for clients. [default: the folder's name, or the hub id; the model as
        typed goes too]
    --data-parallel-size INT
        Number of engine processes behind the port, each on a GPU of its own; the least
        loaded one takes a request.
    --on-engine-failure TEXT
        What the server does when an engine process dies: restart it, or exit with status 1.
    --hang-timeout FLOAT = server.hang_timeout_s
        Seconds without a sign of life after which the server kills an engine process, or 20
        times its slowest step where that is longer; 0 is never.
    --request-timeout FLOAT = server.request_timeout_s
        Seconds that a request may take in all before the server answers 504; 0 is for ever.
    --max-queue INT
        Number of outputs that may wait; the server answers further ones with 429.
    --ignore-priority
        Accept the field priority of requests without an effect.
    --drain-timeout FLOAT = server.drain_timeout_s
        Seconds that running requests have to finish after SIGTERM.
    --chat-template TEXT
        Chat template: a Jinja file, or the name of one of the model's.
    --tool-call-parser TEXT
        Form of tool calls in outputs: gemma4, hermes, llama3_json, mistral, openai (gpt-oss),
        qwen3_coder, none, or auto (by the template).
    --correction NAME=PATH ... = speculative.corrections
        A further correction of the head's drafts: a name, and a file correction.st or the folder
        with it; may be given several times. A request names it ("speculation": {"correction":
        NAME}); others have the head's own. [default: none]
    --no-playground = server.playground
        Serve no page at /.
    --allow-heads DIR ... = server.allow_heads
        Folder from which POST /admin/head may take another draft head while the server runs;
        may be given several times; needs --admin-key-file. [default: the head stays]
    """,
    section="server",
    read={"--correction": read_pairs},
)

VLLM = group(
    "vLLM (needs --engine vllm)",
    """
    --engine TEXT = engine_name
        Engine: peagle, or vllm (installed beside it, for several GPUs and nodes). [default:
        peagle]
    --vllm-python FILE:PATH
        Python of the environment that has vLLM. [default: PEAGLE_VLLM_PYTHON, this one, or
        .venv-vllm/bin/python]
    --tensor-parallel-size INT
        Number of GPUs that share each layer. [default: 1]
    --pipeline-parallel-size INT
        Number of groups of GPUs that share the layers out. [default: 1]
    --print-command
        Print the command that starts vLLM, and start nothing.
    """,
    read={"--engine": one_of("peagle", "vllm")},
)

# Options of the engine for tuning a server.
TUNING = group(
    "Tuning",
    """
    --max-itl-ms FLOAT
        Largest time in milliseconds between two tokens of a request while prompts of others
        run; prompts go in chunks that fit. 0 sets no limit. [default: 100]
    --max-hold-ms FLOAT
        Longest time in milliseconds that a short prompt waits on a busy GPU for others, so that
        one step begins several; 0 lets none wait.
    --seed INT
        Source of the seeds of requests without a seed.
    --block-size INT
        Number of token slots in a KV block.
    --num-kv-blocks INT
        Number of KV blocks. [default: what memory and --max-num-seqs allow]
    --enforce-eager
        Launch every kernel by itself, without CUDA graphs; on a GPU only.
    """,
    section="engine",
)

SAFETY = group(
    "Safety",
    """
    --api-key-file FILE:PATH = api_key_file
        File of API keys, one a line, that open all routes; /live, /health and /ping need
        none. The variable PEAGLE_API_KEY may hold keys too, separated by commas. [default:
        none: everybody who reaches the port is served]
    --admin-key-file FILE:PATH = admin_key_file
        File of keys, one a line, that open /admin/head and nothing else. [default: none]
    --allowed-host TEXT ... = server.allowed_hosts
        Host name of the server; may be given several times, * is any. [default: localhost
        on a loopback address, else any]
    --allowed-origin TEXT ... = server.allowed_origins
        Origin of web pages that may call the server, like https://chat.example.com; may be
        given several times. [default: none]
    --key-requests-per-minute INT
        Number of requests of each API key a minute; the server answers further ones with
        429. [default: no limit]
    --key-tokens-per-minute INT
        Number of prompt and output tokens of each API key a minute. A request counts with
        its max_tokens until it ends, then with its length. [default: no limit]
    --key-concurrency INT
        Number of requests of each API key at a time. [default: no limit]
    --max-body-bytes INT
        Largest body of a request, in bytes.
    --max-connections INT
        Number of connections at a time; one more closes the connection that has been silent
        for longest. [default: what the limit of open files allows, at most 4096]
    --head-timeout FLOAT = server.head_timeout_s
        Seconds that a client has for the head of a request.
    --compile-timeout-s FLOAT
        Processor seconds that a grammar or a schema may take to compile.
    --grammar-budget FLOAT = server.grammar_budget_s
        Processor seconds that the grammar of a request may take in a step; beyond that the
        request ends with an error. 0 sets no limit.
    --no-user-grammars = server.user_grammars
        Refuse regular expressions and grammars in requests; schemas, choices and tools
        stay.
    --parse-special-tokens
        Read special tokens that the messages and tools of a chat spell as these tokens. A
        user can then end a turn and begin another one. [default: they are text]
    """,
    section="server",
)

RECORDING = group(
    "Recording",
    """
    --record DIR
        Folder for the token ids of requests and answers, as training data of a head. [default:
        nothing is recorded]
    --record-for SHA256 ... = server.record_for
        SHA-256 of an API key whose requests are recorded; may be given several times.
    --record-all
        Record every request that does not say no ("store": false).
    --record-share FLOAT
        Share of these requests that is recorded, chosen by a hash of the request's id.
    --record-max-gib FLOAT
        Largest size of the records in GiB; the server deletes the oldest first.
    --record-days FLOAT
        Days after which the server deletes records.
    --record-key-file FILE
        File of the key that encrypts records, 32 random bytes in base64. [default: records are
        not encrypted]
    """,
    section="server",
)

OBSERVATION = group(
    "Logs and traces",
    """
    --log-format TEXT
        Form of the log on standard error: text or json.
    --log-prompts
        Write outputs into the log.
    --otlp-endpoint URL
        Address of the OpenTelemetry collector for spans, like http://localhost:4318.
        [default: nowhere]
    --cloudwatch-interval FLOAT = server.cloudwatch_interval_s
        Seconds between two lines of acceptance metrics for CloudWatch on standard output; 0
        writes none. [default: 0, in a SageMaker container 60]
    """,
    section="server",
)

SETTINGS = group(
    "Settings",
    """
    --config FILE:PATH
        TOML file of settings: format_version, target, revision, and the tables engine,
        speculative, sampling and server. Variables (PEAGLE_DTYPE,
        PEAGLE_SPECULATIVE_CONFIG, PEAGLE_SAMPLING, ...) override the file, flags override
        both.
    --show-config
        Print the merged settings as JSON, with what they decide here (device, type, K, threads,
        longest sequence), and do nothing else.
    --show-memory
        Print the memory plan to standard error: what takes memory, and the context and
        number of requests that fit. serve logs it. On a GPU it is always printed.
    """,
)


class OutputFormat(StrEnum):
    """The formats of a printed result."""

    TEXT = "text"
    JSON = "json"


ChatTemplate = Annotated[
    str | None,
    typer.Option(
        help="Chat template: a Jinja file, or the name of one of the tokenizer's.",
        show_default="the tokenizer's",
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Split of a folder of data; FOLDER/NAME names it too.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="The target model, like --target.", show_default=False),
]
# Parameters of the commands that measure.
MoreHeads = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=MODEL",
        help="Another method: a head with a name of yours, or ngram; may be given several times.",
    ),
]
UseTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Format prompts by the chat template, or take them as text.",
        show_default="the template where there is one",
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="Thinking mode of the chat template; a template without one accepts --no-thinking.",
        show_default="the template's",
    ),
]
DEFAULT_LIMIT = 16
PromptLimit = Annotated[
    int | None,
    typer.Option(
        help="Number of prompts of each set.",
        show_default=f"{DEFAULT_LIMIT} without --set, else all",
    ),
]
ShuffleSeed = Annotated[
    int | None,
    typer.Option(
        metavar="SEED",
        help="Seed that chooses prompts from all over a set.",
        show_default="the first ones",
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for results and a report; results in it are not measured again.",
    ),
]
Format = Annotated[OutputFormat, typer.Option("--format", help="Form of the printed result.")]
