"""A run under way: data, model, updates, validation, checkpoints, and its summary."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from slayformer.config import TrainConfig
from slayformer.evaluation.document_losses import sums_of_validation
from slayformer.evaluation.loss import LossTotals, score
from slayformer.model.gpt2 import GPT2
from slayformer.registry import attention_entry
from slayformer.training import checkpoint, distributed
from slayformer.training.bad_updates import BadUpdates, Fault, poisoned
from slayformer.training.budget import Plan
from slayformer.training.devices import found_device
from slayformer.training.engine import TrainingEngine
from slayformer.training.going_on import changes_so_far
from slayformer.training.initial_weights import (
    InitialWeights,
    keep_record,
    load_initial_weights,
    write_record,
)
from slayformer.training.inputs import Inputs
from slayformer.training.interruption import StopSignal, resume_command
from slayformer.training.logging import RunLog, open_log
from slayformer.training.meters import Meter, model_flops_utilisation, peak_memory_bytes
from slayformer.training.objective import LanguageModelObjective
from slayformer.training.plan_table import own_parameters
from slayformer.training.run_directory import (
    RunStart,
    git_revision,
    package_versions,
    write_records,
)
from slayformer.training.sample import keep_samples, write_sample
from slayformer.training.saving import Saver
from slayformer.training.schedule import learning_rate


class Training:
    """A run under way. `update` counts the updates done, and so is the index of the next one."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        inputs: Inputs,
        start: RunStart,
        weights: InitialWeights | None,
    ) -> None:
        self.config, self.plan, self.inputs = config, plan, inputs
        self.directory = start.directory
        state = checkpoint.read_state(start.checkpoint) if start.checkpoint else {}
        self.update = state.get("update", 0)
        # the last validation loss, by its update
        self.validated: dict[int, float] = {}
        # a run that branches off another has no checkpoint of its own yet
        self.saved_update = 0 if start.is_branch else self.update
        self.meter = Meter(
            distributed.device(),
            tokens_before=plan.tokens_at(self.update),
            before=state.get("seconds_by_part"),
        )
        self.earlier_peak_bytes = state.get("peak_memory_bytes", 0)
        self.bad_updates = BadUpdates(config.bad_updates, state.get("recent_losses"))
        self.changes = changes_so_far(start.checkpoint, config) if start.checkpoint else []
        self.started = time.monotonic() - state.get("seconds", 0.0)
        model = GPT2(
            config.model,
            config.attention,
            vocabulary_size=inputs.data.tokenizer.vocabulary_size,
            seed=config.seed,
        )
        if start.checkpoint is not None:
            checkpoint.load_weights(start.checkpoint, model)
        told = [] if weights is None else load_initial_weights(weights, model)
        objective = LanguageModelObjective(
            model,
            config.engine.precision,
            config.optimizer.z_loss,
            distributed.context_group(),
        )
        self.forward_flops = model.flops_per_token(config.model.context_length)
        self.engine = TrainingEngine(objective, config)
        # dropout differs between ranks and follows from the seed, and from the update where ranks
        # that were not there before go on
        draw = np.random.SeedSequence((config.seed, distributed.rank(), self.update))
        torch.manual_seed(int(draw.generate_state(1)[0]))
        if start.checkpoint is not None:
            same_world = state["world_size"] == distributed.world_size()
            checkpoint.restore(start.checkpoint, self.engine, same_world=same_world)
            if self.engine.loss_scale is not None and state.get("loss_scale"):
                self.engine.loss_scale.state = state["loss_scale"]
        self.saver = Saver(start.directory, config, inputs.data.tokenizer)
        distributed.run_on_main(lambda: write_records(start.directory, config, plan))
        self.log: RunLog | None = None
        if distributed.is_main():
            self.log = open_log(config, plan, inputs, start, state)
            # the last one is written anew, as its validation is
            keep_samples(start.directory, before_update=min(self.update + 1, plan.updates))
        if weights is not None and self.log is not None:
            write_record(start.directory, weights)
            for line in told:
                self.log.say(line)
        if start.is_branch and start.metrics_from is not None and self.log is not None:
            keep_record(start.metrics_from, start.directory)

    def run(self) -> None:
        """Do the updates that are left, then validate, save and sum up; or stop when asked to."""
        validate_every = self.config.validation.every_updates
        save_every = self.config.checkpoint.every_updates
        self._save()
        with StopSignal() as stop, self.saver:
            while self.update < self.plan.updates:
                stopping = self._do_update(stop)
                if self.update == self.plan.updates:
                    break
                if stopping:
                    self._save(wait=True)
                    self._say_stopped()
                    return
                if validate_every and self.update % validate_every == 0:
                    self._validate()
                    self._write_sample()
                if save_every and self.update % save_every == 0:
                    self._save()
            totals = self._validate()
            self._save(wait=True)
            self._sum_up(totals, self._write_sample())

    def _do_update(self, stop: StopSignal) -> bool:
        """Do one update; return whether any rank has been asked to stop."""
        samples = self.plan.samples_of(self.update)
        targets = len(samples) * self.plan.context_length
        passes = self.plan.micro_batches(self.update, distributed.data_rank())
        # cross entropy and z-loss
        own_nats = torch.zeros(2, dtype=torch.float64, device=self.engine.device)
        # tokens, and how many of them a guard replaced
        own_guarded = torch.zeros_like(own_nats)
        objective = self.engine.objective
        for number, micro_batch in enumerate(passes, start=1):
            with self.meter.part("data"):
                batch = self.inputs.micro_batch(micro_batch, padding_sample=samples[0])
            with self.meter.part("forward_backward"):
                nats_BT = self.engine.forward(batch)
                # every token of the update weighs the same, whatever the passes and ranks;
                # DeepSpeed divides by all ranks, those that share a sequence too
                loss = nats_BT.sum() * (distributed.world_size() / targets)
                share = objective.model.guarded_share()
                if share is not None:
                    own_guarded += nats_BT.numel() * torch.stack([torch.ones_like(share), share])
                own_nats[0] += nats_BT.detach().sum(dtype=torch.float64)
                if objective.z_nats is not None:
                    own_nats += torch.stack([-objective.z_nats, objective.z_nats])
                if number == len(passes):
                    # before its last gradients: an update that is at fault is spoilt by them
                    own = [*own_nats.tolist(), *own_guarded.tolist(), float(stop.received)]
                    own.append(float(self.saver.failed))
                    nats, z_nats, rows, guarded, stops, unsaved = distributed.sum_over_ranks(
                        torch.tensor(own, dtype=torch.float64)
                    ).tolist()
                    if unsaved:
                        self.saver.wait()
                    fault = self._judge(self.bad_updates.of_loss(nats / targets), samples)
                    loss = poisoned(loss, fault)
                self.engine.backward(loss, last=number == len(passes))
        rate = learning_rate(
            self.update,
            self.plan.updates,
            peak=self.config.optimizer.learning_rate,
            schedule=self.config.schedule,
            tokens_at=self.plan.tokens_at,
        )
        loss_scale = self.engine.loss_scale and self.engine.loss_scale.value
        with self.meter.part("optimizer", wait=True):
            norm = self.engine.step(rate, is_poisoned=fault is not None)
        if fault is None and loss_scale is None:
            fault = self._judge(self.bad_updates.of_gradient(norm), samples)
        # fp16 drops what overflows
        if fault is None and math.isfinite(norm):
            self.bad_updates.accept(nats / targets)
        told = self.meter.end_update(targets)
        self.update += 1
        if self.log is not None:
            record = {
                "update": self.update,
                "tokens": self.plan.tokens_at(self.update),
                "loss": nats / targets,
                "learning_rate": rate,
                # none where the update was skipped, in fp16 because of an overflow
                "gradient_norm": norm if math.isfinite(norm) else None,
                **told,
                "samples": self.plan.samples_at(self.update),
                "peak_memory_bytes": peak_memory_bytes(self.engine.device),
            }
            mfu = self._mfu(told["tokens_per_second"])
            record |= {} if mfu is None else {"mfu": mfu}
            record |= {} if loss_scale is None else {"loss_scale": loss_scale}
            record |= {} if fault is None else {"skipped": fault.what}
            if objective.z_loss:
                record["z_loss"] = z_nats / targets
            if rows:
                record["guarded_share"] = guarded / rows
            self.log.train(record, warm_tokens_per_second=self.meter.warm_tokens_per_second)
        return stops > 0

    def _mfu(self, tokens_per_second: float) -> float | None:
        return model_flops_utilisation(
            tokens_per_second,
            forward_flops=self.forward_flops,
            device=found_device(self.config.engine.precision),
            devices=distributed.world_size(),
        )

    def _judge(self, fault: Fault | None, samples: range) -> Fault | None:
        """Return `fault` if the update is to be skipped for it; UserError if the run is to stop."""
        if fault is None:
            return None
        update = f"update {self.update + 1:,} (samples {samples[0]:,} to {samples[-1]:,})"
        saved = f"update {self.saved_update:,}" if self.saved_update else "none"
        self.bad_updates.decide(fault, f"{update}; newest checkpoint: {saved}")
        if self.log is not None:
            self.log.say(f"skipped {update}: {fault.what}")
        return fault

    def _validate(self) -> LossTotals:
        """Score the fixed validation windows on all ranks, and write the record.

        After the last update also what each document had.
        """
        documents = None
        if self.update == self.plan.updates:
            documents = sums_of_validation(
                self.inputs.data.validation,
                windows=self.inputs.windows,
                context_length=self.plan.context_length,
                end_of_text=self.inputs.data.tokenizer.end_of_text,
            )
        with self.meter.part("validation"):
            totals = score(
                self.engine.objective,
                self.inputs.validation,
                windows=self.inputs.windows,
                batch_samples=self.plan.micro_samples,
                byte_lengths=self.inputs.data.tokenizer.token_byte_lengths(),
                observe=None if documents is None else documents.add,
            )
        if documents is not None:
            losses = documents.over_ranks()
            distributed.run_on_main(lambda: losses.write(self.directory))
        self.validated = {self.update: totals.loss}
        if self.log is not None:
            self.log.validation(
                {
                    "update": self.update,
                    "tokens": self.plan.tokens_at(self.update),
                    "loss": totals.loss,
                    "perplexity": totals.perplexity,
                    "bits_per_byte": totals.bits_per_byte,
                    "scored_tokens": totals.tokens,
                }
            )
        return totals

    def _write_sample(self) -> str | None:
        return write_sample(self.directory, self.engine, self.inputs, self.config, self.update)

    def _save(self, *, wait: bool = False) -> None:
        """Begin to save a checkpoint of this moment, unless there is one; `wait` until it is there.

        The meter counts what training has to wait for.
        """
        with self.meter.part("saving"):
            if self.saved_update != self.update:
                self.saver.save(self.engine, self._state())
                self.saved_update = self.update
            if wait:
                self.saver.wait()

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint tells of the run besides its tensors."""
        return {
            "update": self.update,
            "samples": self.plan.samples_at(self.update),
            "tokens": self.plan.tokens_at(self.update),
            "world_size": distributed.world_size(),
            "context_parallel": self.plan.context_parallel,
            "zero_stage": self.config.engine.zero_stage,
            "micro_samples": self.plan.micro_samples,
            "validation_loss": self.validated.get(self.update),
            "mechanism": self.config.attention.name,
            "tokenizer": self.inputs.data.tokenizer.identity,
            "data": self.inputs.data.directory.name,
            "data_identity": self.inputs.data.identity,
            "seconds_by_part": self.meter.state,
            "peak_memory_bytes": self._peak_memory_bytes(),
            "changed_settings": self.changes,
            "recent_losses": self.bad_updates.state,
            "loss_scale": self.engine.loss_scale and self.engine.loss_scale.state,
            "seconds": time.monotonic() - self.started,
            "wandb_id": self.log.wandb_id if self.log is not None else None,
            "git_revision": git_revision(),
            "packages": package_versions(),
        }

    def _peak_memory_bytes(self) -> int:
        """Return the most memory that this process and those before it have had in use."""
        return max(peak_memory_bytes(self.engine.device), self.earlier_peak_bytes)

    def _sum_up(self, totals: LossTotals, sample: str | None) -> None:
        """Write summary.json and print how it ended."""
        unigram = distributed.run_on_main(self.inputs.unigram_loss)
        peak_bytes = max(distributed.gather_objects(self._peak_memory_bytes()))
        if self.log is None:
            return
        model, length = self.engine.objective.model, self.plan.context_length
        seconds = self.meter.seconds
        options = self.config.attention
        mechanism = options.mechanism or options.name
        summary = {
            "mechanism": self.config.attention.name,
            "seed": self.config.seed,
            "updates": self.plan.updates,
            "tokens": self.plan.tokens_at(self.plan.updates),
            "parameters": own_parameters(model),
            "flops_per_token": self.forward_flops,
            "state_bytes": model.state_bytes(length),
            "control": attention_entry(mechanism).attention.control,
            "validation_loss": totals.loss,
            "perplexity": totals.perplexity,
            "bits_per_byte": totals.bits_per_byte,
            "loss_by_position": totals.by_position(),
            "unigram_loss": unigram,
            "changed_settings": self.changes,
            "tokens_per_second": self.meter.tokens_per_second,
            "milliseconds_per_update": {
                part: 1000 * seconds[part] / self.plan.updates for part in seconds
            },
            "mfu": self._mfu(self.meter.tokens_per_second),
            "peak_memory_bytes": peak_bytes,
            "seconds": time.monotonic() - self.started,
            "finished": True,
        }
        newest = checkpoint.find_checkpoint(self.directory)
        self.log.summary(summary, sample=sample, checkpoint=newest)

    def _say_stopped(self) -> None:
        if self.log is not None:
            self.log.say(f"stopped and saved after update {self.update:,} of {self.plan.updates:,}")
            self.log.say(f"resume with: {resume_command(self.directory)}")
