"""LoGRA: reinforcement learning of language models with low-rank gradient sketches.

A dense gradient G and two Adam moments take three times the memory of the weights.  LoGRA
(arXiv 2610.06647) keeps none of them.  For each linear layer, with N tokens,

    Y  = X W^T                           the layer, W [d_out, d_in]
    G  = dY^T X                          its gradient, never formed
    A  = +-1/sqrt(r)                     random signs [r, d_in], E[A^T A] = I, new each update
    S  = G A^T = dY^T (X A^T)            the sketch [d_out, r]: all that backward keeps
    v  = b2 v + (1 - b2) mean_j S_ij^2   RowAdam: one second moment a row
    D  = S_i / (sqrt(v_i) + eps)         each layer scaled back to its own norm ||S||
    U  = D * update_ratio * ||W|| / ||D A||          all layers together
    z' = d/da logits(W - a U A)          one forward-mode pass, at a = 0
    KL = mean over tokens of Var_p(z' / T) / 2       predicted for a step of 1
    alpha = min(alpha_max, sqrt(budget / KL))        as far as the KL budget lets it go
    F  = bfloat16(alpha U)
    W  = W - F A                         trainer and generator alike: the wire carries F

    W [d_out, d_in] weight           X [N, d_in] input        Y [N, d_out] output
    A [r, d_in] projection           S D U F [d_out, r]       v [d_out] second moments
    alpha step, T temperature        G answers a prompt (group size; G is also the gradient)

    sketches = attach_sketches(model, rank=256)             # what is trained, what is frozen
    optimizer = LoGRA(sketches, update_ratio=6e-5)
    control = KLControl(budget=2e-4)
    loss.backward()                                         # a SUM over tokens
    optimizer.propose(tokens)                               # S -> U
    curve, _ = predict_kl(model, sketches, probe)           # predicted KL of that U
    factors = optimizer.step(control.scale(curve, update))  # W -= F A, and a new A

Each section uses only what stands above it.  For an evening: 1, 3, 4 up to LoGRA, 5, 6, 8; section
2 and what crosses between ranks in 7 are for many GPUs.  vLLM is needed in section 7 alone, and
outside it only the probe of 5 touches transformers.
"""

import contextlib
import functools
import hashlib
import math
import os
import pickle
import sys
import weakref
from bisect import bisect_left
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

# ------------------------------------------------------------------------------------------------
# 1  Projection: A is a pure function of (seed, update // refresh, key); it is never sent or saved
# ------------------------------------------------------------------------------------------------

# The layers of one width share one A; the key is that width.  Each sketch stays unbiased, since
# E[A^T A] = I holds layer by layer, and a whole model needs two or three matrices, not hundreds.


def stable_seed(*parts) -> int:
    """A 63-bit seed from anything printable: the same on every machine, rank and Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def logical_shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words >> bits, with zeros from the left."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


def random_words(seed: int, n: int, device="cpu") -> torch.Tensor:
    """n random 64-bit words [n], word i = splitmix64(seed, i) (Steele et al., OOPSLA 2014).

    Integer arithmetic wraps alike everywhere, so the bits depend on no device and no version of
    torch.  Its words are signed, hence the 2^64 taken off the published constants.
    """
    x = torch.arange(1, n + 1, device=device) * (0x9E3779B97F4A7C15 - 2**64) + seed
    x = (x ^ logical_shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ logical_shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ logical_shift(x, 31)


def random_uniform(seed: int, n: int) -> torch.Tensor:
    """n numbers in (0, 1), float64 [n]: the top 52 bits of each word, never 0 and never 1."""
    return (logical_shift(random_words(seed, n), 12).double() + 0.5) * 2.0**-52


def make_projection(rank, d_in, seed, kind="rademacher", device="cpu", dtype=torch.float32):
    """A [rank, d_in] with E[A^T A] = I: signs +-1/sqrt(rank), or N(0, 1/rank).

    64 signs are drawn as one word.  "identity" makes S the dense gradient, if rank >= d_in: the
    control for what sketching costs.  Raises ValueError on another kind.
    """
    n = rank * d_in
    if kind == "identity":
        return torch.eye(rank, d_in, device=device, dtype=dtype)  # the columns beyond d_in are 0
    if kind == "rademacher":
        octets = random_words(seed, (n + 63) // 64, device).view(torch.uint8)  # [n / 8]
        bits = (octets[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
        A = bits.flatten()[:n].to(dtype).mul_(2).sub_(1)  # exact in every dtype: -1 or +1
    elif kind == "gaussian":  # drawn on the CPU in float64: erfinv is not the same everywhere
        A = (torch.erfinv(2 * random_uniform(seed, n) - 1) * math.sqrt(2)).to(device, dtype)
    else:
        raise ValueError(f"projection must be rademacher, gaussian or identity, not {kind!r}")
    return A.mul_(rank**-0.5).view(rank, d_in)


def draw_projections(widths, update, like, rank, seed, kind, refresh) -> dict:
    """{d_in: A [rank, d_in]} of one update, on the device and in the dtype of the tensor `like`.
    refresh: updates that share an A; 0: it is never redrawn."""
    key = ("projection", seed, update // refresh if refresh else 0)
    seeds = {d_in: stable_seed(*key, f"in_features={d_in}") for d_in in sorted({*widths})}
    options = (kind, like.device, like.dtype)
    return {d_in: make_projection(rank, d_in, seed, *options) for d_in, seed in seeds.items()}


def subtract_factor(W: torch.Tensor, factor: torch.Tensor, A: torch.Tensor, share=1.0, ranks=1):
    """W <- W - bfloat16(share F) A in place: what trainer and generator must do alike, to the bit.

    W [d_out, d_in] float32, F [d_out, r] bfloat16, A [r, d_in].  share: of the step; below 0 it is
    taken back.  ranks: the trainer's; the product is made in the blocks of rows that each of them
    holds, since one of another shape may round otherwise.
    """
    factor = (factor.float() * share).to(torch.bfloat16)
    for rows, part in zip(W.chunk(ranks), factor.chunk(ranks), strict=True):
        rows.addmm_(part.to(W.dtype), A.to(W.dtype), alpha=-1)


# ------------------------------------------------------------------------------------------------
# 2  Sketch: backward adds dY^T (X A^T) to S; weight.grad never exists
# ------------------------------------------------------------------------------------------------


def decoder_layers(model) -> torch.nn.ModuleList:
    """The stack of decoder layers: the largest ModuleList.  Raises ValueError if there is none."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers")
    return max(stacks, key=lambda stack: sum(p.numel() for p in stack.parameters()))


class SketchLinear(torch.autograd.Function):
    """Y = X W^T + b whose backward adds dY^T P, P = X A^T, to S instead of forming dY^T X.

    Forward keeps P [N, r], not X [N, d_in].  S sums over micro-batches in its own dtype, float32.
    With several ranks it has the rows that this rank owns, summed over all of them.
    """

    @staticmethod
    def forward(ctx, X, W, bias, P, S):
        ctx.save_for_backward(W, P)
        ctx.S = S
        return F.linear(X, W, bias)  # [..., d_out]

    @staticmethod
    def backward(ctx, dY):
        W, P = ctx.saved_tensors
        dY_rows, P = (M.flatten(0, -2).to(ctx.S.dtype) for M in (dY, P))  # [N, d_out], [N, r]
        if world() > 1:  # so that no rank ever has all rows of all layers
            ctx.S.add_(scatter_rows(dY_rows.T @ P))
        else:
            ctx.S.addmm_(dY_rows.T, P)
        del dY_rows, P
        dX = dY @ W.to(dY.dtype) if ctx.needs_input_grad[0] else None
        return dX, None, None, None, None


def dual_linear(X, W, bias, A, U):
    """Y = X W^T + b with its derivative along W(a) = W - a U A at a = 0.

    Y' = X' W^T - (X A^T) U^T.  X may be a dual tensor, and Y is one.
    """
    X, dX = forward_ad.unpack_dual(X)
    # Primal and tangent share one product with W
    Y, dY = (F.linear(X, W), 0) if dX is None else F.linear(torch.stack([X, dX]), W).unbind(0)
    dY = dY - (torch.matmul(X, A.T.to(X.dtype)) @ U.T.to(Y.dtype)).to(Y.dtype)
    return forward_ad.make_dual(Y if bias is None else Y + bias.to(Y.dtype), dY)


