"""The part of the samplers' suite about drafts: what is kept is what sampling step by step would have chosen."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from ..contracts.sampler import Sampler, VerifyOutput
from .conformance import Candidate, check
from .sampler_choices import SamplerChoices

#: Parameters of the rows, and how their texts end.
_KINDS: Final[Sequence[dict[str, Any]]] = (
    {"temperature": 0.0},
    {},
    {"top_k": 4, "frequency_penalty": 2.0, "repetition_penalty": 1.4},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 1.0, "min_tokens": 3, "stop_ids": (1, 2)},
    {"stop_ids": (0, 1, 2, 3, 4)},
    {"max_length": 12},
)


class SamplerVerifying(SamplerChoices, standard=True):
    def test_verify_keeps_what_sampling_would_have_chosen(self, candidate: Candidate, dtype: str) -> None:
        """Chains of drafts that are right up to some point: what is kept, its count and path, and the state after it
        are those of sampling step by step."""
        vocab, width = 11, 4
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(_KINDS)]
        for trial in range(1 if self.grid == "small" else 12):
            sampler = self.make(candidate, openings, vocab, max_drafts=width - 1)
            stepwise = self.make(candidate, openings, vocab)
            draw = torch.Generator().manual_seed(trial)
            sizes = torch.randint(1, width + 1, (len(openings),), generator=draw).tolist()
            sizes[trial % len(openings)] = width
            right = [int(torch.randint(0, size + 1, (1,), generator=draw)) for size in sizes]
            logits = [self.logits(size, vocab, dtype, seed=100 * trial + at) for at, size in enumerate(sizes)]
            queries, kept = [], []
            for slot, size in enumerate(sizes):
                row, path, alive = [0], [], True
                for j in range(size):
                    draft = j  # of a path that is over: whatever
                    if alive:
                        id = int(self.sample(stepwise, logits[slot][j : j + 1], [slot], [10 + j]).ids)
                        path.append(id)
                        opening = openings[slot]
                        ended = id in opening.stop_ids and len(path) > opening.sampling.min_tokens
                        draft = id if j < right[slot] else (id + 1) % vocab
                        alive = draft == id and not ended and 10 + len(path) < opening.max_length
                    row.append(draft)
                queries.append(row[:size])
                kept.append(path)
            with torch.inference_mode():
                out = sampler.verify(torch.cat(logits), self.verify_rows(queries, [10] * len(openings)))
            self.hold_kept(out, kept, [list(range(len(path))) for path in kept], width, trial)
            self.hold_afterwards(sampler, stepwise, self.logits(len(openings), vocab, dtype, seed=900 + trial), trial)

    def test_verify_follows_the_path_through_a_tree(self, candidate: Candidate, dtype: str) -> None:
        """Trees in which some path is right up to some point: as with chains, all is as sampling step by step."""
        vocab, width = 13, 7
        openings = [self.opening(slot, **kind) for slot, kind in enumerate(_KINDS)]
        for trial in range(1 if self.grid == "small" else 12):
            sampler = self.make(candidate, openings, vocab, max_drafts=width - 1, trees=True)
            stepwise = self.make(candidate, openings, vocab)
            draw = Random(trial)
            queries, parents, kept, paths, logits = [], [], [], [], []
            for slot, opening in enumerate(openings):
                size = width if slot == trial % len(openings) else draw.randint(1, width)
                own = [-1, *(draw.randrange(query) for query in range(1, size))]
                logits.append(self.logits(size, vocab, dtype, seed=100 * trial + slot))
                ids, here = [0] * size, 0
                path: list[int] = []
                way: list[int] = []
                for query in range(size):  # of one parent no two drafts are alike
                    children = [child for child in range(size) if own[child] == query]
                    for child, id in zip(children, draw.sample(range(vocab), len(children)), strict=True):
                        ids[child] = id
                while True:
                    position = 10 + len(path)
                    id = int(self.sample(stepwise, logits[slot][here : here + 1], [slot], [position]).ids)
                    path.append(id)
                    way.append(here)
                    children = [child for child in range(size) if own[child] == here]
                    right = next((child for child in children if ids[child] == id), None)
                    if right is None and children and draw.random() < 0.8:
                        right = draw.choice(children)
                        ids[right] = id
                    ended = id in opening.stop_ids and len(path) > opening.sampling.min_tokens
                    if right is None or ended or 10 + len(path) >= opening.max_length:
                        break
                    here = right
                queries.append(ids)
                parents.append(own)
                kept.append(path)
                paths.append(way)
            with torch.inference_mode():
                out = sampler.verify(torch.cat(logits), self.verify_rows(queries, [10] * len(openings), parents))
            self.hold_kept(out, kept, paths, width, trial)
            self.hold_afterwards(sampler, stepwise, self.logits(len(openings), vocab, dtype, seed=900 + trial), trial)

    def hold_kept(
        self,
        out: VerifyOutput,
        kept: Sequence[Sequence[int]],
        paths: Sequence[Sequence[int]],
        width: int,
        trial: int,
    ) -> None:
        """Ids and the queries that they were chosen after, of each row."""
        for what, told, expected in (("ids", out.ids, kept), ("path", out.path, paths)):
            padded = [[*row, *[-1] * (width - len(row))] for row in expected]
            check(told.tolist() == padded, f"trial {trial}: {what} {told.tolist()}, must be {padded}")
        counts = [len(path) for path in kept]
        check(out.count.tolist() == counts, f"trial {trial}: counts {out.count.tolist()}, must be {counts}")

    def hold_afterwards(self, sampler: Sampler, stepwise: Sampler, logits: Tensor, trial: int) -> None:
        """The same state: the next choices of all slots are alike."""
        slots, positions = range(len(logits)), [30] * len(logits)
        both = [self.sample(one, logits, slots, positions).ids.tolist() for one in (sampler, stepwise)]
        check(both[0] == both[1], f"trial {trial}: afterwards it chose {both[0]}, must be {both[1]}")
