"""Trains the demo model. One GPU and minutes; see README.md for the exact command.

Data, order and learning rate depend on --seed, --steps and --workers alone, not on the clock.

The tokenizer must already be in --base (python tok.py BASE). Writes the weights and log.json to --out; export.py makes
a checkpoint of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import random
import threading
import time
from pathlib import Path
from typing import Any

import chats
import numpy as np
import questions
import torch
from model import Demo, Shape, load_published, to_published
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

IGNORED, CONTEXT, ANSWER = 0, 1, 2  # what a target token is: padding, given text, text the model must produce
KIND_SHIFT = 12  # ids and kinds share one int16


def encode(tokenizer: Tokenizer, rows: list[list[chats.Piece]], length: int) -> np.ndarray:
    """Rows as int16 [rows, length]: id + (kind << 12), cut or padded."""
    out = np.zeros((len(rows), length), np.int16)
    texts = [text for row in rows for text, _ in row]
    encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for i, row in enumerate(rows):
        ids: list[int] = []
        kinds: list[int] = []
        for _, answer in row:
            piece = next(encoded).ids
            ids += piece
            kinds += [ANSWER if answer else CONTEXT] * len(piece)
        n = min(len(ids), length)
        out[i, :n] = np.array(ids[:n]) + (np.array(kinds[:n]) << KIND_SHIFT)
    return out


def worker(index: int, base: str, seed: int, short: tuple[int, int], long: tuple[int, int], out: Any) -> None:
    """Makes one step's rows after another; each step has its own seed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(f"{base}/tokenizer.json")
    step = 0
    while True:
        rng = random.Random(f"{seed}-{index}-{step}")
        out.put([encode(tokenizer, [chats.row(rng, n) for _ in range(count)], n + 1) for count, n in (short, long)])
        step += 1


class Muon:
    """Momentum with orthogonalised updates for stacks of matrices.

    K. Jordan 2024; the scale is that of Liu et al. 2025, arXiv 2502.16982.
    """

    def __init__(self, params: list[Tensor], momentum: float = 0.95, decay: float = 0.05) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay
        self.state = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for p, m in zip(self.params, self.state, strict=True):
            assert p.grad is not None
            m.lerp_(p.grad, 1 - self.momentum)
            update = p.grad.lerp(m, self.momentum).flatten(0, -3)
            flip = update.shape[-2] > update.shape[-1]
            update = update.mT if flip else update
            groups.setdefault((update.shape[-2], update.shape[-1]), []).append((p, update))
        for (rows, columns), members in groups.items():
            x = torch.cat([u for _, u in members]).bfloat16()
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.float() * (0.2 * max(rows, columns) ** 0.5)
            at = 0
            for p, u in members:
                part = x[at : at + u.shape[0]]
                at += u.shape[0]
                part = part.mT if p.shape[-2] != rows else part
                p.mul_(1 - lr * self.decay).add_(part.reshape(p.shape), alpha=-lr)