def layer_path(name: str) -> str:
    """The plain path of a module: checkpoint, FSDP and compile wrappers leave no trace in it."""
    wrappers = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def find_targets(model, targets=()) -> dict:
    """{path: nn.Linear} of the layers to train: every linear layer inside the decoder layers.

    `targets` narrows them by the last part of the name, such as ("q_proj", "v_proj").  Raises
    ValueError if a name matches nothing or nothing is left, if the model has adapters or
    tensor-parallel weights, or, without targets, if a tenth of its weights would stay behind.
    """
    if hasattr(model, "peft_config"):
        raise ValueError(f"{type(model).__name__} has adapters attached; merge them first")
    if getattr(model, "tp_size", None):
        raise ValueError(f"the weights of {type(model).__name__} are split by tensor parallelism")
    stack = decoder_layers(model)
    where = next(name for name, module in model.named_modules() if module is stack)
    inside = {layer_path(f"{where}.{name}".strip(".")): m for name, m in stack.named_modules()}
    found = {path: m for path, m in inside.items() if isinstance(m, torch.nn.Linear)}
    # Matrices that are no nn.Linear: the experts of a mixture, the Conv1D of GPT-2
    matrices = {name: p for name, p in stack.named_parameters() if p.ndim > 1}
    linear = {id(module.weight) for module in found.values()}
    others = {name: p.numel() for name, p in matrices.items() if id(p) not in linear}
    share = sum(others.values()) / max(sum(p.numel() for p in matrices.values()), 1)
    if share > 0.1 and not targets:
        those = f"{share:.0%} of the weights, such as {max(others, key=others.get)},"
        raise ValueError(f"{those} are in no nn.Linear and would stay frozen; name what to train")
    names = sorted({path.rpartition(".")[2] for path in found})
    if missing := sorted(set(targets) - set(names)):
        raise ValueError(f"no linear layer is called {', '.join(missing)}; there are {names}")
    found = {path: m for path, m in found.items() if path.rpartition(".")[2] in (targets or names)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no nn.Linear in its decoder layers")
    return found


def freeze_all_but(model, layers: dict) -> str:
    """Only the weights of `layers` are trained, not even their biases.  Returns a summary line."""
    model.requires_grad_(False)
    weights = [module.weight.requires_grad_(True) for module in layers.values()]
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    biases = [p for name, p in frozen.items() if name.endswith("bias")]
    groups = (weights, frozen.values(), biases)
    total, fixed, of_biases = (sum(p.numel() for p in group) for group in groups)
    return (
        f"{len(layers)} linear layers ({total:,} weights) are trained; {len(frozen)} tensors"
        f" ({fixed:,}) are frozen, among them {len(biases)} biases ({of_biases:,})"
    )


class Sketches:
    """The sketches of all target layers in one flat buffer, and the projections A they share.

    buffer [own rows, r]    S while backward runs, U from propose() to step(), of the rows that this
                            rank owns; layers that share an A are neighbours
    rows {path: view}       the owned rows of each layer in it
    A {d_in: [r, d_in]}     the projections of the current update
    """

    def __init__(self, layers: dict, rank, seed=0, kind="rademacher", refresh=1):
        if rank < 1:
            raise ValueError(f"rank must be at least 1, not {rank}")
        for path, module in layers.items():
            if module.weight.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{path} is {module.weight.dtype}: small steps need float32")
            if "forward" in vars(module):
                raise ValueError(f"{path} has a forward of its own; was it attached already?")
        self.layers = dict(sorted(layers.items(), key=lambda item: item[1].in_features))
        self.settings = {"rank": rank, "seed": seed, "kind": kind, "refresh": refresh}
        heights = [module.out_features for module in self.layers.values()]
        self.sizes = [len(range(d_out)[owned(d_out)]) for d_out in heights]  # sharded yet or not
        weight = local(next(iter(layers.values())).weight)
        self.buffer = weight.new_zeros(sum(self.sizes), rank)
        self.rows = dict(zip(self.layers, self.buffer.split(self.sizes), strict=True))
        self.probing = self.proposed = False
        self.redraw(0)
        for path, module in self.layers.items():
            module.forward = functools.partial(self.forward, path, module)

    def forward(self, path, module, X):
        """What a target layer computes, by what is asked: value, value and sketch, or tangent."""
        A, W, bias, rows = self.A[module.in_features], module.weight, module.bias, self.rows[path]
        if self.probing:
            return dual_linear(X, W, bias, A, gather_rows(rows, module.out_features))
        if not torch.is_grad_enabled():
            return F.linear(X, W, bias)
        if self.proposed:
            raise RuntimeError("backward between propose() and step() would add S to U")
        # q, k, v have one input, and so do gate and up: X A^T is made once for them.  A weak
        # reference lets X go when the model is done with it.
        last_X, version, P = self.last
        if last_X() is not X or version != X._version:
            P = X.detach() @ A.T.to(X.dtype)  # [..., r]
            self.last = (weakref.ref(X), X._version, P)
        return SketchLinear.apply(X, W, bias, P, rows)

    def redraw(self, update: int) -> None:
        """The projections of one update, from its number alone."""
        widths = (module.in_features for module in self.layers.values())
        self.A = draw_projections(widths, update, self.buffer, **self.settings)
        self.last = (lambda: None, 0, None)  # no X A^T of an A that is gone

    def by_width(self, flat):
        """Pairs (d_in, its layers' rows of `flat`, a tensor with the rows of the buffer)."""
        counts = dict.fromkeys(self.A, 0)
        for module, size in zip(self.layers.values(), self.sizes, strict=True):
            counts[module.in_features] += size
        return zip(counts, flat.split([*counts.values()]), strict=True)

    def detach(self) -> None:
        """The model is as it was before attach_sketches, but for what was learned."""
        for module in self.layers.values():
            del module.forward
        for parameter, trained in self.trained_before:
            parameter.requires_grad_(trained)


def attach_sketches(model, rank, targets=(), seed=0, kind="rademacher", refresh=1) -> Sketches:
    """Replace the weight gradients of the target layers by sketches; freeze all else, and say so.

    Of the modules only forward changes: state_dict() keys stay.  Raises ValueError as find_targets
    does, and if rank < 1, a target is not in float32 or has a forward of its own already.
    """
    layers = find_targets(model, targets)
    sketches = Sketches(layers, rank, seed, kind, refresh)
    sketches.trained_before = [(p, p.requires_grad) for p in model.parameters()]
    summary = freeze_all_but(model, layers)
    if my_rank() == 0:
        print(f"rank {rank}: {summary}", file=sys.stderr)
    return sketches


# ------------------------------------------------------------------------------------------------
# 4  RowAdam and other rules: from the sketch S to the proposal U
# ------------------------------------------------------------------------------------------------

# No first moment: the next A spans another subspace, and a moment kept in the coordinates of an
# A that is gone means nothing there.  The scale of a row survives the redraw.


def row_adam(S, v, sizes, beta2=0.95, eps=1e-8, keep_layer_norm=True):
    """S [sum d_out, r] becomes D in place; v [sum d_out] is updated in place.

        v_i <- b2 v_i + (1 - b2) mean_j S_ij^2
        s_i  = 1 / (sqrt(v_i) + eps * mean_i sqrt(v_i)),   D = s_i S_ij
        s    = s / sqrt(mean(s^2)),   D <- D * ||S||_F / ||D||_F      if keep_layer_norm

    sizes: the rows of each layer in S; means and norms are each layer's own, over all ranks.
    Adam's bias correction 1 / (1 - b2^t) is one factor for all layers and cancels in the global
    size, which the caller sets.  A row that never had a gradient gets s = 0.  The norms of D follow
    from those of the rows: S is read once and written once.
    """

    def layer_sums(*columns):  # the columns of rows [n] summed over each layer's rows, on all ranks
        layers = torch.stack(columns, 1).split(sizes)  # [own d_out, columns] each
        sums = rank_sum(torch.stack([layer.sum(0) for layer in layers]))  # [layers, columns]
        return sums.repeat_interleave(counts, 0).unbind(1)  # back to rows

    counts, tiny = torch.tensor(sizes, device=S.device), torch.finfo(S.dtype).tiny
    squares = torch.linalg.vector_norm(S, dim=1).square_()  # [own rows], = r mean_j S_ij^2
    v.mul_(beta2).add_(squares, alpha=(1 - beta2) / S.shape[1])
    root = v.sqrt()
    n, sum_root, sum_squares = layer_sums(torch.ones_like(v), root, squares)
    s = torch.where(root > 0, 1 / (root + eps * sum_root / n), 0)
    if keep_layer_norm:  # else the size of S is forgotten, as in Adam, and s is not normalised
        (sum_s,) = layer_sums(s.square())
        s = s / (sum_s / n).sqrt().clamp_min(tiny)
        (D_squares,) = layer_sums(s.square() * squares)
        s = s * sum_squares.sqrt() / D_squares.sqrt().clamp_min(tiny)
    return S.mul_(s[:, None])


def newton_schulz(S, sizes, scales, steps=5, batch=32):
    """Each layer's S [d_out, r] becomes, in place, `scales` times about its polar factor: singular
    values above 2e-3 of ||S||_F come to between .68 and 1.21 (Muon, Jordan et al. 2024).

        X = S / ||S||_F,   five times:  Q = X^T X,   X <- X (3.4445 - 4.775 Q + 2.0315 Q^2)

    All factors are polynomials of one Q, so only r x r matrices are iterated: P is the product of
    the brackets M, and Q <- Q M^2.  S is read for the first Q, summed over ranks, and for S P.
    sizes: the owned rows of each layer, of which `batch` are worked on at a time.  In S's own
    precision: a Q rounded to bfloat16 has eigenvalues below zero, and they would explode.
    """
    layers = S.split(sizes)
    for i in range(0, len(layers), batch):
        Q = rank_sum(torch.stack([X.T @ X for X in layers[i : i + batch]]))  # [layers, r, r]
        norm = Q.diagonal(dim1=1, dim2=2).sum(1).sqrt().clamp_min(torch.finfo(S.dtype).tiny ** 0.5)
        identity = torch.eye(S.shape[1], dtype=S.dtype, device=S.device)
        Q = Q / norm.square()[:, None, None]
        P = identity * (norm.new_tensor(scales[i : i + batch]) / norm)[:, None, None]
        for step in range(steps):
            M = 3.4445 * identity - 4.775 * Q + 2.0315 * Q @ Q
            P, Q = P @ M, Q @ M @ M if step < steps - 1 else None
        for X, P_l in zip(layers[i : i + batch], P, strict=True):
            X.copy_(X @ P_l)
    return S


def sketch_adam(S, m, v, beta1=0.9, beta2=0.95):
    """Adam on the entries of S, in a basis that is kept; S becomes D, m and v [as S] are updated.

    D = m / sqrt(v): Adam's bias corrections cancel in the global size, which the caller sets.
    """
    m.lerp_(S, 1 - beta1)
    v.mul_(beta2).addcmul_(S, S, value=1 - beta2)
    return S.copy_(m).div_(v.sqrt().clamp_min_(torch.finfo(S.dtype).tiny))


def projected_norm_squared(D, A) -> torch.Tensor:
    """||D A||_F^2 = <D^T D, A A^T>: two r x r matrices in place of a d_out x d_in one."""
    return ((D.T @ D).double() * (A @ A.T).double()).sum().clamp_min(0)


def finite_norm(matrices, what: str) -> float:
    """||M||_F of all matrices of all ranks, row by row, then in float64: no large temporary.
    Raises FloatingPointError, naming `what`, unless it is finite."""
    rows = torch.cat([torch.linalg.vector_norm(M, dim=1) for M in matrices])
    norm = rank_sum(rows.double().square().sum()).sqrt().item()
    if not math.isfinite(norm):
        raise FloatingPointError(f"{what} is not finite")
    return norm


class LoGRA(torch.optim.Optimizer):
    """A rule on sketches, whose step length is left to the caller (arXiv 2610.06647).

    rule: from S to the direction D.  row_adam, the paper's; sketch_muon, newton_schulz with scales
    sqrt(max(1, d_out / d_in)), no state; sketch_adam, which needs an A kept for many updates;
    sketch_sgd, D = S; any other is a ValueError.  The size of the step is the same for all.
    update_ratio: ||U A|| / ||W|| over all layers, before alpha (dimensionless; the paper: 6e-5).
    keep_layer_norm: whether each layer keeps the norm of its own sketch (row_adam); else D is that
    of Adam with one v a row, about alike for all layers.
    """

    def __init__(self, sketches, update_ratio=6e-5, keep_layer_norm=True, rule="row_adam"):
        S = sketches.buffer
        state = {"row_adam": {"v": S[:, 0]}, "sketch_adam": {"m": S, "v": S}}
        state |= {"sketch_muon": {}, "sketch_sgd": {}}
        if rule not in state:
            raise ValueError(f"there is no rule {rule!r}")
        weights = [module.weight for module in sketches.layers.values()]
        super().__init__(weights, {"update_ratio": update_ratio})
        self.sketches, self.layers, self.rule = sketches, sketches.layers, rule
        self.moments = {name: torch.zeros_like(M) for name, M in state[rule].items()}
        self.update, self.sketch_norm, self.keep_layer_norm = 0, 0.0, keep_layer_norm
        check_same(sketches.A.values())

    @torch.no_grad()
    def propose(self, tokens: int) -> None:
        """S -> U in the buffer.  The loss was a sum over tokens, of all micro-batches and ranks;
        here is the one division by their number.

        Raises FloatingPointError if the sketch is not finite (no weight has moved then), and
        RuntimeError if the buffer holds a proposal already.
        """
        sketches, layers = self.sketches, self.sketches.layers.values()
        if sketches.proposed:
            raise RuntimeError("propose() twice: the buffer holds U, not S; step() comes between")
        S = sketches.buffer.div_(tokens)
        self.sketch_norm = finite_norm([S], f"the sketch of update {self.update}")
        if self.rule == "row_adam":
            row_adam(S, self.moments["v"], sketches.sizes, keep_layer_norm=self.keep_layer_norm)
            if not self.keep_layer_norm:  # columns that A = I leaves 0 count in no mean
                for d_in, D in sketches.by_width(S):
                    D.mul_(sketches.A[d_in].any(1).double().mean().sqrt())
        if self.rule == "sketch_muon":
            scales = [max(1, m.out_features / m.in_features) ** 0.5 for m in layers]
            newton_schulz(S, sketches.sizes, scales)
        if self.rule == "sketch_adam":
            sketch_adam(S, **self.moments)
        D_norm = sum(projected_norm_squared(D, sketches.A[d]) for d, D in sketches.by_width(S))
        D_norm = rank_sum(D_norm).sqrt().item()
        W_norm = finite_norm([local(m.weight) for m in layers], "the norm of the weights")
        S.mul_(self.param_groups[0]["update_ratio"] * W_norm / D_norm if D_norm else 0.0)
        sketches.proposed = True

    @torch.no_grad()
    def step(self, alpha: float = 1.0) -> dict:
        """W <- W - F A with F = bfloat16(alpha U), then S = 0 and a new A.  Returns {path: F
        [d_out, r]}, whole on every rank.  Raises RuntimeError unless propose() came first."""
        sketches, old, factors = self.sketches, self.sketches.A, {}
        if not sketches.proposed:
            raise RuntimeError("step() before propose(): the buffer holds S, not U")
        parts = sketches.buffer.mul_(alpha).to(torch.bfloat16).split(sketches.sizes)
        for (path, module), part in zip(sketches.layers.items(), parts, strict=True):
            subtract_factor(local(module.weight), part, old[module.in_features])
            factors[path] = gather_rows(part, module.out_features)
        self.update += 1
        self.zero_grad()
        sketches.redraw(self.update)
        if "m" in self.moments:  # G A^T in the new basis, by the estimate that G = m A
            for d_in, m in sketches.by_width(self.moments["m"]):
                if not torch.equal(old[d_in], A := sketches.A[d_in]):
                    m.copy_(m @ (old[d_in] @ A.T))
        return factors

    @torch.no_grad()
    def take_back(self, factors: dict, back: float) -> None:
        """W <- W + bfloat16(back F) A, for the factors that step() has just returned."""
        draw = (self.sketches.A, self.update - 1, self.sketches.buffer)  # step() has drawn the next
        A = draw_projections(*draw, **self.sketches.settings)
        for path, module in self.sketches.layers.items():
            part = factors[path][owned(module.out_features)]
            subtract_factor(local(module.weight), part, A[module.in_features], -back)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what backward has added since the last step."""
        self.sketches.buffer.zero_()
        self.sketches.proposed = False

    def state_dict(self) -> dict:
        """Tensors and plain numbers; moments whole, for any number of ranks.  All must call."""
        sketches, moments = self.sketches, {}
        for name, rows in self.moments.items():
            parts = zip(rows.split(sketches.sizes), sketches.layers.values(), strict=True)
            moments[name] = torch.cat([gather_rows(part, m.out_features) for part, m in parts])
        settings = {"rule": self.rule, **sketches.settings, "layers": list(sketches.layers)}
        return {"update": self.update, **moments, "settings": settings}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError if the state is of another rule, sketch (settings) or set of layers."""
        for key, value in self.state_dict()["settings"].items():
            if (was := state["settings"].get(key)) != value:
                was, value = str(was)[:60], str(value)[:60]  # the layers are many
                raise ValueError(f"the checkpoint has {key} {was}, this run has {key} {value}")
        self.update = state["update"]
        for name, rows in self.moments.items():
            parts = state[name].split([m.out_features for m in self.sketches.layers.values()])
            rows.copy_(torch.cat([part[owned(len(part))] for part in parts]))
        self.zero_grad()
        self.sketches.redraw(self.update)
        check_same(self.sketches.A.values())


# ------------------------------------------------------------------------------------------------
# 4  The policy on its answers, and the GRPO objective
# ------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One generated answer.  `row` and `index` belong to the caller, the rest is filled in turn."""

    prompt: list  # token ids
    completion: list  # token ids, the end-of-sequence token included
    logprobs: list  # of the completion, as the engine sampled it
    finished: bool  # ended by itself, not cut at max_new_tokens
    row: dict = field(default_factory=dict)
    index: int = 0
    reward: float = 0.0
    advantage: float = 0.0
    old_logprobs: torch.Tensor | None = None  # the trainer's own, at the batch's first update


def compute_dtype(device, dtype: str):
    """A context: matrix products are made in `dtype`, weights stay float32, casts are not kept."""
    low = dtype == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, low, cache_enabled=False)


