"""Training a draft head on text the target wrote itself.

The head learns the target's distribution at every response position, from true features and from
its own (the recursive levels a tree needs). An EAGLE-2 head starts from the closed-form regression
of the next feature on [embedding, feature], an EAGLE-3 head from the target's lm_head. The run
writes checkpoints and resumes exactly. Under ``accelerate launch`` every process takes its share
of a step's batches and the gradients are averaged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle2_kernels.models.heads import Eagle3Head, EagleHead
from eagle2_kernels.training.data import (
    Conversation,
    FeatureCache,
    batches,
    draft_vocabulary,
    read_conversations,
    split,
)
from eagle2_kernels.training.evaluate import TreeShape, accepted_at, walk
from eagle2_kernels.training.losses import LOSSES, own_head_loss, shared_head_loss
from eagle2_kernels.training.plot import plot_log
from eagle2_kernels.training.progress import ProgressBar

__all__ = ["TrainConfig", "Trainer", "ridge_start", "train"]


@dataclass
class TrainConfig:
    """What a run needs to know. The defaults are those of the head this package ships."""

    data: str = ""
    """A .jsonl or .jsonl.gz file of {prompt, response, greedy}: token ids the target wrote."""
    target: str = "demo"
    """Hugging Face causal LM, directory or hub name; "demo" is the demo's SmolLM2."""
    kind: str = "eagle2"
    """The head's kind: "eagle2", "eagle3", or "eagle3.1" (each of the target's states normalised,
    recursive steps fed after the norm); the latter two need a target of 7 layers or more."""
    output: str = "head"
    """Directory for the head that validated best (config.json, model.safetensors)."""
    work_dir: str = "train-work"
    """Checkpoints, cached features, log.jsonl, and the best head so far in best/."""
    resume: bool = False
    """Continue from the work directory's checkpoint; without it a directory that holds one is an
    error."""
    draft_vocab_size: int = 8192
    """Most frequent response ids the head may propose; 0 keeps the whole vocabulary."""
    max_tokens: int = 1_100_000
    """Training tokens used at most, greedy conversations first; 0 for all. May grow on resume: the
    features of new text are the costly part, so a run can start on little of it."""
    held_out: int = 48
    """Greedy conversations kept for validation."""
    steps: int = 2000
    """Optimizer steps in all."""
    batch_size: int = 8
    """Conversations a batch."""
    accumulate: int = 1
    """Batches a process takes per optimizer step."""
    unroll: int = 2
    """Draft levels trained: 1 from true features only, more from the head's own."""
    unroll_from: int = 500
    """First step with more than one level: one level learns faster at first."""
    unroll_weight: float = 0.8
    """Loss weight of each level relative to the one before."""
    learning_rate: float = 4e-4
    """Peak rate of AdamW: linear warmup, flat, then decay to a fiftieth."""
    warmup_steps: int = 30
    """Steps of linear warmup."""
    schedule: str = "linear"
    """How the rate decays: "linear" or "cosine"."""
    decay_fraction: float = 0.4
    """Last part of the run in which the rate decays; 1 for all of it. A flat start lets a run be
    lengthened."""
    ema: float = 0.0
    """Decay of a moving average of the weights, which is then what is validated and shipped; 0 is
    off. The average of step t starts at min(ema, (1 + t) / (10 + t))."""
    weight_decay: float = 0.01
    """Decoupled weight decay of the matrices."""
    clip_norm: float = 1.0
    """Largest gradient norm."""
    loss: str = "kl"
    """How far the draft's distribution is from the target's: "kl" (soft cross-entropy), or one of
    the acceptance losses "lk_alpha" and "lk_lambda" (`help(eagle2_kernels.training.losses)`)."""
    feature_weight: float = 0.5
    """Weight of the smooth-L1 loss on the feature, added to that loss (EAGLE-2)."""
    feature_noise: float = 0.0
    """Half-width of uniform noise on input features, in units of their standard deviation."""
    ridge_tokens: int = 60_000
    """Tokens of the closed-form start (EAGLE-2); 0 starts from random weights."""
    ridge_lambda: float = 1e-2
    """Ridge penalty, relative to each input's sum of squares."""
    eval_every: int = 400
    """Steps between validations (and one at the end)."""
    patience: int = 0
    """Validations in a row without a longer accept length that end the run early; 0 is off."""
    checkpoint_minutes: float = 3.0
    """Minutes between checkpoints; one is also written at the end."""
    threads: int | None = None
    """CPU threads. Default: torch's choice."""
    seed: int = 0
    """Of the split, the data order, the initial weights and the noise."""
    stop_after: int | None = None
    """End this run early, checkpoint written, after that many steps in all (for tests, or to
    share a machine); the schedule still counts `steps`."""
    tree: TreeShape = field(default_factory=TreeShape)
    """Tree of the teacher-forced accept length."""


