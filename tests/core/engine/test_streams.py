"""What a consumer sees: text in pieces, stop strings, finish reasons, log-probabilities, slow readers, deadlines."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from pegboard import DeadlineExceeded, Delta, Engine, Part, SamplingParams, hookimpl
from pegboard.testing.tiny import tiny_model
from pegboard_sampling.torch_sampler import TorchSampler

EOS = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
#: A page of the model in float32: 16 entries, K and V, 2 heads of 16, 3 layers.
PAGE = 16 * 2 * 2 * 16 * 4 * 3
TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "emoji": "👩‍👩‍👧‍👦 and 😀😃 and 🏴󠁧󠁢󠁥󠁮󠁧󠁿.",
    "hangul": "한국어 문장, 조합형 한글.",
    "combining": "e\u0301te\u0301 n\u0303o a\u0308\u0323\u0301 zu\u0308rich",
    "mixed": "naïve 日本語 русский 😀\tx\n\n  y  ",
}


def build_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with few merges: most characters beyond ASCII take several tokens."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(TEXTS.values()), trainer)
    return tokenizer


TOKENIZER = build_tokenizer()


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def by_bytes(text: str) -> list[int]:
    """One token a byte: every character beyond ASCII is split."""
    from tokenizers import pre_tokenizers

    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [id for piece, _ in pieces for c in piece if (id := TOKENIZER.token_to_id(c)) is not None]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("streams") / "m", vocab_size=320, tokenizer=False)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


class Scripted(TorchSampler):
    """Chooses given ids, by the first two tokens of the prompt; without a script what the parent chooses."""

    scripts: dict[tuple[int, ...], list[int]] = {}
    #: Seconds that each step takes.
    pace = 0.0

    def open(self, openings: Sequence[Any]) -> None:
        self._begin = getattr(self, "_begin", {}) | {o.slot: (o.prompt[:2], len(o.prompt)) for o in openings}
        super().open(openings)

    def sample(self, logits: torch.Tensor, rows: Any) -> Any:
        time.sleep(self.pace)
        output = super().sample(logits, rows)
        for row, (slot, position) in enumerate(zip(rows.host_slots, rows.positions.tolist(), strict=True)):
            first, length = self._begin[slot]
            script = self.scripts.get(first)
            if script is not None:
                output.ids[row] = script[position - length] if position - length < len(script) else encode("~")[0]
        return output


class Script:
    """A plugin object, and numbers for prompts that stand for scripts."""

    def __init__(self) -> None:
        self.sampler: Any = type("Scripted", (Scripted,), {"scripts": {}})
        self._names = itertools.product(range(100, 300), repeat=2)

    @hookimpl
    def pegboard_parts(self) -> list[Part]:
        return [Part(role="sampler", name="scripted", factory=self.sampler, summary="for a test")]

    def __call__(self, ids: Sequence[int]) -> list[int]:
        """The prompt that is answered with these ids."""
        name = next(self._names)
        self.sampler.scripts[name] = list(ids)
        return [*name, 9]


@pytest.fixture(scope="module")
def made_script() -> Script:
    return Script()


@pytest.fixture
def script(made_script: Script) -> Iterator[Script]:
    yield made_script
    made_script.sampler.pace = 0.0


@pytest.fixture(scope="module", params=[0, 1], ids=["ahead-0", "ahead-1"])
def engine(request: pytest.FixtureRequest, path: Path, made_script: Script) -> Iterator[Engine]:
    settings = {"max_rows": 4, "max_length": 256, "run_ahead": request.param, "sampler": "scripted"}
    with Engine(path, device="cpu", plugins=[made_script], **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Engine]:
    with Engine(path, device="cpu", max_rows=4, max_length=256) as engine:
        yield engine


def collect(engine: Engine, prompt: Any, sampling: SamplingParams, **options: Any) -> list[Delta]:
    """Every delta, each waited for at most 10 s."""
    handle = engine.submit(prompt, sampling, **options)
    deltas = []
    while (delta := handle.take(timeout=10)) is not None:
        deltas.append(delta)
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


# -- text


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("split", [encode, by_bytes], ids=["merged", "bytes"])
@pytest.mark.supports("Text", "streaming of emoji, Hangul and combining marks")
def test_pieces_joined_are_the_text(engine: Engine, script: Script, name: str, split: Any) -> None:
    ids = split(TEXTS[name])
    assert TOKENIZER.decode(ids) == TEXTS[name]
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True))
    assert text_of(deltas) == TEXTS[name]
    assert ids_of(deltas) == tuple(ids)
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert engine.submit(script(ids), SamplingParams(max_tokens=len(ids))).result(timeout=10).text == TEXTS[name]


def test_text_comes_as_soon_as_it_is_settled(engine: Engine, script: Script) -> None:
    """One delta a token; a character's delta is the one of its last byte."""
    ids = by_bytes("a😀b")
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=len(ids)))
    assert [delta.text for delta in deltas if delta.token_ids] == ["a", "", "", "", "😀", "b"]