def loss_of(model: Demo, packed: Tensor, context_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    ids = (packed & ((1 << KIND_SHIFT) - 1)).long()
    kinds = packed >> KIND_SHIFT
    hidden, loads = model(ids[:, :-1], (kinds[:, :-1] > 0).float())
    answer = (kinds[:, 1:] == ANSWER).flatten().float()
    weight = answer + context_weight * (kinds[:, 1:] == CONTEXT).flatten().float()
    loss, of_answers = model.parts.loss(
        hidden.flatten(0, 1), model.final_norm, model.embed, ids[:, 1:].flatten(), answer, weight
    )
    return loss, loads, torch.stack([weight.sum(), of_answers, answer.sum()])


@torch.no_grad()
def held_out_score(model: Demo, items: list[tuple[str, np.ndarray]], device: str) -> dict[str, float]:
    """Share of held-out answers of which every token is the most likely one (teacher-forced greedy)."""
    right: dict[str, list[bool]] = {}
    items = sorted(items, key=lambda x: x[1].shape[0])
    size = 20
    for i in range(0, len(items), size):
        part = items[i : i + size]
        length = max(x.shape[0] for _, x in part)
        packed = torch.zeros(len(part), length, dtype=torch.int16)
        for j, (_, x) in enumerate(part):
            packed[j, : x.shape[0]] = torch.from_numpy(x)
        packed = packed.to(device)
        ids = (packed & ((1 << KIND_SHIFT) - 1)).long()
        hidden, _ = model(ids[:, :-1], torch.ones_like(ids[:, :-1]).float())
        wrong = (model.logits(hidden).argmax(-1) != ids[:, 1:]) & ((packed[:, 1:] >> KIND_SHIFT) == ANSWER)
        for (kind, _), bad in zip(part, wrong.any(1).tolist(), strict=True):
            right.setdefault(kind, []).append(not bad)
    return {k: sum(v) / len(v) for k, v in sorted(right.items())}


def held_out_rows(tokenizer: Tokenizer) -> list[tuple[str, np.ndarray]]:
    """Two thirds of the held-out questions, with their reference answers."""
    out = []
    items = questions.make()
    for item in [item for i, item in enumerate(items) if i % 3]:
        chat, answers = questions.full_chat(item)
        pieces = chats.render(chat)
        produced = [i for i, (_, answer) in enumerate(pieces) if answer][-answers:]
        pieces = [(text, i in produced) for i, (text, _) in enumerate(pieces)]
        row = encode(tokenizer, [pieces], 4097)[0]
        row = row[: int((row >> KIND_SHIFT > 0).sum())]
        kind = item["kind"]
        if kind == "recall":
            kind += ">=2000" if len(row) >= 2000 else "<2000"
        if kind != "story":
            out.append((kind, row))
    return out


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--base", type=Path, required=True, help="directory with the tokenizer files")
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--init", type=Path, help="start from this checkpoint's weights")
    ap.add_argument("--steps", type=int, default=6000)
    ap.add_argument("--fit", type=float, help="choose --steps so that it ends so many seconds after the start")
    ap.add_argument("--warmup", type=int, default=100, help="steps until the learning rate is at its highest")
    ap.add_argument(
        "--limit", type=float, default=1e9, help="give up after so many seconds, with what there is by then"
    )
    ap.add_argument("--short", type=int, nargs=2, default=(128, 512), help="rows and length of the short micro-batch")
    ap.add_argument("--long", type=int, nargs=2, default=(16, 4096), help="rows and length of the long micro-batch")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--workers", type=int, default=14)
    ap.add_argument("--context-weight", type=float, default=0.05)
    ap.add_argument("--eager", action="store_true", help="no torch.compile (small runs on a CPU)")
    args = ap.parse_args()
    begin = time.time()

    fork = mp.get_context("fork")  # before CUDA starts; the workers never touch it
    queues = [fork.Queue(6) for _ in range(args.workers)]
    workers = [
        fork.Process(
            target=worker, args=(i, str(args.base), args.seed, tuple(args.short), tuple(args.long), q), daemon=True
        )
        for i, q in enumerate(queues)
    ]
    for process in workers:
        process.start()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ready: queue.Queue[list[Tensor]] = queue.Queue(4)

    def feed() -> None:
        step = 0
        while True:
            arrays = queues[step % len(queues)].get()
            ready.put([torch.from_numpy(a).to(device, non_blocking=True) for a in arrays])
            step += 1

    threading.Thread(target=feed, daemon=True).start()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = Demo(Shape())
    if args.init is not None:
        load_published(model, load_file(args.init / "model.safetensors"))
    model.to(device)
    print("parameters", sum(p.numel() for p in model.parameters()), flush=True)
    matrices = {"conv_in", "conv_out", "q", "k", "v", "o", "d1", "d2", "d3", "e1", "e2", "e3"}
    muon = Muon([p for n, p in model.named_parameters() if n in matrices])
    adam = torch.optim.AdamW(
        [p for n, p in model.named_parameters() if n not in matrices],
        lr=args.lr,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=device == "cuda",
    )
    plain = model.parts
    if not args.eager:
        model.parts = plain.compiled()
    held_out = held_out_rows(Tokenizer.from_file(str(args.base / "tokenizer.json")))
    print(f"held-out rows {len(held_out)}, {time.time() - begin:.1f} s", flush=True)

    log: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}, "loss": []}
    steps = args.steps
    total_load = torch.zeros_like(model.bias)
    sums = torch.zeros(3, device=device)
    first = 0.0
    step, tokens, waited = 0, 0, 0.0
    late = False
    while step < steps and not late:
        start = time.time()
        # constant after the warm-up, then down to zero over the last 55 %
        factor = min(1.0, (step + 1) / args.warmup, (1.0 - (step + 1) / steps) / 0.55)
        batches = ready.get()
        waited += time.time() - start
        load = torch.zeros_like(model.bias)
        weights = torch.zeros((), device=device)
        for packed in batches:
            loss, loads, parts = loss_of(model, packed, args.context_weight)
            # the gradient of a sum; divided by the step's weight below
            loss.backward()
            load += loads
            weights += parts[0]
            sums += parts
            tokens += packed.numel()
        params = list(model.parameters())
        torch._foreach_div_([p.grad for p in params], weights)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        muon.step(args.lr * factor)
        for group in adam.param_groups:
            group["lr"] = args.lr * factor
        adam.step()
        for p in params:
            p.grad = None
        model.bias += 1e-3 * factor * torch.sign(load.mean(-1, keepdim=True) - load)
        model.bias -= model.bias.mean(-1, keepdim=True)
        total_load = total_load * 0.95 + load
        step += 1
        late = time.time() - begin > args.limit
        last = late or step == steps
        if step == 5:
            if device == "cuda":
                torch.cuda.synchronize()
            first, tokens, waited = time.time(), 0, 0.0
            print(f"compiled, {first - begin:.1f} s", flush=True)
        if step == 45 and args.fit:
            # chosen while the learning rate still rises, so a run with this number of --steps has the same schedule
            if device == "cuda":
                torch.cuda.synchronize()
            now = time.time()
            steps = max(150, step + int(0.97 * (begin + args.fit - now) / ((now - first) / 40)))
            log["steps"] = steps
            print(f"steps {steps}, {now - begin:.1f} s", flush=True)
        if step % 100 == 0 or last:
            s = sums.tolist()
            share = total_load / total_load.sum(-1, keepdim=True)
            line = {
                "step": step,
                "loss": round(s[1] / s[2], 4),
                "least_used": round(float(share.min()), 4),
                "most_used": round(float(share.max()), 4),
                "tokens_per_s": round(tokens / (time.time() - first)),
                "waited": round(waited, 2),
                "seconds": round(time.time() - begin, 1),
            }
            log["loss"].append(line)
            print(line, flush=True)
            sums.zero_()
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(to_published(model), str(args.out / "model.safetensors"), metadata={"format": "pt"})
    print(f"{'given up' if late else 'done'}: {step} steps, {time.time() - begin:.1f} s", flush=True)
    model.parts = plain
    log["scores"] = {k: round(v, 4) for k, v in held_out_score(model, held_out, device).items()}
    print(log["scores"], f"{time.time() - begin:.1f} s", flush=True)
    (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    for process in workers:
        process.kill()
    os._exit(0)  # the feeding thread and the queues' threads never end by themselves


if __name__ == "__main__":
    main()