def micro_batches(samples, size: int) -> list:
    """Lists of at most `size` samples, of like lengths so that little is padding."""
    ordered = sorted(samples, key=lambda s: len(s.prompt) + len(s.completion))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def response_hidden(model, samples, device):
    """Final hidden states that predict the generated tokens, [n, H], and those tokens, [n].

    Rows are padded on the right: a causal model then needs no mask.  What is prompt, answer or
    padding is known by position; no token's value decides what is in the loss.
    """
    rows = [torch.tensor(s.prompt + s.completion) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # [B, L]
    generated = torch.zeros_like(ids, dtype=torch.bool)
    for i, s in enumerate(samples):
        generated[i, len(s.prompt) : len(s.prompt) + len(s.completion)] = True
    # Not model.base_model(...): an engine that serves by transformers' own class rewrites its call
    output = torch.nn.Module.__call__(model.base_model, input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state  # [B, L, H]
    return hidden[:, :-1][generated[:, 1:]], ids[generated]  # position t - 1 predicts token t


def policy_head(model):
    """The function hidden [n, H] -> logits [n, V], with what some families do after the product.
    A sharded head is gathered here, and kept as long as the function is; all ranks must call."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    W, bias = whole(head.weight), None if head.bias is None else whole(head.bias)
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2

    def logits(h):
        z = F.linear(h.to(W.dtype), W, bias) * scale
        return torch.tanh(z / cap) * cap if cap else z

    logits.chunk = max(1, 2**24 // len(W))  # as many positions as make 64 MiB of float32 logits
    return logits


def group_advantages(rewards: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """Advantages [P, G] of the G answers to each of P prompts: (reward - mean) / std of the group
    (GRPO 2402.03300, 4.1), or without the std (Dr. GRPO 2503.20783).  Equal rewards get 0."""
    rewards = rewards.double()
    centred = rewards - rewards.mean(1, keepdim=True)
    std = rewards.std(1, correction=0, keepdim=True)
    alive = std > 1e-9 * rewards.abs().amax(1, keepdim=True)
    return torch.where(alive, centred / std if divide_by_std else centred, 0.0)


def running_mean_advantages(rewards: torch.Tensor, baseline: float | None, weight=0.1):
    """Advantages [P, G] = reward - baseline, where G may be 1, and the next baseline (the paper's).

    baseline: a running mean of the steps before this one, over all ranks, so that it knows nothing
    of the answers it judges (a choice of ours).  None: the first step is judged by its own mean.
    """
    rewards = rewards.double()
    (mean,) = rank_mean(rewards.sum()[None], rewards.numel())
    baseline = mean if baseline is None else baseline
    centred = rewards - baseline
    signal = centred.abs() > 1e-9 * max(abs(baseline), rewards.abs().max())  # above rounding
    return torch.where(signal, centred, 0.0), baseline + weight * (mean - baseline)


def token_logprobs(hidden, head, ids, temperature, chunk=512):
    """log p(ids) [n] under softmax(head(hidden) / T), hidden [n, H].  `chunk` positions at a time,
    made again in backward: no [n, V] matrix ever exists."""

    def logprobs(h, i):
        z = head(h).float() / temperature  # [chunk, V]
        return z.gather(1, i[:, None]).squeeze(1) - z.logsumexp(1)

    pieces = zip(hidden.split(chunk), ids.split(chunk), strict=True)
    again = functools.partial(checkpoint, logprobs, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(h, i) for h, i in pieces])


def policy_loss(logp, old_logp, engine_logp, advantages, clip_low, clip_high):
    """The loss SUMMED over tokens; all arguments [n], one entry a generated token.

        ratio = exp(logp - old_logp)                       1 at the first update of a batch
        w     = min(exp(old_logp - engine_logp), 2)        truncated importance sampling
        loss  = -sum w min(ratio adv, clip(ratio, 1 - clip_low, 1 + clip_high) adv)

    Clipping with two bounds is DAPO's (2503.14476, 3.1); the sum over all tokens of the step, to
    be divided once by their number, its token-level loss (3.3).
    """
    ratio = (logp - old_logp).exp()
    weight = (old_logp - engine_logp).exp().clamp(max=2)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(weight * torch.minimum(ratio * advantages, clipped * advantages)).sum()


def backward(model, samples, config, first: bool):
    """Add the policy gradient of the samples, a SUM over their tokens, to S.

    At the first update of a batch the trainer's log-probs become the old ones of the ratio, and the
    mean of log p_engine - log p_trainer over tokens of finished samples that have an advantage is
    returned, else None.
    """
    device = model.device
    differences = [torch.empty(0, device=device)]
    for micro, counts in in_step(micro_batches(samples, config.micro_batch)):
        lengths = [len(s.completion) for s in micro]
        with compute_dtype(device, config.dtype):
            hidden, ids = response_hidden(model, micro, device)  # [n, H], [n]
            leaf = hidden.detach().requires_grad_()  # where the head's backward ends
            head = policy_head(model)
            logp = token_logprobs(leaf, head, ids, config.temperature, head.chunk)  # [n]
        engine = torch.tensor([x for s in micro for x in s.logprobs], device=device)
        if first and counts:
            for s, old in zip(micro, logp.detach().split(lengths), strict=True):
                s.old_logprobs = old
            heard = [s.finished and s.advantage != 0 for s in micro for _ in s.completion]
            differences.append((engine - logp.detach())[torch.tensor(heard, device=device)])
        old = torch.cat([s.old_logprobs for s in micro])
        advantages = torch.tensor([s.advantage for s in micro for _ in s.completion], device=device)
        advantages = advantages * counts  # a repeated batch adds nothing
        policy_loss(logp, old, engine, advantages, config.clip_low, config.clip_high).backward()
        del logp, head  # the head's weight and logits are gone before the layers run backward
        hidden.backward(leaf.grad)
    found = torch.cat(differences)
    mean = rank_mean(found.sum()[None], len(found))
    return mean[0] if mean else None


# ------------------------------------------------------------------------------------------------
# 5  Predicted KL: how far the policy will move, before it moves
# ------------------------------------------------------------------------------------------------


def cosine(ends, update: int, updates: int) -> float:
    """From the first of two ends, at update 0, to the last, at update `updates` - 1 and after."""
    first, last = ends
    done = min(update / max(updates - 1, 1), 1.0)
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2


def blockwise_attention(module, query, key, value, mask, scaling, softcap=None, **_):
    """Softmax attention in plain operations, so that forward-mode AD goes through it.

    query [B, heads, L, d], key and value [B, kv_heads, L, d], mask added to the scores, which exist
    for 128 queries at a time.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    blocks = []
    for start in range(0, query.shape[2], 128):
        scores = query[:, :, start : start + 128] @ key.transpose(2, 3) * scaling
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = scores + mask[:, :, start : start + 128]  # [B, heads, 128, L]
        blocks.append(scores.float().softmax(-1).to(value.dtype) @ value)
    return torch.cat(blocks, 2).transpose(1, 2).contiguous(), None  # [B, L, heads, d]


@contextlib.contextmanager
def probe_mode(model, sketches=None):
    """Inside, the model attends by blockwise_attention and its target layers carry the derivative
    along -U A; outside, also after an error, all is as before."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("logra_probe", blockwise_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("logra_probe", eager_mask)
    before, experts = model.config._attn_implementation, model.config._experts_implementation
    try:
        model.set_attn_implementation("logra_probe")
        if experts:  # of a mixture: their grouped product has no forward mode either
            model.set_experts_implementation("eager")
        if sketches:
            sketches.probing = True
        yield
    finally:
        model.set_attn_implementation(before)
        if experts:
            model.set_experts_implementation(experts)
        if sketches:
            sketches.probing = False


def probe_states(model, probe, micro_batch, sketches=None) -> list:
    """Final hidden states [n, H] of the probe by probe_mode, one tensor a micro-batch."""
    with probe_mode(model, sketches):
        passes = in_step(micro_batches(probe, micro_batch))
        hidden = [(response_hidden(model, batch, model.device)[0], n) for batch, n in passes]
    return [h for h, counts in hidden if counts]


def phi(x):
    """e^x - 1 - x, without the cancellation near 0: a series where |x| < 0.1."""
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return torch.where(x.abs() < 0.1, series, torch.expm1(x) - x)


def centred_change(z, dz, temperature):
    """p = softmax(z / T) and u = (z' - E_p z') / T, all [n, V]; z' is the derivative of z."""
    p = (z / temperature).softmax(-1)
    u = dz / temperature
    return p, u - (p * u).sum(-1, keepdim=True)


def quadratic_kl(z, dz, temperature):
    """KL of a step of 1 to second order, summed over positions: Var_p(z' / T) / 2."""
    p, u = centred_change(z, dz, temperature)
    return (p * u.square()).sum() / 2


def linearised_kl(z, dz, temperature, steps):
    """KL(p || softmax((z + a z') / T)) for each a in steps, summed over positions.

    The softmax is kept whole, only the network is linearised: log(1 + sum_v p_v phi(a u_v)), which
    cannot be negative; the naive form is worthless below 1e-6.
    """
    p, u = centred_change(z, dz, temperature)
    kls = [(p * phi((a * u).clamp(max=80))).sum(-1).log1p().sum() for a in steps]
    return torch.stack(kls)


def exact_kl(z, z_after, temperature):
    """KL(p || q) summed over positions, p = softmax(z / T) before a step, q after it."""
    log_p, log_q = (z / temperature).log_softmax(-1), (z_after / temperature).log_softmax(-1)
    return (log_p.exp() * phi((log_q - log_p).clamp(max=80))).sum()


@torch.no_grad()
def predict_kl(model, sketches, probe, temperature=1.0, steps=None, micro_batch=1, chunk=None):
    """The KL that W - a U A would cause, from one forward-mode pass over all layers at once.

    probe: Samples.  steps: None for the quadratic predictor, or the grid of a at which the KL of
    the linearised policy is taken.  sketches: None (a control) predicts nothing.
    Returns the curve (list of a, list of mean KL per generated token, in nats) and the probe's
    final hidden states, from which realised_kl tells later what came of it.
    Memory: `micro_batch` answers in the model, `chunk` positions in the head.
    """
    total = 0.0
    predictor = functools.partial(linearised_kl, steps=steps) if steps else quadratic_kl
    with forward_ad.dual_level():
        hidden = probe_states(model, probe, micro_batch, sketches)
        hidden_before = [forward_ad.unpack_dual(h).primal for h in hidden]
        if not sketches:
            return None, hidden_before
        head = policy_head(model)  # gathered when the layers are done
        for h in (part for states in hidden for part in states.split(chunk or head.chunk)):
            # A logit of 8 moves by less than bfloat16 can tell
            with compute_dtype(model.device, "float32"):
                pair = forward_ad.unpack_dual(head(h.float()).float())  # z, z' [chunk, V]
            total = total + predictor(*pair, temperature)
            del pair
    kls = rank_mean(total.view(-1), sum(map(len, hidden)))
    return (list(steps or [1.0]), kls), hidden_before


@torch.no_grad()
def realised_kl(model, probe, hidden_before, temperature=1.0, micro_batch=1, chunk=None) -> float:
    """KL(before || after), mean per generated token of the probe, by the same path as predict_kl.
    The head is frozen, so logits before the step are made again from its hidden states."""
    hidden_after = probe_states(model, probe, micro_batch)
    head, total = policy_head(model), 0.0  # gathered when the layers are done
    for pair in zip(hidden_before, hidden_after, strict=True):
        for hs in zip(*(h.split(chunk or head.chunk) for h in pair), strict=True):
            with compute_dtype(model.device, "float32"):
                z, z_after = (head(h.float()).float() for h in hs)
            total += exact_kl(z, z_after, temperature).item()
            del z, z_after
    return rank_mean(torch.tensor([total], dtype=torch.float64), sum(map(len, hidden_before)))[0]


def interpolate(x, xs, ys, slope):
    """y at x, linear in log x and log y between the points, y ~ x^slope beyond them."""
    i = bisect_left(xs, x)
    if 0 < i < len(xs):
        slope = math.log(ys[i] / ys[i - 1]) / math.log(xs[i] / xs[i - 1])
    i = max(i - 1, 0)
    return ys[i] * (x / xs[i]) ** slope


def kl_at(curve, alpha: float) -> float:
    """The predicted KL of a step of alpha; KL ~ alpha^2 beyond the points of the curve."""
    steps, kls = curve
    return interpolate(alpha, steps, kls, 2) if min(kls) > 0 and alpha > 0 else 0.0


class KLControl:
    """The KL budget of each update, and the step that spends it (the paper's values).

    budget -> final_budget: cosine over `updates` updates, both ends included; constant after.
    alpha_max bounds every step; with enabled=False each is 1.
    mismatch: how much trainer and engine differ before any step, an average of what observe() is
    told; it is taken off the budget, down to one half.
    baseline: of running_mean_advantages, kept here to be saved with the mismatch.
    """

    def __init__(self, budget=2e-4, final_budget=2e-5, updates=300, alpha_max=3.0, enabled=True):
        self.ends, self.updates, self.alpha_max = (budget, final_budget), updates, alpha_max
        self.enabled, self.mismatch, self.baseline = enabled, 0.0, None

    def budget(self, update: int) -> float:
        """The KL per token that update number `update` (from 0) may spend."""
        budget = cosine(self.ends, update, self.updates)
        return max(budget - self.mismatch, budget / 2)

    def observe(self, difference: float) -> None:
        """difference: mean of log p_engine - log p_trainer over tokens of finished answers."""
        self.mismatch = 0.7 * self.mismatch + 0.3 * max(0.0, difference)

    def scale(self, curve, update: int) -> float:
        """alpha = min(alpha_max, the step at which the predicted KL is the budget).

        The quadratic predictor's curve is one point, and then this is sqrt(budget / KL).
        Raises FloatingPointError if a prediction is negative or not finite.
        """
        steps, kls = curve
        if not all(0 <= kl < math.inf for kl in kls):
            raise FloatingPointError(f"the predicted KL of update {update} is {kls}")
        if not self.enabled or min(kls) == 0:  # without a KL nothing moves: any step will do
            return 1.0
        return min(self.alpha_max, interpolate(self.budget(update), kls, steps, 1 / 2))

    def excess(self, realised: float, update: int) -> float:
        """The share of a step to take back, 0 to .9, so that its realised KL is the budget.
        Raises FloatingPointError if the realised KL is not finite."""
        if not realised < math.inf:
            raise FloatingPointError(f"the realised KL of update {update} is {realised}")
        excess = realised > self.budget(update)
        return 1 - max(0.1, math.sqrt(self.budget(update) / realised)) if excess else 0.0

    def grid(self) -> list:
        """Sixteen steps for the linearised predictor, down to a thousandth of alpha_max."""
        return [self.alpha_max * 1024 ** (i / 15 - 1) for i in range(16)]


# ------------------------------------------------------------------------------------------------
# 6  Generation, sync and the loop
# ------------------------------------------------------------------------------------------------


class SketchSync:
    """What a vLLM worker learns of LoGRA: redraw A, subtract F A.

    vLLM mixes this class into its worker.  Engines in bfloat16 keep a float32 master of the target
    weights on the host and round it: a step of 6e-5 is far below half a unit of a bfloat16 and
    would vanish if it were subtracted in place.
    """

    def sync_weights(self, weights, settings: dict, ranks: int) -> None:
        """Take the trainer's float32 weights, pairs (path, W), whose rows so many ranks hold.
        Raises StopRun if a layer is not in this engine or has another shape."""
        self.logra_settings, self.logra_ranks, self.logra_layers = settings, ranks, {}
        modules = dict(self.get_model().named_modules())
        for path, W in weights:
            rows = engine_rows(self.get_model(), modules, path)
            if rows.shape != W.shape:
                raise StopRun(f"{path}: engine {list(rows.shape)}, trainer {list(W.shape)}")
            same = rows.dtype == W.dtype
            self.logra_layers[path] = rows, rows if same else W.detach().to("cpu", copy=True)
            rows.copy_(W)

    def sync_factors(self, factors: dict, update: int, back: float = 0.0) -> None:
        """W <- W - F A for {path: F}, A redrawn from the number of the update, then round.

        back: the share of the step that the trainer took back, in the same two products.
        Raises StopRun, before anything is written, unless every target layer would be.
        """
        layers, rank = self.logra_layers, self.logra_settings["rank"]
        wanted = {(path, (len(master), rank)) for path, (_, master) in layers.items()}
        if wrong := wanted ^ {(path, tuple(factor.shape)) for path, factor in factors.items()}:
            raise StopRun(f"factors and target layers differ: {sorted(wrong)}")
        widths = (master.shape[1] for _, master in layers.values())
        like = next(iter(factors.values())).float()  # the product is made where the trainer made it
        A = draw_projections(widths, update, like, **self.logra_settings)
        for path, factor in factors.items():
            rows, master = layers[path]
            W = master.to(like.device)
            for share in (1, -back) if back else (1,):
                subtract_factor(W, factor, A[W.shape[1]], share, self.logra_ranks)
            for copy in (master, rows):  # either may be W itself
                copy.copy_(W)

    def sync_read(self) -> dict:
        """{path: weights} as the engine computes with them."""
        return {path: rows.clone() for path, (rows, _) in self.logra_layers.items()}


def engine_rows(model, modules: dict, path: str) -> torch.Tensor:
    """The rows of vLLM's parameter for the layer `path`; q, k, v and gate, up are fused there.
    Raises StopRun if there is no such layer."""
    if path in modules:
        return modules[path].weight.data
    parent, _, leaf = path.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        module = modules.get(f"{parent}.{fused}")
        if leaf in parts and module is not None:
            sizes, i = module.output_partition_sizes, parts.index(leaf)
            return module.weight.data.narrow(0, sum(sizes[:i]), sizes[i])
    raise StopRun(f"the engine has no layer {path}: its weights would not be updated")


class VLLMGenerator:
    """The policy in a vLLM engine in this process.  Token ids in, token ids out, never text.

    generate(prompts, seeds, ...) -> Samples, one for each prompt and seed
    update(factors, update, back)    W -= F A in the engine, but for a share that is taken back
    load(weights)                    the target weights whole, pairs (path, W)

    path: of a Hugging Face directory.  max_length: tokens of prompt and answer.  settings: those of
    the Sketches.  kv_gib: of the key-value cache.  alone: no trainer shares the GPU.
    """

    def __init__(self, path, eos_ids, max_length, settings, dtype="float32", kv_gib=1, alone=False):
        on_cpu = not torch.cuda.is_available()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # tensors pass by reference
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if on_cpu:  # enforce_eager below leaves nothing for the compiler but 12 s of start-up
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        import vllm
        import vllm.model_executor.layers.utils as layer_utils
        from vllm.model_executor.models import registry

        # The registry looks at the model class in a second interpreter, which costs seconds and
        # meets the broken torchvision again.  Here it looks for itself.
        registry._run_in_subprocess = lambda function: function()
        if on_cpu:  # vLLM's kernel packs the weights away, and writing to them changes nothing
            layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
                layer, "cpu_linear", F.linear
            )
        self.vllm, self.eos_ids, self.settings = vllm, list(eos_ids), settings
        # A generation rank is alone on its GPU and need not make room for a trainer
        self.can_sleep, self.asleep = not (on_cpu or alone), False
        self.llm = vllm.LLM(
            str(path),
            dtype=dtype,
            seed=0,
            max_model_len=max_length,
            max_num_seqs=256,
            max_num_batched_tokens=max(8192, max_length),
            enable_chunked_prefill=not on_cpu,  # on a CPU, seeded requests cannot be split
            enforce_eager=on_cpu,
            kv_cache_memory_bytes=int(kv_gib * 2**30),
            gpu_memory_utilization=0.01,  # no share of the GPU is claimed beyond what is used
            enable_sleep_mode=self.can_sleep,
            logprobs_mode="processed_logprobs",  # after the temperature: what was sampled from
            generation_config="vllm",  # not the model's: every sampling field is set below
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            worker_extension_cls="logra.SketchSync",
            distributed_executor_backend="external_launcher" if world() > 1 else None,
        )

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0) -> list:
        """One Sample for each prompt (token ids) and seed; temperature 0 is greedy."""
        if not prompts:
            return []
        self.wake()
        fixed = dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), 0.0)
        fixed |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "temperature": temperature}
        fixed |= {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        fixed |= {"max_tokens": max_new_tokens, "stop_token_ids": self.eos_ids}
        params = [self.vllm.SamplingParams(seed=seed, **fixed) for seed in seeds]
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = [o.outputs[0] for o in self.llm.generate(requests, params, use_tqdm=False)]
        if self.can_sleep:  # level 1 keeps the weights, on the host; level 2 would lose them
            self.llm.sleep(level=1)
            self.asleep = True
        return [
            Sample(ids, list(o.token_ids), list(o.logprobs.logprobs), o.finish_reason == "stop")
            for ids, o in zip(prompts, outputs, strict=True)
        ]

    def wake(self) -> None:
        """Bring the weights to the GPU and forget all keys and values: those of other weights are
        wrong, and what was generated before must not matter, not even by a bit."""
        if self.asleep:
            self.llm.wake_up()
        self.asleep = False
        self.llm.reset_prefix_cache()

    def call(self, method: str, *args):
        """A method of SketchSync."""
        self.wake()
        return self.llm.collective_rpc(method, args=args)[0]

    def update(self, factors: dict, update: int, back: float = 0.0) -> None:
        self.call("sync_factors", factors, update, back)

    def load(self, weights, ranks=None) -> None:
        """Weights are gathered one at a time.  ranks: how many hold them (default: all)."""
        pairs = ((path, whole(W)) for path, W in weights)
        self.call("sync_weights", pairs, self.settings, ranks or world())

    def read(self) -> dict:
        """{path: weights} of the target layers as the engine has them."""
        return self.call("sync_read")


class HFGenerator:
    """The same methods on the trainer's own model, for machines without vLLM and as an oracle."""

    def __init__(self, model, eos_ids, dtype="float32"):
        self.model, self.dtype = model, dtype
        self.eos_ids = torch.tensor(list(eos_ids), device=model.device)

    @torch.no_grad()
    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0, rows=256) -> list:
        """As VLLMGenerator.generate, at most `rows` prompts at a time."""
        if len(prompts) > rows:
            cuts = [slice(i, i + rows) for i in range(0, len(prompts), rows)]
            options = (max_new_tokens, temperature, rows)
            return [s for cut in cuts for s in self.generate(prompts[cut], seeds[cut], *options)]
        device, length = self.model.device, max(map(len, prompts))
        # [B, L], padded on the left so that all rows grow at their end
        ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts]).to(device)
        draws = torch.stack([random_uniform(seed, max_new_tokens) for seed in seeds]).to(device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        tokens, logps, cache = [], [], None
        for t in range(max_new_tokens):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            options = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
            with compute_dtype(device, self.dtype):
                out = self.model(ids, **options, use_cache=True, logits_to_keep=1)
            cache, z = out.past_key_values, out.logits[:, -1].float()  # [B, V]
            logp = (z / (temperature or 1.0)).log_softmax(-1)
            # Inverse of the cumulative distribution: one uniform number a token, none shared.
            cumulative = logp.double().exp().cumsum(-1)
            ids = torch.searchsorted(cumulative, draws[:, t, None] * cumulative[:, -1:])  # [B, 1]
            ids = ids if temperature else z.argmax(-1, keepdim=True)
            tokens.append(ids)
            logps.append(logp.gather(1, ids))
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            done |= torch.isin(ids[:, 0], self.eos_ids)
            if done.all():
                break
        tokens, logps = torch.cat(tokens, 1), torch.cat(logps, 1).tolist()
        ends = torch.isin(tokens, self.eos_ids).tolist()
        samples = []
        for prompt, ids, logp, end in zip(prompts, tokens.tolist(), logps, ends, strict=True):
            n = end.index(True) + 1 if True in end else len(end)
            samples.append(Sample(prompt, ids[:n], logp[:n], True in end))
        return samples

    def update(self, *_) -> None:
        """Nothing to send: the weights are the trainer's."""

    load = update


def grpo(model, generator, optimizer, control, draw, reward, config, first_step=0, lap=id):
    """Yield one dict of metrics after every update: a step is one batch, updated once or more.

    draw(step) -> [(index, token ids, row)], the prompts of a step, of which each rank takes its
    share.  reward(sample) -> float.  config: the fields of train.Config that are read below.
    Everything random follows from (seed, step, prompt, sample) and the number of the update, so a
    run that starts again at first_step with the same weights and optimizer is the same run.
    lap(name) is called at the end of each phase of a step; by default it does nothing.
    """
    sketches = optimizer.sketches  # None: a control without them
    weights = {path: module.weight for path, module in optimizer.layers.items()}
    grid = control.grid() if config.kl_predictor == "linearised" else None
    compute = compute_dtype(model.device, config.dtype)  # a context, here around functions
    common = {"temperature": config.temperature, "micro_batch": config.micro_batch}
    predict = compute(functools.partial(predict_kl, model, sketches, steps=grid, **common))
    measure = compute(functools.partial(realised_kl, model, **common))

    for step in range(first_step, config.steps):
        # 1  G answers to each prompt, scored
        share = draw(step)[my_rank() :: world()]
        prompts = [(*prompt, g) for prompt in share for g in range(config.group_size)]
        seeds = [stable_seed("sample", config.seed, step, index, g) for index, _, _, g in prompts]
        ids = [ids for _, ids, _, _ in prompts]
        with together():
            samples = generator.generate(ids, seeds, config.max_new_tokens, config.temperature)
            for sample, (index, _, row, _) in zip(samples, prompts, strict=True):
                sample.index, sample.row = index, row
                sample.reward = reward(sample)
        lap("generate")

        # 2  who beat the group
        rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
        rewards = rewards.view(-1, config.group_size)  # [P, G]
        if config.advantage == "running_mean":
            advantages, control.baseline = running_mean_advantages(rewards, control.baseline)
        else:
            advantages = group_advantages(rewards, config.divide_by_std)
        covered = [s for s in samples if s.finished or not config.mask_truncated]  # by the loss
        for sample, advantage in zip(samples, advantages.flatten().tolist(), strict=True):
            sample.advantage = advantage * (sample.finished or not config.mask_truncated)
        alive = [s for s in samples if s.advantage]  # the others would add exactly 0
        sums = {
            "reward": rewards.sum().item(),
            "solved": (rewards > 0).sum().item(),
            "dead_groups": (advantages == 0).all(1).sum().item() * config.group_size,  # answers
            "length": sum(len(s.completion) for s in samples),
            "truncated": sum(not s.finished for s in samples),
        }
        counts = [len(samples), sum(len(s.completion) for s in covered), len(alive)]
        table = torch.tensor([*sums.values(), *counts], dtype=torch.float64)
        *totals, answers, denominator, signals = rank_sum(table).tolist()
        metrics = {name: x / answers for name, x in zip(sums, totals, strict=True)}
        if config.denominator == "constant":  # Dr. GRPO (2503.20783)
            denominator = answers * config.max_new_tokens
        probe = samples[:: config.group_size][: config.probe_responses]
        probe = [replace(s, completion=s.completion[:4096]) for s in probe]  # the paper's bound
        repeats = config.updates_per_batch if signals else 1

        for repeat in range(repeats):
            update, alpha, back, sent = optimizer.update, 0.0, 0.0, {}
            curve = realised = None
            if signals:
                # 3  adds dY^T (X A^T) to S
                difference = backward(model, alive or samples[:1], config, first=repeat == 0)
                if difference is not None:
                    control.observe(difference)
                lap("train")
                # 4  a direction U of size update_ratio
                optimizer.propose(denominator)
                lap("update")
                # 5  how far the KL budget lets it go
                check = config.kl_check_every and update % config.kl_check_every == 0
                check = check or config.verify_step
                if sketches or check:
                    curve, before = predict(probe)
                alpha = control.scale(curve, update) if curve else 1.0
                lap("probe")
                # 6  W -= F A, F = alpha U rounded; a new A
                factors = optimizer.step(alpha)
                lap("update")
                if check:
                    realised = measure(probe, before)
                if config.verify_step and (back := control.excess(realised, update)):
                    optimizer.take_back(factors, back)
                    alpha *= 1 - back
                    realised = measure(probe, before)
                lap("probe")
                # 7  send the factor and a number, not W
                sent = factors if config.sync == "factors" else weights
                if config.sync == "factors":
                    generator.update(factors, update, back)
                else:
                    generator.load(weights.items())
                lap("sync")

            yield {
                "step": step + 1,
                "update": optimizer.update,
                **metrics,  # means over the answers of all ranks
                "kl_predicted": kl_at(curve, alpha) if curve else None,  # nats a token
                "kl_realised": realised,
                "alpha": alpha,
                "budget": control.budget(update),
                "mismatch": control.mismatch,
                "update_ratio": alpha * optimizer.param_groups[0].get("update_ratio", 0.0),
                "grad_sketch_norm": optimizer.sketch_norm if signals else 0.0,
                "sync_bytes": sum(x.numel() * x.element_size() for x in sent.values()),
                "wire_bytes": getattr(generator, "crossed", 0),  # to and from generation ranks
                "tokens": answers * metrics["length"],
                "samples": samples,
                "last": repeat == repeats - 1,  # of this batch
            }
            generator.crossed = 0


# ------------------------------------------------------------------------------------------------
# 7  Many ranks: each holds some rows of every W; a single rank holds them all
# ------------------------------------------------------------------------------------------------


class StopRun(Exception):
    """A reason to stop that all ranks raise together, so that none waits for another."""


def world() -> int:
    """The number of training ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def my_rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def rank_sum(x: torch.Tensor) -> torch.Tensor:
    """x summed over all ranks, in place."""
    if world() > 1:
        dist.all_reduce(x)
    return x


def rank_mean(totals: torch.Tensor, count: int):
    """totals [k] / count, each summed over all ranks: a list of floats, None if nothing counts."""
    sums = torch.cat([totals.double(), totals.new_tensor([count], dtype=torch.float64)])
    *sums, count = rank_sum(sums).tolist()
    return [total / count for total in sums] if count else None


def from_all_ranks(x) -> list:
    """What every rank gives here, in their order: objects that can be pickled."""
    given = [x] * world()
    if world() > 1:
        dist.all_gather_object(given, x)
    return given


def in_step(batches: list) -> list:
    """Pairs (batch, whether it counts), as many on every rank: the ranks gather weights together,
    so one that has fewer batches repeats its last, and it counts for nothing."""
    n = len(batches)
    return [(batches[min(i, n - 1)], i < n) for i in range(max(from_all_ranks(n)))]


def raise_together(error) -> None:
    """Raise StopRun on every rank if any rank has an error; with one rank, that error."""
    if world() == 1 and error:
        raise error
    errors = from_all_ranks(error and (str(error) or repr(error)))
    for rank, words in enumerate(errors):
        if words:
            raise StopRun(words if len({*errors}) == 1 else f"rank {rank}: {words}") from error


@contextlib.contextmanager
def together():
    """An error inside is raised by all ranks, as raise_together does: none waits for another."""
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001, the other ranks must hear of it
        failure = error
    raise_together(failure)


def check_same(projections) -> None:
    """Raise StopRun unless all ranks have the same projections, to the bit."""
    if world() == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    for A in projections:
        digest.update(A.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests = from_all_ranks(digest.hexdigest())
    if len({*digests}) > 1:
        raise StopRun(f"projections differ between ranks: {digests}")


def owned(d_out: int) -> slice:
    """The rows of a [d_out, ...] matrix that this rank holds, by FSDP2's split.  All slices are
    equally long; those of the last ranks may pass the end of the matrix."""
    size = -(-d_out // world())
    return slice(my_rank() * size, (my_rank() + 1) * size)


def scatter_rows(S: torch.Tensor) -> torch.Tensor:
    """The owned rows of S [d_out, r] summed over ranks.  Shards may be uneven, or empty."""
    own, (d_out, r) = owned(len(S)), S.shape
    rows = S.new_empty(own.stop - own.start, r)
    padding = S.new_zeros(len(rows) * world() - d_out, r)
    dist.reduce_scatter_single(rows, torch.cat([S, padding]))
    return rows[: len(S[own])]


def gather_rows(rows: torch.Tensor, d_out: int) -> torch.Tensor:
    """The whole [d_out, ...] from the rows that each rank owns."""
    if world() == 1:
        return rows
    size, shape = owned(d_out).stop - owned(d_out).start, rows.shape[1:]
    padded = torch.cat([rows, rows.new_zeros(size - len(rows), *shape)])
    everything = rows.new_empty(size * world(), *shape)
    dist.all_gather_single(everything, padded)
    return everything[:d_out]


def local(W: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a weight: of a sharded one its shard, of a plain one all."""
    return W.detach().to_local() if isinstance(W, DTensor) else W.detach()


def whole(W: torch.Tensor) -> torch.Tensor:
    """A weight gathered from all ranks; all must call."""
    return W.detach().full_tensor() if isinstance(W, DTensor) else W.detach()


def gathered_embedding(module, dtype, ids):
    """[B, L, H] of ids [B, L] by the embedding's own forward (some scale it), its weight whole."""
    shard = module.weight
    module.weight = torch.nn.Parameter(whole(shard), requires_grad=False)
    try:
        return type(module).forward(module, ids).to(dtype)
    finally:
        module.weight = shard


def own_float32(module) -> None:
    """Copy the weights of a module, even float32 ones, out of the mapped file that they may lie in:
    a mapped tensor is not aligned, and the same product may round otherwise there."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):  # it is a shard already
            parameter.data = parameter.data.to(torch.float32, copy=True)


def shard_model(model, dtype, frozen_dtype=torch.float32) -> None:
    """FSDP2: this rank keeps its rows of every weight in float32 and computes in `dtype`.

    Each decoder layer is a group, gathered when its turn comes.  Embedding and head are frozen, so
    they are plain shards in frozen_dtype, the one they were stored in, made whole where they are
    used; FSDP would hold its flat buffer beside the copy.
    """
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (world(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    for module in (embedding,) if tied else (embedding, head):
        W = module.weight.detach().to(mesh.device_type, frozen_dtype)
        W = distribute_tensor(W, mesh, [Shard(0)], src_data_rank=None)  # each cuts its own rows
        module.weight = torch.nn.Parameter(W, requires_grad=False)
    if tied:
        head.weight = embedding.weight
    embedding.forward = functools.partial(gathered_embedding, embedding, dtype)
    for module in (*decoder_layers(model), model.base_model):
        own_float32(module)  # a layer at a time: the whole model is never in this rank's memory
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params={embedding.weight})
        module.set_gradient_divide_factor(1.0)  # sums, as everywhere
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def exchange(wire, message) -> tuple:
    """What each rank of the wire has to say, in their order, and the bytes of all that.

    Raises StopRun if one of them is gone.
    """
    mine = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(wire.size())]
    try:
        wire.allgather([sizes], [torch.tensor([len(mine)])]).wait()
        said = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in sizes]
        padded = F.pad(mine, (0, len(said[0]) - len(mine)))
        wire.allgather([said], [padded]).wait()
    except RuntimeError as error:
        raise StopRun("another rank is gone, or was silent for an hour") from error
    return [pickle.loads(x.numpy()) for x in said], sum(map(int, sizes))


class RemoteGenerator:
    """The same methods, and stop(), on a training rank whose engines are ranks of their own.

    All training ranks call together.  Raises StopRun, on all of them, if an engine fails.
    crossed: the bytes of what was said and sent since generate() was last called, each once.
    """

    def __init__(self, wire, *engine):
        self.wire, self.crossed = wire, 0
        self.ask("start", *engine)
        self.answers()

    def ask(self, *request) -> list:
        """What all ranks say while this one makes its request."""
        said, size = exchange(self.wire, request)
        self.crossed += size
        return said

    def answers(self) -> list:
        """What the engines have to say, in their order; words are those of an error."""
        replies = self.ask()[world() :]
        for rank, reply in enumerate(replies, world()):
            if isinstance(reply, str):
                raise StopRun(f"rank {rank}: {reply}")
        return [answer for reply in replies for answer in reply]

    def generate(self, prompts, seeds, max_new_tokens, temperature=1.0) -> list:
        """As VLLMGenerator.generate: the prompts of all training ranks, split among engines."""
        self.crossed = 0
        asked = self.ask("generate", max_new_tokens, temperature, prompts, seeds)
        answers = self.answers()
        start = sum(len(request[-1]) for request in asked[: my_rank()])
        answers = answers[start : start + len(prompts)]
        return [Sample(ids, *answer) for ids, answer in zip(prompts, answers, strict=True)]

    def send(self, verb: str, tensors: dict, *numbers) -> None:
        """Ask, and broadcast the tensors from rank 0, one gathered at a time."""
        self.ask(verb, {path: (tuple(x.shape), x.dtype) for path, x in tensors.items()}, *numbers)
        for x in tensors.values():
            self.wire.broadcast(x := whole(x).cpu().contiguous(), 0).wait()
            self.crossed += x.numel() * x.element_size()
        self.answers()

    def update(self, factors: dict, update: int, back: float = 0.0) -> None:
        self.send("update", factors, update, back)

    def load(self, weights) -> None:
        self.send("load", dict(weights), world())

    def stop(self) -> None:
        self.ask("stop")


def serve(wire, start) -> None:
    """What a generation rank does: start an engine by start(...), generate, update, until "stop".

    A request is a tuple (verb, ...) of each training rank, an answer a list, or the words of an
    error; who only listens says None.  If the training ranks are gone, it is over.
    """

    def receive(announced):
        for path, (shape, dtype) in announced.items():
            wire.broadcast(tensor := torch.empty(shape, dtype=dtype), 0).wait()
            yield path, tensor.to(device)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(StopRun):
        while True:
            asked = [request for request in exchange(wire, None)[0] if request]  # training ranks'
            verb, *args = asked[0]
            if verb == "stop":
                return
            tensors, answers = receive(args[0]) if verb in ("update", "load") else (), []
            try:
                if verb == "start":
                    generator = start(*args)
                elif verb == "update":
                    generator.update(dict(tensors), *args[1:])
                elif verb == "load":
                    generator.load(tensors, *args[1:])
                else:
                    prompts, seeds = ([x for request in asked for x in request[i]] for i in (3, 4))
                    engines, mine = wire.size() - len(asked), wire.rank() - len(asked)
                    share = slice(*(k * len(prompts) // engines for k in (mine, mine + 1)))
                    samples = generator.generate(prompts[share], seeds[share], *args[:2])
                    answers = [(s.completion, s.logprobs, s.finished) for s in samples]
            except Exception as error:  # noqa: BLE001, the training ranks must hear of it
                answers = str(error) or repr(error)
            for _ in tensors:
                pass  # what is left of them is on its way
            exchange(wire, answers)