def test_a_character_that_stays_incomplete_ends_as_replacement(engine: Engine, script: Script) -> None:
    ids = by_bytes("a😀")[:-1]
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=len(ids)))
    assert text_of(deltas) == TOKENIZER.decode(ids)
    assert [delta.text for delta in deltas[:-1]] == ["a", "", ""]


@pytest.mark.parametrize("name", TEXTS)
def test_text_prompts(plain: Engine, name: str) -> None:
    output = plain.submit(TEXTS[name], GREEDY).result(timeout=10).raise_for_error()
    assert output.prompt_token_ids == tuple(encode(TEXTS[name]))
    assert output.text == TOKENIZER.decode(list(output.token_ids), skip_special_tokens=True)
    assert output.token_ids == plain.submit(encode(TEXTS[name]), GREEDY).result(timeout=10).token_ids


def test_special_tokens_in_a_prompt(plain: Engine) -> None:
    as_text = (*encode("a"), *by_bytes("</s>"), *encode("b"))
    assert plain.submit("a</s>b", GREEDY).result(timeout=10).prompt_token_ids == as_text
    assert EOS in plain.submit("a</s>b", GREEDY, special=True).result(timeout=10).prompt_token_ids


def test_ids_beyond_the_tokenizer_are_never_chosen(plain: Engine) -> None:
    """The head has 320 rows, the tokenizer fewer words."""
    limit = TOKENIZER.get_vocab_size()
    assert limit < 320
    output = plain.submit([5, 6], SamplingParams(temperature=100.0, seed=1, max_tokens=200, ignore_eos=True)).result(10)
    assert max(output.raise_for_error().token_ids) < limit


# -- stop strings


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "shown", "matched"),
    [
        ("one two three", ("two",), "one ", "two"),
        ("one two three", ("three", "two"), "one ", "two"),
        ("one two three", ("e two t",), "on", "e two t"),
        ("aab aaab", ("aaab",), "aab ", "aaab"),
        ("value: 한국어 end", ("한국어",), "value: ", "한국어"),
        ("value: 한국어 end", ("국",), "value: 한", "국"),
        ("x 😀😃 y", ("😃",), "x 😀", "😃"),
        ("cafe\u0301 bar", ("\u0301",), "cafe", "\u0301"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
        ("stop", ("s",), "", "s"),
        ("abcabd", ("abd", "cab"), "ab", "cab"),
    ],
)
@pytest.mark.parametrize("split", [encode, by_bytes], ids=["merged", "bytes"])
@pytest.mark.supports("Sampling", "stop strings across tokens, shown or not")
def test_stop_strings(
    engine: Engine,
    script: Script,
    split: Any,
    text: str,
    stops: tuple[str, ...],
    shown: str,
    matched: str,
    include: bool,
) -> None:
    ids = split(text)
    sampling = SamplingParams(temperature=0.0, max_tokens=100, stop=stops, include_stop=include, logprobs=0)
    deltas = collect(engine, script(ids), sampling)
    assert text_of(deltas) == shown + (matched if include else "")
    # The shortest beginning of the ids whose text holds the whole stop string.
    needed = next(n for n in range(1, len(ids) + 1) if shown + matched in TOKENIZER.decode(ids[:n]))
    assert ids_of(deltas) == tuple(ids[:needed])
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]
    assert deltas[-1].error is None
    metrics = deltas[-1].metrics
    assert metrics is not None
    assert metrics.output_tokens == needed
    assert [record.token_id for delta in deltas for record in delta.logprobs] == ids[:needed]
    # Nothing is streamed and then taken back.
    for end in range(1, len(deltas) + 1):
        assert (shown + (matched if include else "")).startswith(text_of(deltas[:end]))