def loss_rows(conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor]:
    """(batch index, draft row) of every row in a loss: its output predicts a response token.

    Row i holds (token i + 1, feature i) and predicts feature i + 1 and token i + 2; its root is
    token i + 1, so rows run from the response's first token to the one before its last.
    """
    batch, rows = [], []
    for b, c in enumerate(conversations):
        r = torch.arange(len(c.prompt) - 1, len(c) - 2)
        rows.append(r)
        batch.append(torch.full_like(r, b))
    return torch.cat(batch), torch.cat(rows)


@torch.no_grad()
def ridge_start(
    head: EagleHead, cache: FeatureCache, indices: Sequence[int], penalty: float
) -> float:
    """Set fc to argmin |fc [e_{i+1}; f_i] + bias - f_{i+1}|^2 + penalty |fc D|^2, response rows.

    D holds the root of each input's sum of squares, so the penalty is the same for embeddings and
    features. The layer's two output projections become zero: the head starts as that regression.
    Returns the share of variance explained.
    """
    size = head.config.hidden_size
    # A column of ones carries the bias.
    gram = torch.zeros(2 * size + 1, 2 * size + 1, dtype=torch.float64)
    cross = torch.zeros(2 * size + 1, size, dtype=torch.float64)
    square, total, count = 0.0, torch.zeros(size, dtype=torch.float64), 0
    for start in range(0, len(indices), 8):
        part = list(indices[start : start + 8])
        tokens, features = cache.batch(part)
        b, r = loss_rows([cache.conversations[i] for i in part])
        if not len(r):
            continue
        f = features.float().cpu()
        e = head.embed(tokens).float().cpu()
        x = torch.cat((e[b, r + 1], f[b, r], torch.ones(len(r), 1)), dim=1)
        y = f[b, r + 1]
        gram += (x.T @ x).double()
        cross += (x.T @ y).double()
        square += float(y.square().sum(dtype=torch.float64))
        total += y.sum(0, dtype=torch.float64)
        count += len(r)
    if not count:
        raise ValueError("ridge_start: expected conversations with at least two response tokens")
    if head.fc.bias is None:
        gram[-1, :], gram[:, -1], cross[-1] = 0, 0, 0
        gram[-1, -1] = 1
    # Embeddings are far smaller than features: a common penalty would erase them, so scale first.
    scale = gram.diagonal().clamp_min(1e-12).sqrt()
    system = gram / scale / scale[:, None]
    system += penalty * torch.eye(len(system), dtype=torch.float64)
    solution = torch.linalg.solve(system, cross / scale[:, None]) / scale[:, None]
    head.fc.weight.copy_(solution[:-1].T)
    if head.fc.bias is not None:
        head.fc.bias.copy_(solution[-1])
    head.layers[0].self_attn.o_proj.weight.zero_()
    head.layers[0].mlp.down_proj.weight.zero_()
    error = square - 2 * float((solution * cross).sum())
    error += float((solution * (gram @ solution)).sum())
    return 1.0 - error / (square - float(total.square().sum()) / count)


