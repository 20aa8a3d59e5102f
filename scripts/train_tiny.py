"""Train kvtier-tiny, the small language model that ships with kvtier, and write its folder.

    nice -n 15 python scripts/train_tiny.py --log train.jsonl    # the first shipped run
    nice -n 15 python scripts/train_tiny.py --minutes 37         # as many steps as fit
    python scripts/train_tiny.py --judge --log train.jsonl       # measure it, write the model card
    python scripts/train_tiny.py --continue-from FOLDER --minutes 30 --out OTHER --log more.jsonl

The corpus is the standard library of the interpreter that runs this (CPython 3.11 for the shipped
weights), so nothing is downloaded. Everything is seeded; another interpreter, package release,
number of threads or kind of CPU gives a slightly different model.
Three phases differ in the length of a row (512, 2,048 and 4,096 tokens); the learning rate falls to
zero over the last two. With ``--minutes`` the first phase ends when its share of the time is used
up, and what fits is logged as ``phases``.

``--continue-from`` trains a finished model further, with fresh optimiser state and the rows in
another order. Its learning rate falls by the clock, so that it ends in time on any machine. The
shipped weights come from a first run and such runs after it: the model card has the commands.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from tiny import (
    card,
    corpus,
    data,
    environment,
    export,
    forward,
    judge,
    optim,
    schedule,
    tokenizer,
)
from transformers import AutoTokenizer, Qwen3ForCausalLM

FOLDER = Path(__file__).parents[1] / "src/kvtier/serve/engine/builtin/kvtier-tiny"
SEED = 20250
CONTINUED_SEED = 20251
TOKENS_PER_STEP = 4096
TIME_SHARES = (0.60, 0.16, 0.24)
# Cost of one step against one step of the first phase, for --minutes only.
STEP_COSTS = (1.0, 1.3, 1.8)
# The first run of the shipped weights: the average at this step of this schedule, stopped there.
FIRST_RUN_PHASES = (464, 96, 104)
FIRST_RUN_STOP = 642
EMA_DECAY = 0.98


class Trainer:
    """One training run; ``run`` or ``run_on`` leaves the best weights in ``folder``.

    begin: the folder of a trained model to go on from, with its tokenizer; None: from nothing.
    """

    def __init__(
        self, folder: Path, log: Path | None, export_every_s: float, begin: Path | None = None
    ) -> None:
        self._start = time.monotonic()
        self._folder = folder
        self._log_path = log
        self._export_every_s = export_every_s
        documents = corpus.read_library()
        topics = corpus.read_topics()
        train = [d for d in documents if not d.held_out]
        folder.mkdir(parents=True, exist_ok=True)
        if begin is None:
            texts = [d.text for d in train] + list(topics.values())
            tokenizer.train_tokenizer(texts, folder, export.MAX_LENGTH)
        else:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if folder.resolve() != begin.resolve():
                    shutil.copyfile(begin / name, folder / name)
        tok = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.rows = data.Rows(tok, train, topics, SEED if begin is None else CONTINUED_SEED)
        self.model = self._first_model(len(tok), begin)
        forward_difference = forward.check_forward(self.model)
        if begin is None:
            with torch.no_grad():
                for layer in self.model.model.layers:  # every layer starts as the identity
                    layer.self_attn.o_proj.weight.zero_()
                    layer.mlp.down_proj.weight.zero_()
        self.averaged: Qwen3ForCausalLM = copy.deepcopy(self.model)
        self._valid = judge.held_out_rows(tok, documents, 1024)[::4]
        self._log(
            files=len(train),
            corpus_tokens=self.rows.num_corpus_tokens,
            held_out_files=len(documents) - len(train),
            parameters=sum(p.numel() for p in self.model.parameters()),
            forward_difference=forward_difference,
        )

    @staticmethod
    def _first_model(vocab_size: int, begin: Path | None) -> Qwen3ForCausalLM:
        if begin is None:
            return export.build_model(vocab_size, SEED)
        torch.manual_seed(CONTINUED_SEED)
        return Qwen3ForCausalLM.from_pretrained(
            begin, dtype=torch.float32, trust_remote_code=False
        ).train()

    def _log(self, **fields: object) -> None:
        line = json.dumps({"s": round(time.monotonic() - self._start, 1), **fields})
        print(line, flush=True)
        if self._log_path is not None:
            with self._log_path.open("a", encoding="utf-8") as f:
                f.write(line + "\n")

    def _valid_loss(self, model: Qwen3ForCausalLM) -> float:
        return round(float(judge.token_losses(model, self._valid).mean()), 4)

    def run(self, phases: tuple[int, ...], minutes: float | None, stop_at: int | None) -> None:
        """Train, exporting now and then; with ``minutes`` the phases are found on the way.

        stop_at: end after this many steps, with the averaged weights.
        """
        self._optimiser = optim.Optimiser(self.model)
        step, self._train_start = 0, time.monotonic()
        last_export = self._train_start
        if minutes is not None:
            phases = (sys.maxsize,) * len(schedule.LENGTHS)
        for phase, length in enumerate(schedule.LENGTHS):
            cos, sin = forward.rope_table(self.model, length)
            batches = self.rows.batches(length, TOKENS_PER_STEP)
            first = step
            while step - first < phases[phase] and step != stop_at:
                loss = forward.loss(self.model, next(batches), cos, sin)
                loss.backward()
                self._update(step, schedule.scale_by_steps(step, phases))
                step += 1
                if step % 20 == 0:
                    self._log_step(step, length, loss.item())
                now = time.monotonic()
                if now - last_export > self._export_every_s:
                    last_export = now
                    self._log(step=step, valid_averaged=self._valid_loss(self.averaged))
                    export.export(self.averaged, self._folder)
                if minutes is not None and phase == 0:
                    phases = self._phases_by_clock(step, 60 * minutes) or phases
        self._finish(step, phases, step != stop_at)

    def _finish(self, step: int, phases: tuple[int, ...], may_be_plain: bool) -> None:
        """Export the averaged weights, or the plain ones where they are better."""
        plain, averaged = self._valid_loss(self.model), self._valid_loss(self.averaged)
        self._log(
            done=step,
            phases=phases,
            train_tokens=step * TOKENS_PER_STEP,
            valid=plain,
            valid_averaged=averaged,
            minutes=round((time.monotonic() - self._start) / 60, 1),
        )
        keep_plain = may_be_plain and plain <= averaged
        export.export(self.model if keep_plain else self.averaged, self._folder)

    def run_on(self, minutes: float) -> None:
        """Train further until ``minutes`` after the start, with a rate that falls by the clock."""
        self._optimiser = optim.Optimiser(self.model)
        self._train_start = last_export = time.monotonic()
        budget_s = 60 * minutes - (self._train_start - self._start)
        step, counts = 0, [0] * len(schedule.LENGTHS)
        self._log(budget_minutes=minutes, valid_before=self._valid_loss(self.model))
        for phase, length in enumerate(schedule.LENGTHS):
            cos, sin = forward.rope_table(self.model, length)
            batches = self.rows.batches(length, TOKENS_PER_STEP)
            while True:
                now = time.monotonic()
                progress = (now - self._train_start) / budget_s
                if progress >= schedule.CONTINUED_ENDS[phase]:
                    break
                loss = forward.loss(self.model, next(batches), cos, sin)
                loss.backward()
                self._update(step, schedule.scale_by_clock(step, progress))
                step += 1
                counts[phase] += 1
                if step % 20 == 0:
                    self._log_step(step, length, loss.item())
                if now - last_export > self._export_every_s:
                    last_export = now
                    self._log(step=step, valid_averaged=self._valid_loss(self.averaged))
                    export.export(self.averaged, self._folder)
        self._finish(step, tuple(counts), True)

    def _update(self, step: int, scale: float) -> None:
        """Apply the gradients, then let the average follow."""
        self._optimiser.step(scale)
        # The average forgets faster at the start, where the weights change most.
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.averaged.parameters()), list(self.model.parameters()), 1 - decay
            )

    def _log_step(self, step: int, length: int, loss: float) -> None:
        spent = time.monotonic() - self._train_start
        self._log(
            step=step,
            length=length,
            loss=round(loss, 4),
            tokens=step * TOKENS_PER_STEP,
            tokens_per_s=round(step * TOKENS_PER_STEP / spent),
        )

    def _phases_by_clock(self, step: int, budget_s: float) -> tuple[int, ...] | None:
        """Return the phases that fit into the budget, once the first has used its share of it."""
        now = time.monotonic()
        if now - self._start <= budget_s * TIME_SHARES[0]:
            return None
        step_s = (now - self._train_start) / step
        rest = (
            max(1, round(budget_s * share / (step_s * cost)))
            for share, cost in zip(TIME_SHARES[1:], STEP_COSTS[1:], strict=True)
        )
        phases = (step, *rest)
        self._log(phases=phases)
        return phases


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description="Train kvtier-tiny and write its folder.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write")
    parser.add_argument(
        "--log",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also append the log, JSON lines, to this file; with --judge: the logs of all runs "
        "that made the weights, first one first",
    )
    parser.add_argument("--minutes", type=float, help="find the number of steps by the clock")
    parser.add_argument(
        "--phases",
        type=int,
        nargs=3,
        metavar="STEPS",
        help="steps of each phase, and no early stop",
    )
    parser.add_argument(
        "--continue-from",
        type=Path,
        metavar="FOLDER",
        help="train this model further, for --minutes; its tokenizer is kept",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--export-every", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--judge", action="store_true", help="don't train: measure the folder, write its model card"
    )
    parser.add_argument(
        "--prompts", type=int, default=judge.NUM_PROMPTS, help="with --judge: greedy prompts"
    )
    options = parser.parse_args()
    environment.restart_with_settings()
    torch.set_num_threads(options.threads)
    if options.judge:
        if not options.log:
            parser.error("--judge needs --log FILE for each run that made the weights")
        runs = [card.read_log(path) for path in options.log]
        verdict = judge.judge(options.out, options.prompts)
        card.write_card(options.out, runs, verdict)
        print(json.dumps(verdict, indent=2))
        return
    if options.continue_from is not None and options.minutes is None:
        parser.error("--continue-from needs --minutes: the learning rate falls by the clock")
    if len(options.log) > 1:
        parser.error("--log: one run writes one log")
    log = options.log[0] if options.log else None
    trainer = Trainer(options.out, log, options.export_every, options.continue_from)
    if options.continue_from is not None:
        trainer.run_on(options.minutes)
    elif options.minutes or options.phases:
        trainer.run(tuple(options.phases or FIRST_RUN_PHASES), options.minutes, None)
    else:
        trainer.run(FIRST_RUN_PHASES, None, FIRST_RUN_STOP)


if __name__ == "__main__":
    main()