def test_a_beginning_of_a_stop_string_at_the_end_is_shown(engine: Engine, script: Script) -> None:
    ids = by_bytes("abc END")
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=len(ids), stop=("END!",)))
    assert text_of(deltas) == "abc END"
    assert deltas[-1].finish_reason == "length"


def test_stop_string_in_the_very_last_token(engine: Engine, script: Script) -> None:
    """It completes with the token that max_tokens allows last: it is a stop all the same."""
    ids = by_bytes("abc END")
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=len(ids), stop=("END",)))
    assert (text_of(deltas), deltas[-1].finish_reason) == ("abc ", "stop")


def test_stop_strings_of_many_requests_at_once(engine: Engine, script: Script) -> None:
    """Each ends by itself; what others say doesn't matter."""
    wanted, handles = [], []
    for index in range(8):
        ids = by_bytes("x" * index + "STOP" + "y" * 10)
        handles.append(engine.submit(script(ids), SamplingParams(temperature=0.0, max_tokens=40, stop=("STOP",))))
        wanted.append(("x" * index, index + 4, "stop"))
    outputs = [handle.result(timeout=10) for handle in handles]
    assert [(o.text, len(o.token_ids), o.finish_reason) for o in outputs] == wanted


# -- ends


@pytest.mark.supports("Sampling", "EOS")
def test_eos_ends_and_is_included(engine: Engine, script: Script) -> None:
    ids = [*encode("bye"), EOS, *encode("never")]
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=50))
    assert text_of(deltas) == "bye"
    assert ids_of(deltas) == (*encode("bye"), EOS)
    assert deltas[-1].finish_reason == "stop"


def test_eos_is_ignored_when_asked(engine: Engine, script: Script) -> None:
    ids = [*encode("a"), EOS, *encode("b")]
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert (text_of(deltas), ids_of(deltas), deltas[-1].finish_reason) == ("ab", tuple(ids), "length")


@pytest.mark.supports("Sampling", "stop ids")
def test_stop_ids(engine: Engine, script: Script) -> None:
    ids = encode("quick brown")
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=(ids[2],)))
    end = ids.index(ids[2]) + 1
    assert ids_of(deltas) == tuple(ids[:end])
    assert text_of(deltas) == TOKENIZER.decode(ids[:end])
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.supports("Sampling", "max_tokens")
def test_max_tokens_is_exact(engine: Engine, script: Script) -> None:
    for count in (1, 2, 15, 16, 17):
        deltas = collect(engine, script(by_bytes("z" * 40)), SamplingParams(temperature=0.0, max_tokens=count))
        assert (len(ids_of(deltas)), deltas[-1].finish_reason) == (count, "length")


@pytest.mark.supports("Sampling", "min_tokens")
def test_min_tokens_delays_eos_and_stop_ids(engine: Engine, script: Script) -> None:
    ids = [*encode("a"), EOS, *encode("b"), EOS, *encode("c"), EOS, *encode("d")]
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=50, min_tokens=4))
    assert (ids_of(deltas), deltas[-1].finish_reason) == (tuple(ids[:6]), "stop")
    ids = [*encode("a"), 50, *encode("b"), 50]
    deltas = collect(
        engine, script(ids), SamplingParams(temperature=0.0, max_tokens=50, min_tokens=2, stop_token_ids=(50,))
    )
    assert ids_of(deltas) == tuple(ids)


def test_min_tokens_masks_eos_in_the_choice(path: Path, plain: Engine) -> None:
    """The real sampler, pushed to EOS by a bias: it can't be chosen before, and is the first thing after."""
    sampling = SamplingParams(temperature=0.0, max_tokens=20, min_tokens=5, logit_bias={EOS: 1e4})
    output = plain.submit([5, 6], sampling).result(timeout=10).raise_for_error()
    assert EOS not in output.token_ids[:5]
    assert output.token_ids[5:] == (EOS,)
    assert output.finish_reason == "stop"


