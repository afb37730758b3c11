"""What a run is configured with: frozen, validated values.

Owns every default (one table: the fields of `EngineConfig`). Knows nothing of requests, tensors or widgets.
The field metadata (`help`, `min`, `max`, `choices`, `unit`) feeds the explorer's controls and the command
line's messages, so that a limit is written down once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from cbviz.disciplines import DISCIPLINES, Discipline
from cbviz.specs import KV_CACHE_DTYPES, ModelSpec, kv_bytes_per_element


class ConfigError(ValueError):
    """A field is wrong. The message names the field, the value and the limit, and says what to do."""


MOST_DIGITS = 18
"""Digits of a whole number that comes as text: what fits into 64 bits."""


def whole_number(text: str) -> int | None:
    """Return the number that `text` writes in ASCII digits, None for anything else.

    `str.isdigit` also takes digits that `int` refuses, and `int` refuses very long numbers.

    >>> whole_number("12"), whole_number("²"), whole_number("-1"), whole_number("9" * 5000)
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def clean_text(text: str) -> str:
    """`text` with U+FFFD in place of each lone surrogate: half of a character, which no file and no tokenizer
    takes.

    >>> ascii(clean_text("hi \\ud83d there"))
    "'hi \\\\ufffd there'"
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def shown(value: Any, most: int = 80) -> str:
    """`repr(value)` for a message: at most `most` characters, whatever the value is.

    >>> shown("text"), shown(1.5), shown(10**5000)
    ("'text'", '1.5', 'a number of more than 40 digits')
    """
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    if isinstance(value, (str, bytes)) and len(value) > most:
        value = value[:most]
    try:
        return repr(value)[:most]
    except Exception:  # nested without end, or an object whose repr fails
        return f"an object of type {type(value).__name__}"


def knob(
    default: Any,
    help: str,
    *,
    min: float | None = None,
    max: float | None = None,
    choices: Collection[str] | None = None,
    unit: str = "",
    live: bool = True,
) -> Any:
    """A config field with the metadata that controls, messages and docs are made from.

    `live`: may change during a run.
    """
    return field(
        default=default,
        metadata={"help": help, "min": min, "max": max, "choices": choices, "unit": unit, "live": live},
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that shapes a run.

    Frozen; a change makes a new one (`replace`) and is recorded as an input of its step.
    """

    discipline: str = knob("chunked", "How batches are formed.", choices=DISCIPLINES)
    policy: str = knob(
        "fcfs", "Order of the waiting queue; also who is preempted, unless a victim rule is set."
    )
    max_num_seqs: int = knob(8, "Seats: requests that may run at once.", min=1, max=4096, unit="requests")
    max_num_batched_tokens: int | None = knob(
        None,
        "Token budget of one step. Empty: 256 with chunked prefill, else max_model_len.",
        min=1,
        max=1_000_000,
        unit="tokens",
    )
    max_model_len: int | None = knob(
        None,
        "Longest prompt + output. Empty: what the model and the pool allow.",
        min=2,
        max=10_000_000,
        unit="tokens",
        live=False,
    )
    block_size: int = knob(16, "Tokens in one KV block.", min=1, max=1024, unit="tokens", live=False)
    num_blocks: int = knob(
        256,
        "KV blocks in the pool; block 0 is vLLM's null block and is never given out.",
        min=2,
        max=4_000_000,
        unit="blocks",
        live=False,
    )
    enable_prefix_caching: bool = knob(True, "Full blocks are found again by their hash.", live=False)
    enable_chunked_prefill: bool | None = knob(
        None, "Split prompts over steps. Empty: as the discipline says."
    )
    long_prefill_token_threshold: int = knob(
        0, "Longest chunk of a prompt in one step; 0: no limit.", min=0, max=1_000_000, unit="tokens"
    )
    scheduler_reserve_full_isl: bool | None = knob(
        None, "Admit only if all known tokens fit now. Empty: as the discipline says."
    )
    watermark: float = knob(0.0, "Share of the pool that an admission must leave free.", min=0.0, max=0.9)
    kv_cache_memory_bytes: int | None = knob(
        None,
        "Size of the KV pool in bytes; sets num_blocks. Empty: num_blocks is used.",
        min=1,
        max=10**13,
        unit="bytes",
        live=False,
    )
    kv_cache_dtype: str = knob(
        "auto",
        (
            "How keys and values are kept: auto as the precision says; in 32 or 16 bits; as 8- or 4-bit "
            "codes "
            "with a scale for each token and head."
        ),
        choices=KV_CACHE_DTYPES,
        live=False,
    )
    sliding_window: int = knob(
        0,
        "Attention window; 0: the model's own if it has one, else full attention.",
        min=0,
        max=10_000_000,
        unit="tokens",
        live=False,
    )
    attention_sinks: int = knob(
        0,
        (
            "First tokens that every query sees though they lie left of its window (StreamingLLM, arXiv "
            "2309.17453). Needs a window."
        ),
        min=0,
        max=10_000_000,
        unit="tokens",
        live=False,
    )
    preemption_mode: str = knob(
        "recompute",
        (
            "What a preempted request does with its KV: throw it away and compute it again, or wait on the "
            "host and be copied back."
        ),
        choices=("recompute", "swap"),
    )
    swap_blocks: int = knob(
        256,
        "Host blocks for requests that are swapped out; where they run short a request is recomputed.",
        min=0,
        max=4_000_000,
        unit="blocks",
        live=False,
    )
    kv_allocation: str = knob(
        "paged",
        (
            "Where a request's KV lies: any free blocks, through a block table; or one run of blocks for "
            "prompt + max_tokens, as before paging."
        ),
        choices=("paged", "contiguous"),
        live=False,
    )
    contiguous_fit: str = knob(
        "first-fit",
        "Which run of free blocks a contiguous request gets: the first that is long enough, or the shortest.",
        choices=("first-fit", "best-fit"),
        live=False,
    )
    victim: str | None = knob(
        None,
        "Who is preempted when the pool is full. Empty: as the discipline and policy say.",
        choices=("policy", "last", "lowest-priority", "least-work-lost", "fewest-outputs"),
    )
    speculative: str = knob(
        "off",
        "Speculative decoding: who proposes drafts for the model to check. off, ngram (repeats what stands "
        "in the prompt), self-draft (the first layers "
        "of the model), draft-model (a second, smaller model), or a proposer of yours.",
    )
    num_speculative_tokens: int = knob(
        3, "Drafts proposed for a request in one step.", min=1, max=32, unit="tokens"
    )
    prompt_lookup_min: int = knob(
        2,
        "ngram: shortest run of last tokens that is looked for in the text so far.",
        min=1,
        max=64,
        unit="tokens",
    )
    prompt_lookup_max: int = knob(
        4, "ngram: longest run of last tokens that is looked for.", min=1, max=64, unit="tokens"
    )
    draft_layers: int = knob(
        0, "self-draft: layers that draft. 0: a third of them.", min=0, max=1000, unit="layers"
    )
    draft_model: str = knob(
        "", "draft-model: a second model with the same vocabulary (name, folder or file).", live=False
    )
    draft_acceptance: float = knob(
        0.7,
        "Simulated runs: chance that a draft is right, given that those before it were.",
        min=0.0,
        max=1.0,
    )
    timeout_s: float = knob(
        0.0,
        "A request still unfinished this long after its arrival is ended; 0: never.",
        min=0.0,
        max=1e9,
        unit="s",
    )
    shed_after_s: float = knob(
        0.0,
        "Load shedding: a request that has waited this long without ever running is dropped; 0: never.",
        min=0.0,
        max=1e9,
        unit="s",
    )
    max_waiting_requests: int = knob(
        0,
        "Queue limit: a request that arrives while this many wait is refused; 0: no limit.",
        min=0,
        max=10_000_000,
        unit="requests",
    )
    max_waiting_tokens: int = knob(
        0,
        "Queue limit: a request whose prompt would take the waiting ones over this is refused; 0: no limit.",
        min=0,
        max=1_000_000_000,
        unit="tokens",
    )
    degrade_above: float = knob(
        0.0,
        (
            "Above this share of the pool in use, batch-class requests (priority > 0) go in static batches "
            "and "
            "let others pass; 0: off."
        ),
        min=0.0,
        max=1.0,
    )
    clock: str | None = knob(
        None,
        "Where a step's duration comes from. Empty: measured for a real model, else modelled.",
        choices=("measured", "modelled"),
        live=False,
    )
    cost: str = knob(
        "roofline",
        "Cost model of the modelled clock.",
        choices=("roofline", "article", "article-shared"),
        live=False,
    )
    modelled_device: str = knob("NVIDIA H100 SXM", "Device whose time the modelled clock tells.", live=False)
    precision: str = knob(
        "fast",
        "Arithmetic of the real model: float32; weights and KV in 16 bits; weights in 8 bits.",
        choices=("exact", "fast", "int8"),
        live=False,
    )
    kernels: str = knob(
        "auto",
        "Which operators the real model uses.",
        choices=("auto", "reference", "torch", "cpu", "triton"),
        live=False,
    )
    batch_invariant: bool = knob(
        False,
        (
            "No bit of a request's logits may depend on batch-mates or on how its prompt is cut; refused "
            "where "
            "operators don't promise it."
        ),
        live=False,
    )
    device: str = knob("auto", "Where the real model runs: auto, cpu, cuda.", live=False)
    enforce_eager: bool = knob(
        False,
        (
            "On a GPU: every step launches its kernels one by one; decode steps are not replayed from CUDA "
            "graphs."
        ),
        live=False,
    )
    seed: int = knob(0, "Seed of sampling and of made-up tokens.", min=0, max=2**63 - 1, live=False)

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            _check_field(f, value)
            if isinstance(value, str):
                object.__setattr__(self, f.name, clean_text(value))
        if (
            self.max_num_batched_tokens is not None
            and self.max_model_len is not None
            and not self.chunked
            and self.max_num_batched_tokens < self.max_model_len
        ):
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but discipline "
                f"{self.discipline!r} without chunked prefill computes a whole prompt in one "
                f"step: it must be at least max_model_len, {self.max_model_len}. Raise it, lower "
                "max_model_len, or choose a chunked discipline."
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, it may be at most prompt_lookup_max, "
                f"{self.prompt_lookup_max}"
            )
        if self.speculative != "off" and self.rules.pad:
            raise ConfigError(
                f"speculative is {self.speculative!r}, but discipline {self.discipline!r} keeps all rows "
                "in step, one token each, as generate() does; its assisted "
                "generation takes a single sequence. Choose another discipline, such as static, or set "
                "speculative to off."
            )
        if self.speculative == "draft-model" and not self.draft_model:
            raise ConfigError(
                "speculative is 'draft-model', but draft_model is empty: name a model with the same "
                "vocabulary, or choose self-draft"
            )
        if self.kv_allocation == "contiguous" and self.speculative != "off":
            raise ConfigError(
                f"kv_allocation is 'contiguous' and speculative is {self.speculative!r}: drafts need slots "
                "beyond prompt + max_tokens, and a contiguous "
                "run can't grow. Set speculative to 'off' or kv_allocation to 'paged'."
            )
        if self.attention_sinks and self.preemption_mode == "swap":
            raise ConfigError(
                f"attention_sinks is {self.attention_sinks} and preemption_mode is 'swap': a request is "
                "copied out and back as one run of blocks, and with sinks "
                "there are two. Set preemption_mode to 'recompute' or attention_sinks to 0."
            )
        if self.kv_allocation == "contiguous" and self.sliding_window:
            raise ConfigError(
                f"kv_allocation is 'contiguous' and sliding_window is {self.sliding_window}: a contiguous "
                "run is given back whole, no block of it can leave "
                "the window. Set sliding_window to 0 or kv_allocation to 'paged'."
            )

    @property
    def rules(self) -> Discipline:
        """The discipline's row, with this config's overrides applied."""
        d = DISCIPLINES[self.discipline]
        changes: dict[str, Any] = {}
        if self.enable_chunked_prefill is not None:
            changes["chunked"] = self.enable_chunked_prefill
        if self.scheduler_reserve_full_isl is not None:
            changes["reserve_full_isl"] = self.scheduler_reserve_full_isl
        if self.victim is not None:
            changes["victim"] = self.victim
        if self.kv_allocation == "contiguous":
            changes["reserve"] = "max-tokens"  # a run can't grow: what lies behind it may be taken
        return dataclasses.replace(d, **changes) if changes else d

    @property
    def chunked(self) -> bool:
        return (
            DISCIPLINES[self.discipline].chunked
            if self.enable_chunked_prefill is None
            else self.enable_chunked_prefill
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots taken beyond a request's tokens of the step, into which a drafting model writes the KV of its
        drafts (vLLM's EAGLE and draft models).
        """
        return self.num_speculative_tokens if self.speculative in ("self-draft", "draft-model") else 0

    @property
    def num_draft_slots(self) -> int:
        """Slots that a request may need beyond prompt + max_tokens because of drafts."""
        return (
            0
            if self.speculative == "off"
            else self.num_lookahead_tokens + (0 if self.rules.trim_drafts else self.num_speculative_tokens)
        )

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be given out: all but the null block."""
        return self.num_blocks - 1

    @property
    def pool_tokens(self) -> int:
        return self.num_usable_blocks * self.block_size

    def blocks_that_fit(self, kv_bytes_per_token: float) -> int:
        """num_blocks, or how many blocks kv_cache_memory_bytes holds where that is set (the null block among
        them). Raises ConfigError if fewer than two.
        """
        if self.kv_cache_memory_bytes is None:
            return self.num_blocks
        block = kv_bytes_per_token * self.block_size
        if self.kv_cache_memory_bytes < 2 * block:
            raise ConfigError(
                f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes:,}, the least is "
                f"{math.ceil(2 * block):,}: two blocks of {self.block_size} tokens, "
                f"{kv_bytes_per_token:,.0f} bytes each token. Raise it, or lower block_size or "
                "kv_cache_dtype."
            )
        return int(self.kv_cache_memory_bytes // block)

    def resolve(
        self, model_context: int, *, kv_bytes_per_token: float = 0.0, window: int = 0
    ) -> tuple[EngineConfig, list[str]]:
        """Fills in what was left empty, for a model with `model_context` positions that keeps
        `kv_bytes_per_token`, and of which no layer sees beyond `window` positions under this config (0: some
        layer sees all). Returns the full config and notes for the user.
        """
        notes: list[str] = []
        if self.kv_cache_memory_bytes is not None:
            self = dataclasses.replace(self, num_blocks=self.blocks_that_fit(kv_bytes_per_token))
            notes.append(
                f"num_blocks is {self.num_blocks}: what {self.kv_cache_memory_bytes:,} bytes hold at "
                f"{kv_bytes_per_token:,.0f} bytes a token"
            )
        if window and window != self.sliding_window and self.kv_allocation == "paged":
            self = dataclasses.replace(self, sliding_window=window)
            notes.append(f"sliding_window is {window}: the model's own, no layer sees further")
        if self.attention_sinks and not (window or self.sliding_window):
            raise ConfigError(
                f"attention_sinks is {self.attention_sinks}, but there is no window that every layer keeps "
                "to, and without one all see the first tokens anyway: "
                "set sliding_window, or attention_sinks to 0"
            )
        limit = self.max_model_len
        if limit is None:
            limit = min(model_context, self.pool_tokens)
        elif limit > model_context:
            raise ConfigError(
                f"max_model_len is {limit}, but the model has {model_context} positions. Lower it to "
                f"{model_context} or choose another model."
            )
        budget = self.max_num_batched_tokens
        if not self.chunked and (budget is None or budget < limit):
            if budget is not None:
                notes.append(
                    f"max_num_batched_tokens raised from {budget} to {limit}: {self.discipline} computes "
                    "whole prompts"
                )
            budget = limit
        elif budget is None:
            budget = 256
        if self.rules.pad and budget < self.max_num_seqs:
            notes.append(
                f"max_num_batched_tokens raised from {budget} to {self.max_num_seqs}: {self.discipline} "
                "computes every row in each step, max_num_seqs of them"
            )
            budget = self.max_num_seqs
        caching = self.enable_prefix_caching
        if caching and self.kv_allocation == "contiguous":
            caching = False
            notes.append("enable_prefix_caching is off: with kv_allocation contiguous nobody shares blocks")
        return dataclasses.replace(
            self, max_model_len=limit, max_num_batched_tokens=budget, enable_prefix_caching=caching
        ), notes

    def replace(self, **changes: Any) -> EngineConfig:
        """A changed copy; a `num_blocks` that is named counts, whatever bytes the pool was sized by.

        Raises ConfigError for an unknown field, naming the nearest known one.
        """
        if "num_blocks" in changes and "kv_cache_memory_bytes" not in changes:
            changes = {**changes, "kv_cache_memory_bytes": None}
        return dataclasses.replace(self, **check_names(changes))

    def changed(self, **changes: Any) -> EngineConfig:
        """As `replace`, for a resolved config: a budget that was not named is raised to max_model_len where a
        new discipline computes whole prompts, and to max_num_seqs where it computes every row in each step.
        """
        check_names(changes)
        if "max_num_batched_tokens" in changes:
            return self.replace(**changes)
        least = 0
        unset = self.replace(**{**changes, "max_num_batched_tokens": None})
        if not unset.chunked:
            least = unset.max_model_len or 0
        if unset.rules.pad:
            least = max(least, unset.max_num_seqs)
        if (self.max_num_batched_tokens or 0) < least:
            changes["max_num_batched_tokens"] = least
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def as_run(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model as a run under `config` has it: its KV of that type, the config's window laid over its own,
    sinks. Raises ConfigError.

    Where only some layers have a window of their own and the config's is larger, all are counted with the
    config's: a little too much.
    """
    changes: dict[str, Any] = {}
    if config.kv_cache_dtype != "auto":
        if spec.attention == "mla" and config.kv_cache_dtype.startswith("int"):
            raise ConfigError(
                f"kv_cache_dtype is {config.kv_cache_dtype!r}, but {spec.name} has MLA, whose latent is "
                "not kept as codes: choose auto, float16 or float32"
            )
        changes["kv_bytes_per_element"] = kv_bytes_per_element(config.kv_cache_dtype, spec.head_dim)
    own = 0 if spec.num_global_layers else spec.sliding_window
    if config.sliding_window:
        changes |= {
            "sliding_window": min(config.sliding_window, own or config.sliding_window),
            "num_global_layers": 0,
        }
    if config.attention_sinks and (spec.sliding_window or config.sliding_window):
        changes["attention_sinks"] = config.attention_sinks
    return dataclasses.replace(spec, **changes) if changes else spec


CONFIG_FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(EngineConfig)}


def name_problems(names: Iterable[str], known: Iterable[str] | None = None, what: str = "field") -> list[str]:
    """A sentence for each name that is not known, with the nearest one that is.

    `known`: by default the fields of EngineConfig.
    """
    known = list(CONFIG_FIELDS if known is None else known)
    problems = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(
                f"unknown {what} {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}")
            )
    return problems


def check_names(changes: dict[str, Any]) -> dict[str, Any]:
    """Raises ConfigError if keys are no fields of EngineConfig; it names all of them."""
    if problems := name_problems(changes):
        raise ConfigError("\n".join(problems))
    return changes


def check_value(name: str, value: Any) -> None:
    """Raises ConfigError if field `name` cannot have this value, whatever the others are."""
    _check_field(CONFIG_FIELDS[name], value)


def parse_value(name: str, text: str) -> Any:
    """The value of field `name` written as `text` (command line, URL).

    Raises ConfigError naming the field and its type.

    >>> parse_value("max_num_seqs", "16"), parse_value("enable_prefix_caching", "off"), parse_value("max_model_len", "")
    (16, False, None)
    """
    check_names({name: text})
    kind = str(CONFIG_FIELDS[name].type)
    low = text.strip().lower()
    if low in ("", "none", "auto") and "None" in kind:
        return None
    try:
        if "bool" in kind:
            if low in ("1", "true", "yes", "on"):
                return True
            if low in ("0", "false", "no", "off"):
                return False
            raise ValueError
        if "int" in kind:
            return int(text)
        if "float" in kind:
            return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be {kind.replace(' | None', '')}, got {shown(text)}") from None
    return text


def _check_field(f: dataclasses.Field[Any], value: Any) -> None:
    kind = str(f.type)
    meta = f.metadata
    if value is None:
        if "None" in kind:
            return
        raise ConfigError(f"{f.name} must be {kind}, got None")
    if "bool" in kind:
        if not isinstance(value, bool):
            raise ConfigError(f"{f.name} must be true or false, got {shown(value)}")
        return
    if "int" in kind or "float" in kind:
        if isinstance(value, bool) or not isinstance(value, int if "int" in kind else (int, float)):
            raise ConfigError(
                f"{f.name} must be {'a whole number' if 'int' in kind else 'a number'}, got {shown(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{f.name} must be finite, got {shown(value)}")
        if meta["min"] is not None and value < meta["min"]:
            raise ConfigError(f"{f.name} is {shown(value)}, the least is {meta['min']}")
        if meta["max"] is not None and value > meta["max"]:
            raise ConfigError(f"{f.name} is {shown(value)}, the most is {meta['max']}")
        return
    if not isinstance(value, str):
        raise ConfigError(f"{f.name} must be text, got {shown(value)}")
    if meta["choices"] and value not in meta["choices"]:
        near = difflib.get_close_matches(value, meta["choices"], n=1)
        raise ConfigError(
            f"{f.name} is {shown(value)}, it must be one of {', '.join(meta['choices'])}"
            + (f" (did you mean {near[0]!r}?)" if near else "")
        )