class Trainer:
    """One run: data, cached features, the head, its optimizer, checkpoints and the log."""

    def __init__(
        self,
        config: TrainConfig,
        target: nn.Module,
        conversations: Sequence[Conversation],
        *,
        eos_ids: Sequence[int] = (),
        accelerator: Any = None,
    ) -> None:
        self.config = c = config
        _check(c)
        self.accelerator = accelerator
        self.rank, self.processes = 0, 1
        if accelerator is not None:
            self.rank, self.processes = accelerator.process_index, accelerator.num_processes
        self.target = target.eval().requires_grad_(False)
        self.work = Path(c.work_dir)
        self.work.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.work / "checkpoint.pt"
        limit = c.max_tokens or None
        self.training, self.validation = split(conversations, c.held_out, limit, c.seed)
        vocab = None
        if c.draft_vocab_size:
            # Counted over all text but the held-out: counting is free, features are not.
            everything, _ = split(conversations, c.held_out, None, c.seed)
            vocab = draft_vocabulary(everything, c.draft_vocab_size, eos_ids)
        # Master weights in float32; the forward runs in bfloat16 under autocast.
        kind, variant = _KINDS[c.kind]
        self.head = kind.from_target(target, vocab, dtype=torch.float32, seed=c.seed, **variant)
        self.device = target.get_input_embeddings().weight.device
        taps = self.head.taps(target.config.get_text_config().num_hidden_layers)
        # A process keeps the features of the conversations it meets.
        mine = f"-{self.rank}" if self.processes > 1 else ""
        self.cache = FeatureCache(self.training, target, self.work, f"train{mine}", taps)
        self.held_out = FeatureCache(self.validation, target, self.work, f"valid{mine}", taps)
        # The target's lm_head rows of the draft vocabulary: what its features are read with.
        self.rows = target.get_output_embeddings().weight.detach()
        if self.head.draft_to_target is not None:
            self.rows = self.rows[self.head.draft_to_target].contiguous()
        matrices = [p for p in self.head.parameters() if p.ndim == 2]
        others = [p for p in self.head.parameters() if p.ndim != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": c.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=c.learning_rate,
            betas=(0.9, 0.95),
        )
        self.step, self.tokens_seen, self.seconds = 0, 0, 0.0
        self.best, self.stale = -1.0, 0
        self.average: dict[str, Tensor] | None = None
        if c.ema:
            self.average = {n: p.detach().clone() for n, p in self.head.named_parameters()}
        self._argmax: dict[int, Tensor] = {}
        if c.resume and self.checkpoint.is_file():
            self._load()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or validation has stopped improving."""
        c = self.config
        return self.step >= c.steps or bool(c.patience and self.stale >= c.patience)

    def rate(self, step: int) -> float:
        """Learning rate of a step: warmup, flat, decay to a fiftieth of the peak."""
        c = self.config
        warm = min(1.0, (step + 1) / max(1, c.warmup_steps))
        left = min(1.0, (c.steps - step) / max(1.0, c.decay_fraction * c.steps))
        if c.schedule == "cosine":
            left = 0.02 + 0.98 * (1 - math.cos(math.pi * left)) / 2
        return c.learning_rate * warm * max(0.02, left)

    def start(self) -> None:
        """Closed-form start from the first conversations of epoch 0 (their features are kept)."""
        c = self.config
        indices, total = [], 0
        for group in batches(self.training, c.batch_size, 0, c.seed):
            if total >= c.ridge_tokens:
                break
            indices += group
            total += sum(len(self.training[i]) for i in group)
        if indices:
            explained = ridge_start(self.head, self.cache, indices, c.ridge_lambda)
            self._log(event="ridge", tokens=total, explained=round(explained, 4))

    def loss(self, indices: Sequence[int], noise: torch.Generator | None = None) -> Tensor:
        """Loss of one batch: sum over levels of w^s (`loss` + a * smooth-L1) / sum w^s.

        An EAGLE-3 head's output is no feature of the target: it has no smooth-L1 part.
        """
        c = self.config
        tokens, features = self.cache.batch(indices)
        features, final = self._split(features)
        b, r = loss_rows([self.training[i] for i in indices])
        levels = c.unroll if self.step >= c.unroll_from else 1
        given = features
        if c.feature_noise and noise is not None:
            shift = torch.rand(features.shape, generator=noise).to(features.device) - 0.5
            given = features + (2 * c.feature_noise * features.float().std() * shift).to(
                features.dtype
            )
        truth = final[b, r + 1]
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs = self.head.forward_train(tokens[:, 1:], given[:, :-1], levels)
            hidden = torch.stack([g[b, r] for g in outputs]).float()
            if isinstance(self.head, Eagle3Head):
                losses = own_head_loss(self.head, hidden, truth, self.rows, c.loss)
                near = torch.zeros_like(losses)
        if not isinstance(self.head, Eagle3Head):
            losses = shared_head_loss(hidden, truth, self.rows, c.loss)
            near = F.smooth_l1_loss(hidden, truth.float().expand_as(hidden), reduction="none")
            near = near.mean(dim=(1, 2))
        weights = c.unroll_weight ** torch.arange(levels, device=hidden.device)
        self._parts = (losses.detach(), near.detach())
        return (weights * (losses + c.feature_weight * near)).sum() / weights.sum()

    def run(self, progress: Callable[[int, int, str], None] | None = None) -> EagleHead:
        """Train to the end (or `stop_after`), validating and writing checkpoints on the way.

        `progress(step, steps, text)` is called after each step.
        """
        c = self.config
        if self.best < 0:
            # A new run, or one resumed from before the best head was kept.
            if self.step == 0 and c.ridge_tokens and c.kind == "eagle2":
                self.start()
                self._start_average()
            self._judge(self.validate())
            self.save_checkpoint()
        self.head.train()
        last_save = began = time.monotonic()
        before = self.seconds
        end = c.steps if c.stop_after is None else min(c.steps, c.stop_after)
        for groups in self._schedule():
            if self.step >= end or self.finished:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(self.step)
            losses, near, norm = self._descend(groups)
            self.step += 1
            self._average_weights()
            self.tokens_seen += sum(len(self.training[i]) for group in groups for i in group)
            self.seconds = before + time.monotonic() - began
            if progress is not None:
                text = " ".join(f"{v:.3f}" for v in losses.tolist())
                progress(self.step, c.steps, f"loss {text} | {self.tokens_seen / 1e6:.2f} M tokens")
            if self.step % 20 == 0:
                self._log(
                    event="train",
                    loss=[round(v, 4) for v in losses.tolist()],
                    smooth_l1=[round(v, 4) for v in near.tolist()],
                    grad_norm=round(norm, 3),
                    rate=self.rate(self.step - 1),
                )
            if self.step % c.eval_every == 0 or self.step == c.steps:
                self._judge(self.validate())
            if time.monotonic() - last_save > 60 * c.checkpoint_minutes:
                self.save_checkpoint()
                last_save = time.monotonic()
        self.save_checkpoint()
        return self.head

    def _descend(self, groups: Sequence[list[int]]) -> tuple[Tensor, Tensor, float]:
        """One optimizer step over these batches, this process taking its share.

        Returns loss and smooth-L1 by level (of the share), and the gradient's norm.
        """
        c = self.config
        first = self.rank * c.accumulate
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        for i in range(first, first + c.accumulate):
            count = self.step * len(groups) + i
            noise = torch.Generator().manual_seed(c.seed * 1_000_003 + count)
            loss = self.loss(groups[i], noise)
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()} at step {self.step}")
            (loss / c.accumulate).backward()
            parts.append(self._parts)
        if self.processes > 1:
            for p in self.head.parameters():
                p.grad = self.accelerator.reduce(p.grad, "mean")
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), c.clip_norm)
        self.optimizer.step()
        losses, near = (torch.stack(part).mean(0) for part in zip(*parts, strict=True))
        return losses, near, float(norm)

    @torch.no_grad()
    def _start_average(self) -> None:
        if self.average is not None:
            for name, p in self.head.named_parameters():
                self.average[name].copy_(p)

    @torch.no_grad()
    def _average_weights(self) -> None:
        if self.average is not None:
            keep = min(self.config.ema, (1 + self.step) / (10 + self.step))
            for name, p in self.head.named_parameters():
                self.average[name].lerp_(p, 1 - keep)

    def _judge(self, figures: dict[str, float]) -> None:
        """Keep the head in best/ when its accept length is the longest so far.

        Texts too short to draft for measure nothing (0): then the newest head is kept.
        """
        if figures["accept_length"] > self.best or not figures["accept_length"]:
            self.best, self.stale = figures["accept_length"], 0
            if self.rank == 0:
                self._shipped().save(self.work / "best")
        else:
            self.stale += 1

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Held-out agreement with the target's argmax (top 1, top 4) and accept length.

        The accept length walks each held-out answer with `config.tree`, the weights in bfloat16 as
        they ship; the answer stands for the target, so it is an estimate of real decoding.
        """
        self.head.eval()
        head = self._shipped()
        top1 = top4 = rows = tokens = forwards = 0
        for i, c in enumerate(self.validation):
            ids, features = self.held_out.batch([i])
            features, final = self._split(features)
            r = torch.arange(len(c.prompt) - 1, len(c) - 2, device=ids.device)
            if not len(r):
                continue
            hidden = head.forward_train(ids[:, 1:], features[:, :-1].to(head.fc.weight.dtype))[0]
            guess = head.logits(hidden[0, r]).topk(4, dim=-1).indices
            if head.draft_to_target is not None:
                guess = head.draft_to_target[guess]
            hit = guess == self._target_argmax(i, final[0, r + 1])[:, None]
            top1 += int(hit[:, 0].sum())
            top4 += int(hit.any(dim=-1).sum())
            rows += len(r)
            accepted = accepted_at(head, ids[0], features[0], len(c.prompt), self.config.tree)
            emitted, used = walk(accepted)
            tokens, forwards = tokens + emitted, forwards + used
        self.head.train()
        figures = {
            "top1": round(top1 / max(rows, 1), 4),
            "top4": round(top4 / max(rows, 1), 4),
            "accept_length": round(tokens / max(forwards, 1), 4),
        }
        self._log(event="validation", **figures)
        return figures

    def _split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and the last hidden state (one and the same for an EAGLE-2 head)."""
        return features[..., -self.head.feature_size :], features[..., : self.rows.shape[1]]

    def _target_argmax(self, index: int, features: Tensor) -> Tensor:
        if index not in self._argmax:
            lm_head = self.target.get_output_embeddings()
            self._argmax[index] = lm_head(features.to(lm_head.weight.dtype)).argmax(dim=-1)
        return self._argmax[index]

    def _shipped(self) -> EagleHead:
        dtype = self.head.embed_weight.dtype
        head = type(self.head)(
            self.head.config, self.head.draft_to_target, dtype=dtype, device=self.device
        )
        head.load_state_dict(self.head.state_dict() | (self.average or {}))
        return head.bind(self.target).eval()

    def _schedule(self) -> Iterator[list[list[int]]]:
        """Batches of each step from the current one on, those of all processes.

        The order depends on seed and step only.
        """
        c = self.config
        size = c.accumulate * self.processes
        per_epoch = math.ceil(len(self.training) / c.batch_size)
        epoch, skip = divmod(self.step * size, per_epoch)
        taken: list[list[int]] = []
        while True:
            for group in itertools.islice(
                batches(self.training, c.batch_size, epoch, c.seed), skip, None
            ):
                taken.append(group)
                if len(taken) == size:
                    yield taken
                    taken = []
            epoch, skip = epoch + 1, 0

    def save_checkpoint(self) -> None:
        """Write head, optimizer and counters atomically; flush the cached features first."""
        self.cache.flush()
        self.held_out.flush()
        if self.rank:
            return
        state = {
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "seconds": self.seconds,
            "best": self.best,
            "stale": self.stale,
            "average": self.average,
            "processes": self.processes,
            "config": asdict(self.config),
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.checkpoint)

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        # What decides the data order may not change in mid-run.
        fixed = ["seed", "batch_size", "accumulate", "processes", "held_out", "draft_vocab_size"]
        fixed.append("kind")
        then = {"kind": "eagle2", "accumulate": 1, "processes": state.get("processes", 1)}
        then |= state["config"]
        now = asdict(self.config) | {"processes": self.processes}
        if (now["max_tokens"] or math.inf) < (then["max_tokens"] or math.inf):
            fixed.append("max_tokens")
        changed = [f"{k} ({then[k]!r} -> {now[k]!r})" for k in fixed if then[k] != now[k]]
        if changed:
            raise ValueError(f"resume: expected the run's own settings, changed: {changed}")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group, decay in zip(
            self.optimizer.param_groups, (self.config.weight_decay, 0.0), strict=True
        ):
            group["weight_decay"] = decay
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        self.seconds = state["seconds"]
        self.best, self.stale = state.get("best", -1.0), state.get("stale", 0)
        if self.average is not None:
            # A run that averages from here on starts with what it has.
            self._start_average()
            self.average.update(state.get("average") or {})

    def _log(self, **row: Any) -> None:
        if self.rank:
            return
        row = {"step": self.step, "tokens_seen": self.tokens_seen, **row}
        row["seconds"] = round(self.seconds, 1)
        with (self.work / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")


def _check(c: TrainConfig) -> None:
    choices = {"kind": tuple(_KINDS), "schedule": ("linear", "cosine"), "loss": LOSSES}
    for name, allowed in choices.items():
        if getattr(c, name) not in allowed:
            raise ValueError(f"{name}: expected {' or '.join(allowed)}, got {getattr(c, name)!r}")
    for name in ("steps", "batch_size", "accumulate", "eval_every", "unroll", "held_out"):
        if getattr(c, name) < 1:
            raise ValueError(f"{name}: expected at least 1, got {getattr(c, name)}")
    for name in ("patience", "max_tokens", "draft_vocab_size", "ridge_tokens"):
        if getattr(c, name) < 0:
            raise ValueError(f"{name}: expected 0 or more, got {getattr(c, name)}")
    if not 0 <= c.ema < 1:
        raise ValueError(f"ema: expected a decay in [0, 1), got {c.ema}")
    if not c.resume and (Path(c.work_dir) / "checkpoint.pt").is_file():
        raise FileExistsError(
            f"work_dir: {c.work_dir} holds a run; resume it (resume=True, --resume) or name "
            "another directory"
        )


def train(config: TrainConfig) -> Path | None:
    """Run a training from files to a saved head, with a progress bar; return the head's directory.

    When the run has `finished`, the head that validated best is in that directory; None when
    `stop_after` came first, and nothing was saved there. A plot of loss and accept length, where
    matplotlib is installed, is in ``work_dir``/curve.png. Started by
    ``accelerate launch``, the processes share the steps' batches.

    Raises FileNotFoundError for missing data, FileExistsError for a used work directory without
    `resume`, ValueError for settings that do not fit.
    """
    if not config.data or not Path(config.data).is_file():
        raise FileNotFoundError(f"data: expected a .jsonl or .jsonl.gz file, got {config.data!r}")
    if config.threads:
        torch.set_num_threads(config.threads)
    # Before the target is loaded: a wrong setting is told at once.
    _check(config)
    conversations = read_conversations(config.data)
    split(conversations, config.held_out, None, config.seed)
    target = open_target(config.target)
    accelerator = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import Accelerator

        accelerator = Accelerator()
        target = target.to(accelerator.device)
    eos = target.generation_config.eos_token_id or target.config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    trainer = Trainer(config, target, conversations, eos_ids=eos, accelerator=accelerator)
    with ProgressBar() if trainer.rank == 0 else contextlib.nullcontext() as progress:
        trainer.run(progress)
    if trainer.rank == 0:
        if trainer.finished:
            shutil.copytree(trainer.work / "best", config.output, dirs_exist_ok=True)
        plot_log(trainer.work / "log.jsonl", trainer.work / "curve.png")
    return Path(config.output) if trainer.finished else None


def open_target(name: str) -> nn.Module:
    if name == "demo":
        from eagle2_kernels.demo import load_target

        return load_target(dtype=torch.bfloat16)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)


_KINDS: dict[str, tuple[type[EagleHead], dict[str, Any]]] = {
    "eagle2": (EagleHead, {}),
    "eagle3": (Eagle3Head, {}),
    "eagle3.1": (Eagle3Head, {"fc_norm": True, "norm_output": True}),
}