def test_min_tokens_delays_stop_strings(engine: Engine, script: Script) -> None:
    ids = by_bytes("a.b.c.d")
    deltas = collect(engine, script(ids), SamplingParams(temperature=0.0, max_tokens=50, min_tokens=3, stop=(".",)))
    assert text_of(deltas) == "a.b"
    assert ids_of(deltas) == tuple(ids[:4])
    assert deltas[-1].finish_reason == "stop"


def test_abort_ends_with_abort(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.002
    handle = engine.submit(script(by_bytes("z" * 200)), SamplingParams(temperature=0.0, max_tokens=200))
    first = handle.take(timeout=10)
    assert first is not None
    handle.abort()
    deltas = [first, *handle]
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].error is None
    assert text_of(deltas) == "z" * len(ids_of(deltas))
    assert len(ids_of(deltas)) < 200


@pytest.mark.supports("Sampling", "several continuations (n)")
def test_one_terminal_delta_per_sample(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=4, n=5, max_tokens=9, ignore_eos=True)
    deltas = collect(engine, [1, 5, 6], sampling)
    assert {delta.index for delta in deltas} == {0, 1, 2, 3, 4}
    for index in range(5):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
        assert len(ids_of(own)) == 9
        assert own[-1].metrics is not None
        assert all(delta.metrics is None for delta in own[:-1])
    output = engine.submit([1, 5, 6], sampling).result(timeout=10)
    assert [c.token_ids for c in output.completions] == [
        ids_of([delta for delta in deltas if delta.index == index]) for index in range(5)
    ]


def test_samples_end_each_for_itself(engine: Engine) -> None:
    """A stop string that only some of them say: the others go on to their length."""
    sampling = SamplingParams(temperature=1.5, seed=11, n=8, max_tokens=12, ignore_eos=True)
    free = engine.submit([1, 5, 6], sampling).result(timeout=10).completions
    stop = next(c for text in [free[0].text] for c in text if sum(c in o.text for o in free) < len(free))
    stopped = SamplingParams(temperature=1.5, seed=11, n=8, max_tokens=12, ignore_eos=True, stop=(stop,))
    for without, completion in zip(free, engine.submit([1, 5, 6], stopped).result(timeout=10).completions, strict=True):
        if stop in without.text:
            assert (completion.text, completion.finish_reason) == (without.text.partition(stop)[0], "stop")
        else:
            assert (completion.text, completion.finish_reason) == (without.text, "length")


# -- log-probabilities


