"""The suite for samplers: against the definition in float64, token by token, and as a distribution."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from ..dtypes import torch_dtype
from .conformance import Candidate, check, no_synchronisation, same_bits, unchanged
from .oracles.sampling import adjust, choose
from .sampler_choices import PROMPT
from .sampler_verifying import SamplerVerifying


class SamplerSuite(SamplerVerifying, standard=True):
    """Subclass it, set `part`, `device` and the `dtypes` that logits may have."""

    # -- noise and independence

    def test_noise_is_the_definition(self, candidate: Candidate) -> None:
        """Flat logits: the noise alone decides, for 64-bit seeds and positions."""
        seeds = (0, 1, (1 << 32) + 1, (1 << 63) + 5, (1 << 64) - 1)
        openings = [self.opening(slot, seed=seed) for slot, seed in enumerate(seeds)]
        sampler = self.make(candidate, openings, 97)
        logits = torch.zeros(len(seeds), 97, device=self.device, dtype=torch_dtype(self.dtypes[0]))
        for position in (0, 1, 77, (1 << 32) + 77, 1 << 40):
            ids = self.sample(sampler, logits, range(len(seeds)), [position] * len(seeds)).ids.tolist()
            self.hold_choices(ids, logits, openings, position, "float32")

    def test_place_and_neighbours_do_not_matter(self, candidate: Candidate, dtype: str) -> None:
        """Each row alone, among others, and at another place gives the same id."""
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"top_k": 7},
            {"top_p": 0.8, "logprobs": 2},
            {"min_p": 0.05},
            {"presence_penalty": 1.0, "output": (4, 5)},
            {},
        ]
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(kinds)]
        slots, count = list(range(len(kinds))), len(kinds)
        logits = self.logits(count, 700, dtype)
        together = self.sample(self.make(candidate, openings, 700), logits, slots, slots).ids.tolist()
        turned = self.sample(self.make(candidate, openings, 700), logits.flip(0), slots[::-1], slots[::-1]).ids.tolist()
        check(turned[::-1] == together, f"in the other order {turned[::-1]}, before {together}")
        sampler = self.make(candidate, openings, 700)
        alone = [self.sample(sampler, logits[slot : slot + 1], [slot], [slot]).ids.tolist()[0] for slot in slots]
        check(alone == together, f"alone {alone}, together {together}")

    def test_batch_invariant(self, candidate: Candidate, dtype: str) -> None:
        """When the need asks for it: log-probabilities, too, have the same bits alone and among others."""
        openings = [self.opening(slot, logprobs=4) for slot in range(9)]
        logits = self.logits(9, 700, dtype)
        make = {"batch_invariant": True}
        together = self.sample(self.make(candidate, openings, 700, **make), logits, range(9), range(9)).logprobs
        sampler = self.make(candidate, openings, 700, **make)
        check(together is not None, "no log-probabilities, though rows ask for them")
        for slot in range(9):
            alone = self.sample(sampler, logits[slot : slot + 1], [slot], [slot]).logprobs
            check(alone is not None, "no log-probabilities, though the row asks for them")
            assert together is not None
            assert alone is not None
            same = same_bits(alone.chosen[0], together.chosen[slot]) and same_bits(
                alone.top_values[0], together.top_values[slot]
            )
            check(same, f"slot {slot}: other bits alone")

    def test_a_broken_row_fails_alone(self, candidate: Candidate, dtype: str) -> None:
        """NaN gives -1, nothing above -inf gives -2; the rows beside are as ever."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {},
            {"top_k": 2},
            {"top_p": 0.5},
            {"frequency_penalty": 0.5},
        ]
        nan, inf = math.nan, math.inf
        good = [0.25, 1.0, -2.0, 0.875]
        for row, answer in (([nan, 0.0, 1.0, 2.0], -1), ([0.0, 9.0, nan, 2.0], -1), ([-inf] * 4, -2)):
            for kind in kinds:
                openings = [self.opening(slot, **kind) for slot in range(3)]
                sampler = self.make(candidate, openings, 4)
                logits = torch.tensor([good, row, good], dtype=torch_dtype(dtype), device=self.device)
                ids = self.sample(sampler, logits, [0, 1, 2], [4, 4, 4]).ids.tolist()
                check(ids[1] == answer, f"logits {row} with {kind} gave {ids[1]}, must be {answer}")
                self.hold_choices([ids[0], ids[2]], logits[::2], openings[::2], 4, dtype)
        masked = self.make(candidate, [self.opening(0, min_tokens=1, stop_ids=(0, 1, 2))], 3)
        ids = self.sample(
            masked, torch.zeros(1, 3, device=self.device, dtype=torch_dtype(dtype)), [0], [0]
        ).ids.tolist()
        check(ids == [-2], f"every id is masked by min_tokens: gave {ids}, must be [-2]")

    # -- state of slots

    def test_counts_advance_with_what_was_chosen(self, candidate: Candidate, dtype: str) -> None:
        """A life of ten steps, slots beside each other, equals ten openings with the output so far."""
        kind: dict[str, Any] = {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
            "min_tokens": 4,
            "stop_ids": (2, 3),
        }
        openings = [self.opening(slot, **kind) for slot in range(3)]
        sampler = self.make(candidate, openings, 12)
        outputs: list[tuple[int, ...]] = [(), (), ()]
        for step in range(10):
            order = [2, 0, 1] if step % 2 else [0, 2]  # not every slot runs in every step
            logits = self.logits(len(order), 12, dtype, seed=step, size=1.0)
            ids = self.sample(sampler, logits, order, [step] * len(order)).ids.tolist()
            now = [self.opening(slot, output=outputs[slot], **kind) for slot in order]
            self.hold_choices(ids, logits, now, step, dtype)
            for slot, id in zip(order, ids, strict=True):
                outputs[slot] += (id,)

    def test_opening_forgets(self, candidate: Candidate) -> None:
        """Whatever a slot held is gone, and slots that were not opened keep theirs."""
        kind: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 5.0}
        sampler = self.make(candidate, [self.opening(slot, **kind) for slot in range(2)], 12)
        logits = torch.zeros(2, 12, device=self.device, dtype=torch_dtype(self.dtypes[0]))
        for step in range(3):
            ids = self.sample(sampler, logits, [0, 1], [step, step]).ids.tolist()
            check(ids == [step, step], f"step {step} of equal logits with a frequency penalty gave {ids}")
        sampler.open([self.opening(0, **kind)])
        ids = self.sample(sampler, logits, [0, 1], [3, 3]).ids.tolist()
        check(ids == [0, 3], f"slot 0 was opened anew and slot 1 goes on: gave {ids}, must be [0, 3]")
        sampler.open([self.opening(1, temperature=0.0), self.opening(0, output=(0, 1), **kind)])
        ids = self.sample(sampler, logits, [0, 1], [4, 4]).ids.tolist()
        check(ids == [2, 0], f"slot 0 has output (0, 1), slot 1 no penalty any more: gave {ids}, must be [2, 0]")

    # -- inputs and outputs

    def test_logits_are_not_changed(self, candidate: Candidate, dtype: str) -> None:
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"logit_bias": {3: 1.0}, "top_k": 3}, {"top_p": 0.5}]
        for few in (kinds, kinds[:1], kinds[1:2], kinds[2:3], kinds[3:]):
            openings = [self.opening(slot, logprobs=2, **kind) for slot, kind in enumerate(few)]
            sampler = self.make(candidate, openings, 40)
            logits = self.logits(len(few), 40, dtype)
            rows = self.sample_rows(range(len(few)), range(len(few)))
            with unchanged(logits=logits, slots=rows.slots, positions=rows.positions), torch.inference_mode():
                sampler.sample(logits, rows)
            targets = torch.zeros(len(few), dtype=torch.int64, device=self.device)
            with unchanged(logits=logits, targets=targets):
                sampler.score(logits, targets, 3)

    def test_strided_logits(self, candidate: Candidate, dtype: str) -> None:
        """Rows out of a wider tensor, as a padded vocabulary gives them."""
        openings = [self.opening(0), self.opening(1, top_k=5, logprobs=1), self.opening(2, temperature=0.0)]
        wide = torch.full((6, 90), math.nan, dtype=torch_dtype(dtype), device=self.device)
        logits = self.logits(3, 40, dtype)
        wide[::2, 10:50] = logits
        with torch.inference_mode():
            out = self.make(candidate, openings, 40).sample(wide[::2, 10:50], self.sample_rows([0, 1, 2], [3, 3, 3]))
        self.hold_choices(out.ids.tolist(), logits, openings, 3, dtype)

    def test_ids_are_int64_on_the_device(self, candidate: Candidate, dtype: str) -> None:
        openings = [self.opening(0), self.opening(1, temperature=0.0)]
        sampler = self.make(candidate, openings, 40)
        logits = self.logits(2, 40, dtype)
        ids = self.sample(sampler, logits, [0, 1], [0, 0]).ids
        check(ids.dtype == torch.int64, f"ids are {ids.dtype}")
        check(ids.shape == (2,), f"ids are {tuple(ids.shape)} for two rows")
        check(ids.device == logits.device, f"ids are on {ids.device}, logits on {logits.device}")
        named = sampler.features([0, 1])
        check(
            isinstance(named, frozenset), f"features are a {type(named).__name__}, must be a frozenset: part of a key"
        )
        key = sampler.graph_key([0, 1])
        check(key is not None, "graph_key is None, which in SampleRows means that nobody asked for it")
        check(hash(key) == hash(sampler.graph_key([1, 0])), "graph_key depends on the order of the slots")

    # -- log-probabilities

    def test_logprobs_only_when_asked(self, candidate: Candidate, dtype: str) -> None:
        sampler = self.make(candidate, [self.opening(0), self.opening(1, temperature=0.0)], 30)
        found = self.sample(sampler, self.logits(2, 30, dtype), [0, 1], [0, 0]).logprobs
        check(found is None, "nobody asked for log-probabilities, and they were computed")

    def test_raw_logprobs(self, candidate: Candidate, dtype: str) -> None:
        """log_softmax of the logits as they came, whatever was chosen from; ties by lower id; a row that asks for none
        does not disturb."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0, "logprobs": 3},
            {"logit_bias": {4: 9.0}, "logprobs": 0},
            {"temperature": 0.5},
            {"temperature": 0.5, "top_k": 3, "logprobs": 5},
            {"repetition_penalty": 3.0, "prompt": (7, 20), "logprobs": 1},
        ]
        sampler = self.make(candidate, [self.opening(slot, **kind) for slot, kind in enumerate(kinds)], 30)
        logits = self.logits(5, 30, dtype, seed=8)
        logits[0, 7] = logits[0, 20] = logits[0, 3] = 16.0
        out = self.sample(sampler, logits, range(5), [0] * 5)
        for slot, kind in enumerate(kinds):
            if "logprobs" in kind:
                row = logits[slot].double().log_softmax(-1)
                self.hold_logprobs(out.logprobs, slot, row, int(out.ids[slot]), kind["logprobs"])

    def test_processed_logprobs(self, candidate: Candidate, dtype: str) -> None:
        """Those of what the choice was made from: dropped tokens have -inf. Greedy rows: of the adjusted logits."""
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.7},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.5, "top_p": 0.5},
            {"min_p": 0.1, "repetition_penalty": 1.5, "prompt": PROMPT},
        ]
        kinds = [kind | {"logprobs": 12, "logprobs_mode": "processed"} for kind in kinds]
        greedy: dict[str, Any] = {
            "temperature": 0.0,
            "logit_bias": {1: 3.0},
            "logprobs": 3,
            "logprobs_mode": "processed",
        }
        openings = [self.opening(slot, **kind) for slot, kind in enumerate([*kinds, greedy])]
        logits = self.logits(5, 61, dtype, seed=4)
        out = self.sample(self.make(candidate, openings, 61), logits, range(5), [2] * 5)
        for slot, opening in enumerate(openings[:-1]):
            row = choose(logits[slot], opening, 2).probabilities.log()
            self.hold_logprobs(out.logprobs, slot, row, int(out.ids[slot]), 12)
        row = adjust(logits[4].cpu(), openings[4]).log_softmax(-1)
        self.hold_logprobs(out.logprobs, 4, row, int(out.ids[4]), 3)

    def test_score(self, candidate: Candidate, dtype: str) -> None:
        """Prompt log-probabilities: of given targets, with the most probable ones."""
        sampler = self.make(candidate, [self.opening(0)], 30)
        logits = self.logits(4, 30, dtype, seed=8)
        logits[1, 9] = logits[1, 4] = 16.0
        targets = [2, 9, 29, 0]
        found = sampler.score(logits, torch.tensor(targets, device=self.device), 4)
        for row, target in enumerate(targets):
            self.hold_logprobs(found, row, logits[row].double().log_softmax(-1), target, 4)
        none = sampler.score(logits, torch.tensor(targets, device=self.device), 0)
        check(none.top_ids.shape == (4, 0), f"top 0 gave ids of {tuple(none.top_ids.shape)}")

    def test_says_what_verification_wants(self, candidate: Candidate) -> None:
        """Whether it wants the distributions of drafts depends on the options alone."""
        found = candidate.factory.wants_probs(candidate.options)
        check(isinstance(found, bool), f"wants_probs gave {found!r}, no bool")
        check(found == candidate.factory.wants_probs(candidate.options), "wants_probs says something else each time")

    # -- the device

    def test_does_not_synchronise(self, candidate: Candidate, dtype: str) -> None:
        if not self.device.startswith("cuda") or candidate.factory.needs_host_token:
            pytest.skip("only on CUDA, and not for a sampler that needs the host's view")
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.0},
            {"top_k": 5, "logprobs": 2},
            {"frequency_penalty": 1.0},
        ]
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(kinds)]
        sampler = self.make(candidate, openings, 700)
        logits, rows = self.logits(4, 700, dtype), self.sample_rows(range(4), range(4))
        sampler.sample(logits, rows)
        with no_synchronisation(self.device):
            sampler.sample(logits, rows)

    def test_capturable(self, candidate: Candidate, dtype: str) -> None:
        """A recorded graph must follow new logits, positions, slots and parameters of slots, and go on counting. Its
        last row is idle: a slot that was never opened, logits that are NaN."""
        if not self.device.startswith("cuda") or not candidate.factory.capturable:
            pytest.skip("recorded on CUDA only, when the sampler says that it is capturable")
        kinds: list[dict[str, Any]] = [
            {"frequency_penalty": 1.0, "top_p": 0.9},
            {"presence_penalty": 0.5, "temperature": 0.7, "top_p": 0.6},
        ]
        sampler = candidate.create(self.need(50, 6))
        sampler.open([self.opening(slot, **kinds[0]) for slot in range(5)])
        key = sampler.graph_key([0, 1, 2])
        logits, rows = self.logits(4, 50, dtype), self.sample_rows([0, 1, 2, 5], [0, 0, 0, 0])
        rows = msgspec.structs.replace(rows, host_slots=(0, 1, 2), key=key)
        logits[3] = math.nan
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sampler.sample(logits, rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = sampler.sample(logits, rows)
        for turn, order in enumerate(([0, 1, 2], [4, 1, 3])):
            openings = [self.opening(slot, **kinds[(slot + turn) % 2]) for slot in order]
            sampler.open(openings)
            check(sampler.graph_key(order) == key, "slots that use the same have another graph_key")
            rows.slots[:3] = torch.tensor(order, device=self.device)
            outputs: list[tuple[int, ...]] = [(), (), ()]
            for step in range(5):
                logits[:3] = self.logits(3, 50, dtype, seed=step)
                rows.positions.fill_(step)
                graph.replay()
                ids = out.ids.tolist()[:3]
                now = [
                    self.opening(slot, output=output, **kinds[(slot + turn) % 2])
                    for slot, output in zip(order, outputs, strict=True)
                ]
                self.hold_choices(ids, logits[:3], now, step, dtype)
                outputs = [(*output, id) for output, id in zip(outputs, ids, strict=True)]