@pytest.fixture(scope="module")
def log_softmax(path: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """ids -> [len(ids), V] float64, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def scores(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0]
        logits[:, TOKENIZER.get_vocab_size() :] = -torch.inf  # these are never chosen
        scored: torch.Tensor = logits.log_softmax(-1)
        return scored

    return scores


PROMPT = [5, 6, 100, 33, 250, 17, 17, 90]


@pytest.mark.supports("Sampling", "logprobs of the output")
def test_logprobs_stand_beside_their_tokens(plain: Engine, log_softmax: Any) -> None:
    sampling = SamplingParams(temperature=1.3, seed=3, max_tokens=12, ignore_eos=True, logprobs=4)
    deltas = collect(plain, PROMPT, sampling)
    ids = ids_of(deltas)
    for delta in deltas:
        assert [record.token_id for record in delta.logprobs] == list(delta.token_ids)
    wanted = log_softmax([*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    for step, record in enumerate(record for delta in deltas for record in delta.logprobs):
        assert record.logprob == pytest.approx(float(wanted[step, record.token_id]), abs=1e-4)
        values, best = wanted[step].topk(4)
        assert [value for _, value in record.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert [token for token, _ in record.top] == best.tolist()


@pytest.mark.supports("Sampling", "logprobs of the prompt")
def test_prompt_logprobs(plain: Engine, log_softmax: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    for _ in range(2):  # the second time the prefix is cached, and they are wanted all the same
        output = plain.submit(PROMPT * 5, sampling).result(timeout=10).raise_for_error()
        records = output.prompt_logprobs
        assert records is not None
        assert [record.token_id for record in records] == (PROMPT * 5)[1:]
        wanted = log_softmax(PROMPT * 5)
        for place, record in enumerate(records):
            assert record.logprob == pytest.approx(float(wanted[place, record.token_id]), abs=1e-4)
            assert [value for _, value in record.top] == pytest.approx(wanted[place].topk(3).values.tolist(), abs=1e-4)


def test_prompt_logprobs_of_many_samples_come_once(plain: Engine) -> None:
    sampling = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    deltas = collect(plain, PROMPT, sampling)
    assert [r.token_id for delta in deltas for r in delta.prompt_logprobs] == PROMPT[1:]
    output = plain.submit(PROMPT, sampling).result(timeout=10)
    assert [record.token_id for record in output.prompt_logprobs or ()] == PROMPT[1:]


def test_no_logprobs_unless_asked(plain: Engine) -> None:
    output = plain.submit(PROMPT, GREEDY).result(timeout=10)
    assert output.completions[0].logprobs is None
    assert output.prompt_logprobs is None


# -- slow consumers


def settled(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 10 s."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.002)
    return False


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.supports("Engine", "slow consumers pause their own request only")
def test_a_slow_consumer_pauses_its_own_request_only(
    path: Path, make_engine: Callable[..., Engine], n: int, ahead: int
) -> None:
    engine = make_engine(path, device="cpu", max_rows=8, max_length=256, stream_buffer=4, run_ahead=ahead)
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, n=n)
    right = engine.submit(PROMPT, sampling).result(timeout=10)
    slow = engine.submit(PROMPT, sampling)
    assert settled(lambda: engine.stats().paused == n)
    assert slow.paused
    others = [engine.submit([9, i], sampling).result(timeout=10) for i in range(4)]
    assert all(output.error is None for output in others)
    assert engine.stats().paused == n
    deltas = []
    while (delta := slow.take(timeout=10)) is not None:
        deltas.append(delta)
    for completion in right.completions:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert ids_of(own) == completion.token_ids
        assert text_of(own) == completion.text
    assert settled(lambda: engine.stats().running == 0)


def test_a_paused_request_gives_its_pages_to_who_needs_them(path: Path, make_engine: Callable[..., Engine]) -> None:
    """A pool for one long request: the paused one is preempted, and goes on with the same ids later."""
    engine = make_engine(path, device="cpu", max_rows=4, max_length=64, stream_buffer=3, kv_memory=6 * PAGE)
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=50, ignore_eos=True)
    right = engine.submit(PROMPT, sampling).result(timeout=10).token_ids
    slow = engine.submit(PROMPT, sampling)
    assert settled(lambda: engine.stats().paused == 1)
    outputs = [engine.submit([9, i], sampling).result(timeout=10) for i in range(3)]
    assert [len(output.raise_for_error().token_ids) for output in outputs] == [50] * 3
    assert slow.paused
    assert ids_of(list(slow)) == right


def test_waiting_for_the_result_wakes_a_paused_request(path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(path, device="cpu", max_rows=2, max_length=256, stream_buffer=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    right = engine.submit(PROMPT, sampling).result(timeout=10)
    slow = engine.submit(PROMPT, sampling)
    assert settled(lambda: engine.stats().paused == 1)
    assert slow.result(timeout=10).token_ids == right.token_ids


def test_a_paused_request_can_be_aborted(path: Path, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(path, device="cpu", max_rows=2, max_length=256, stream_buffer=2)
    slow = engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert settled(lambda: engine.stats().paused == 1)
    slow.abort()
    assert settled(lambda: engine.stats().running == engine.stats().paused == 0)
    deltas = list(slow)
    assert deltas[-1].finish_reason == "abort"


def test_consumers_in_many_threads(path: Path, make_engine: Callable[..., Engine]) -> None:
    """Submitted and consumed from 12 threads at once, some slowly: every one gets its own."""
    engine = make_engine(path, device="cpu", max_rows=4, max_length=128, stream_buffer=2)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    right = [engine.submit([9, i], sampling).result(timeout=10).token_ids for i in range(12)]
    found: dict[int, tuple[int, ...]] = {}

    def consume(index: int) -> None:
        taken = []
        for delta in engine.stream([9, index], sampling):
            taken.append(delta)
            time.sleep(0.002 * (index % 3))
        found[index] = ids_of(taken)

    threads = [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found.get(i) for i in range(12)] == right


# -- leaving early


@pytest.mark.supports("Engine", "cancellation")
def test_leaving_the_loop_aborts(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.002
    prompt = script(by_bytes("z" * 200))
    for delta in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=200)):
        assert delta.text == "z"
        break
    assert settled(lambda: engine.stats().running == 0)


def test_an_exception_in_the_loop_aborts(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.002
    prompt = script(by_bytes("z" * 200))

    def consume() -> None:
        for _ in engine.stream(prompt, SamplingParams(temperature=0.0, max_tokens=200)):
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        consume()
    assert settled(lambda: engine.stats().running == 0)


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_a_stream_that_was_never_begun_aborts(engine: Engine, script: Script, how: str) -> None:
    """As when the caller's own code fails between asking and looping: nobody can ever take its deltas."""
    script.sampler.pace = 0.01
    stream = engine.stream(script(by_bytes("z" * 200)), SamplingParams(temperature=0.0, max_tokens=200))
    if how == "closed":
        stream.close()
    del stream
    started = time.monotonic()
    assert settled(lambda: engine.stats().running + engine.stats().waiting == 0)
    assert time.monotonic() - started < 1.0, "it ran to its end, 200 steps of 10 ms"


def test_a_bad_request_raises_where_it_is_asked_for(engine: Engine) -> None:
    from pegboard import InvalidRequest

    with pytest.raises(InvalidRequest):
        engine.stream([], GREEDY)


# -- deadlines


@pytest.mark.supports("Engine", "deadlines")
def test_deadline_while_running(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.005
    prompt = script(by_bytes("z" * 200))
    begin = time.monotonic()
    output = engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=200), timeout=0.1).result(timeout=10)
    assert output.finish_reason == "deadline"
    assert 0.1 <= time.monotonic() - begin < 0.8
    assert 0 < len(output.token_ids) < 60
    assert output.text == "z" * len(output.token_ids)
    with pytest.raises(DeadlineExceeded, match="deadline"):
        output.raise_for_error()
    assert engine.stats().running == 0


def test_deadline_while_queued(path: Path, script: Script, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(path, device="cpu", max_rows=1, max_length=256, plugins=[script], sampler="scripted")
    script.sampler.pace = 0.01
    running = engine.submit(script(by_bytes("z" * 60)), SamplingParams(temperature=0.0, max_tokens=60))
    begin = time.monotonic()
    queued = engine.submit(script(by_bytes("y")), SamplingParams(temperature=0.0, max_tokens=1), timeout=0.05)
    output = queued.result(timeout=10)
    assert (output.finish_reason, output.token_ids) == ("deadline", ())
    assert time.monotonic() - begin < 0.5
    assert len(running.result(timeout=10).raise_for_error().token_ids) == 60


def test_deadline_while_paused(path: Path, make_engine: Callable[..., Engine]) -> None:
    """Nothing else runs, so only the clock can end it."""
    engine = make_engine(path, device="cpu", max_rows=2, max_length=256, stream_buffer=2)
    slow = engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), timeout=0.3)
    assert settled(lambda: engine.stats().paused == 1)
    assert settled(lambda: not slow.live)
    assert engine.stats().paused == engine.stats().running == 0
    deltas = list(slow)
    assert deltas[-1].finish_reason == "deadline"
    assert deltas[-1].error


def test_deadline_of_every_sample(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.005
    sampling = SamplingParams(temperature=0.0, max_tokens=200, n=3)
    output = engine.submit(script(by_bytes("z" * 200)), sampling, timeout=0.1).result(timeout=10)
    assert [c.finish_reason for c in output.completions] == ["deadline"] * 3


# -- results


def test_result_times_out_and_the_request_goes_on(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.005
    handle = engine.submit(script(by_bytes("z" * 40)), SamplingParams(temperature=0.0, max_tokens=40))
    with pytest.raises(TimeoutError, match=handle.id):
        handle.result(timeout=0.02)
    assert handle.result(timeout=10).text == "z" * 40
    assert handle.result(timeout=0).text == "z" * 40, "asked once more"


def test_take_times_out(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.05
    handle = engine.submit(script(by_bytes("z")), SamplingParams(temperature=0.0, max_tokens=1))
    with pytest.raises(TimeoutError, match=handle.id):
        handle.take(timeout=0.001)
    delta = handle.take(timeout=10)
    assert delta is not None
    assert (delta.text, handle.take(timeout=0)) == ("z", None)


@pytest.mark.parametrize("taken", ["one", "all"])
def test_result_after_streaming_is_the_whole(engine: Engine, script: Script, taken: str) -> None:
    """ "Wait for the end and put everything together": what was taken before is part of it."""
    handle = engine.submit(script(by_bytes("hello")), SamplingParams(temperature=0.0, max_tokens=5))
    if taken == "one":
        handle.take(timeout=10)
    else:
        list(handle)
    output = handle.result(timeout=10)
    assert (output.text, output.finish_reason) == ("hello", "length")
    assert output.token_ids == tuple(by_bytes("hello"))


def test_what_nobody_waits_for_is_there_at_the_end(engine: Engine, script: Script) -> None:
    """With `gather` tokens become text at once, at the end, whatever the end is."""
    script.sampler.pace = 0.005
    text = TEXTS["emoji"]
    greedy = SamplingParams(temperature=0.0, max_tokens=len(by_bytes(text)), logprobs=1)
    handles = [engine.submit(script(by_bytes(text)), greedy) for _ in range(2)]
    for handle in handles:
        handle.gather()
    cut = engine.submit(script(by_bytes("z" * 200)), SamplingParams(temperature=0.0, max_tokens=200))
    first = cut.take(timeout=10)
    assert first is not None
    cut.gather()
    for output in [handle.result(timeout=20) for handle in handles]:
        (found,) = output.completions
        assert (found.text, found.token_ids) == (text, tuple(by_bytes(text)))
        assert [record.token_id for record in found.logprobs or ()] == by_bytes(text)
        assert found.metrics.output_tokens == len(by_bytes(text))
        assert 0 < (found.metrics.ttft or 0) < found.metrics.total_time / 2
    cut.abort()
    (found,) = cut.result(timeout=10).completions
    assert found.finish_reason == "abort"
    assert found.text == "z" * len(found.token_ids)
    assert len(found.token_ids) == found.metrics.output_tokens > 1


def test_metrics(engine: Engine, script: Script) -> None:
    script.sampler.pace = 0.01
    metrics = engine.submit(script(by_bytes("hello")), SamplingParams(temperature=0.0, max_tokens=5)).result(10).metrics
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.preemptions) == (3, 5, 0)
    assert metrics.queue_time is not None
    assert metrics.ttft is not None
    assert metrics.itl is not None
    assert metrics.total_time is not None
    assert 0 <= metrics.queue_time <= metrics.ttft <= metrics.total_time
    assert metrics.ttft >= 0.01
    assert 0.008 <= metrics.itl < 1
    assert metrics.total_time >= 0.05


def test_queue_time_is_not_the_first_steps_time(engine: Engine, script: Script) -> None:
    """Submission to first row in a step: nobody was before it, so it is far below the time of a step."""
    script.sampler.pace = 0.4
    metrics = engine.submit(script(by_bytes("a")), SamplingParams(temperature=0.0, max_tokens=1)).result(10).metrics
    assert metrics.queue_time is not None
    assert metrics.queue_time < 0.3


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_model(tmp_path_factory.mktemp("chat") / "m", vocab_size=320, tokenizer=False)
    TOKENIZER.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    with Engine(folder, device="cpu", max_rows=2, max_length=128) as engine:
        yield engine


@pytest.mark.supports("Text", "chat templates")
def test_chat_renders_the_template_with_its_special_tokens(chatty: Engine) -> None:
    messages = [{"role": "user", "content": "hi 😀"}]
    ids = (1, *encode("user: hi 😀"), EOS)
    assert chatty.render(messages) == "<s>user: hi 😀</s>"
    assert chatty.chat(messages, GREEDY).prompt_token_ids == ids
    whole = chatty.generate([list(ids)], GREEDY)[0]
    assert "".join(delta.text for delta in chatty.stream_chat(messages, GREEDY)) == whole.text


@pytest.mark.parametrize(
    "messages", [[], None, "hi", {"role": "user"}, [5], [{"role": "user"}], [{"content": "x"}]], ids=repr
)
def test_bad_conversations(chatty: Engine, messages: Any) -> None:
    from pegboard import InvalidRequest

    with pytest.raises(InvalidRequest, match="messages"):
        chatty.chat(messages, GREEDY)
    assert chatty.chat([{"role": "user", "content": "hi"}], GREEDY).error is None
